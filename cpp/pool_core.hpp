// One pool of slots and the policy that rules it: what is resident, what a step hits, loads and evicts. It knows
// blocks by dense ids, and nothing of files, weights, slots' places or Python. A layer-scoped cache has a pool per
// layer, a global one a single pool. The live engine and replay call the same members, so their counts agree by
// construction.
//
// Contracts (how the members of one event meet the cache):
//   atomic             hits are the members resident when the event starts; room is made among the others; then every
//                      member is updated once, in ascending id order, with one time
//   serial             one access after the other; an access may evict a member of its own event
//   serial-hits-first  serial, but the members resident at the start go first
// Admission:
//   forced  every missed block stays; others leave before members of the event, members leave only when the event
//           alone is larger than the pool (then the best ones by policy rank stay)
//   bypass  after the update the best blocks by policy rank stay, members or not; a missed block may be dropped after
//           use
//   never   missed blocks are dropped after use: only pins are resident (static sets)
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "policies/policy.hpp"

namespace colibri {

enum class Lookup : uint8_t { atomic, serial, serial_hits_first };
enum class Admission : uint8_t { forced, bypass, never };

// The distinct members of one event, as ids of one pool: ascending under the atomic contract, else in order of use.
struct Event {
    const int32_t* ids = nullptr;
    int n = 0;
    const float* gates = nullptr;    // (n,) or null
    const int32_t* nexts = nullptr;  // (n,) position of each member's next request, or null without a future
    int64_t pass = 0;                // forward passes so far
    int64_t access = 0;              // accesses of all layers before this event
    int first_id = 0, last_id = 0;   // the layer's ids are first_id <= id < last_id
};

struct RunCount {
    int64_t events = 0, full_events = 0, hits = 0, misses = 0, evictions = 0, drops = 0, logical_hits = 0,
            logical_misses = 0;
    void operator+=(const RunCount& c) {
        events += c.events, full_events += c.full_events, hits += c.hits, misses += c.misses, evictions += c.evictions;
        drops += c.drops, logical_hits += c.logical_hits, logical_misses += c.logical_misses;
    }
};

// Many events of one pool, for Pool::run: event numbers into the arrays of a whole trace.
struct Run {
    const int32_t* events;
    size_t count;
    const int64_t* offsets;     // members of event e: ids[offsets[e] .. offsets[e + 1])
    const int32_t* ids;
    const float* gates;         // or null
    const int32_t* nexts;
    const int32_t* repeats;     // times each member was asked for, or null: once
    const int32_t* pass;        // by event
    int64_t first_access;       // index of the first member since the last reset
    const int32_t* row;         // by event: where in `total` it counts
    const int32_t* alone;       // by event: one-member events of one row from here on, numbered consecutively
    RunCount* total;

    int64_t asked(int64_t first, int64_t last) const {
        int64_t n = last - first;
        for (int64_t i = first; repeats && i < last; ++i) n += repeats[i] - 1;
        return n;
    }
};

// Whether a policy can serve an access to a full pool in one go: `int turn(id, resident)`, as lru can.
template <class P, class = void> struct TakesTurns : std::false_type {};
template <class P> struct TakesTurns<P, std::void_t<decltype(&P::turn)>> : std::true_type {};

template <class P> class Pool {
public:
    // `capacity` in blocks, or in bytes when `cost` gives the bytes of each block; `slots` is then how many fit on
    // average.
    Pool(P policy, int ids, int64_t capacity, int slots, Admission admission, std::vector<int64_t> cost = {})
        : policy_(std::move(policy)), state_(ids, absent), uses_(ids, 0), members_(ids), fresh_(ids), nobody_(ids),
          cost_(std::move(cost)), capacity_(capacity), slots_(slots), admission_(admission),
          plain_(admission == Admission::forced && cost_.empty()) {}

    bool resident(int id) const { return state_[id] != absent; }
    bool pinned(int id) const { return state_[id] == pin_; }
    int64_t capacity() const { return capacity_; }
    int64_t used() const { return used_; }
    int ids() const { return int(state_.size()); }

    // Serve one event. `log` hears hit(i), miss(i), prefetched(i, in_time) with i the member's index, and evict(id),
    // drop(id) (loaded by this event, not kept), wasted(id) (prefetched, evicted unused; evict follows).
    template <class Log> void step(const Event& e, Lookup lookup, Log& log) {
        if (look_ahead_) mark(e);
        if (e.n == 1) one(e, 0, 0, log);
        else if (lookup == Lookup::atomic) atomic(e, log);
        else serial(e, lookup, log);
    }

    // Serve events one after the other as `step` would under the atomic contract, until one is larger than the pool;
    // that one is for `step`. Returns how many were served; counts go to r.total. Needs `plain()`.
    size_t run(const Run& r) {
        size_t k = 0;
        while (k < r.count) {
            int64_t e = r.events[k];
            size_t alone = std::min<size_t>(r.alone[e], r.count - k);
            if (alone) run_singles(r, e, alone);
            size_t served = alone ? alone : run_sets(r, k);
            k += served;
            if (!served) break;
        }
        return k;
    }
    bool plain() const { return plain_ && capacity_ > pins_; }

    // Room for a block that a predictor wants, without displacing a warmer one: a free slot, an expired prefetch, or
    // the policy's victim if that was used no more often so far. Members of the last event may still be in use and
    // stay. False: already resident, or no such room. Needs `look_ahead`.
    template <class Log> bool prefetch(int id, Log& log) {
        if (resident(id) || admission_ == Admission::never) return false;
        int others = demand_;
        for (int m : running_) others -= state_[m] == demand;
        while (used_ + cost(id) > capacity_) {
            if (evict_expired(members_, log)) continue;
            if (others-- <= 0) return false;
            int victim = policy_.victim(members_);
            if (uses_[victim] > uses_[id]) return false;
            evict_demand(victim, log);
        }
        state_[id] = fetching;
        used_ += cost(id);
        staged_.push_back(id);
        return true;
    }
    void loaded(int id) {
        if (state_[id] == fetching) state_[id] = fetched;
    }

    // Make `id` resident for good. The caller loads it if it was not resident. False when the pool is full of pins.
    template <class Log> bool pin(int id, Log& log) {
        if (state_[id] == pin_) return true;
        if (state_[id] != absent) forget(id);
        while (used_ + cost(id) > capacity_ && evict_one(nobody_, demand_ + int(staged_.size()), log)) {}
        if (used_ + cost(id) > capacity_) return false;
        state_[id] = pin_;
        ++pins_;
        used_ += cost(id);
        policy_.resize(policy_slots());
        return true;
    }
    // Make `id` resident as if it had just been missed, without counting. False when there is no free room.
    bool preload(const Access& a) {
        if (resident(a.id)) return true;
        if (used_ + cost(a.id) > capacity_) return false;
        admit(a);
        return true;
    }

    template <class Log> void resize(int64_t capacity, int slots, Log& log) {
        capacity_ = capacity;
        slots_ = slots;
        policy_.resize(policy_slots());
        shrink(log);
    }

    // Cold: nothing resident but the pins, no history.
    void reset() {
        for (auto& s : state_)
            if (s != pin_) s = absent;
        uses_.assign(uses_.size(), 0);
        staged_.clear();
        policy_.clear();
        used_ = 0;
        demand_ = 0;
        now_ = 0;
        for (int id = 0; id < ids(); ++id)
            if (state_[id] == pin_) used_ += cost(id);
    }
    void look_ahead(bool on) { look_ahead_ = on, plain_ = plain_ && !on; }  // keep what `prefetch` must know
    int staged() const { return int(staged_.size()); }

private:
    enum State : uint8_t { absent, demand, pin_, fetching, fetched, expired };

    int64_t cost(int id) const { return cost_.empty() ? 1 : cost_[id]; }
    int policy_slots() const { return std::max(slots_ - pins_, 0); }
    Access access(const Event& e, int i, int offset) const {
        return {e.ids[i], now_, e.pass, e.access + offset, e.gates ? e.gates[i] : 1.0f, e.nexts ? e.nexts[i] : never};
    }

    // The two loops that replay spends its time in: `step` for what is plain. With the policy and the counts in local
    // variables the compiler can keep their pointers in registers, which doubles the speed.
    void run_singles(const Run& r, int64_t e, size_t n) {
        P policy = std::move(policy_);
        State* state = state_.data();
        int64_t first = r.offsets[e], used = used_, hits = 0, weight = 0, evictions = 0;
        Access a{0, now_, 0, first - r.first_access, 1.0f, never};
        size_t i = 0;
        const bool turns = TakesTurns<P>::value && !r.repeats && pins_ == 0;  // once the pool is full
        for (; i < n && !(turns && used == capacity_); ++i, ++a.access) {
            a.id = r.ids[first + i];
            ++a.now;
            a.pass = r.pass[e + i];
            a.next = r.nexts[first + i];
            if (r.gates) a.gate = r.gates[first + i];
            State was = state[a.id];
            if (was != absent) {
                ++hits;
                if (r.repeats) weight += r.repeats[first + i] - 1;
                if (was == demand) policy.hit(a);
                continue;
            }
            policy.miss(a);
            if (used == capacity_) {
                int victim = policy.victim(NoPins{});
                policy.evict(victim);
                state[victim] = absent;
                ++evictions;
            } else {
                ++used;
            }
            state[a.id] = demand;
            policy.insert(a);
        }
        a.now += int64_t(n - i);
        if constexpr (TakesTurns<P>::value)
            for (; i < n; ++i) {
                int id = r.ids[first + i];
                bool resident = state[id] == demand;
                state[policy.turn(id, resident)] = absent;
                state[id] = demand;
                hits += resident, evictions += !resident;
            }
        policy_ = std::move(policy);
        used_ = used, now_ = a.now, demand_ = int(used - pins_);
        int64_t m = int64_t(n);
        r.total[r.row[e]] +=
            {m, hits, hits, m - hits, evictions, 0, hits + weight, r.asked(first, first + m) - hits - weight};
    }
    size_t run_sets(const Run& r, size_t k) {
        P policy = std::move(policy_);
        State* state = state_.data();
        int64_t used = used_, now = now_;
        size_t start = k;
        for (; k < r.count; ++k) {
            int64_t e = r.events[k], first = r.offsets[e], last = r.offsets[e + 1];
            members_.clear();
            int64_t misses = 0, resting = used - pins_;  // blocks of the policy that are no members
            for (int64_t i = first; i < last; ++i) {
                State was = state[r.ids[i]];
                misses += was == absent;
                resting -= was == demand;
                members_.add(r.ids[i]);
            }
            int64_t n = last - first, leaving = std::max<int64_t>(used + misses - capacity_, 0);
            if (n == 1 || leaving > resting) break;
            Access a{0, ++now, r.pass[e], first - r.first_access, 1.0f, never};
            if (misses)
                for (int64_t i = first; i < last; ++i)
                    if (state[a.id = r.ids[i]] == absent) policy.miss(a);
            for (int64_t v = 0; v < leaving; ++v) {
                int victim = policy.victim(members_);
                policy.evict(victim);
                state[victim] = absent;
            }
            int64_t weight = 0;
            for (int64_t i = first; i < last; ++i) {
                a.id = r.ids[i];
                a.next = r.nexts[i];
                if (r.gates) a.gate = r.gates[i];
                if (state[a.id] == absent) {
                    state[a.id] = demand;
                    policy.insert(a);
                } else {
                    if (r.repeats) weight += r.repeats[i] - 1;
                    if (state[a.id] == demand) policy.hit(a);
                }
            }
            used += misses - leaving;
            int64_t hits = n - misses;
            r.total[r.row[e]] +=
                {1, misses == 0, hits, misses, leaving, 0, hits + weight, r.asked(first, last) - hits - weight};
        }
        policy_ = std::move(policy);
        used_ = used, now_ = now, demand_ = int(used - pins_);
        return k - start;
    }

    template <class Log> void serial(const Event& e, Lookup lookup, Log& log) {
        if (lookup == Lookup::serial) {
            for (int i = 0; i < e.n; ++i) one(e, i, i, log);
            return;
        }
        later_.clear();
        int served = 0;
        for (int i = 0; i < e.n; ++i) {
            if (resident(e.ids[i])) one(e, i, served++, log);
            else later_.push_back(i);
        }
        for (int i : later_) one(e, i, served++, log);
    }

    template <class Log> void atomic(const Event& e, Log& log) {
        ++now_;
        if (!look_ahead_) members_.clear();
        int64_t need = 0;
        int others = demand_ + int(staged_.size());  // evictable blocks that are no members
        for (int i = 0; i < e.n; ++i) {
            int id = e.ids[i];
            if (!look_ahead_) members_.add(id);
            if (state_[id] == absent) need += cost(id);
            else if (state_[id] != pin_) --others;
        }
        if (need)
            for (int i = 0; i < e.n; ++i)
                if (!in_policy(e.ids[i])) policy_.miss(access(e, i, 0));
        if (admission_ == Admission::forced)
            while (used_ + need > capacity_ && others > 0) {
                evict_one(members_, others, log);
                --others;
            }
        for (int i = 0; i < e.n; ++i) serve(e, i, 0, log);
        shrink(log);
    }

    // One access by itself: the serial contract, and the atomic one for an event of one member.
    template <class Log> void one(const Event& e, int i, int offset, Log& log) {
        ++now_;
        int id = e.ids[i];
        if (!in_policy(id)) {
            policy_.miss(access(e, i, offset));
            if (state_[id] == absent && admission_ == Admission::forced) {
                int others = demand_ + int(staged_.size());
                while (used_ + cost(id) > capacity_ && others-- > 0) evict_one(nobody_, others + 1, log);
            }
        }
        serve(e, i, offset, log);
        shrink(log);
    }

    template <class Log> void serve(const Event& e, int i, int offset, Log& log) {
        int id = e.ids[i];
        if (look_ahead_) ++uses_[id];
        switch (state_[id]) {
            case demand:
                log.hit(i);
                policy_.hit(access(e, i, offset));
                break;
            case pin_: log.hit(i); break;
            case absent:
                log.miss(i);
                if (admission_ == Admission::never) {
                    log.drop(id);
                    break;
                }
                fresh_.add(id);
                admit(access(e, i, offset));
                break;
            default:  // prefetched, and used for the first time: from now on the policy's
                log.prefetched(i, state_[id] != fetching);
                unstage(id);
                used_ -= cost(id);
                admit(access(e, i, offset));
        }
    }
    template <class Log> void shrink(Log& log) {
        while (used_ > capacity_ && evict_one(nobody_, demand_ + int(staged_.size()), log)) {}
        fresh_.clear();
    }
    void admit(const Access& a) {
        state_[a.id] = demand;
        used_ += cost(a.id);
        ++demand_;
        policy_.insert(a);
    }
    bool in_policy(int id) const { return state_[id] == demand || state_[id] == pin_; }

    // Evict one block not in `pins`: a prefetch whose time has passed, else the policy's choice, else the oldest
    // prefetch. `others` is how many evictable blocks there are; false when there is none.
    template <class Log> bool evict_one(const Pins& pins, int others, Log& log) {
        if (others <= 0) return false;
        if (staged_.empty()) {
            evict_demand(policy_.victim(pins), log);
            return true;
        }
        if (evict_expired(pins, log)) return true;
        int waiting = 0;
        for (int id : staged_) waiting += !pins(id);
        if (others > waiting) {
            evict_demand(policy_.victim(pins), log);
            return true;
        }
        for (int id : staged_)
            if (!pins(id)) return evict_staged(id, log), true;
        return false;
    }
    template <class Log> void evict_demand(int id, Log& log) {
        policy_.evict(id);
        state_[id] = absent;
        used_ -= cost(id);
        --demand_;
        if (fresh_(id)) log.drop(id);
        else log.evict(id);
    }
    template <class Log> bool evict_expired(const Pins& pins, Log& log) {
        for (int id : staged_)
            if (state_[id] == expired && !pins(id)) return evict_staged(id, log), true;
        return false;
    }
    template <class Log> void evict_staged(int id, Log& log) {
        unstage(id);
        state_[id] = absent;
        used_ -= cost(id);
        log.wasted(id);
        log.evict(id);
    }
    void unstage(int id) {
        for (size_t i = 0; i < staged_.size(); ++i)
            if (staged_[i] == id) {
                staged_.erase(staged_.begin() + i);
                return;
            }
    }
    // The layer's event has come: its prefetches that it does not want lose their protection.
    void mark(const Event& e) {
        members_.clear();
        running_.assign(e.ids, e.ids + e.n);
        for (int id : running_) members_.add(id);
        for (int id : staged_)
            if (id >= e.first_id && id < e.last_id && !members_(id)) state_[id] = expired;
    }
    void forget(int id) {
        if (state_[id] == demand) {
            policy_.evict(id);
            --demand_;
        } else {
            unstage(id);
        }
        state_[id] = absent;
        used_ -= cost(id);
    }

    P policy_;
    std::vector<State> state_;
    std::vector<uint32_t> uses_;   // demand uses so far, kept only when something prefetches
    Pins members_, fresh_, nobody_;  // of the running event: its members; those it loaded; always empty
    std::vector<int64_t> cost_;    // bytes of each block, or empty: every block takes 1
    std::vector<int> staged_;      // prefetched and not used yet, oldest first
    std::vector<int> later_;
    int64_t capacity_;             // in the unit of cost
    int slots_;                    // capacity as a number of blocks, for policies that split it
    int64_t used_ = 0, now_ = 0;
    int demand_ = 0;               // blocks the policy holds
    int pins_ = 0;                 // pinned blocks
    Admission admission_;
    bool plain_;                   // equal blocks, all kept: most replays
    bool look_ahead_ = false;
    std::vector<int> running_;     // members of the last event, kept when something prefetches
};

}  // namespace colibri

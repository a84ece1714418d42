// Hits at every number of slots in one pass, for policies whose content at C slots is the top C of one stack.
//
// `rank` of an access is the smallest C at which it hits, so a histogram of ranks is the whole curve:
// hits(C) = sum of histogram[1 .. C]; histogram[0] counts first uses. An event is free of misses from its largest rank
// on. Mattson, Gecsei, Slutz, Traiger, "Evaluation Techniques for Storage Hierarchies", IBM Systems Journal 1970.
#pragma once
#include <functional>

#include "stream_core.hpp"

namespace colibri {

struct Curve {
    int most;                           // ranks are 1 .. most, the blocks of a pool
    std::vector<int64_t> accesses;      // [(layer * 2 + phase) * (most + 1) + rank]
    std::vector<int64_t> events;        // the same, an event counted at its largest rank
};

// How many blocks were used more recently: one bit per use that is still its block's last, and a Fenwick tree over
// words of bits. Positions are renumbered when they run out, which happens once in so many uses that it costs nothing
// per use.
class Recency {
public:
    explicit Recency(int ids) : place_(ids, -1) {
        while (words_ * 64 < 4 * ids) words_ *= 2;
        bits_.assign(words_, 0);
        tree_.assign(words_ + 1, 0);
        owner_.assign(words_ * 64, 0);
    }
    void clear() {
        std::fill(place_.begin(), place_.end(), -1);
        std::fill(bits_.begin(), bits_.end(), 0);
        std::fill(tree_.begin(), tree_.end(), 0);
        next_ = live_ = 0;
    }
    // 1 for the most recently used block; 0 for one never used.
    int rank(int id) const {
        int at = place_[id];
        if (at < 0) return 0;
        int older = __builtin_popcountll(bits_[at >> 6] & ((1ull << (at & 63)) - 1));
        for (int w = at >> 6; w > 0; w &= w - 1) older += tree_[w];
        return live_ - older;
    }
    void touch(int id) {
        if (next_ == words_ * 64) renumber();
        int at = place_[id];
        if (at >= 0) {
            bits_[at >> 6] &= ~(1ull << (at & 63));
            if ((at >> 6) != (next_ >> 6)) add(at >> 6, -1), add(next_ >> 6, 1);
        } else {
            ++live_;
            add(next_ >> 6, 1);
        }
        bits_[next_ >> 6] |= 1ull << (next_ & 63);
        owner_[next_] = id;
        place_[id] = next_++;
    }

private:
    void add(int word, int n) {
        for (int w = word + 1; w <= words_; w += w & -w) tree_[w] += n;
    }
    void renumber() {
        std::fill(tree_.begin(), tree_.end(), 0);
        int to = 0;
        for (int at = 0; at < next_; ++at)
            if (bits_[at >> 6] >> (at & 63) & 1) {
                owner_[to] = owner_[at];
                place_[owner_[to]] = to;
                ++to;
            }
        std::fill(bits_.begin(), bits_.end(), 0);
        for (int at = 0; at < to; ++at) {
            bits_[at >> 6] |= 1ull << (at & 63);
            add(at >> 6, 1);
        }
        next_ = to;
    }
    int words_ = 4;
    std::vector<int> place_, owner_;  // position of each block's last use, and back
    std::vector<uint64_t> bits_;
    std::vector<int> tree_;           // Fenwick sums of live bits per word
    int next_ = 0, live_ = 0;
};

// Mattson's stack for priorities: what may stay at C slots but not at C - 1 stands at place C.
class PriorityStack {
public:
    PriorityStack(int ids, bool forced) : place_(ids, -1), member_(ids), forced_(forced) {}
    void clear() {
        for (const Entry& entry : stack_) place_[entry.id] = -1;
        stack_.clear();
    }
    int rank(int id) const { return place_[id] + 1; }

    // The event's members (any order) with their new keys; a larger (key, id) stays longer.
    //
    // At C slots the members join what was there, and the best C stay (members first when admission is forced).
    // Walking down the old stack, `waiting` holds what did not stay at C slots but may at more; each place takes the
    // best of those.
    void update(const int32_t* ids, int n, const uint64_t* keys) {
        if (n == 1) return update_one({keys[0], ids[0]});
        int unseen = 0;
        member_.clear();
        waiting_.clear();
        members_.clear();
        for (int i = 0; i < n; ++i) {
            members_.push_back({keys[i], ids[i]});
            member_.add(ids[i]);
            unseen += place_[ids[i]] < 0;
        }
        int old = int(stack_.size()), at = 0;
        stack_.resize(old + unseen);
        auto read = [&](int j) {
            if (j < old && !member_(stack_[j].id)) push(stack_[j]);
        };
        if (forced_) {
            for (; at < n; ++at) read(at);
            std::sort(members_.begin(), members_.end(), [](const Entry& a, const Entry& b) { return b < a; });
            for (int j = 0; j < n; ++j) put(j, members_[j]);
        } else {
            for (const Entry& member : members_) push(member);
        }
        for (; !waiting_.empty(); ++at) {
            read(at);
            put(at, pop());
        }
    }

private:
    struct Entry {
        uint64_t key;
        int id;
        bool operator<(const Entry& other) const { return key < other.key || (key == other.key && id < other.id); }
    };
    // The same for an event of one member, where at most one entry waits.
    void update_one(Entry member) {
        int end = place_[member.id];
        if (end < 0) {
            end = int(stack_.size());
            stack_.push_back(member);
        }
        Entry waiting = member;
        int at = 0;
        if (forced_ && end > 0) {
            waiting = stack_[0];
            put(at++, member);
        }
        for (; at < end; ++at) {
            if (!(stack_[at] < waiting)) continue;
            Entry loser = stack_[at];
            put(at, waiting);
            waiting = loser;
        }
        put(end, waiting);
    }
    void push(const Entry& entry) {
        waiting_.push_back(entry);
        std::push_heap(waiting_.begin(), waiting_.end());
    }
    Entry pop() {
        std::pop_heap(waiting_.begin(), waiting_.end());
        Entry best = waiting_.back();
        waiting_.pop_back();
        return best;
    }
    void put(int at, const Entry& entry) {
        stack_[at] = entry;
        place_[entry.id] = at;
    }
    std::vector<Entry> stack_, waiting_, members_;
    std::vector<int> place_;
    Pins member_;
    bool forced_;
};

// Walk the stream, ranking each event's accesses before `serve(pool, first, n)` lets the pool see them.
template <class Pool, class Serve>
Curve walk(const Stream& s, std::vector<Pool>& pools, int64_t first_counted, bool weigh,
           const std::function<void()>& poll, Serve&& serve) {
    int most = s.pool_ids();
    Curve c{most, std::vector<int64_t>(size_t(s.layers) * 2 * (most + 1), 0), {}};
    c.events = c.accesses;
    int64_t next_poll = 0;
    for (int64_t e = 0; e < s.events(); ++e) {
        if (s.offsets[e] >= next_poll) {
            poll();
            next_poll = s.offsets[e] + (1 << 18);
        }
        if (s.starts[e])
            for (auto& pool : pools) pool.clear();
        auto& pool = pools[s.pool(e)];
        size_t row = size_t(s.layer[e] * 2 + s.phase[e]) * (most + 1);
        int largest = 0;
        bool cold = false, counted = e >= first_counted;
        auto count = [&](int64_t i, int rank) {
            cold |= rank == 0;
            largest = std::max(largest, rank);
            if (counted) c.accesses[row + rank] += weigh && !s.repeats.empty() ? s.repeats[i] : 1;
        };
        int64_t first = s.offsets[e], last = s.offsets[e + 1];
        if (s.atomic) {
            for (int64_t i = first; i < last; ++i) count(i, pool.rank(s.ids[i]));
            serve(pool, first, int(last - first));
        } else {
            for (int64_t i = first; i < last; ++i) {
                count(i, pool.rank(s.ids[i]));
                serve(pool, i, 1);
            }
        }
        if (counted) ++c.events[row + (cold ? 0 : largest)];
    }
    return c;
}

inline Curve lru_curve(const Stream& s, int64_t first_counted, bool weigh, const std::function<void()>& poll) {
    std::vector<Recency> pools(s.future.size(), Recency(s.pool_ids()));
    return walk(s, pools, first_counted, weigh, poll, [&](Recency& pool, int64_t first, int n) {
        for (int i = 0; i < n; ++i) pool.touch(s.ids[first + i]);
    });
}

inline Curve belady_curve(const Stream& s, bool forced, int64_t first_counted, bool weigh,
                          const std::function<void()>& poll) {
    std::vector<PriorityStack> pools(s.future.size(), PriorityStack(s.pool_ids(), forced));
    std::vector<uint64_t> keys;
    return walk(s, pools, first_counted, weigh, poll, [&](PriorityStack& pool, int64_t first, int n) {
        keys.resize(n);
        for (int i = 0; i < n; ++i) keys[i] = uint64_t(never - s.nexts[first + i]);
        pool.update(&s.ids[first], n, keys.data());
    });
}

inline Curve lfu_curve(const Stream& s, bool forced, int64_t first_counted, bool weigh,
                       const std::function<void()>& poll) {
    struct Counted : PriorityStack {
        using PriorityStack::PriorityStack;
        std::vector<uint64_t> uses;
        uint64_t now = 0;
        void clear() {
            PriorityStack::clear();
            std::fill(uses.begin(), uses.end(), 0);
        }
    };
    std::vector<Counted> pools(s.future.size(), Counted(s.pool_ids(), forced));
    for (auto& pool : pools) pool.uses.assign(s.pool_ids(), 0);
    std::vector<uint64_t> keys;
    return walk(s, pools, first_counted, weigh, poll, [&](Counted& pool, int64_t first, int n) {
        keys.resize(n);
        ++pool.now;
        for (int i = 0; i < n; ++i) keys[i] = ++pool.uses[s.ids[first + i]] << 36 | pool.now;
        pool.update(&s.ids[first], n, keys.data());
    });
}

// A static set: block `id` of pool p is resident from ranks[p * ids + id] slots on (0: never).
inline Curve static_curve(const Stream& s, const std::vector<int>& ranks, int64_t first_counted, bool weigh,
                          const std::function<void()>& poll) {
    struct Fixed {
        const int* ranks;
        int rank(int id) const { return ranks[id]; }
        void clear() {}
    };
    std::vector<Fixed> pools;
    for (size_t p = 0; p < s.future.size(); ++p) pools.push_back({ranks.data() + p * s.pool_ids()});
    return walk(s, pools, first_counted, weigh, poll, [](Fixed&, int64_t, int) {});
}

}  // namespace colibri

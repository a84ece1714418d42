// The live cache: CacheCore plus the place of every resident block. A step's answer says where each block will be,
// which loads go to which slot, and which of them must wait because a member of the same step still reads that slot.
#pragma once
#include <functional>

#include "stream_core.hpp"

namespace colibri {

struct Load {
    int index;  // into StepResult::blocks
    int slot;   // -1: used once from a transient buffer, not kept
    bool late;  // the slot's old block is a hit of this very step: load after it was used
};
struct Victim {
    int layer, block, slot;
};
struct Moved {
    int from, to;
};
struct StepResult {
    std::vector<uint16_t> blocks;  // distinct, first seen first
    std::vector<int> slots;        // slot that each is read from, -1 for a transient buffer
    std::vector<uint8_t> hit;      // 0 miss, 1 resident, 2 prefetched and loaded, 3 prefetched and still loading
    std::vector<Load> loads;       // in the order the contract loads them
    std::vector<Victim> victims;   // evicted, with the slot they had
};
struct CacheEvent {
    int step, layer, block, hit, slot, victim_layer, victim_block;  // -1 where there is none
};

class ExpertCache {
public:
    // `make` builds a pool's policy. `future`, when known, are the events to come, which Belady's rule needs.
    ExpertCache(const CacheSettings& s, const std::function<AnyPolicy(const PolicySetup&)>& make,
                int event_capacity = 0, std::unique_ptr<Stream> future = nullptr)
        : future_(std::move(future)),
          core_(s,
                [&](PolicySetup& setup, int pool) {
                    if (future_) setup.future = &future_->future[pool];
                    return make(setup);
                }),
          arrange_(s.lookup, s.order, s.seed),
          seen_(s.layers * s.blocks, -1),
          slot_(s.layers * s.blocks, -1),
          event_capacity_(event_capacity) {
        core_.look_ahead(true);
        lay_out();
    }
    ExpertCache(const ExpertCache&) = delete;
    const CacheSettings& settings() const { return core_.settings(); }
    const std::vector<Tally>& tally() const { return core_.tally(); }
    void reset_tally() { core_.reset_tally(); }
    int slot_of(int layer, int block) const { return slot_[layer * settings().blocks + block]; }
    int slot_count() const { return int(occupant_.size()); }
    // layer * blocks + block in this slot, or -1.
    int occupant(int slot) const { return occupant_[slot]; }

    // One layer's step. `weights` is null or one router weight per entry of `blocks`; of repeated blocks the largest
    // counts.
    const StepResult& step(int layer, const uint16_t* blocks, int n, int phase, const float* weights) {
        clear_result();
        int first = layer * settings().blocks;
        gates_seen_.clear();
        for (int i = 0; i < n; ++i) {
            int& at = seen_[first + blocks[i]];
            if (at < 0) {
                at = int(r_.blocks.size());
                r_.blocks.push_back(blocks[i]);
                if (weights) gates_seen_.push_back(weights[i]);
            } else if (weights) {
                gates_seen_[at] = std::max(gates_seen_[at], weights[i]);
            }
        }
        for (uint16_t b : r_.blocks) seen_[first + b] = -1;
        int members = int(r_.blocks.size());
        r_.slots.assign(members, -1);
        r_.hit.assign(members, 0);
        for (int i = 0; i < members; ++i) r_.slots[i] = slot_[first + r_.blocks[i]];

        arrange_(r_.blocks.data(), members, order_);
        ids_.resize(members);
        gates_.resize(weights ? members : 0);
        for (int i = 0; i < members; ++i) {
            ids_[i] = core_.base(layer) + r_.blocks[order_[i]];
            if (weights) gates_[i] = gates_seen_[order_[i]];
        }
        Watch watch{*this, layer};
        const int32_t* nexts = future_ ? foretold(layer) : nullptr;
        core_.step(layer, phase, ids_.data(), members, weights ? gates_.data() : nullptr, nexts, watch);
        place(layer);
        last_used_[layer] = r_.blocks;
        if (event_capacity_) record(layer);
        ++steps_;
        return r_;
    }

    // Blocks a predictor expects `layer` to need. The result's blocks, slots and loads are the accepted ones.
    const StepResult& prefetch(int layer, const uint16_t* blocks, int n) {
        clear_result();
        Watch watch{*this, layer};
        for (int i = 0; i < n; ++i) {
            if (!core_.prefetch(layer, core_.base(layer) + blocks[i], watch)) continue;
            loading_.push_back(int(r_.blocks.size()));
            r_.blocks.push_back(blocks[i]);
            r_.slots.push_back(-1);
            r_.hit.push_back(0);
        }
        place(layer);
        return r_;
    }
    void loaded(int slot) {
        int key = occupant_[slot];
        if (key >= 0) core_.pool(layer_of(key)).loaded(pool_id(key));
    }
    // Make these blocks resident, for good or (preload) until the policy evicts them; the result's loads say which
    // must be read. Preloading takes free room only: a block that finds none is left out of the loads.
    StepResult hold(const std::vector<std::pair<int, int>>& blocks, bool for_good) {
        StepResult all;
        for (auto [layer, block] : blocks) {
            clear_result();
            Watch watch{*this, layer};
            int id = core_.base(layer) + block;
            bool had = slot_of(layer, block) >= 0;
            int32_t next = future_ ? future_->first_use(settings().global ? 0 : layer, id, 0) : never;
            bool held = for_good ? core_.pool(layer).pin(id, watch)
                                 : core_.pool(layer).preload(core_.first_access(id, next));
            if (!held && for_good)
                throw std::invalid_argument("cannot pin block " + std::to_string(block) + " of layer " +
                                            std::to_string(layer) + ": all slots of its pool hold pinned blocks");
            r_.blocks.push_back(uint16_t(block));
            r_.slots.push_back(slot_of(layer, block));
            r_.hit.push_back(had);
            if (held && !had) loading_.push_back(0);
            place(layer);
            int at = int(all.blocks.size());
            all.blocks.push_back(uint16_t(block));
            all.slots.push_back(r_.slots[0]);
            all.hit.push_back(had);
            for (Load load : r_.loads) all.loads.push_back({at, load.slot, false});
            all.victims.insert(all.victims.end(), r_.victims.begin(), r_.victims.end());
        }
        return all;
    }
    // A new number of slots. Blocks that must go are in the result's victims (old slots); `moves` renumbers the others.
    const StepResult& resize(int slots, std::vector<Moved>& moves) {
        clear_result();
        Watch watch{*this, 0};
        core_.resize(slots, settings().capacity_bytes, watch);
        for (int key : evicted_) leave(key);
        std::vector<int> old = slot_;
        lay_out();
        for (int key = 0; key < int(old.size()); ++key) {
            if (old[key] < 0) continue;
            int to = take(layer_of(key));
            settle(key, to);
            moves.push_back({old[key], to});
        }
        return r_;
    }
    void reset() {
        core_.reset();
        next_event_of_future_ = 0;
        for (int key = 0; key < int(slot_.size()); ++key)
            if (slot_[key] >= 0 && !core_.pool(layer_of(key)).resident(pool_id(key))) {
                give(slot_[key]);
                occupant_[slot_[key]] = -1;
                slot_[key] = -1;
            }
        for (auto& used : last_used_) used.clear();
    }
    // (layers * blocks): 0 absent, 1 resident, 2 resident and used by its layer's last step.
    std::vector<uint8_t> residency() const {
        std::vector<uint8_t> map(slot_.size());
        for (size_t key = 0; key < map.size(); ++key) map[key] = slot_[key] >= 0;
        for (size_t layer = 0; layer < last_used_.size(); ++layer)
            for (uint16_t b : last_used_[layer]) map[layer * settings().blocks + b] *= 2;
        return map;
    }
    // The newest events, oldest first.
    std::vector<CacheEvent> events() const {
        std::vector<CacheEvent> ordered(events_.begin() + next_event_, events_.end());
        ordered.insert(ordered.end(), events_.begin(), events_.begin() + next_event_);
        return ordered;
    }

private:
    struct Watch {  // hears the pool and notes what the result needs
        ExpertCache& cache;
        int pool;
        void hit(int i) { cache.r_.hit[cache.order_[i]] = 1; }
        void prefetched(int i, bool timely) { cache.r_.hit[cache.order_[i]] = timely ? 2 : 3; }
        void miss(int i) { cache.loading_.push_back(cache.order_[i]); }
        void evict(int id) {
            cache.evicted_.push_back(cache.settings().global ? id : pool * cache.settings().blocks + id);
        }
        void drop(int) {}
        void wasted(int) {}
    };
    // Next uses of this step's members. Raises std::invalid_argument when the step is not the one that was foretold.
    const int32_t* foretold(int layer) {
        const Stream& f = *future_;
        int64_t e = next_event_of_future_;
        bool same = e < f.events() && f.layer[e] == layer && f.offsets[e + 1] - f.offsets[e] == int64_t(ids_.size()) &&
                    std::equal(ids_.begin(), ids_.end(), f.ids.begin() + f.offsets[e]);
        if (!same)
            throw std::invalid_argument("step " + std::to_string(e) + " (layer " + std::to_string(layer) +
                                        ") is not the one the cache was told to expect; record this run again");
        ++next_event_of_future_;
        return &f.nexts[f.offsets[e]];
    }
    int layer_of(int key) const { return key / settings().blocks; }
    int pool_id(int key) const { return settings().global ? key : key % settings().blocks; }
    int free_list(int layer) const { return settings().global ? 0 : layer; }

    void clear_result() {
        r_.blocks.clear(), r_.slots.clear(), r_.hit.clear(), r_.loads.clear(), r_.victims.clear();
        loading_.clear(), evicted_.clear();
    }
    // Empty slots for the settings' number of slots, the lowest free first.
    void lay_out() {
        const CacheSettings& s = settings();
        free_.assign(s.pools(), {});
        int total = 0;
        for (int p = 0; p < s.pools(); ++p) {
            int n = s.slots_of(p);
            if (s.by_bytes()) {
                int64_t smallest = *std::min_element(s.block_bytes.begin(), s.block_bytes.end());
                n = int(std::min<int64_t>(s.capacity_bytes / smallest, int64_t(s.layers) * s.blocks));
            }
            for (int i = n - 1; i >= 0; --i) free_[p].push_back(total + i);
            total += n;
        }
        occupant_.assign(total, -1);
        slot_.assign(slot_.size(), -1);
        last_used_.resize(s.layers);
        pool_of_slot_.clear();
        for (int p = 0; p < s.pools(); ++p) pool_of_slot_.insert(pool_of_slot_.end(), free_[p].size(), p);
    }
    int take(int layer) {
        auto& free = free_[free_list(layer)];
        int slot = free.back();
        free.pop_back();
        return slot;
    }
    void give(int slot, bool last = false) {
        auto& free = free_[pool_of_slot_[slot]];
        free.insert(last ? free.begin() : free.end(), slot);
    }
    void settle(int key, int slot) {
        slot_[key] = slot;
        occupant_[slot] = key;
    }
    // The block gave up its slot; whose slot it was stays in `r_.victims`.
    void leave(int key) {
        int slot = slot_[key];
        if (slot < 0) return;  // loaded and evicted within this step
        r_.victims.push_back({layer_of(key), key % settings().blocks, slot});
        slot_[key] = occupant_[slot] = -1;
    }
    // Turn the pool's decisions into slots: first what left, then where the kept loads go. Slots that no hit of this
    // step reads are filled first.
    void place(int layer) {
        int first = layer * settings().blocks;
        for (int key : evicted_) leave(key);
        for (const Victim& v : r_.victims) give(v.slot, still_read(v.slot));
        auto& pool = core_.pool(layer);
        for (int index : loading_) {
            int key = first + r_.blocks[index];
            int slot = -1;
            bool late = false;
            if (pool.resident(pool_id(key))) {
                slot = take(layer);
                late = still_read(slot);
                settle(key, slot);
                kept_.push_back({index, slot});
            }
            r_.loads.push_back({index, slot, late});
        }
        for (auto [index, slot] : kept_) r_.slots[index] = slot;
        for (const Load& load : r_.loads)
            if (load.slot < 0) r_.slots[load.index] = -1;
        kept_.clear();
    }
    // Does a hit of this step read `slot`? (Only called for slots of blocks that the step evicted, and for free ones.)
    bool still_read(int slot) const {
        for (size_t i = 0; i < r_.slots.size(); ++i)
            if (r_.hit[i] && r_.slots[i] == slot) return true;
        return false;
    }
    void record(int layer) {
        size_t v = 0;
        for (size_t i = 0; i < r_.blocks.size(); ++i) {
            CacheEvent e{steps_, layer, r_.blocks[i], r_.hit[i], r_.slots[i], -1, -1};
            if (!r_.hit[i] && v < r_.victims.size()) {
                e.victim_layer = r_.victims[v].layer;
                e.victim_block = r_.victims[v++].block;
            }
            if (int(events_.size()) < event_capacity_) {
                events_.push_back(e);
            } else {
                events_[next_event_] = e;
                next_event_ = (next_event_ + 1) % event_capacity_;
            }
        }
    }

    std::unique_ptr<Stream> future_;
    int64_t next_event_of_future_ = 0;
    CacheCore<AnyPolicy> core_;
    Arrange arrange_;
    std::vector<int> seen_;       // index in r_.blocks, while a step runs
    std::vector<int> slot_;       // by key = layer * blocks + block; -1 absent
    std::vector<int> occupant_;   // key by slot; -1 empty
    std::vector<int> pool_of_slot_;
    std::vector<std::vector<int>> free_;  // free slots of each pool, next one last
    std::vector<std::vector<uint16_t>> last_used_;
    StepResult r_;
    std::vector<int> order_, loading_, evicted_;
    std::vector<std::pair<int, int>> kept_;
    std::vector<int32_t> ids_;
    std::vector<float> gates_, gates_seen_;
    int event_capacity_, next_event_ = 0, steps_ = 0;
    std::vector<CacheEvent> events_;
};

}  // namespace colibri

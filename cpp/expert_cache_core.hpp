// The expert cache: pools of slots (pool_core.hpp), the order in which an event's members count, and counters per
// layer and phase. Which file a block comes from, where its bytes lie and what it computes is for others.
#pragma once
#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "policies/registry.hpp"
#include "pool_core.hpp"

namespace colibri {

enum class Order : uint8_t { rank, id, random };

struct CacheSettings {
    int layers = 1, blocks = 1;    // MoE layers; blocks per layer
    int slots = 1;                 // per layer, or in all when global
    bool global = false;
    std::string policy = "lru";
    Lookup lookup = Lookup::atomic;
    Order order = Order::rank;     // of the accesses of an event, serial contracts only
    Admission admission = Admission::forced;
    uint64_t seed = 0;
    std::map<std::string, double> params;
    int64_t capacity_bytes = 0;    // instead of slots, when > 0
    std::vector<int64_t> block_bytes;  // (layers,), needed with capacity_bytes

    Admission admits() const {  // some policies are a rule of admission as well
        return policy == "static-pin" ? Admission::never : policy == "belady-bypass" ? Admission::bypass : admission;
    }
    int pools() const { return global ? 1 : layers; }
    // Bytes are the unit only where blocks of different sizes share a pool.
    bool by_bytes() const { return capacity_bytes > 0 && global; }
    // Slots of a layer's pool, or of the global one; by bytes this is how many blocks of mean size fit.
    int slots_of(int layer) const {
        if (capacity_bytes <= 0) return slots;
        if (!global) return int(std::min<int64_t>(capacity_bytes / layers / block_bytes[layer], blocks));
        int64_t mean = std::accumulate(block_bytes.begin(), block_bytes.end(), int64_t(0)) / layers;
        return int(std::min<int64_t>(std::max<int64_t>(capacity_bytes / mean, 1), int64_t(layers) * blocks));
    }
};

// Counts of one layer in one phase. accesses = hits + prefetch_timely + prefetch_late + misses.
struct Tally {
    int64_t events = 0;           // steps of the layer
    int64_t full_events = 0;      // those without a miss
    int64_t hits = 0;             // found resident by demand
    int64_t misses = 0;           // loaded
    int64_t evictions = 0;        // blocks pushed out by this layer's steps
    int64_t drops = 0;            // loaded, used and not kept
    int64_t prefetch_issued = 0;
    int64_t prefetch_timely = 0;  // found because it was fetched ahead, and loaded
    int64_t prefetch_late = 0;    // fetched ahead, still loading
    int64_t prefetch_wasted = 0;  // fetched ahead, evicted unused
};

// Counts what the pool tells and passes it on.
template <class Log> struct Counting {
    Tally& tally;
    Log& log;
    void hit(int i) { ++tally.hits, log.hit(i); }
    void miss(int i) { ++tally.misses, log.miss(i); }
    void prefetched(int i, bool timely) {
        ++(timely ? tally.prefetch_timely : tally.prefetch_late);
        log.prefetched(i, timely);
    }
    void evict(int id) { ++tally.evictions, log.evict(id); }
    void drop(int id) { ++tally.drops, log.drop(id); }
    void wasted(int id) { ++tally.prefetch_wasted, log.wasted(id); }
};

// Members of an event in the order the contract wants: ascending ids for atomic, else by `order`.
class Arrange {
public:
    Arrange(Lookup lookup, Order order, uint64_t seed)
        : lookup_(lookup), order_(order), random_(seed ^ 0x6f72646572ull) {}
    // Fill `index` with a permutation of 0..n-1.
    template <class Id> void operator()(const Id* ids, int n, std::vector<int>& index) {
        index.resize(n);
        std::iota(index.begin(), index.end(), 0);
        if (lookup_ == Lookup::atomic || order_ == Order::id)
            std::sort(index.begin(), index.end(), [&](int a, int b) { return ids[a] < ids[b]; });
        else if (order_ == Order::random)
            for (int i = n - 1; i > 0; --i) std::swap(index[i], index[random_.below(i + 1)]);
    }

private:
    Lookup lookup_;
    Order order_;
    Random random_;
};

template <class P> class CacheCore {
public:
    // `make(setup, pool)` builds the policy of one pool.
    template <class Make> CacheCore(const CacheSettings& s, Make&& make) : s_(s), tally_(s.layers * 2) {
        for (int p = 0; p < s.pools(); ++p) {
            PolicySetup setup;
            setup.ids = s.global ? s.layers * s.blocks : s.blocks;
            setup.slots = s.slots_of(p);
            setup.blocks = s.blocks;
            setup.first_layer = p;
            setup.seed = s.seed * 1000003 + p;
            setup.params = s.params;
            std::vector<int64_t> cost;
            if (s.by_bytes())
                for (int id = 0; id < setup.ids; ++id) cost.push_back(s.block_bytes[id / s.blocks]);
            pools_.emplace_back(make(setup, p), setup.ids, s.by_bytes() ? s.capacity_bytes : setup.slots, setup.slots,
                                s.admits(), std::move(cost));
            refuse_unread(s.policy, setup);
        }
    }

    CacheCore(CacheCore&&) = default;
    Pool<P>& pool(int layer) { return pools_[s_.global ? 0 : layer]; }
    const Pool<P>& pool(int layer) const { return pools_[s_.global ? 0 : layer]; }
    int base(int layer) const { return s_.global ? layer * s_.blocks : 0; }
    const CacheSettings& settings() const { return s_; }
    const std::vector<Tally>& tally() const { return tally_; }  // [layer * 2 + phase]
    void reset_tally() { tally_.assign(tally_.size(), Tally{}); }

    // Serve an event whose members are pool ids in the order of `Arrange`. `log` hears what Pool::step tells.
    template <class Log>
    void step(int layer, int phase, const int32_t* ids, int n, const float* gates, const int32_t* nexts, Log& log) {
        if (layer <= last_layer_) ++pass_;
        last_layer_ = layer;
        Event e{ids, n, gates, nexts, pass_, accesses_, base(layer), base(layer) + s_.blocks};
        Counting<Log> both{tally_[layer * 2 + phase], log};
        int64_t misses = both.tally.misses;
        pool(layer).step(e, s_.lookup, both);
        accesses_ += n;
        ++both.tally.events;
        both.tally.full_events += both.tally.misses == misses;
        phase_ = phase;
    }
    template <class Log> bool prefetch(int layer, int id, Log& log) {
        Counting<Log> both{tally_[layer * 2 + phase_], log};
        bool issued = pool(layer).prefetch(id, both);
        both.tally.prefetch_issued += issued;
        return issued;
    }
    // Cold start again: pins stay, counters stay.
    void reset() {
        for (auto& p : pools_) p.reset();
        last_layer_ = INT32_MAX;
        pass_ = accesses_ = 0;
    }
    template <class Log> void resize(int slots, int64_t capacity_bytes, Log& log) {
        s_.slots = slots;
        s_.capacity_bytes = capacity_bytes;
        for (int p = 0; p < s_.pools(); ++p) {
            Counting<Log> both{tally_[p * 2 + phase_], log};
            log.pool = p;
            pools_[p].resize(s_.by_bytes() ? capacity_bytes : s_.slots_of(p), s_.slots_of(p), both);
        }
    }
    Access first_access(int id, int32_t next) const { return {id, 0, pass_, accesses_, 1.0f, next}; }
    void look_ahead(bool on) {
        for (auto& p : pools_) p.look_ahead(on);
    }

private:
    CacheSettings s_;
    std::vector<Pool<P>> pools_;
    std::vector<Tally> tally_;
    int last_layer_ = INT32_MAX, phase_ = 0;
    int64_t pass_ = 0, accesses_ = 0;
};

}  // namespace colibri

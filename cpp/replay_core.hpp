// Replay: drive a CacheCore with a Stream, as the live engine would have, and keep the counts. No slots' places, no bytes.
#pragma once
#include <atomic>
#include <functional>

#include "prefetch_core.hpp"

namespace colibri {

struct ReplaySettings {
    CacheSettings cache;
    PrefetchSettings prefetch;
    std::vector<std::pair<int, int>> pins, preload;  // (layer, block) resident at the start, and after every reset
    int64_t first_counted = 0;                       // events before this one warm the cache and are not counted
};

struct ReplayResult {
    std::vector<Tally> tally;        // [layer * 2 + phase]
    std::vector<int64_t> logical_hits, logical_misses;  // [layer * 2 + phase], a member counted as often as it was asked for
    int64_t preloaded = 0;           // blocks loaded before the first event
    PrefetchScore prefetch;
};

struct Interrupted : std::runtime_error {
    Interrupted() : std::runtime_error("stopped by another thread") {}
};

// What replay wants to hear of a step: which members hit, when repeats have weight.
struct Weigh {
    const int32_t* repeats = nullptr;  // of the event's members; null: each counts once
    int64_t hits = 0, misses = 0;
    int pool = 0;
    void hit(int i) { hits += repeats ? repeats[i] : 1; }
    void prefetched(int i, bool) { hit(i); }
    void miss(int i) { misses += repeats ? repeats[i] : 1; }
    void evict(int) {}
    void drop(int) {}
    void wasted(int) {}
};

template <class Core> void warm(Core& core, const ReplaySettings& r, ReplayResult& result) {
    Weigh log;
    for (auto [layer, block] : r.pins) {
        int id = core.base(layer) + block;
        result.preloaded += !core.pool(layer).resident(id);
        if (!core.pool(layer).pin(id, log))
            throw std::invalid_argument("cannot pin block " + std::to_string(block) + " of layer " + std::to_string(layer) +
                                        ": all slots of its pool hold pinned blocks");
    }
    for (auto [layer, block] : r.preload) {
        int id = core.base(layer) + block;
        result.preloaded += !core.pool(layer).resident(id) && core.pool(layer).preload(core.first_access(id));
    }
}

// `poll` is asked every few milliseconds and throws Interrupted to stop. `Ahead` compiles the predictors in.
template <bool Ahead, class Core>
ReplayResult drive(const Stream& s, const ReplaySettings& r, Core& core, const std::function<void()>& poll) {
    ReplayResult result;
    result.logical_hits.assign(s.layers * 2, 0);
    result.logical_misses.assign(s.layers * 2, 0);
    std::unique_ptr<Prefetcher> prefetcher;
    if (Ahead) prefetcher = std::make_unique<Prefetcher>(s, r.prefetch);
    core.look_ahead(Ahead);
    warm(core, r, result);
    const float* gates = s.gates.empty() ? nullptr : s.gates.data();
    const int32_t* repeats = s.repeats.empty() ? nullptr : s.repeats.data();
    int64_t next_poll = 0;
    for (int64_t e = 0; e < s.events(); ++e) {
        int64_t first = s.offsets[e];
        int n = int(s.offsets[e + 1] - first), layer = s.layer[e], at = layer * 2 + s.phase[e];
        if (first >= next_poll) {
            poll();
            next_poll = first + (1 << 18);
        }
        if (s.starts[e]) {
            core.reset();
            if constexpr (Ahead) prefetcher->forget();
            warm(core, r, result);
        }
        if (e == r.first_counted) core.reset_tally();
        if constexpr (Ahead) prefetcher->arrive(core, e);
        Weigh log;
        log.repeats = repeats ? repeats + first : nullptr;
        core.step(layer, s.phase[e], &s.ids[first], n, gates ? gates + first : nullptr, &s.nexts[first], log);
        if (e >= r.first_counted) {
            result.logical_hits[at] += log.hits;
            result.logical_misses[at] += log.misses;
        }
        if constexpr (Ahead) prefetcher->advance(core, e, log.misses, log);
    }
    result.tally = core.tally();
    if (prefetcher) result.prefetch = prefetcher->score();
    return result;
}

// `custom`, when given, makes the policy of each pool instead of a class of this folder.
inline ReplayResult replay(const Stream& s, const ReplaySettings& r, const std::function<void()>& poll,
                           const std::function<AnyPolicy(const PolicySetup&)>& custom = nullptr) {
    ReplayResult result;
    auto with_future = [&](PolicySetup& setup, int pool) -> PolicySetup& {
        setup.future = &s.future[pool];
        return setup;
    };
    bool ahead = r.prefetch.predictor != Predictor::none;
    bool fast = !custom && !ahead && with_fast_policy(r.cache.policy, [&](auto tag) {
        using P = typename decltype(tag)::type;
        CacheCore<P> core(r.cache, [&](PolicySetup& setup, int pool) { return P(with_future(setup, pool)); });
        result = drive<false>(s, r, core, poll);
    });
    if (fast) return result;
    CacheCore<AnyPolicy> core(r.cache, [&](PolicySetup& setup, int pool) {
        return custom ? custom(with_future(setup, pool)) : make_policy(r.cache.policy, with_future(setup, pool));
    });
    return ahead ? drive<true>(s, r, core, poll) : drive<false>(s, r, core, poll);
}

}  // namespace colibri

// Replay: drive a CacheCore with a Stream, as the live engine would have, and keep the counts. No slots' places, no
// bytes.
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
    std::vector<int64_t> logical_hits,
        logical_misses;              // [layer * 2 + phase], a member counted as often as it was asked for
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

// Make pins and preloads resident, in all pools or in one.
template <class Core>
void warm(const Stream& s, const ReplaySettings& r, Core& core, ReplayResult& result, int32_t epoch = 0,
          int only = -1) {
    Weigh log;
    auto skip = [&](int layer) { return only >= 0 && &core.pool(layer) != &core.pool(only); };
    for (auto [layer, block] : r.pins) {
        if (skip(layer)) continue;
        int id = core.base(layer) + block;
        result.preloaded += !core.pool(layer).resident(id);
        if (!core.pool(layer).pin(id, log))
            throw std::invalid_argument("cannot pin block " + std::to_string(block) + " of layer " +
                                        std::to_string(layer) + ": all slots of its pool hold pinned blocks");
    }
    for (auto [layer, block] : r.preload) {
        if (skip(layer)) continue;
        int id = core.base(layer) + block;
        result.preloaded += !core.pool(layer).resident(id) && core.pool(layer).preload(
                                core.first_access(id, s.first_use(s.global ? 0 : layer, id, epoch)));
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
    warm(s, r, core, result);
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
            warm(s, r, core, result, s.epoch[e]);
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

// The same counts for policies in C++ and without predictors: pool after pool, each through all of its events.
template <class P>
ReplayResult drive_pools(const Stream& s, const ReplaySettings& r, CacheCore<P>& core,
                         const std::function<void()>& poll) {
    ReplayResult result;
    warm(s, r, core, result);
    const float* gates = s.gates.empty() ? nullptr : s.gates.data();
    const int32_t* repeats = s.repeats.empty() ? nullptr : s.repeats.data();
    std::vector<RunCount> counted(s.layers * 2), ignored(s.layers * 2);
    constexpr size_t chunk = 1 << 16;  // events between polls
    for (size_t p = 0; p < s.events_of.size(); ++p) {
        Pool<P>& pool = core.pool(int(p));
        const auto& events = s.events_of[p];
        int32_t epoch = 0;
        for (size_t k = 0, end; k < events.size(); k = end) {
            poll();
            if (s.epoch[events[k]] != epoch) {
                epoch = s.epoch[events[k]];
                pool.reset();
                warm(s, r, core, result, epoch, int(p));
            }
            bool counts = events[k] >= r.first_counted;
            auto same = [&](int32_t e) { return s.epoch[e] == epoch && (e >= r.first_counted) == counts; };
            auto from = events.begin() + k;
            end = k + (std::partition_point(from, from + std::min(chunk, events.size() - k), same) - from);
            auto& total = counts ? counted : ignored;
            while (k < end) {
                if (s.atomic && pool.plain())
                    k += pool.run({&events[k], end - k, s.offsets.data(), s.ids.data(), gates, s.nexts.data(), repeats,
                                   s.pass.data(), s.first_access[epoch], s.row.data(), s.alone.data(), total.data()});
                if (k == end) break;
                int64_t e = events[k++], first = s.offsets[e];
                int base = core.base(s.layer[e]);
                Event event{&s.ids[first],
                            int(s.offsets[e + 1] - first),
                            gates ? gates + first : nullptr,
                            &s.nexts[first],
                            s.pass[e],
                            first - s.first_access[epoch],
                            base,
                            base + s.blocks};
                Tally tally;
                Weigh weigh;
                weigh.repeats = repeats ? repeats + first : nullptr;
                Counting<Weigh> log{tally, weigh};
                pool.step(event, r.cache.lookup, log);
                total[s.row[e]] += {1,           tally.misses == 0, tally.hits,  tally.misses, tally.evictions,
                                    tally.drops, weigh.hits,        weigh.misses};
            }
        }
    }
    for (const RunCount& c : counted) {
        result.tally.push_back({c.events, c.full_events, c.hits, c.misses, c.evictions, c.drops});
        result.logical_hits.push_back(c.logical_hits);
        result.logical_misses.push_back(c.logical_misses);
    }
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
        result = drive_pools(s, r, core, poll);
    });
    if (fast) return result;
    CacheCore<AnyPolicy> core(r.cache, [&](PolicySetup& setup, int pool) {
        return custom ? custom(with_future(setup, pool)) : make_policy(r.cache.policy, with_future(setup, pool));
    });
    return ahead ? drive<true>(s, r, core, poll) : drive<false>(s, r, core, poll);
}

}  // namespace colibri

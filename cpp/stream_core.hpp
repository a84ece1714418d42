// A routing trace made ready for replay: per event its distinct members in the order the contract serves them, as pool
// ids, with weights, repeats and the position of each member's next request. One stream serves every policy and slot
// count.
#pragma once
#include "expert_cache_core.hpp"

namespace colibri {

struct TraceView {  // arrays of a trace, not owned
    int64_t events = 0;
    const int64_t* offsets = nullptr;     // (events + 1,)
    const uint16_t* experts = nullptr;    // (offsets[events],) repeats allowed inside an event
    const float* weights = nullptr;       // like experts, or null
    const int32_t* layer = nullptr;       // (events,) index 0 .. layers - 1
    const uint8_t* phase = nullptr;       // (events,) 0 prefill, 1 decode
    const int32_t* sequence = nullptr;    // (events,)
};

struct Stream {
    int layers, blocks;
    bool global, atomic, reset;       // reset: the cache is cold again where the sequence changes
    std::vector<int64_t> offsets;     // (events + 1,)
    std::vector<int32_t> ids;         // members as pool ids, in served order
    std::vector<int32_t>
        asked;  // the same members as blocks, first asked for first: what predictors cut off at a budget
    std::vector<float> gates;         // largest weight any repeat had; empty without weights
    std::vector<int32_t> repeats;     // times each member was asked for in its event; empty when always 1
    std::vector<int32_t> nexts;       // position in the pool's future of the member's next request, or `never`
    std::vector<int32_t> layer;       // (events,)
    std::vector<uint8_t> phase;       // (events,)
    std::vector<int32_t> row;         // (events,) layer * 2 + phase
    std::vector<uint8_t> starts;      // (events,) 1 where the cache is reset first
    std::vector<int32_t> epoch;       // (events,) resets so far
    std::vector<int32_t> pass;        // (events,) forward passes since the last reset, as CacheCore counts them
    std::vector<int64_t> first_access;  // (epochs,) index of the epoch's first member
    std::vector<std::vector<int32_t>> events_of;  // events of each pool
    std::vector<int32_t>
        alone;  // (events,) one-member events from this one on, in one pool, row and epoch; 0: more members
    std::vector<std::vector<int32_t>> future;  // by pool: id at each position

    Stream(const TraceView& t, int layers, int blocks, bool global, Lookup lookup, Order order, uint64_t seed,
           bool reset)
        : layers(layers), blocks(blocks), global(global), atomic(lookup == Lookup::atomic), reset(reset) {
        fill(t, Arrange(lookup, order, seed));
        index();
        look_ahead();
    }
    int64_t events() const { return int64_t(layer.size()); }
    int pool(int64_t event) const { return global ? 0 : layer[event]; }
    int pool_ids() const { return global ? layers * blocks : blocks; }
    // Position of a block's first request after the `epochs`-th reset, or `never`.
    int32_t first_use(int pool, int id, int32_t epochs) const {
        int32_t start = 0;
        for (int32_t e : events_of[pool]) {
            int32_t n = int32_t(offsets[e + 1] - offsets[e]);
            if (epoch[e] > epochs) break;
            for (int32_t i = 0; i < n && epoch[e] == epochs; ++i)
                if (ids[offsets[e] + i] == id) return start + (atomic ? n - 1 - i : i);
            start += n;
        }
        return never;
    }

private:
    void fill(const TraceView& t, Arrange arrange) {
        offsets.reserve(t.events + 1);
        offsets.push_back(0);
        layer.assign(t.layer, t.layer + t.events);
        phase.assign(t.phase, t.phase + t.events);
        starts.assign(t.events, 0);
        ids.reserve(t.offsets[t.events]);
        std::vector<int> at(blocks, -1), index;
        std::vector<uint16_t> members;
        std::vector<int32_t> times;
        std::vector<float> weights;
        bool repeated = false;
        for (int64_t e = 0; e < t.events; ++e) {
            if (reset && e > 0) starts[e] = t.sequence[e] != t.sequence[e - 1];
            members.clear(), times.clear(), weights.clear();
            for (int64_t i = t.offsets[e]; i < t.offsets[e + 1]; ++i) {
                int& seen = at[t.experts[i]];
                if (seen < 0) {
                    seen = int(members.size());
                    members.push_back(t.experts[i]);
                    times.push_back(1);
                    if (t.weights) weights.push_back(t.weights[i]);
                } else {
                    repeated = true;
                    ++times[seen];
                    if (t.weights) weights[seen] = std::max(weights[seen], t.weights[i]);
                }
            }
            for (uint16_t m : members) at[m] = -1;
            arrange(members.data(), int(members.size()), index);
            asked.insert(asked.end(), members.begin(), members.end());
            int base = global ? layer[e] * blocks : 0;
            for (int i : index) {
                ids.push_back(base + members[i]);
                repeats.push_back(times[i]);
                if (t.weights) gates.push_back(weights[i]);
            }
            offsets.push_back(int64_t(ids.size()));
        }
        if (!repeated) repeats.clear();
    }
    void index() {
        int64_t n = events();
        epoch.resize(n), pass.resize(n), row.resize(n);
        events_of.resize(global ? 1 : layers);
        first_access.push_back(0);
        int32_t epochs = 0, passes = 0, before = INT32_MAX;
        for (int64_t e = 0; e < n; ++e) {
            if (starts[e]) {
                ++epochs, passes = 0, before = INT32_MAX;
                first_access.push_back(offsets[e]);
            }
            passes += layer[e] <= before;
            before = layer[e];
            epoch[e] = epochs;
            pass[e] = passes;
            row[e] = layer[e] * 2 + phase[e];
            events_of[pool(e)].push_back(int32_t(e));
        }
        alone.assign(n, 0);
        for (int64_t e = n - 1; e >= 0; --e) {
            if (offsets[e + 1] - offsets[e] != 1) continue;
            bool joined = e + 1 < n && row[e] == row[e + 1] && epoch[e] == epoch[e + 1];
            alone[e] = joined ? alone[e + 1] + 1 : 1;
        }
    }
    // Positions run through a pool's future in served order. Members of an atomic event are needed at the same time;
    // there the lowest id gets the last position, so that "largest position leaves first" keeps the rule that it
    // leaves first.
    void look_ahead() {
        int pools = global ? 1 : layers;
        future.resize(pools);
        nexts.assign(ids.size(), never);
        std::vector<int32_t> upcoming(size_t(pools) * pool_ids(), never);
        std::vector<int32_t> end(pools, 0);
        for (int64_t e = 0; e < events(); ++e) end[pool(e)] += int32_t(offsets[e + 1] - offsets[e]);
        for (int p = 0; p < pools; ++p) future[p].resize(end[p]);
        for (int64_t e = events() - 1; e >= 0; --e) {
            int p = pool(e);
            int32_t* next = &upcoming[size_t(p) * pool_ids()];
            int64_t first = offsets[e], n = offsets[e + 1] - first;
            int32_t start = end[p] -= int32_t(n);
            for (int64_t i = 0; i < n; ++i) nexts[first + i] = next[ids[first + i]];
            for (int64_t i = 0; i < n; ++i) {
                int32_t position = start + int32_t(atomic ? n - 1 - i : i);
                future[p][position] = ids[first + i];
                next[ids[first + i]] = position;
            }
            if (starts[e]) std::fill(upcoming.begin(), upcoming.end(), never);
        }
    }
};

}  // namespace colibri

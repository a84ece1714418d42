// What the bindings of the live cache and of replay share: a Stream from numpy arrays, and counters as numpy arrays.
#pragma once
#include <optional>

#include "numpy.hpp"
#include "stream_core.hpp"

namespace colibri {

using Input = nanobind::ndarray<nanobind::ro>;

// Arrays as Stream.make documents them. Raises std::invalid_argument naming the array that does not fit.
inline Stream* make_stream(int layers, int blocks, const Input& offsets, const Input& experts, const Input& layer,
                           const Input& phase, const Input& sequence, const std::optional<Input>& weights,
                           const std::string& scope, const std::string& lookup, const std::string& order, uint64_t seed,
                           bool reset) {
    at_least("layers", layers, 1);
    between("blocks_per_layer", blocks, 1, 65535);
    auto off = view<int64_t>("offsets", offsets, 1);
    auto ids = view<uint16_t>("experts", experts, 1);
    auto lay = view<int32_t>("layer", layer, 1);
    auto pha = view<uint8_t>("phase", phase, 1);
    auto seq = view<int32_t>("sequence", sequence, 1);
    auto same = [](const char* name, size_t found, size_t wanted) {
        if (found != wanted)
            throw std::invalid_argument(std::string(name) + " must have " + std::to_string(wanted) + " values, got " +
                                        std::to_string(found));
    };
    same("offsets", off.size, lay.size + 1);
    same("phase", pha.size, lay.size);
    same("sequence", seq.size, lay.size);
    TraceView t{int64_t(lay.size), off.data, ids.data, nullptr, lay.data, pha.data, seq.data};
    if (weights) {
        auto w = view<float>("weights", *weights, 1);
        same("weights", w.size, ids.size);
        t.weights = w.data;
    }
    if (off[0] != 0 || off[lay.size] != int64_t(ids.size) || ids.size >= size_t(never))
        throw std::invalid_argument("offsets must run from 0 to " + std::to_string(ids.size) +
                                    " (experts, below 2^31), got " + std::to_string(off[0]) + " to " +
                                    std::to_string(off[lay.size]));
    for (size_t e = 0; e < lay.size; ++e) {
        if (off[e + 1] < off[e])
            throw std::invalid_argument("offsets must not fall, but do at event " + std::to_string(e));
        between("layer", lay[e], 0, layers - 1);
        between("phase", pha[e], 0, 1);
    }
    for (uint16_t id : ids)
        if (id >= blocks)
            throw std::invalid_argument("expert ids must be below " + std::to_string(blocks) + ", got " +
                                        std::to_string(id));
    bool global = choice("scope", scope, {"layer", "global"}) == 1;
    auto contract = Lookup(choice("lookup", lookup, {"atomic", "serial", "serial-hits-first"}));
    auto sorted = Order(choice("order", order, {"rank", "id", "random"}));
    nanobind::gil_scoped_release release;
    return new Stream(t, layers, blocks, global, contract, sorted, seed, reset);
}

// Slots, or bytes when `capacity_bytes` > 0; then every layer says how large its blocks are.
inline void set_size(CacheSettings& s, int slots, int64_t capacity_bytes, const std::vector<int64_t>& block_bytes) {
    if (capacity_bytes == 0) {
        s.slots = at_least("slots", slots, 1);
        return;
    }
    if (block_bytes.size() != size_t(s.layers))
        throw std::invalid_argument("block_bytes must have one value per layer, " + std::to_string(s.layers) +
                                    ", got " + std::to_string(block_bytes.size()));
    s.capacity_bytes = capacity_bytes;
    s.block_bytes = block_bytes;
    int64_t largest = 0;
    for (int64_t bytes : block_bytes) {
        if (bytes < 1) throw std::invalid_argument("block_bytes must be at least 1, got " + std::to_string(bytes));
        largest = std::max(largest, bytes);
    }
    int64_t least = s.global ? largest : largest * s.layers;
    if (capacity_bytes < least)
        throw std::invalid_argument("capacity_bytes must hold a block" + std::string(s.global ? "" : " per layer") +
                                    ", " + std::to_string(least) + " bytes, got " + std::to_string(capacity_bytes));
}

// int64 (layers, 2 phases) by name.
inline nanobind::dict tally_arrays(const std::vector<Tally>& tally) {
    struct Column {
        const char* name;
        int64_t Tally::*count;
    };
    nanobind::dict all;
    for (Column c : {Column{"events", &Tally::events}, {"full_events", &Tally::full_events}, {"hits", &Tally::hits},
                     {"misses", &Tally::misses}, {"evictions", &Tally::evictions}, {"drops", &Tally::drops},
                     {"prefetch_issued", &Tally::prefetch_issued}, {"prefetch_timely", &Tally::prefetch_timely},
                     {"prefetch_late", &Tally::prefetch_late}, {"prefetch_wasted", &Tally::prefetch_wasted}}) {
        std::vector<int64_t> values;
        for (const Tally& t : tally) values.push_back(t.*c.count);
        all[c.name] = array(std::move(values), {tally.size() / 2, 2});
    }
    return all;
}

}  // namespace colibri

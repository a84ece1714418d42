// cppimport: Python's view of the expert cache (expert_slots_core.hpp). A step takes microseconds, so it keeps the
// GIL; that also makes `residency()` from another thread safe.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "expert_slots_core.hpp"
#include "numpy.hpp"
#include "python_policy.hpp"
#include "stream_binding.hpp"

namespace nb = nanobind;
using namespace colibri;

static CacheSettings settings(int layers, int blocks, int slots, const std::string& scope, const std::string& lookup,
                              const std::string& order, const std::string& admission, uint64_t seed,
                              const std::map<std::string, double>& params, int64_t capacity_bytes,
                              const std::vector<int64_t>& block_bytes) {
    CacheSettings s;
    s.layers = at_least("layers", layers, 1);
    s.blocks = between("blocks_per_layer", blocks, 1, 65535);
    s.global = choice("scope", scope, {"layer", "global"}) == 1;
    s.lookup = Lookup(choice("lookup", lookup, {"atomic", "serial", "serial-hits-first"}));
    s.order = Order(choice("order", order, {"rank", "id", "random"}));
    s.admission = Admission(choice("admission", admission, {"forced", "bypass"}));
    s.seed = seed;
    s.params = params;
    set_size(s, slots, capacity_bytes, block_bytes);
    return s;
}

// The recorded run that a cache with a future is going to repeat: (layer, offsets, experts) arrays.
static std::unique_ptr<Stream> future_of(const CacheSettings& s, const nb::tuple& arrays, const std::string& scope,
                                         const std::string& lookup, const std::string& order) {
    if (nb::len(arrays) != 3)
        throw std::invalid_argument("future must be (layer, offsets, experts), got " + std::to_string(nb::len(arrays)) +
                                    " arrays");
    auto layer = nb::cast<Input>(arrays[0]);
    size_t events = layer.ndim() == 1 ? layer.shape(0) : 0;
    nb::object decode = array(std::vector<uint8_t>(events, 1), {events});
    nb::object sequence = array(std::vector<int32_t>(events, 0), {events});
    return std::unique_ptr<Stream>(make_stream(
        s.layers, s.blocks, nb::cast<Input>(arrays[1]), nb::cast<Input>(arrays[2]), layer, nb::cast<Input>(decode),
        nb::cast<Input>(sequence), std::nullopt, scope, lookup, order, s.seed, false));
}

static void check_layer(const CacheSettings& s, int layer) { between("layer", layer, 0, s.layers - 1); }

static void check_blocks(const CacheSettings& s, const uint16_t* blocks, size_t n) {
    for (size_t i = 0; i < n; ++i)
        if (blocks[i] >= s.blocks)
            throw std::invalid_argument("block ids must be below " + std::to_string(s.blocks) + ", got " +
                                        std::to_string(blocks[i]) + " at position " + std::to_string(i));
}

static nb::object loads_array(const StepResult& r) {
    std::vector<int32_t> flat;
    for (const Load& load : r.loads) flat.insert(flat.end(), {load.index, load.slot});
    return array(flat, {r.loads.size(), 2});
}

static nb::object late_array(const StepResult& r) {
    std::vector<uint8_t> flat;
    for (const Load& load : r.loads) flat.push_back(load.late);
    return array(flat, {flat.size()});
}

static nb::object victims_array(const StepResult& r) {
    std::vector<int32_t> flat;
    for (const Victim& v : r.victims) flat.insert(flat.end(), {v.layer, v.block, v.slot});
    return array(flat, {r.victims.size(), 3});
}

using Pairs = std::vector<std::pair<int, int>>;

static const Pairs& checked(const ExpertCache& c, const Pairs& blocks) {
    for (auto [layer, block] : blocks) {
        check_layer(c.settings(), layer);
        between("block", block, 0, c.settings().blocks - 1);
    }
    return blocks;
}

NB_MODULE(expert_cache, m) {
    m.doc() = "Which expert blocks are resident, where, and who leaves: the cache of the live engine and of replay.";

    nb::class_<StepResult>(m, "StepResult", "What one step of a layer found, loads and evicts. Arrays are copies.")
        .def_prop_ro("blocks", [](const StepResult& r) { return array(r.blocks, {r.blocks.size()}); },
                     "uint16 (u,): distinct blocks, first seen first.")
        .def_prop_ro("slots", [](const StepResult& r) { return array(r.slots, {r.slots.size()}); },
                     "int32 (u,): slot each block is read from; -1 = streams through a transient buffer, not kept.")
        .def_prop_ro("hit", [](const StepResult& r) { return array(r.hit, {r.hit.size()}); },
                     "uint8 (u,): 0 miss, 1 resident, 2 prefetched and loaded, 3 prefetched and still loading.")
        .def_prop_ro("loads", loads_array,
                     "int32 (m, 2): (index into blocks, slot or -1), in the order the contract loads them.")
        .def_prop_ro("late", late_array,
                     "uint8 (m,): 1 = the load's slot is still read by a hit of this step; load it after that.")
        .def_prop_ro("victims", victims_array, "int32 (v, 3): (layer, block, slot) that this step evicted.");

    nb::class_<ExpertCache>(
        m, "ExpertCache",
        "Residency, policy state, pins and counters of expert blocks; no weights. A slot's number is its place in the "
        "pool: layer * slots + local under scope \"layer\". Raises ValueError on impossible arguments.")
        .def(
            "__init__",
            [](ExpertCache* self, int layers, int blocks, int slots, const std::string& scope, nb::object policy,
               const std::string& lookup, const std::string& order, const std::string& admission, uint64_t seed,
               std::optional<std::map<std::string, double>> params, int events, int64_t capacity_bytes,
               const std::vector<int64_t>& block_bytes, std::optional<nb::tuple> future) {
                auto s = settings(layers, blocks, slots, scope, lookup, order, admission, seed,
                                  params.value_or(std::map<std::string, double>{}), capacity_bytes, block_bytes);
                bool named = nb::isinstance<nb::str>(policy);
                s.policy = named ? nb::cast<std::string>(policy) : "python";
                new (self) ExpertCache(
                    s,
                    [&](const PolicySetup& setup) {
                        return named ? make_policy(s.policy, setup) : AnyPolicy::of<PythonPolicy>(policy, setup);
                    },
                    at_least("events", events, 0), future ? future_of(s, *future, scope, lookup, order) : nullptr);
            },
            nb::arg("layers"), nb::arg("blocks_per_layer"), nb::arg("slots"), nb::arg("scope") = "layer",
            nb::arg("policy") = "lru", nb::kw_only(), nb::arg("lookup") = "atomic", nb::arg("order") = "rank",
            nb::arg("admission") = "forced", nb::arg("seed") = 0, nb::arg("params") = nb::none(), nb::arg("events") = 0,
            nb::arg("capacity_bytes") = 0, nb::arg("block_bytes") = std::vector<int64_t>{},
            nb::arg("future") = nb::none(),
            "policy: a name, or a callable that makes a policy object (python_policy.hpp). capacity_bytes with "
            "block_bytes (layers,) replaces slots. events: accesses to remember. future: (layer int32, offsets int64, "
            "experts uint16) of the steps to come, for belady.")
        .def(
            "step",
            [](ExpertCache& c, int layer, nb::ndarray<nb::ro> blocks, int phase,
               std::optional<nb::ndarray<nb::ro>> weights) {
                check_layer(c.settings(), layer);
                between("phase", phase, 0, 1);
                auto ids = view<uint16_t>("blocks", blocks, 1);
                const float* gates = nullptr;
                if (weights) {
                    auto w = view<float>("weights", *weights, 1);
                    if (w.size != ids.size)
                        throw std::invalid_argument(
                            "weights must have one value per block: " + std::to_string(ids.size) + " blocks, " +
                            std::to_string(w.size) + " weights");
                    gates = w.data;
                }
                check_blocks(c.settings(), ids.data, ids.size);
                return c.step(layer, ids.data, int(ids.size), phase, gates);
            },
            nb::arg("layer"), nb::arg("blocks"), nb::arg("phase"), nb::arg("weights") = nb::none(),
            "Serve one layer's step. blocks uint16 (n,), repeats allowed; phase 0 prefill, 1 decode; weights float32 "
            "(n,).")
        .def(
            "prefetch",
            [](ExpertCache& c, int layer, nb::ndarray<nb::ro> blocks) {
                check_layer(c.settings(), layer);
                auto ids = view<uint16_t>("blocks", blocks, 1);
                check_blocks(c.settings(), ids.data, ids.size);
                return c.prefetch(layer, ids.data, int(ids.size));
            },
            nb::arg("layer"), nb::arg("blocks"),
            "Fetch ahead what has room without displacing a warmer block; `loads` of the result lists what to read.")
        .def(
            "loaded", [](ExpertCache& c, int slot) { c.loaded(between("slot", slot, 0, c.slot_count() - 1)); },
            nb::arg("slot"), "A prefetched block has arrived.")
        .def(
            "pin", [](ExpertCache& c, const Pairs& blocks) { return c.hold(checked(c, blocks), true); },
            nb::arg("blocks"), "Keep (layer, block) pairs resident for good; `loads` lists what to read.")
        .def(
            "preload", [](ExpertCache& c, const Pairs& blocks) { return c.hold(checked(c, blocks), false); },
            nb::arg("blocks"),
            "Make (layer, block) pairs resident as if just missed, while there is free room; `loads` lists "
            "what to read.")
        .def(
            "resize",
            [](ExpertCache& c, int slots) {
                std::vector<Moved> moves;
                const StepResult& r = c.resize(at_least("slots", slots, 1), moves);
                std::vector<int32_t> flat;
                for (const Moved& move : moves) flat.insert(flat.end(), {move.from, move.to});
                return nb::make_tuple(victims_array(r), array(flat, {moves.size(), 2}));
            },
            nb::arg("slots"),
            "Change the number of slots. Returns victims int32 (v, 3) with their old slots, and moves int32 (m, 2) of "
            "all that stay: (old slot, new slot).")
        .def("reset", &ExpertCache::reset, "Cold again: only pins are resident and no history is left. Counters stay.")
        .def(
            "counters", [](const ExpertCache& c) { return tally_arrays(c.tally()); },
            "int64 arrays (layers, 2 phases) by name.")
        .def("reset_counters", &ExpertCache::reset_tally)
        .def(
            "residency",
            [](const ExpertCache& c) {
                return array(c.residency(), {size_t(c.settings().layers), size_t(c.settings().blocks)});
            },
            "uint8 (layers, blocks): 0 absent, 1 resident, 2 resident and used by its layer's last step.")
        .def(
            "slot_of",
            [](const ExpertCache& c, int layer, int block) {
                check_layer(c.settings(), layer);
                return c.slot_of(layer, between("block", block, 0, c.settings().blocks - 1));
            },
            nb::arg("layer"), nb::arg("block"), "The block's slot, or -1.")
        .def(
            "occupant",
            [](const ExpertCache& c, int slot) -> std::optional<std::pair<int, int>> {
                int key = c.occupant(between("slot", slot, 0, c.slot_count() - 1));
                if (key < 0) return std::nullopt;
                return std::pair(key / c.settings().blocks, key % c.settings().blocks);
            },
            nb::arg("slot"), "(layer, block) in this slot, or None.")
        .def_prop_ro("slot_count", &ExpertCache::slot_count)
        .def(
            "events",
            [](const ExpertCache& c) {
                static_assert(sizeof(CacheEvent) == 7 * sizeof(int));
                auto events = c.events();
                std::vector<int32_t> flat(events.size() * 7);
                if (!events.empty()) std::memcpy(flat.data(), events.data(), flat.size() * sizeof(int32_t));
                return array(flat, {events.size(), 7});
            },
            "int32 (n, 7): step, layer, block, hit, slot, victim layer, victim block (-1: none) of the newest accesses.");
}

/*
<%
import colibri_lab.kernels as k
k.configure(cfg)
%>
*/

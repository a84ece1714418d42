// cppimport: replay of routing traces and one-pass curves (replay_core.hpp, curves_core.hpp), for colibri_lab.trace.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "curves_core.hpp"
#include "numpy.hpp"
#include "python_policy.hpp"
#include "replay_core.hpp"
#include "stream_binding.hpp"

namespace nb = nanobind;
using namespace colibri;

// Lets another thread end a running replay or curve.
struct Stop {
    std::atomic<bool> asked{false};
};

static std::function<void()> poll_with(Stop* stop) {
    return [stop] {
        if (stop && stop->asked) throw Interrupted{};
        nb::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    };
}

static nb::dict counts(const Stream& s, const ReplayResult& r) {
    nb::dict all = tally_arrays(r.tally);
    std::vector<size_t> shape{size_t(s.layers), 2};
    all["logical_hits"] = array(r.logical_hits, shape);
    all["logical_misses"] = array(r.logical_misses, shape);
    all["preloaded"] = r.preloaded;
    all["predicted"] = r.prefetch.predicted;
    all["correct"] = r.prefetch.correct;
    all["wanted"] = r.prefetch.wanted;
    return all;
}

static std::vector<std::pair<int, int>> checked(const char* name, const Stream& s,
                                                std::vector<std::pair<int, int>> blocks) {
    for (auto [layer, block] : blocks) {
        between((std::string(name) + " layer").c_str(), layer, 0, s.layers - 1);
        between((std::string(name) + " block").c_str(), block, 0, s.blocks - 1);
    }
    return blocks;
}

static nb::dict run(const Stream& s, nb::object policy, int slots, int64_t capacity_bytes,
                    const std::vector<int64_t>& block_bytes, const std::string& lookup, const std::string& admission,
                    uint64_t seed, const std::map<std::string, double>& params,
                    const std::vector<std::pair<int, int>>& pins, const std::vector<std::pair<int, int>>& preload,
                    const std::string& prefetch, int budget, int lead, double bandwidth, int64_t first_counted,
                    Stop* stop) {
    ReplaySettings r;
    CacheSettings& c = r.cache;
    c.layers = s.layers;
    c.blocks = s.blocks;
    c.global = s.global;
    c.lookup = Lookup(choice("lookup", lookup, {"atomic", "serial", "serial-hits-first"}));
    if ((c.lookup == Lookup::atomic) != s.atomic)
        throw std::invalid_argument("lookup " + lookup + " does not fit this stream, which was made for " +
                                    (s.atomic ? "atomic" : "serial") + " lookup");
    c.admission = Admission(choice("admission", admission, {"forced", "bypass"}));
    c.seed = seed;
    c.params = params;
    set_size(c, slots, capacity_bytes, block_bytes);
    r.pins = checked("pins", s, pins);
    r.preload = checked("preload", s, preload);
    r.prefetch.predictor = Predictor(choice("prefetch", prefetch, {"none", "same", "markov", "popular", "oracle"}));
    r.prefetch.budget = at_least("budget", budget, 0);
    r.prefetch.lead = between("lead", lead, 1, s.layers);
    r.prefetch.bandwidth = bandwidth;
    if (!(bandwidth >= 0)) throw std::invalid_argument("bandwidth must be 0 or more, got " + std::to_string(bandwidth));
    r.first_counted = first_counted;
    if (!nb::isinstance<nb::str>(policy)) {
        c.policy = "python";
        return counts(s, replay(s, r, poll_with(stop), [&](const PolicySetup& setup) {
                          return AnyPolicy::of<PythonPolicy>(policy, setup);
                      }));
    }
    c.policy = nb::cast<std::string>(policy);
    ReplayResult result;
    {
        nb::gil_scoped_release release;
        result = replay(s, r, poll_with(stop));
    }
    return counts(s, result);
}

static nb::tuple histograms(const Stream& s, const std::function<Curve()>& make) {
    Curve c;
    {
        nb::gil_scoped_release release;
        c = make();
    }
    std::vector<size_t> shape{size_t(s.layers), 2, size_t(c.most) + 1};
    return nb::make_tuple(array(std::move(c.accesses), shape), array(std::move(c.events), shape));
}

NB_MODULE(replay, m) {
    m.doc() = "Replay of routing traces through the expert cache, and hits at all slot counts in one pass.";
    nb::exception<Interrupted>(m, "Interrupted");

    nb::class_<Stop>(m, "Stop", "Ends the replays and curves that were given it, from any thread.")
        .def(nb::init<>())
        .def("set", [](Stop& s) { s.asked = true; });

    nb::class_<Stream>(m, "Stream", "A trace made ready for replay under one scope, lookup and order.")
        .def_static(
            "make", make_stream, nb::arg("layers"), nb::arg("blocks_per_layer"), nb::arg("offsets"), nb::arg("experts"),
            nb::arg("layer"), nb::arg("phase"), nb::arg("sequence"), nb::arg("weights") = nb::none(), nb::kw_only(),
            nb::arg("scope") = "layer", nb::arg("lookup") = "atomic", nb::arg("order") = "rank", nb::arg("seed") = 0,
            nb::arg("reset") = false,
            "offsets int64 (events + 1,), experts uint16 (offsets[-1],) with repeats, layer int32, phase uint8 and "
            "sequence int32 (events,), weights float32 like experts. reset: cold again where the sequence changes.")
        .def_prop_ro("pools", [](const Stream& s) { return int(s.future.size()); })
        .def_prop_ro("events", &Stream::events)
        .def_prop_ro(
            "accesses", [](const Stream& s) { return int64_t(s.ids.size()); }, "Distinct members of all events.");

    m.def("replay", run, nb::arg("stream"), nb::arg("policy"), nb::arg("slots"), nb::kw_only(),
          nb::arg("capacity_bytes") = 0, nb::arg("block_bytes") = std::vector<int64_t>{}, nb::arg("lookup") = "atomic",
          nb::arg("admission") = "forced", nb::arg("seed") = 0, nb::arg("params") = std::map<std::string, double>{},
          nb::arg("pins") = std::vector<std::pair<int, int>>{}, nb::arg("preload") = std::vector<std::pair<int, int>>{},
          nb::arg("prefetch") = "none", nb::arg("budget") = 0, nb::arg("lead") = 1, nb::arg("bandwidth") = 0.0,
          nb::arg("first_counted") = 0, nb::arg("stop").none() = nb::none(),
          "Counts of one policy at one size: int64 arrays (layers, 2 phases) by name, and totals.");

    m.def(
        "lru_curve",
        [](const Stream& s, int64_t first_counted, bool logical, Stop* stop) {
            return histograms(s, [&] { return lru_curve(s, first_counted, logical, poll_with(stop)); });
        },
        nb::arg("stream"), nb::arg("first_counted") = 0, nb::arg("logical") = false,
        nb::arg("stop").none() = nb::none(),
        "(accesses, events): int64 (layers, 2 phases, blocks of a pool + 1) by the slots from which each hits, 0: never.");
    m.def("lfu_curve",
          [](const Stream& s, bool forced, int64_t first_counted, bool logical, Stop* stop) {
              return histograms(s, [&] { return lfu_curve(s, forced, first_counted, logical, poll_with(stop)); });
          },
          nb::arg("stream"), nb::arg("forced"), nb::arg("first_counted") = 0, nb::arg("logical") = false,
          nb::arg("stop").none() = nb::none());
    m.def("belady_curve",
          [](const Stream& s, bool forced, int64_t first_counted, bool logical, Stop* stop) {
              return histograms(s, [&] { return belady_curve(s, forced, first_counted, logical, poll_with(stop)); });
          },
          nb::arg("stream"), nb::arg("forced"), nb::arg("first_counted") = 0, nb::arg("logical") = false,
          nb::arg("stop").none() = nb::none());
    m.def("static_curve",
          [](const Stream& s, const std::vector<int>& ranks, int64_t first_counted, bool logical, Stop* stop) {
              size_t wanted = s.future.size() * size_t(s.pool_ids());
              if (ranks.size() != wanted)
                  throw std::invalid_argument("ranks must have " + std::to_string(wanted) + " values, got " +
                                              std::to_string(ranks.size()));
              for (int rank : ranks) between("rank", rank, 0, s.pool_ids());
              return histograms(s, [&] { return static_curve(s, ranks, first_counted, logical, poll_with(stop)); });
          },
          nb::arg("stream"), nb::arg("ranks"), nb::arg("first_counted") = 0, nb::arg("logical") = false,
          nb::arg("stop").none() = nb::none());
}

/*
<%
import colibri_lab.kernels as k
k.configure(cfg)
%>
*/

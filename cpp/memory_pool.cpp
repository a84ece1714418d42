// cppimport: the memory pool, with its region as one numpy array. Calls keep the GIL, so snapshots from other threads
// are safe.
#include "memory_pool_core.hpp"

#include <memory>

#include "numpy.hpp"

#include <nanobind/stl/string.h>

namespace nb = nanobind;
using namespace colibri;

static nb::dict counts(const MemoryPool& pool) {
    const PoolCounts& c = pool.counts();
    auto runs = pool.free_runs();
    auto tags = [](const int64_t* blocks) {
        std::vector<int64_t> bytes(kTags);
        for (int i = 0; i < kTags; ++i) bytes[i] = blocks[i] * kBlockBytes;
        return array(bytes, {size_t(kTags)});
    };
    nb::dict d;
    d["bytes"] = pool.size();
    d["used_bytes"] = c.used * kBlockBytes;
    d["peak_bytes"] = c.peak * kBlockBytes;
    d["free_bytes"] = pool.free() * kBlockBytes;
    d["wasted_bytes"] = c.wasted;
    d["free_runs"] = runs.count;
    d["largest_run_bytes"] = runs.largest * kBlockBytes;
    d["allocations"] = c.allocations;
    d["releases"] = c.releases;
    d["refusals"] = c.refusals;
    d["used_by_tag"] = tags(c.tag_used);
    d["peak_by_tag"] = tags(c.tag_peak);
    return d;
}

NB_MODULE(memory_pool, m) {
    nb::set_leak_warnings(false);  // a program that ends with a model open is no leak
    m.attr("block_bytes") = kBlockBytes;
    m.attr("tags") = kTags;
    nb::class_<MemoryPool>(m, "MemoryPool",
        "One region of memory, given out in runs of 4 KiB blocks. No realloc: a run never moves; release it and allocate another.")
        .def("__init__", [](MemoryPool* self, int64_t bytes, int64_t unit, bool huge_pages, bool prefault) {
                 nb::gil_scoped_release released;  // prefaulting takes a second for some GB
                 new (self) MemoryPool(bytes, unit, huge_pages, prefault);
             },
             nb::arg("bytes"), nb::arg("unit"), nb::arg("huge_pages") = false, nb::arg("prefault") = false,
             "bytes are rounded up to blocks; unit is the coarse view's, in bytes. RuntimeError: the system has no such region.")
        .def("allocate", [](MemoryPool& pool, int64_t bytes, bool coarse, int tag) { return pool.allocate(bytes, coarse ? PoolView::coarse : PoolView::fine, tag); },
             nb::arg("bytes"), nb::arg("coarse"), nb::arg("tag"), "Offset of a run of at least `bytes`, or -1. tag: 1 to tags - 1.")
        .def("release", &MemoryPool::release, nb::arg("offset"), "Give a run back. ValueError unless a live run begins there.")
        .def("memory", [](nb::handle_t<MemoryPool> self) {
                 MemoryPool& pool = nb::cast<MemoryPool&>(self);
                 size_t shape[1] = {size_t(pool.size())};
                 return nb::ndarray<nb::numpy, uint8_t>(pool.base(), 1, shape, nb::borrow(self));
             }, "uint8 (bytes,): the region; it lives as long as any view of it.")
        .def("counts", counts, "Bytes and numbers of allocations; *_by_tag int64 (tags,).")
        .def("snapshot", [](const MemoryPool& pool) { return array(pool.tags(), {size_t(pool.blocks())}); },
             "uint8 (blocks,): the tag of each block, 0 where it is free.")
        .def("touched", [](const MemoryPool& pool) -> nb::object {
                 std::vector<uint8_t> resident;
                 if (!pool.residency(resident)) return nb::none();
                 for (auto& block : resident) block &= 1;
                 return array(resident, {resident.size()});
             }, "uint8 (blocks,): 1 where the system has given memory, None where it does not tell.")
        .def_prop_ro("bytes", &MemoryPool::size)
        .def_prop_ro("unit", &MemoryPool::unit_bytes)
        .def_prop_ro("huge_pages", &MemoryPool::huge_pages, "Whether the system accepted the request for huge pages.");
}

/*
<%
import colibri_lab.kernels as k
k.configure(cfg)
%>
*/

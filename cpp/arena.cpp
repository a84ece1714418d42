// cppimport: arenas whose allocations are numpy arrays.
//
// An engine asks for the same shapes at the same places in every layer and step, so each array is made once and handed
// out again: `take` then costs a table look-up and creates no Python object.
#include "arena_core.hpp"

#include <nanobind/stl/optional.h>

#include <unordered_map>

#include "include/binding.hpp"
#include "numpy.hpp"

using namespace colibri;

namespace {

constexpr int kMaxDims = 4;
constexpr size_t kMaxKept = 4096;  // arrays; a prompt of a new length brings some twenty

struct Key {
    int64_t at;
    const void* dtype;
    int64_t dims[kMaxDims];
    bool operator==(const Key& other) const { return std::memcmp(this, &other, sizeof(Key)) == 0; }
};
struct Hash {
    size_t operator()(const Key& key) const {
        uint64_t h = uint64_t(key.at) ^ reinterpret_cast<uintptr_t>(key.dtype);
        for (int64_t d : key.dims) h = (h ^ uint64_t(d)) * 0x9e3779b97f4a7c15ull, h ^= h >> 29;
        return size_t(h);
    }
};

class NumpyArena {
   public:
    // grow(bytes) returns a uint8 array of at least so many bytes, or raises.
    NumpyArena(nb::object grow, bool checks) : arena_(checks), grow_(grow), ndarray_(nb::module_::import_("numpy").attr("ndarray")) {}

    nb::object take(nb::tuple shape, nb::handle dtype) {
        Key key{};
        key.dtype = dtype.ptr();
        size_t dims = nb::len(shape);
        expect(dims >= 1 && dims <= kMaxDims, "take: shape must have 1 to 4 dimensions, got " + std::to_string(dims));
        int64_t bytes = item_bytes(dtype);
        for (size_t i = 0; i < dims; ++i) {
            int64_t n = nb::cast<int64_t>(shape[i]);
            expect(n >= 0 && n <= (int64_t(1) << 40) / std::max<int64_t>(bytes, 1), "take: impossible dimension " + std::to_string(n));
            key.dims[i] = n + 1;  // so that (3,) and (3, 0) differ
            bytes *= n;
        }
        bytes = std::max<int64_t>(bytes, 1);
        uint8_t* memory = arena_.allocate(bytes);
        if (!memory) {
            int64_t needed = arena_.size_of(bytes);
            add_chunk(grow_(needed));
            ++growths_;
            memory = arena_.allocate(bytes);
            expect(memory != nullptr, "take: grow(" + std::to_string(needed) + ") gave too small a chunk");
        }
        key.at = reinterpret_cast<int64_t>(memory);
        auto found = kept_.find(key);
        if (found != kept_.end()) return found->second;
        if (kept_.size() >= kMaxKept) kept_.clear();
        size_t chunk = arena_.chunk_of(memory);
        nb::object made = ndarray_(shape, dtype, owners_[chunk], arena_.offset_in(chunk, memory));
        kept_.emplace(key, made);
        return made;
    }

    void add_chunk(nb::object memory) {
        auto bytes = nb::cast<Array<uint8_t, 1>>(memory);
        arena_.add_chunk(bytes.data(), int64_t(bytes.size()));
        owners_.push_back(memory);
    }
    void drop_chunks() {
        arena_.drop_chunks();
        kept_.clear();
        owners_.clear();
    }

    nb::tuple mark() const {
        auto m = arena_.mark();
        return nb::make_tuple(m.at, m.used, m.requested);
    }
    void rewind(nb::tuple mark) { arena_.rewind({nb::cast<int64_t>(mark[0]), nb::cast<int64_t>(mark[1]), nb::cast<int64_t>(mark[2])}); }

    nb::dict counts() const {
        nb::dict d;
        d["used_bytes"] = arena_.used();
        d["high_water_bytes"] = arena_.high_water();
        d["requested_bytes"] = arena_.high_request();
        d["capacity_bytes"] = arena_.capacity();
        d["chunks"] = arena_.chunks();
        d["growths"] = growths_;
        d["allocations"] = arena_.allocations();
        return d;
    }
    nb::object samples() const {
        std::vector<int64_t> flat;
        for (auto s : arena_.samples()) flat.insert(flat.end(), {s.ns, s.used});
        return array(flat, {arena_.samples().size(), 2});
    }

    Arena& core() { return arena_; }

   private:
    static int64_t item_bytes(nb::handle dtype) {
        static PyObject* types[4] = {};
        if (!types[0]) {
            nb::module_ numpy = nb::module_::import_("numpy");
            const char* names[4] = {"float32", "int32", "uint16", "uint8"};
            for (int i = 0; i < 4; ++i) types[i] = nb::object(numpy.attr(names[i])).release().ptr();
        }
        constexpr int64_t bytes[4] = {4, 4, 2, 1};
        for (int i = 0; i < 4; ++i)
            if (types[i] == dtype.ptr()) return bytes[i];
        throw std::invalid_argument("take: dtype must be numpy.float32, int32, uint16 or uint8");
    }

    std::vector<nb::object> owners_;  // declared before the arena: the memory must outlive it
    Arena arena_;
    nb::object grow_, ndarray_;
    int64_t growths_ = 0;
    std::unordered_map<Key, nb::object, Hash> kept_;
};

}  // namespace

NB_MODULE(arena, m) {
    nb::set_leak_warnings(false);  // a program that ends with a model open is no leak
    m.attr("align") = kArenaAlign;
    nb::class_<NumpyArena>(m, "Arena", "Scratch memory of one phase of one request: take, rewind, reset; nothing is freed singly.")
        .def(nb::init<nb::object, bool>(), nb::arg("grow"), nb::arg("checks") = false,
             "grow(bytes) returns a new chunk, uint8 of at least so many bytes on a multiple of 64, or raises. checks: poison\n"
             "what is not handed out, and find writes past an end or after a rewind (RuntimeError at the next rewind or take).")
        .def("take", &NumpyArena::take, nb::arg("shape"), nb::arg("dtype"),
             "An array on a multiple of 64 bytes, valid until the arena is rewound past it; not cleared.")
        .def("add_chunk", &NumpyArena::add_chunk, nb::arg("memory"))
        .def("drop_chunks", &NumpyArena::drop_chunks, "Leave all memory; nothing may be in use.")
        .def("mark", &NumpyArena::mark)
        .def("rewind", &NumpyArena::rewind, nb::arg("mark"), "Give back everything taken since `mark`.")
        .def("reset", [](NumpyArena& a) { a.core().reset(); }, "Give back everything; the high-water mark stays.")
        .def("record", [](NumpyArena& a, int most) { a.core().record(size_t(between("samples", most, 0, 1 << 24))); }, nb::arg("samples"),
             "Keep (ns, bytes in use) of so many takes and rewinds from now on; 0 stops.")
        .def("samples", &NumpyArena::samples, "int64 (n, 2): nanoseconds of the steady clock, bytes in use.")
        .def("counts", &NumpyArena::counts, "used, high_water, requested (at the high water, without alignment), capacity; growths.");
}

/*
<%
import colibri_lab.kernels as k
k.configure(cfg)
%>
*/

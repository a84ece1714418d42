// What every nanobind binding needs: array aliases, argument checks that name the argument, and calls without the GIL
// that still notice Ctrl-C.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "threads.hpp"

namespace nb = nanobind;

namespace colibri {

template <class T, int Dims>
using Array = nb::ndarray<T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Room = std::optional<Array<uint8_t, 1>>;

// An array argument. It is never converted: a silent copy would cost time, and results written to it would be lost.
inline auto array(const char* name) { return nb::arg(name).noconvert(); }

inline void expect(bool ok, const std::string& message) {
    if (!ok) throw std::invalid_argument(message);
}

// "x.shape[1] must be 64 (hidden), got 63"
inline void expect_size(const char* what, size_t found, size_t wanted, const char* why) {
    if (found != wanted)
        throw std::invalid_argument(std::string(what) + " must be " + std::to_string(wanted) + " (" + why + "), got " +
                                    std::to_string(found));
}

inline void expect_threads(int threads) {
    expect(threads >= 1 && threads <= 256, "threads must be 1 to 256, got " + std::to_string(threads));
}

// Runs `work` with the GIL released. Ctrl-C makes the parallel loops inside stop early and raises KeyboardInterrupt;
// output arrays are then partly written.
template <class F>
void without_gil(F&& work) {
    Interrupt& state = interrupt();
    state.cancelled = false;
    state.poll = [] {
        nb::gil_scoped_acquire gil;
        return PyErr_CheckSignals() != 0;
    };
    {
        nb::gil_scoped_release released;
        work();
    }
    state.poll = nullptr;
    if (state.cancelled) {
        state.cancelled = false;
        throw nb::python_error();
    }
}

inline void bind_pool(nb::module_& m) {
    m.def("_use_pool", [](nb::capsule table) { pool_table() = static_cast<PoolTable*>(table.data()); }, nb::arg("table"),
          "Share the process-wide compute threads; called by colibri_lab.kernels after loading.");
}

}  // namespace colibri

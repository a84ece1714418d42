// cppimport: read bandwidth and arithmetic peaks of this machine.
#include "bandwidth_core.hpp"

#include "include/binding.hpp"

using namespace colibri;

// What a loop computed, so that no compiler may leave the loop out.
static std::atomic<uint64_t> kept{0};

static void expect_count(const char* what, int64_t value) {
    expect(value >= 1, std::string(what) + " must be at least 1, got " + std::to_string(value));
}

static nb::tuple answer(double work, const Timed& t) { return nb::make_tuple(work, t.seconds, t.held); }

static nb::tuple run_read(Array<const uint8_t, 2> memory, int64_t passes) {
    int threads = static_cast<int>(memory.shape(0));
    expect_threads(threads);
    expect_count("passes", passes);
    expect(memory.shape(1) >= 1024, "memory must have at least 1024 bytes a thread, got " + std::to_string(memory.shape(1)));
    const int64_t stride = static_cast<int64_t>(memory.shape(1)), bytes = (stride - kLine) / (8 * kLine) * (8 * kLine);
    Timed t;
    {
        nb::gil_scoped_release released;
        t = together(threads, [&](int i) {
            const uint8_t* from = memory.data() + i * stride;
            from += -reinterpret_cast<uintptr_t>(from) % kLine;
            uint64_t seen = 0;
            for (int64_t pass = 0; pass < passes; ++pass) {
                seen += read_lines(from, bytes);
                asm volatile("" ::: "memory");  // or the passes become one
            }
            kept += seen;
        });
    }
    return answer(static_cast<double>(bytes) * static_cast<double>(passes) * threads, t);
}

NB_MODULE(bandwidth, m) {
    m.attr("simd") = kSimdPath;
    m.attr("has_byte_dots") = kDotProducts > 0;
    m.def("read", run_read, array("memory"), nb::arg("passes") = 1,
          "Read memory (threads, bytes) u8, a row by each thread, `passes` times -> (bytes read, seconds, held). held is the\n"
          "least share of the time for which a thread had a core. Raises ValueError for less than 1024 bytes a thread.");
    m.def("multiply_adds", [](int threads, int64_t rounds) {
        expect_threads(threads);
        expect_count("rounds", rounds);
        Timed t;
        {
            nb::gil_scoped_release released;
            t = together(threads, [&](int i) { kept += static_cast<uint64_t>(multiply_adds(rounds, static_cast<float>(i))); });
        }
        return answer(2.0 * 16 * kChains * static_cast<double>(rounds) * threads, t);
    }, nb::arg("threads") = 1, nb::arg("rounds") = 1000000,
          "float32 multiply-adds from registers -> (operations, seconds, held); one multiply-add is two operations.");
    m.def("byte_dots", [](int threads, int64_t rounds) -> nb::object {
        expect_threads(threads);
        expect_count("rounds", rounds);
        if (!kDotProducts) return nb::none();
        Timed t;
        {
            nb::gil_scoped_release released;
            t = together(threads, [&](int i) { kept += static_cast<uint64_t>(byte_dots(rounds, i)); });
        }
        return answer(2.0 * kDotProducts * static_cast<double>(rounds) * threads, t);
    }, nb::arg("threads") = 1, nb::arg("rounds") = 1000000,
          "Byte products added into int32 (VNNI, SDOT) -> (operations, seconds, held), or None where this path has no such\n"
          "instruction.");
}

/*
<%
import colibri_lab.kernels as k
k.configure(cfg)
%>
*/

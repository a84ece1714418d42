// cppimport: expert feed-forward over cache slots, bucketing by expert, and the weighted sum of a token's experts.
#include "ffn_core.hpp"

#include <new>

#include "include/binding.hpp"

using namespace colibri;

using Ints = Array<const int32_t, 1>;

static size_t scratch_bytes(int tokens, int rows, int active, int hidden, int inner) {
    return Scratch::aligned(sizeof(Expert) * active) + ffn_scratch_bytes(tokens, rows, hidden, inner);
}

static void run_experts(Array<const float, 2> x, Array<const uint8_t, 2> memory, Ints buffers, Ints which,
                        Array<const int64_t, 3> descriptors, Array<const float, 2> factors, Ints offsets, Ints token_of,
                        Array<float, 2> hidden, Array<float, 2> out, int threads, int block_size, bool exact,
                        bool int8_activations, Room lent) {
    size_t active = buffers.shape(0);
    expect_size("experts.shape[0]", which.shape(0), active, "length of buffers");
    expect_size("offsets.shape[0]", offsets.shape(0), active + 1, "active experts + 1");
    expect_size("descriptors.shape[1]", descriptors.shape(1), 3, "gate, up, down");
    expect_size("descriptors.shape[2]", descriptors.shape(2), kFields, kFieldNames);
    expect_size("factors.shape[0]", factors.shape(0), descriptors.shape(0), "experts in descriptors");
    expect_size("factors.shape[1]", factors.shape(1), 3, "gate, up, down");
    expect_threads(threads);
    expect(block_size >= 16, "block_size must be at least 16, got " + std::to_string(block_size));
    if (active == 0) return;
    const int32_t* o = offsets.data();
    expect(o[0] == 0, "offsets[0] must be 0, got " + std::to_string(o[0]));
    for (size_t a = 0; a < active; ++a)
        expect(o[a] <= o[a + 1], "offsets must not decrease, got " + std::to_string(o[a]) + " then " + std::to_string(o[a + 1]));
    size_t rows = o[active];
    expect(token_of.shape(0) >= rows, "token_of has " + std::to_string(token_of.shape(0)) + " entries, the buckets need " + std::to_string(rows));
    for (size_t r = 0; r < rows; ++r)
        expect(token_of.data()[r] >= 0 && static_cast<size_t>(token_of.data()[r]) < x.shape(0),
               "token_of[" + std::to_string(r) + "] is " + std::to_string(token_of.data()[r]) + ", x has " + std::to_string(x.shape(0)) + " rows");
    static thread_local Scratch own;
    Scratch room = lent ? Scratch(lent->data(), lent->size()) : Scratch(), &scratch = lent ? room : own;
    size_t inner = hidden.shape(1);
    scratch.begin(scratch_bytes(int(x.shape(0)), int(rows), int(active), int(x.shape(1)), int(inner)));
    Expert* experts = scratch.take<Expert>(active);
    for (size_t a = 0; a < active; ++a) {
        int32_t buffer = buffers.data()[a], e = which.data()[a];
        expect(buffer >= 0 && static_cast<size_t>(buffer) < memory.shape(0), "buffer " + std::to_string(buffer) + " of " + std::to_string(memory.shape(0)) + " does not exist");
        expect(e >= 0 && static_cast<size_t>(e) < descriptors.shape(0), "expert " + std::to_string(e) + " of " + std::to_string(descriptors.shape(0)) + " does not exist");
        const uint8_t* base = memory.data() + static_cast<size_t>(buffer) * memory.shape(1);
        int64_t region = static_cast<int64_t>(memory.shape(1));
        const int64_t* d = descriptors.data() + e * 3 * kFields;
        const float* f = factors.data() + e * 3;
        Expert& expert = *new (experts + a) Expert{matrix_at(base, region, d, f[0]), matrix_at(base, region, d + kFields, f[1]), matrix_at(base, region, d + 2 * kFields, f[2])};
        expect_size("gate columns", expert.gate.cols, x.shape(1), "hidden size of x");
        expect_size("up columns", expert.up.cols, x.shape(1), "hidden size of x");
        expect_size("up rows", expert.up.rows, expert.gate.rows, "rows of gate");
        expect_size("down columns", expert.down.cols, expert.gate.rows, "rows of gate");
        expect_size("down rows", expert.down.rows, x.shape(1), "hidden size of x");
        expect_size("gate rows", expert.gate.rows, inner, "columns of hidden");
    }
    expect(out.shape(0) >= rows && out.shape(1) == x.shape(1), "out must be at least (" + std::to_string(rows) + ", " + std::to_string(x.shape(1)) + ")");
    expect(hidden.shape(0) >= rows, "hidden has " + std::to_string(hidden.shape(0)) + " rows, the buckets need " + std::to_string(rows));
    without_gil([&] {
        expert_ffn(x.data(), static_cast<int>(x.shape(0)), token_of.data(), experts, o, static_cast<int>(active), scratch,
                   hidden.data(), out.data(), threads, block_size, exact, int8_activations);
    });
}

NB_MODULE(ffn, m) {
    bind_pool(m);
    m.attr("simd") = kSimdPath;
    m.def("experts", run_experts, array("x"), array("memory"), array("buffers"), array("experts"), array("descriptors"),
          array("factors"), array("offsets"), array("token_of"), array("hidden"), array("out"), nb::arg("threads") = 1,
          nb::arg("block_size") = 64, nb::arg("exact") = true, nb::arg("int8_activations") = false,
          array("scratch").none() = nb::none(),
          "out[r] = down(silu(gate x) * up x) for bucket rows r. x (tokens, hidden) f32; memory (buffers, bytes) u8; buffers and\n"
          "experts (active,) i32; descriptors (E, 3, 7) i64 and factors (E, 3) f32 for gate, up, down; offsets (active + 1,) and\n"
          "token_of (rows,) i32; hidden is room of (rows, intermediate) f32; scratch as in gemm. Raises ValueError on any mismatch.");
    m.def("scratch_bytes", &scratch_bytes, nb::arg("tokens"), nb::arg("rows"), nb::arg("active"), nb::arg("hidden"), nb::arg("inner"),
          "Bytes of scratch that `experts` takes for so many tokens, bucket rows and active experts.");
    m.def("combine", [](Array<const float, 2> rows, Array<const int32_t, 2> row_of, Array<const float, 2> weights, Array<float, 2> y, int threads) {
        size_t tokens = row_of.shape(0), k = row_of.shape(1);
        expect(weights.shape(0) == tokens && weights.shape(1) == k, "weights must have the shape of row_of");
        expect_size("y.shape[0]", y.shape(0), tokens, "tokens");
        expect_size("y.shape[1]", y.shape(1), rows.shape(1), "hidden size");
        expect_threads(threads);
        for (size_t i = 0; i < tokens * k; ++i)
            expect(row_of.data()[i] < static_cast<int64_t>(rows.shape(0)), "row_of has " + std::to_string(row_of.data()[i]) + ", rows has " + std::to_string(rows.shape(0)));
        without_gil([&] { combine(rows.data(), row_of.data(), weights.data(), int(tokens), int(k), int(rows.shape(1)), y.data(), threads); });
    }, array("rows"), array("row_of"), array("weights"), array("y"), nb::arg("threads") = 1,
          "y[t] = sum over rank of weights[t, rank] * rows[row_of[t, rank]], in rank order; row_of -1 is left out.");
    m.def("fill_buckets", [](Array<const int32_t, 2> local, Array<int32_t, 1> offsets, Array<int32_t, 1> token_of, Array<int32_t, 2> row_of, Array<int32_t, 1> cursor, int active) {
        size_t tokens = local.shape(0), k = local.shape(1);
        expect(active >= 0 && offsets.shape(0) >= size_t(active) + 1 && cursor.shape(0) >= size_t(active), "offsets and cursor are too short for " + std::to_string(active) + " experts");
        expect(token_of.shape(0) >= tokens * k, "token_of is too short for " + std::to_string(tokens * k) + " assignments");
        expect(row_of.shape(0) == tokens && row_of.shape(1) == k, "row_of must have the shape of local");
        for (size_t i = 0; i < tokens * k; ++i)
            expect(local.data()[i] < active, "local has " + std::to_string(local.data()[i]) + ", only " + std::to_string(active) + " experts are active");
        return fill_buckets(local.data(), int(tokens), int(k), active, offsets.data(), token_of.data(), row_of.data(), cursor.data());
    }, array("local"), array("offsets"), array("token_of"), array("row_of"), array("cursor"), nb::arg("active"),
          "Bucket (token, rank) assignments by active expert, keeping token order; returns the number of rows.");
    m.def("silu", [](Array<const float, 1> x, Array<float, 1> out, bool exact) {
        expect_size("out.shape[0]", out.shape(0), x.shape(0), "length of x");
        size_t n = x.shape(0);
        for (size_t i = 0; i < n; i += 16) {
            int count = int(std::min<size_t>(16, n - i));
            float lanes[16] = {};
            std::copy(x.data() + i, x.data() + i + count, lanes);
            store_rows(out.data() + i, silu(load(lanes), exact), count);
        }
    }, array("x"), array("out"), nb::arg("exact") = true, "out = x * sigmoid(x); exact, or polynomial with error below 1e-4 in the sigmoid.");
}

/*
<%
import colibri_lab.kernels as k
k.configure(cfg)
%>
*/

// cppimport: grouped-query attention over KV pages, and the rotary embedding.
#include "attention_tile_core.hpp"

#include "include/binding.hpp"

using namespace colibri;

namespace {

using Query = Array<const float, 3>;
using Table = Array<const int32_t, 1>;

void check(const Query& q, const Array<float, 3>& out, const Table& table, int64_t pages, int past, int window, size_t page_size,
           size_t kv_heads, int threads) {
    size_t tokens = q.shape(0), heads = q.shape(1);
    expect(past >= 0, "past must not be negative, got " + std::to_string(past));
    expect(window >= 0, "window must be 0 (all keys) or positive, got " + std::to_string(window));
    for (int i = 0; i < 3; ++i) expect_size("out's shape", out.shape(i), q.shape(i), "that of q");
    expect(kv_heads > 0 && heads % kv_heads == 0, "heads must be a multiple of kv_heads, got " + std::to_string(heads) + " and " + std::to_string(kv_heads));
    expect(page_size > 0, "pages must hold at least one token");
    size_t needed = (past + tokens + page_size - 1) / page_size;
    expect(table.shape(0) >= needed, "the page table has " + std::to_string(table.shape(0)) + " pages, " + std::to_string(needed) + " are needed");
    for (size_t i = 0; i < needed; ++i)
        expect(table.data()[i] >= 0 && table.data()[i] < pages, "page " + std::to_string(table.data()[i]) + " of " + std::to_string(pages) + " does not exist");
    expect_threads(threads);
}

// Keys and values of one layer inside a pool's region: a page number counts blocks of 4096 bytes from its beginning.
constexpr int64_t kBlock = 4096;

KvPages in_pool(const Array<uint8_t, 1>& memory, const Table& table, int64_t k_at, int64_t v_at, int page_size, int kv_heads, int head_dim, bool half) {
    expect(page_size > 0 && kv_heads > 0 && head_dim > 0, "page_size, kv_heads and head_dim must be positive");
    int64_t item = half ? 2 : 4;
    expect(k_at >= 0 && v_at >= 0 && k_at % item == 0 && v_at % item == 0, "k_at and v_at must not be negative and be multiples of " + std::to_string(item));
    return {memory.data() + k_at, memory.data() + v_at, kBlock, table.data(), page_size, kv_heads, head_dim};
}

// How many page numbers, from 0 on, leave room for one page of the layer inside `memory`.
int64_t pages_inside(const Array<uint8_t, 1>& memory, const KvPages& kv, bool half) {
    int64_t bytes = int64_t(kv.page_size) * kv.kv_heads * kv.head_dim * (half ? 2 : 4);
    int64_t last = int64_t(memory.size()) - std::max(kv.k - memory.data(), kv.v - memory.data()) - bytes;
    return last < 0 ? 0 : last / kBlock + 1;
}

}  // namespace

NB_MODULE(attention, m) {
    bind_pool(m);
    m.attr("max_head_dim") = kMaxHeadDim;
    m.def("attend", [](Query q, Array<const float, 4> k, Array<const float, 4> v, Table pages, int past, int window, float scale, Array<float, 3> out, int threads) {
        for (int i = 0; i < 4; ++i) expect_size("v's shape", v.shape(i), k.shape(i), "that of k");
        expect_size("q.shape[2]", q.shape(2), k.shape(3), "head_dim of k");
        check(q, out, pages, int64_t(k.shape(0)), past, window, k.shape(1), k.shape(2), threads);
        int64_t stride = int64_t(k.shape(1) * k.shape(2) * k.shape(3) * sizeof(float));
        auto bytes = [](const float* p) { return reinterpret_cast<const uint8_t*>(p); };
        KvPages kv{bytes(k.data()), bytes(v.data()), stride, pages.data(), int(k.shape(1)), int(k.shape(2)), int(k.shape(3))};
        without_gil([&] { attend_any<float>(q.data(), kv, int(q.shape(0)), int(q.shape(1)), past, window, scale, out.data(), threads); });
    }, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("pages"), nb::arg("past"), nb::arg("window"), nb::arg("scale"), nb::arg("out"), nb::arg("threads") = 1,
          "out, q (tokens, heads, head_dim) f32; k, v (pages, page_size, kv_heads, head_dim) f32; pages (n,) i32 page table.\n"
          "Token t stands at position past + t and sees the last `window` keys including itself (0: all).");
    m.def("attend_pool", [](Query q, Array<uint8_t, 1> memory, Table pages, int64_t k_at, int64_t v_at, int page_size, int kv_heads, bool half, int past, int window, float scale, Array<float, 3> out, int threads) {
        KvPages kv = in_pool(memory, pages, k_at, v_at, page_size, kv_heads, int(q.shape(2)), half);
        check(q, out, pages, pages_inside(memory, kv, half), past, window, size_t(page_size), size_t(kv_heads), threads);
        without_gil([&] { (half ? attend_any<Half> : attend_any<float>)(q.data(), kv, int(q.shape(0)), int(q.shape(1)), past, window, scale, out.data(), threads); });
    }, nb::arg("q"), nb::arg("memory"), nb::arg("pages"), nb::arg("k_at"), nb::arg("v_at"), nb::arg("page_size"), nb::arg("kv_heads"), nb::arg("half"), nb::arg("past"), nb::arg("window"), nb::arg("scale"), nb::arg("out"), nb::arg("threads") = 1,
          "The same out of a pool: memory (bytes,) u8; a page number counts blocks of 4096 bytes, and the layer's keys and values\n"
          "(page_size, kv_heads, head_dim) lie k_at and v_at bytes into a page, as float16 when `half`, else float32.");
    m.def("write_pool", [](Array<const float, 3> k, Array<const float, 3> v, Array<uint8_t, 1> memory, Table pages, int64_t k_at, int64_t v_at, int page_size, bool half, int past) {
        for (int i = 0; i < 3; ++i) expect_size("v's shape", v.shape(i), k.shape(i), "that of k");
        expect(k.shape(0) > 0, "k must have at least one row");
        KvPages kv = in_pool(memory, pages, k_at, v_at, page_size, int(k.shape(1)), int(k.shape(2)), half);
        expect(past >= 0, "past must not be negative, got " + std::to_string(past));
        int64_t inside = pages_inside(memory, kv, half);
        size_t needed = (past + k.shape(0) + page_size - 1) / page_size;
        expect(pages.shape(0) >= needed, "the page table has " + std::to_string(pages.shape(0)) + " pages, " + std::to_string(needed) + " are needed");
        for (size_t i = past / page_size; i < needed; ++i)
            expect(pages.data()[i] >= 0 && pages.data()[i] < inside, "page " + std::to_string(pages.data()[i]) + " of " + std::to_string(inside) + " does not exist");
        int tokens = int(k.shape(0));
        float largest = 0.0f;
        if (half)
            for (size_t i = 0; i < k.size(); ++i) largest = std::max({largest, std::fabs(k.data()[i]), std::fabs(v.data()[i])});
        without_gil([&] {
            auto write = half ? write_rows<Half> : write_rows<float>;
            write(k.data(), kv, kv.k, tokens, past);
            write(v.data(), kv, kv.v, tokens, past);
        });
        return largest;
    }, nb::arg("k"), nb::arg("v"), nb::arg("memory"), nb::arg("pages"), nb::arg("k_at"), nb::arg("v_at"), nb::arg("page_size"), nb::arg("half"), nb::arg("past"),
          "Store k, v (tokens, kv_heads, head_dim) f32 at positions past …; pages as in attend_pool. Returns the largest |value|\n"
          "when `half` (above 65504 it became infinite), else 0.");
    m.def("rotate", [](Array<float, 3> x, Array<const float, 2> cos, Array<const float, 2> sin, bool interleaved) {
        expect_size("cos.shape[0]", cos.shape(0), x.shape(0), "tokens");
        expect_size("sin.shape[0]", sin.shape(0), x.shape(0), "tokens");
        expect_size("sin.shape[1]", sin.shape(1), cos.shape(1), "columns of cos");
        expect(2 * cos.shape(1) <= x.shape(2), "cos has " + std::to_string(cos.shape(1)) + " columns, head_dim is only " + std::to_string(x.shape(2)));
        without_gil([&] { rotate(x.data(), cos.data(), sin.data(), int(x.shape(0)), int(x.shape(1)), int(x.shape(2)), int(2 * cos.shape(1)), interleaved); });
    }, array("x"), array("cos"), array("sin"), nb::arg("interleaved") = false,
          "Rotary embedding in place: x (tokens, heads, head_dim), cos and sin (tokens, dims / 2), float32.");
}

/*
<%
import colibri_lab.kernels as k
k.configure(cfg)
%>
*/

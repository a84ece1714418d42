// cppimport: grouped-query attention over KV pages, and the rotary embedding.
#include "attention_core.hpp"

#include "include/binding.hpp"

using namespace colibri;

NB_MODULE(attention, m) {
    bind_pool(m);
    m.attr("max_head_dim") = kMaxHeadDim;
    m.def("attend", [](Array<const float, 3> q, Array<const float, 4> k, Array<const float, 4> v, Array<const int32_t, 1> pages,
                       int past, int window, float scale, Array<float, 3> out, int threads) {
        size_t tokens = q.shape(0), heads = q.shape(1), page_size = k.shape(1), kv_heads = k.shape(2);
        expect(past >= 0, "past must not be negative, got " + std::to_string(past));
        expect(window >= 0, "window must be 0 (all keys) or positive, got " + std::to_string(window));
        for (int i = 0; i < 4; ++i) expect_size("v's shape", v.shape(i), k.shape(i), "that of k");
        for (int i = 0; i < 3; ++i) expect_size("out's shape", out.shape(i), q.shape(i), "that of q");
        expect_size("q.shape[2]", q.shape(2), k.shape(3), "head_dim of k");
        expect(kv_heads > 0 && heads % kv_heads == 0, "heads must be a multiple of kv_heads, got " + std::to_string(heads) + " and " + std::to_string(kv_heads));
        expect(page_size > 0, "pages must hold at least one token");
        size_t needed = (past + tokens + page_size - 1) / page_size;
        expect(pages.shape(0) >= needed, "the page table has " + std::to_string(pages.shape(0)) + " pages, " + std::to_string(needed) + " are needed");
        for (size_t i = 0; i < needed; ++i)
            expect(pages.data()[i] >= 0 && static_cast<size_t>(pages.data()[i]) < k.shape(0), "page " + std::to_string(pages.data()[i]) + " of " + std::to_string(k.shape(0)) + " does not exist");
        expect_threads(threads);
        KvCache kv{k.data(), v.data(), pages.data(), int(page_size), int(kv_heads), int(k.shape(3))};
        without_gil([&] { attend(q.data(), kv, int(tokens), int(heads), past, window, scale, out.data(), threads); });
    }, array("q"), array("k"), array("v"), array("pages"), nb::arg("past"), nb::arg("window"), nb::arg("scale"), array("out"), nb::arg("threads") = 1,
          "out, q (tokens, heads, head_dim) f32; k, v (pages, page_size, kv_heads, head_dim) f32; pages (n,) i32 page table.\n"
          "Token t stands at position past + t and sees the last `window` keys including itself (0: all).");
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

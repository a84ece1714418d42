// cppimport: matrix product of float32 activations with weights in any stored format.
#include "gemm_core.hpp"

#include <memory>

#include "include/binding.hpp"

using namespace colibri;

NB_MODULE(gemm, m) {
    bind_pool(m);
    m.attr("simd") = kSimdPath;
    m.def("matmul",
          [](Array<const float, 2> x, Bytes base, Array<const int64_t, 1> descriptor, float factor,
             std::optional<Array<const float, 1>> bias, Array<float, 2> out, int threads, int block_size) {
              expect_size("descriptor.shape[0]", descriptor.shape(0), kFields, "rows, cols, format, data, scale, zero");
              Matrix w = matrix_at(base.data(), static_cast<int64_t>(base.size()), descriptor.data(), factor);
              expect_size("x.shape[1]", x.shape(1), w.cols, "columns of the weight");
              expect_size("out.shape[0]", out.shape(0), x.shape(0), "tokens of x");
              expect_size("out.shape[1]", out.shape(1), w.rows, "rows of the weight");
              if (bias) expect_size("bias.shape[0]", bias->shape(0), w.rows, "rows of the weight");
              expect_threads(threads);
              expect(block_size >= 16, "block_size must be at least 16, got " + std::to_string(block_size));
              int tokens = static_cast<int>(x.shape(0));
              const float* b = bias ? bias->data() : nullptr;
              without_gil([&] {
                  constexpr int kStack = 64;  // decode needs no allocation
                  const float* few_rows[kStack];
                  float few_sums[kStack];
                  std::unique_ptr<const float*[]> rows(tokens > kStack ? new const float*[tokens] : nullptr);
                  std::unique_ptr<float[]> sums(tokens > kStack ? new float[tokens] : nullptr);
                  matmul(x.data(), tokens, w, b, out.data(), rows ? rows.get() : few_rows, sums ? sums.get() : few_sums,
                         threads, block_size);
              });
          },
          array("x"), array("base"), array("descriptor"), nb::arg("factor"), array("bias").none(), array("out"),
          nb::arg("threads") = 1, nb::arg("block_size") = 64,
          "out (tokens, rows) = x (tokens, cols) . W^T (+ bias). W lies in `base` (uint8) as `descriptor` says: int64\n"
          "(rows, cols, format, data offset, scale offset, zero offset); layout rows16. Raises ValueError on any mismatch.");
}

/*
<%
import colibri_lab.kernels as k
k.configure(cfg)
%>
*/

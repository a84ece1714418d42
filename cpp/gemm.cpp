// cppimport: matrix product of float32 activations with weights in any stored format.
#include "gemm_core.hpp"

#include "include/binding.hpp"

using namespace colibri;

NB_MODULE(gemm, m) {
    bind_pool(m);
    m.attr("simd") = kSimdPath;
    m.attr("int8_path") = kInt8Path;
    m.def("matmul",
          [](Array<const float, 2> x, Bytes base, Array<const int64_t, 1> descriptor, float factor,
             std::optional<Array<const float, 1>> bias, Array<float, 2> out, int threads, int block_size,
             bool int8_activations, Room lent) {
              expect_size("descriptor.shape[0]", descriptor.shape(0), kFields, kFieldNames);
              Matrix w = matrix_at(base.data(), static_cast<int64_t>(base.size()), descriptor.data(), factor);
              expect_size("x.shape[1]", x.shape(1), w.cols, "columns of the weight");
              expect_size("out.shape[0]", out.shape(0), x.shape(0), "tokens of x");
              expect_size("out.shape[1]", out.shape(1), w.rows, "rows of the weight");
              if (bias) expect_size("bias.shape[0]", bias->shape(0), w.rows, "rows of the weight");
              expect_threads(threads);
              expect(block_size >= 16, "block_size must be at least 16, got " + std::to_string(block_size));
              static thread_local Scratch own;
              Scratch room = lent ? Scratch(lent->data(), lent->size()) : Scratch(), &scratch = lent ? room : own;
              without_gil([&] {
                  matmul(x.data(), static_cast<int>(x.shape(0)), w, bias ? bias->data() : nullptr, out.data(), scratch, threads,
                         block_size, int8_activations);
              });
          },
          array("x"), array("base"), array("descriptor"), nb::arg("factor"), array("bias").none(), array("out"),
          nb::arg("threads") = 1, nb::arg("block_size") = 64, nb::arg("int8_activations") = false,
          array("scratch").none() = nb::none(),
          "out (tokens, rows) = x (tokens, cols) . W^T (+ bias). W lies in `base` (uint8) as `descriptor` says: int64\n"
          "(rows, cols, format, data, scale and zero offset, group); layout rows16. With int8_activations integer weights meet\n"
          "activations rounded to int8 in groups of 64. scratch: uint8 on a multiple of 64, of scratch_bytes(tokens, cols); without\n"
          "it the calling thread keeps some. Raises ValueError on any mismatch.");
    m.def("scratch_bytes", &matmul_scratch_bytes, nb::arg("tokens"), nb::arg("cols"), "Bytes of scratch that a product takes.");
}

/*
<%
import colibri_lab.kernels as k
k.configure(cfg)
%>
*/

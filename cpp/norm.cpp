// cppimport: RMSNorm.
#include "norm_core.hpp"

#include "include/binding.hpp"

using namespace colibri;

NB_MODULE(norm, m) {
    bind_pool(m);
    m.def("rms_norm", [](Array<const float, 2> x, Array<const float, 1> weight, float eps, Array<float, 2> out, int threads) {
        expect_size("weight.shape[0]", weight.shape(0), x.shape(1), "columns of x");
        expect_size("out.shape[0]", out.shape(0), x.shape(0), "rows of x");
        expect_size("out.shape[1]", out.shape(1), x.shape(1), "columns of x");
        expect(x.shape(1) >= 1, "x must have at least one column, got 0");
        expect(eps >= 0, "eps must not be negative, got " + std::to_string(eps));
        expect_threads(threads);
        without_gil([&] { rms_norm(x.data(), weight.data(), int(x.shape(0)), int(x.shape(1)), eps, out.data(), threads); });
    }, array("x"), array("weight"), nb::arg("eps"), array("out"), nb::arg("threads") = 1,
          "out (rows, n) = x * weight / sqrt(mean(x^2) + eps) per row, float32; out may be x.");
}

/*
<%
import colibri_lab.kernels as k
k.configure(cfg)
%>
*/

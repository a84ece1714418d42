// cppimport: router scores to expert ids and weights.
#include "router_core.hpp"

#include "include/binding.hpp"

using namespace colibri;

static void run_route(Array<const float, 2> logits, int kind, std::optional<Array<const float, 1>> bias, int groups, int top_groups,
                      bool renormalise, float scale, Array<uint16_t, 2> ids, Array<float, 2> weights, int threads) {
    size_t tokens = logits.shape(0), experts = logits.shape(1), k = ids.shape(1);
    expect(experts >= 1 && experts <= kMaxExperts, "experts must be 1 to " + std::to_string(kMaxExperts) + ", got " + std::to_string(experts));
    expect(kind >= 0 && kind <= 2, "router kind code must be 0, 1 or 2, got " + std::to_string(kind));
    expect(groups >= 1 && experts % groups == 0, "groups must divide the experts: " + std::to_string(experts) + " / " + std::to_string(groups));
    expect(top_groups >= 1 && top_groups <= groups, "top_groups must be 1 to " + std::to_string(groups) + ", got " + std::to_string(top_groups));
    size_t choosable = kind == 2 && groups > 1 ? experts / groups * top_groups : experts;
    expect(k >= 1 && k <= choosable, "k must be 1 to " + std::to_string(choosable) + " (experts that may be chosen), got " + std::to_string(k));
    expect_size("ids.shape[0]", ids.shape(0), tokens, "tokens");
    expect(weights.shape(0) == tokens && weights.shape(1) == k, "weights must have the shape of ids");
    if (bias) expect_size("bias.shape[0]", bias->shape(0), experts, "experts");
    expect_threads(threads);
    for (size_t i = 0; i < tokens * experts; ++i)
        if (!std::isfinite(logits.data()[i]))
            throw std::invalid_argument("router logit of token " + std::to_string(i / experts) + ", expert " + std::to_string(i % experts) +
                                        " is not finite; run `colibri validate` on the model");
    Router router{static_cast<RouterKind>(kind), int(experts), int(k), bias ? bias->data() : nullptr, groups, top_groups, renormalise, scale};
    without_gil([&] { route(router, logits.data(), int(tokens), ids.data(), weights.data(), threads); });
}

NB_MODULE(router, m) {
    bind_pool(m);
    m.def("route", run_route, array("logits"), nb::arg("kind"), array("bias").none(), nb::arg("groups"), nb::arg("top_groups"),
          nb::arg("renormalise"), nb::arg("scale"), array("ids"), array("weights"), nb::arg("threads") = 1,
          "logits (tokens, experts) f32 -> ids (tokens, k) u16 in router order and weights (tokens, k) f32. kind: 0 softmax,\n"
          "1 topk_softmax, 2 sigmoid_group. bias (experts,) chooses but never weighs. Raises ValueError on bad shapes or NaN.");
}

/*
<%
import colibri_lab.kernels as k
k.configure(cfg)
%>
*/

// SiLU, x * sigmoid(x), with the exact sigmoid or a polynomial stand-in.
#pragma once
#include "simd.hpp"

namespace colibri {

inline F16 sigmoid_exact(F16 x) { return set1(1.0f) / (set1(1.0f) + exp(set1(0.0f) - x)); }

// Range reduction: sigmoid(x) = e/(1+e) with e = 2^n 2^f, |f| <= 1/2. A fifth-order Taylor polynomial stands in for 2^f:
// no table, one division, and an absolute error below 1e-5 everywhere.
inline F16 sigmoid_polynomial(F16 x) {
    F16 t = vmin(vmax(x, set1(-60.0f)), set1(60.0f)) * set1(1.44269504f);
    F16 n = round_even(t);
    F16 f = t - n;
    F16 p = set1(1.33335581e-3f);  // (ln 2)^k / k! for k = 5 … 0
    p = fma(p, f, set1(9.61812911e-3f));
    p = fma(p, f, set1(5.55041087e-2f));
    p = fma(p, f, set1(2.40226507e-1f));
    p = fma(p, f, set1(6.93147181e-1f));
    p = fma(p, f, set1(1.0f));
    F16 e = p * pow2(n);
    return e / (set1(1.0f) + e);
}

inline F16 silu(F16 x, bool exact) { return x * (exact ? sigmoid_exact(x) : sigmoid_polynomial(x)); }

}  // namespace colibri

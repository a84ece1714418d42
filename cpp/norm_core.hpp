// RMSNorm: x * weight / sqrt(mean(x^2) + eps), row by row, in float32 (Zhang and Sennrich 2019).
#pragma once
#include <algorithm>
#include <cmath>

#include "include/simd.hpp"
#include "include/threads.hpp"

namespace colibri {

inline float sum_of_squares(const float* x, int n) {
    F16 acc = set1(0.0f);
    int i = 0;
    for (; i + 16 <= n; i += 16) acc = fma(load(x + i), load(x + i), acc);
    float tail = 0.0f;
    for (; i < n; ++i) tail = std::fma(x[i], x[i], tail);
    return sum(acc) + tail;
}

// Rows of n values; out may be x. Row r is written to out + r * n.
inline void rms_norm(const float* x, const float* weight, int rows, int n, float eps, float* out, int threads) {
    const int per_task = std::max(1, 4096 / n);  // a task should outlast its own hand-over
    parallel_for((rows + per_task - 1) / per_task, threads, [&](int task) {
        for (int r = task * per_task; r < std::min(rows, (task + 1) * per_task); ++r) {
            const float* from = x + static_cast<int64_t>(r) * n;
            float* to = out + static_cast<int64_t>(r) * n;
            float inverse = 1.0f / std::sqrt(sum_of_squares(from, n) / static_cast<float>(n) + eps);
            for (int i = 0; i < n; ++i) to[i] = from[i] * inverse * weight[i];
        }
    });
}

}  // namespace colibri

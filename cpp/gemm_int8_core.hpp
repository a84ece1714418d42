// y = x · Wᵀ with int8 weights (layout rows16) and activations rounded to int8 on the way in.
//
// A token's row is cut into groups of 64 columns, each with its own scale (largest magnitude / 127). Inside a group the sum
// of products is an exact integer; groups are added in float32 in ascending order. An output's bits therefore depend only
// on its row of x and its row of W, whatever the tile, the number of tokens or the number of threads.
//
//   y[n] = scale[n] * (sum_g sx[g] * dot_g(q_w + 128, q_x) - (zero[n] + 128) * sum_g sx[g] * sum(q_x in g))
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "include/int8.hpp"
#include "include/matrix.hpp"
#include "include/threads.hpp"

namespace colibri {

constexpr int kActivationGroup = 64;

inline int activation_groups(int cols) { return (cols + kActivationGroup - 1) / kActivationGroup; }
inline int padded_activations(int cols) { return activation_groups(cols) * kActivationGroup; }

// One quantised row: q (padded columns), scale (groups,), and bias = sum over groups of scale * sum of q.
struct IntRow {
    const int8_t* q;
    const float* scale;
    float bias;
};

// x (cols,) → q padded with zeros to whole groups, scale (groups,); returns the row's bias.
inline float quantise_row(const float* x, int cols, int8_t* q, float* scale) {
    float bias = 0.0f;
    for (int g = 0, first = 0; first < cols; ++g, first += kActivationGroup) {
        int n = std::min(kActivationGroup, cols - first);
        float values[kActivationGroup] = {};
        std::copy(x + first, x + first + n, values);
        F16 top = set1(0.0f);
        for (int i = 0; i < kActivationGroup; i += 16) top = vmax(top, vmax(load(values + i), set1(0.0f) - load(values + i)));
        float lanes[16], largest = 0.0f;
        store(lanes, top);
        for (float lane : lanes) largest = std::max(largest, lane);
        scale[g] = largest / 127.0f;
        float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
        int total = 0;
        for (int i = 0; i < kActivationGroup; ++i) {
            int rounded = static_cast<int>(std::nearbyint(values[i] * inverse));
            q[first + i] = static_cast<int8_t>(rounded);
            total += rounded;
        }
        bias += scale[g] * static_cast<float>(total);
    }
    return bias;
}

// B row blocks from `block` on, times M tokens: sums[m][b] = sum over groups of scale * dot(q_w + 128, q_x).
template <int M, int B>
inline void int8_tile(const uint8_t* block, int64_t stride, int cols, const IntRow* x, F16 (&sums)[M][B]) {
    const int lines = (cols + 3) / 4;
    COLIBRI_UNROLL for (int m = 0; m < M; ++m)
        COLIBRI_UNROLL for (int b = 0; b < B; ++b) sums[m][b] = set1(0.0f);
    for (int g = 0, first = 0; first < lines; ++g, first += kActivationGroup / 4) {
        const int last = std::min(lines, first + kActivationGroup / 4);
        I32 dots[M][B];
        COLIBRI_UNROLL for (int m = 0; m < M; ++m)
            COLIBRI_UNROLL for (int b = 0; b < B; ++b) dots[m][b] = zero_i32();
        if constexpr (M * B == 1) {  // four chains hide the latency; integer sums do not care
            I32 more[3] = {zero_i32(), zero_i32(), zero_i32()};
            const uint8_t* w = block + 64 * first;
            const int8_t* q = x[0].q + 4 * first;
            int l = first;
            for (; l + 4 <= last; l += 4, w += 256, q += 16) {
                __builtin_prefetch(w + 2048), __builtin_prefetch(w + 2112), __builtin_prefetch(w + 2176), __builtin_prefetch(w + 2240);
                dots[0][0] = dot4(dots[0][0], flip_sign(load_unsigned(w)), four_bytes(q));
                more[0] = dot4(more[0], flip_sign(load_unsigned(w + 64)), four_bytes(q + 4));
                more[1] = dot4(more[1], flip_sign(load_unsigned(w + 128)), four_bytes(q + 8));
                more[2] = dot4(more[2], flip_sign(load_unsigned(w + 192)), four_bytes(q + 12));
            }
            for (; l < last; ++l, w += 64, q += 4) dots[0][0] = dot4(dots[0][0], flip_sign(load_unsigned(w)), four_bytes(q));
            dots[0][0] = (dots[0][0] + more[0]) + (more[1] + more[2]);
        } else {
            for (int l = first; l < last; ++l) {
                Line w[B];
                COLIBRI_UNROLL for (int b = 0; b < B; ++b) w[b] = flip_sign(load_unsigned(block + b * stride + 64 * l));
                COLIBRI_UNROLL for (int m = 0; m < M; ++m) {
                    int32_t q = four_bytes(x[m].q + 4 * l);
                    COLIBRI_UNROLL for (int b = 0; b < B; ++b) dots[m][b] = dot4(dots[m][b], w[b], q);
                }
            }
        }
        COLIBRI_UNROLL for (int m = 0; m < M; ++m)
            COLIBRI_UNROLL for (int b = 0; b < B; ++b) sums[m][b] = fma(to_float(dots[m][b]), set1(x[m].scale[g]), sums[m][b]);
    }
}

struct RowScales {
    F16 scale, shift;  // per row: scale * factor, zero + 128
    RowScales(const Matrix& w, int block) {
        scale = w.scale_of(block, 0) * set1(w.factor), shift = w.zero_of(block, 0) + set1(128.0f);
    }
    F16 finish(F16 sum, float bias) const { return (sum - shift * set1(bias)) * scale; }
};

template <int M, int B, class Write>
inline void int8_tile_out(const Matrix& w, int block, const IntRow* x, int token, const RowScales* rows, Write& write) {
    F16 sums[M][B];
    int8_tile<M, B>(w.data + block * w.block_bytes(), w.block_bytes(), w.cols, x + token, sums);
    for (int m = 0; m < M; ++m)
        for (int b = 0; b < B; ++b) write(token + m, 16 * (block + b), rows[b].finish(sums[m][b], x[token + m].bias));
}

// Row blocks [first, last) of W times `tokens` quantised rows; `write(token, row, sixteen outputs)`.
template <class Write>
void int8_blocks(const Matrix& w, int first, int last, const IntRow* x, int tokens, Write&& write) {
    constexpr int kSuper = 96;  // tokens whose rows should stay in L2 while a stretch of W passes
    for (int t0 = 0; t0 < tokens; t0 += kSuper) {
        const int t1 = std::min(tokens, t0 + kSuper);
        int b = first;
        if (t1 - t0 >= kIntTokens)
            for (; b + kIntBlocks <= last; b += kIntBlocks) {
                RowScales rows[2] = {RowScales(w, b), RowScales(w, b + kIntBlocks - 1)};
                int t = t0;
                for (; t + kIntTokens <= t1; t += kIntTokens) int8_tile_out<kIntTokens, kIntBlocks>(w, b, x, t, rows, write);
                for (; t < t1; ++t) int8_tile_out<1, kIntBlocks>(w, b, x, t, rows, write);
            }
        for (; b < last; ++b) {
            RowScales rows(w, b);
            int t = t0;
            for (; t + kIntTokens <= t1; t += kIntTokens) int8_tile_out<kIntTokens, 1>(w, b, x, t, &rows, write);
            for (; t < t1; ++t) int8_tile_out<1, 1>(w, b, x, t, &rows, write);
        }
    }
}

// Rows of activations quantised once and read by many products. The arrays grow to the largest step and are then reused.
class IntRows {
   public:
    const IntRow* rows() const { return rows_.data(); }

    // x[m] (cols,) float32 → row m, on `threads`.
    void quantise(const float* const* x, int tokens, int cols, int threads) {
        const size_t width = padded_activations(cols), groups = activation_groups(cols);
        if (q_.size() < tokens * width) q_.resize(tokens * width);
        if (scale_.size() < tokens * groups) scale_.resize(tokens * groups);
        if (rows_.size() < static_cast<size_t>(tokens)) rows_.resize(tokens);
        parallel_for(tokens, threads, [&](int m) {
            int8_t* q = q_.data() + m * width;
            float* scale = scale_.data() + m * groups;
            float bias = quantise_row(x[m], cols, q, scale);
            rows_[m] = {q, scale, bias};
        });
    }

   private:
    std::vector<int8_t> q_;
    std::vector<float> scale_;
    std::vector<IntRow> rows_;
};

// Whether a matrix as it is stored has an integer path.
inline bool integer_weights(const Matrix& w) { return w.format == Format::int8 && w.group == 0; }

}  // namespace colibri

// y = x · Wᵀ with W in layout rows16 (include/matrix.hpp), x and y float32, sums in float32.
//
// Every output is four chains of fused multiply-adds over k = 0, 4, 8, …; 1, 5, …; 2, 6, …; 3, 7, …, added as
// (c0 + c1) + (c2 + c3). Nothing else about the call - number of tokens, threads, block size - touches that order, so an
// output's bits depend only on its row of x and its row of W.
#pragma once
#include <algorithm>
#include <vector>

#include "gemm_int8_core.hpp"
#include "include/matrix.hpp"
#include "include/threads.hpp"

namespace colibri {

// Sum of x[k] in the four-chain order of gemm, needed once per token by int8 zero points.
inline float chain_sum(const float* x, int k) {
    float c[4] = {0, 0, 0, 0};
    for (int i = 0; i < k; ++i) c[i & 3] += x[i];
    return (c[0] + c[1]) + (c[2] + c[3]);
}

// One 16-row block times M tokens: out[m] holds the 16 raw sums of token m.
template <Format F, int M>
inline void block_times_tokens(const uint8_t* block, int k, const float* const* x, F16* out) {
    constexpr int step = 64 * (F == Format::fp32 ? 4 : F == Format::int8 ? 1 : 2);  // bytes of four columns
    F16 chain[M][4];
    for (int m = 0; m < M; ++m)
        for (int j = 0; j < 4; ++j) chain[m][j] = set1(0.0f);
    int whole = k / 4;
    for (int g = 0; g < whole; ++g, block += step) {
        __builtin_prefetch(block + 2048);
        Columns<F> columns(block);
        for (int m = 0; m < M; ++m)
            for (int j = 0; j < 4; ++j) chain[m][j] = fma(columns.w[j], set1(x[m][4 * g + j]), chain[m][j]);
    }
    if (k % 4) {
        Columns<F> columns(block);
        for (int m = 0; m < M; ++m)
            for (int j = 0; j < k % 4; ++j) chain[m][j] = fma(columns.w[j], set1(x[m][4 * whole + j]), chain[m][j]);
    }
    for (int m = 0; m < M; ++m) out[m] = (chain[m][0] + chain[m][1]) + (chain[m][2] + chain[m][3]);
}

// Blocks [first, last) of W times `tokens` rows of x. sums[m] = chain_sum of row m (int8 only). `write(m, row, value16)`
// takes the sixteen finished outputs of token m from row `row` on.
template <Format F, class Write>
void gemm_blocks(const Matrix& w, int first, int last, const float* const* x, const float* sums, int tokens, Write&& write) {
    constexpr int kSuper = 64;  // tokens whose rows of x should stay in L2 while a stretch of W passes
    for (int t0 = 0; t0 < tokens; t0 += kSuper) {
        int t1 = std::min(tokens, t0 + kSuper);
        for (int b = first; b < last; ++b) {
            const uint8_t* block = w.data + b * w.block_bytes();
            F16 scale = set1(w.factor), zero = set1(0.0f);
            if (F == Format::int8) {
                float s[16] = {}, z[16] = {};
                for (int r = 0; r < std::min(16, w.rows - 16 * b); ++r) {
                    s[r] = w.scale[16 * b + r] * w.factor;
                    z[r] = static_cast<float>(w.zero[16 * b + r]);
                }
                scale = load(s), zero = load(z);
            }
            auto finish = [&](int m, F16 raw) {
                if (F == Format::int8) raw = (raw - zero * set1(sums[m])) * scale;
                else if (w.factor != 1.0f) raw = raw * scale;
                write(m, 16 * b, raw);
            };
            int m = t0;
            F16 out[kTokenTile];
            for (; m + kTokenTile <= t1; m += kTokenTile) {
                block_times_tokens<F, kTokenTile>(block, w.cols, x + m, out);
                for (int i = 0; i < kTokenTile; ++i) finish(m + i, out[i]);
            }
            for (; m < t1; ++m) {
                block_times_tokens<F, 1>(block, w.cols, x + m, out);
                finish(m, out[0]);
            }
        }
    }
}

template <class Write>
void gemm_any(const Matrix& w, int first, int last, const float* const* x, const float* sums, int tokens, Write&& write) {
    switch (w.format) {
        case Format::fp32: return gemm_blocks<Format::fp32>(w, first, last, x, sums, tokens, write);
        case Format::fp16: return gemm_blocks<Format::fp16>(w, first, last, x, sums, tokens, write);
        case Format::bf16: return gemm_blocks<Format::bf16>(w, first, last, x, sums, tokens, write);
        case Format::int8: return gemm_blocks<Format::int8>(w, first, last, x, sums, tokens, write);
    }
}

// Stores up to 16 lanes: the last block of a matrix may have fewer rows.
inline void store_rows(float* to, F16 value, int count) {
    if (count >= 16) return store(to, value);
    float lanes[16];
    store(lanes, value);
    std::copy(lanes, lanes + count, to);
}

// Scratch of one thread that calls products; it grows to the largest call and is then reused.
struct GemmScratch {
    std::vector<const float*> rows;
    std::vector<float> sums;
    IntRows ints;
};

// out (tokens, rows) = x (tokens, cols) · Wᵀ + bias. With `int8_activations` integer weights meet activations rounded to
// int8; other weights are not affected.
inline void matmul(const float* x, int tokens, const Matrix& w, const float* bias, float* out, GemmScratch& scratch,
                   int threads, int block_size, bool int8_activations) {
    if (scratch.rows.size() < static_cast<size_t>(tokens)) scratch.rows.resize(tokens), scratch.sums.resize(tokens);
    const bool integer = int8_activations && integer_weights(w.format);
    for (int m = 0; m < tokens; ++m) scratch.rows[m] = x + static_cast<int64_t>(m) * w.cols;
    if (integer) scratch.ints.quantise(scratch.rows.data(), tokens, w.cols, threads);
    else if (w.format == Format::int8)
        for (int m = 0; m < tokens; ++m) scratch.sums[m] = chain_sum(scratch.rows[m], w.cols);
    const int per_task = std::max(1, block_size / kBlockRows);
    const int tasks = (w.blocks() + per_task - 1) / per_task;
    parallel_for(tasks, threads, [&](int task) {
        int first = task * per_task, last = std::min(w.blocks(), first + per_task);
        auto write = [&](int m, int row, F16 value) {
            int count = std::min(16, w.rows - row);
            if (bias) {
                float b[16] = {};
                std::copy(bias + row, bias + row + count, b);
                value = value + load(b);
            }
            store_rows(out + static_cast<int64_t>(m) * w.rows + row, value, count);
        };
        if (integer) int8_blocks(w, first, last, scratch.ints.rows(), tokens, write);
        else gemm_any(w, first, last, scratch.rows.data(), scratch.sums.data(), tokens, write);
    });
}

}  // namespace colibri

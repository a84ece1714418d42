// y = x · Wᵀ with W in layout rows16 (include/matrix.hpp), x and y float32, sums in float32.
//
// Every output is four chains of fused multiply-adds over k = 0, 4, 8, …; 1, 5, …; 2, 6, …; 3, 7, …, added as
// (c0 + c1) + (c2 + c3); where groups of columns have scales, one such sum per group, less zero point times the group's sum
// of x, and the groups in order. Nothing else about the call - number of tokens, threads, block size - touches that order,
// so an output's bits depend only on its row of x and its row of W.
#pragma once
#include <algorithm>

#include "gemm_int8_core.hpp"
#include "include/matrix.hpp"
#include "include/threads.hpp"

namespace colibri {

// What zero points multiply, made once per token: sums of x over all stretches of 32 columns, then of 64, of 128, and of
// the whole row, the widths that a group can have.
struct ColumnSums {
    static int count(int cols, int width) { return (cols + width - 1) / width; }
    static int size(int cols) { return first(cols, 0) + 1; }

    // Where the sums over stretches of `group` columns begin.
    static int first(int cols, int group) {
        int at = 0;
        for (int width = 32; width <= 128 && width != group; width *= 2) at += count(cols, width);
        return at;
    }

    static void fill(const float* x, int cols, float* out) {
        int n = count(cols, 32);
        for (int g = 0; g < n; ++g) {
            float c[4] = {0, 0, 0, 0};
            for (int k = 32 * g, end = std::min(cols, k + 32); k < end; ++k) c[k & 3] += x[k];
            out[g] = (c[0] + c[1]) + (c[2] + c[3]);
        }
        for (int width = 64; width <= 128; width *= 2) {
            const float* half = out;
            out += n;
            for (int g = 0; g < count(cols, width); ++g) out[g] = half[2 * g] + (2 * g + 1 < n ? half[2 * g + 1] : 0.0f);
            n = count(cols, width);
        }
        float all = 0.0f;
        for (int g = 0; g < n; ++g) all += out[g];
        out[n] = all;
    }
};

// chain[m][j] += columns first + j, first + j + 4, … below `last` times x[m], for the sixteen rows of the lines at `line`.
template <Format F, int M>
inline void add_columns(const uint8_t* line, int first, int last, const float* const* x, F16 (*chain)[4]) {
    constexpr int kStep = line_columns(F);
    F16 w[4], c[M][4];
    COLIBRI_UNROLL for (int m = 0; m < M; ++m)
        COLIBRI_UNROLL for (int j = 0; j < 4; ++j) c[m][j] = chain[m][j];
    int k = first;
    for (; k + kStep <= last; k += kStep, line += line_bytes(F)) {
        prefetch_ahead<line_bytes(F)>(line);
        Columns<F> columns(line);
        for (int part = 0; part < kStep / 4; ++part) {
            columns.get(part, w);
            COLIBRI_UNROLL for (int m = 0; m < M; ++m)
                COLIBRI_UNROLL for (int j = 0; j < 4; ++j) c[m][j] = fma(w[j], set1(x[m][k + 4 * part + j]), c[m][j]);
        }
    }
    COLIBRI_UNROLL for (int m = 0; m < M; ++m)
        COLIBRI_UNROLL for (int j = 0; j < 4; ++j) chain[m][j] = c[m][j];
    if (k == last) return;
    Columns<F> columns(line);
    for (int part = 0; k < last; ++part, k += 4) {
        columns.get(part, w);
        for (int m = 0; m < M; ++m)
            for (int j = 0; j < std::min(4, last - k); ++j) chain[m][j] = fma(w[j], set1(x[m][k + j]), chain[m][j]);
    }
}

// Block b of W times M tokens: out[m] holds the sixteen sums of token m, the factor aside. sums[m * stride + g]: the sum of
// token m's x over group g.
template <Format F, int M>
inline void block_times_tokens(const Matrix& w, int b, const float* const* x, const float* sums, int stride, F16* out) {
    const uint8_t* line = w.data + b * w.block_bytes();
    const int width = w.group_columns(), groups = w.groups();
    for (int m = 0; m < M; ++m) out[m] = set1(0.0f);
    for (int g = 0; g < groups; ++g, line += width / line_columns(F) * line_bytes(F)) {
        F16 chain[M][4];
        for (int m = 0; m < M; ++m)
            for (int j = 0; j < 4; ++j) chain[m][j] = set1(0.0f);
        add_columns<F, M>(line, g * width, std::min(w.cols, (g + 1) * width), x, chain);
        F16 scale, zero;
        if (is_scaled(F)) scale = w.scale_of(b, g);
        if (has_zero_points(F)) zero = w.zero_of(b, g);
        for (int m = 0; m < M; ++m) {
            F16 raw = (chain[m][0] + chain[m][1]) + (chain[m][2] + chain[m][3]);
            if (has_zero_points(F)) raw = raw - zero * set1(sums[m * stride + g]);
            out[m] = is_scaled(F) ? fma(scale, raw, out[m]) : raw;
        }
    }
}

// Blocks [first, last) of W times `tokens` rows of x. sums: ColumnSums of each row, for formats with zero points.
// `write(m, row, value16)` takes the sixteen finished outputs of token m from row `row` on.
template <Format F, class Write>
void gemm_blocks(const Matrix& w, int first, int last, const float* const* x, const float* sums, int tokens, Write&& write) {
    constexpr int kSuper = 64;  // tokens whose rows of x should stay in L2 while a stretch of W passes
    const int stride = ColumnSums::size(w.cols);
    const float* group_sums = sums + ColumnSums::first(w.cols, w.group);
    const F16 factor = set1(w.factor);
    for (int t0 = 0; t0 < tokens; t0 += kSuper) {
        int t1 = std::min(tokens, t0 + kSuper);
        for (int b = first; b < last; ++b) {
            int m = t0;
            F16 out[kTokenTile];
            for (; m + kTokenTile <= t1; m += kTokenTile) {
                block_times_tokens<F, kTokenTile>(w, b, x + m, group_sums + m * stride, stride, out);
                for (int i = 0; i < kTokenTile; ++i) write(m + i, 16 * b, out[i] * factor);
            }
            for (; m < t1; ++m) {
                block_times_tokens<F, 1>(w, b, x + m, group_sums + m * stride, stride, out);
                write(m, 16 * b, out[0] * factor);
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
        case Format::int4: return gemm_blocks<Format::int4>(w, first, last, x, sums, tokens, write);
        case Format::mxfp4: return gemm_blocks<Format::mxfp4>(w, first, last, x, sums, tokens, write);
    }
}

// Blocks of rows that a thread takes at a time. `block_size` rows where several tokens share each of `matrices`; up to four
// times as many in decode, which waits for memory at the start of every stretch, as long as each thread has four tasks.
inline int blocks_per_task(int block_size, int blocks, int matrices, int tokens, int threads) {
    const int least = std::max(1, block_size / kBlockRows);
    if (tokens >= kIntTokens * matrices) return least;
    return std::clamp(blocks * matrices / (4 * threads), least, 4 * least);
}

// Stores up to 16 lanes: the last block of a matrix may have fewer rows.
inline void store_rows(float* to, F16 value, int count) {
    if (count >= 16) return store(to, value);
    float lanes[16];
    store(lanes, value);
    std::copy(lanes, lanes + count, to);
}

// Scratch that a product takes: where each row of x lies, and the rows as integers or their sums, whichever is more.
inline size_t matmul_scratch_bytes(int tokens, int cols) {
    return Scratch::aligned(sizeof(float*) * tokens) +
           std::max(IntRows::bytes(tokens, cols), Scratch::aligned(sizeof(float) * tokens * ColumnSums::size(cols)));
}

// out (tokens, rows) = x (tokens, cols) · Wᵀ + bias. With `int8_activations` integer weights meet activations rounded to
// int8; other weights are not affected.
inline void matmul(const float* x, int tokens, const Matrix& w, const float* bias, float* out, Scratch& scratch, int threads,
                   int block_size, bool int8_activations) {
    const bool integer = int8_activations && integer_weights(w);
    const int64_t stride = ColumnSums::size(w.cols);
    scratch.begin(matmul_scratch_bytes(tokens, w.cols));
    const float** rows = scratch.take<const float*>(tokens);
    IntRows ints;
    float* sums = nullptr;
    for (int m = 0; m < tokens; ++m) rows[m] = x + static_cast<int64_t>(m) * w.cols;
    if (integer) {
        ints.quantise(rows, tokens, w.cols, scratch, threads);
    } else if (has_zero_points(w.format)) {
        sums = scratch.take<float>(tokens * stride);
        for (int m = 0; m < tokens; ++m) ColumnSums::fill(rows[m], w.cols, sums + m * stride);
    }
    const int per_task = blocks_per_task(block_size, w.blocks(), 1, tokens, threads);
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
        if (integer) int8_blocks(w, first, last, ints.rows(), tokens, write);
        else gemm_any(w, first, last, rows, sums, tokens, write);
    });
}

}  // namespace colibri

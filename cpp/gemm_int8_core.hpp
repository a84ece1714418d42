// y = x · Wᵀ with integer weights (int8, int4, mxfp4 in layout rows16) and activations rounded to int8 on the way in.
//
// A token's row is cut into groups of 64 columns, each with its own scale (largest magnitude / 127). Inside a stretch of 64
// columns, or of 32 where the weights have groups of 32, the sum of products is an exact integer; stretches are added in
// float32 in ascending order. An output's bits therefore depend only on its row of x and its row of W, whatever the tile, the
// number of tokens or the number of threads.
//
// Weights enter unsigned, as q + offset, which is what the instruction wants; with shift = zero + offset
//   y[n] = factor * sum over stretches s of  sx[s] * scale[n, s] * (dot_s(q_w + offset, q_x) - shift[n, s] * sum(q_x in s))
#pragma once
#include <algorithm>
#include <cmath>

#include "include/int8.hpp"
#include "include/matrix.hpp"
#include "include/scratch.hpp"
#include "include/threads.hpp"

namespace colibri {

constexpr int kActivationGroup = 64, kSumStretch = 32;

inline int activation_groups(int cols) { return (cols + kActivationGroup - 1) / kActivationGroup; }
inline int padded_activations(int cols) { return activation_groups(cols) * kActivationGroup; }

// One quantised row. bias = sum over groups of scale * sum of q, what one zero point for the whole row multiplies.
struct IntRow {
    const int8_t* q;     // columns padded with zeros to whole groups
    const float* scale;  // (groups,)
    const float* sums;   // (2 * groups,) sum of q over every 32 columns: whole numbers
    float bias;
};

// x (cols,) → q, scale, sums as in IntRow; returns the bias.
inline float quantise_row(const float* x, int cols, int8_t* q, float* scale, float* sums) {
    float bias = 0.0f;
    for (int g = 0, first = 0; first < cols; ++g, first += kActivationGroup) {
        int n = std::min(kActivationGroup, cols - first);
        float padded[kActivationGroup] = {};
        const float* values = x + first;
        if (n < kActivationGroup) values = static_cast<const float*>(std::copy(values, values + n, padded) - n);
        F16 top = set1(0.0f);
        for (int i = 0; i < kActivationGroup; i += 16) top = vmax(top, vmax(load(values + i), set1(0.0f) - load(values + i)));
        float lanes[16], largest = 0.0f;
        store(lanes, top);
        for (float lane : lanes) largest = std::max(largest, lane);
        scale[g] = largest / 127.0f;
        F16 inverse = set1(largest > 0.0f ? 127.0f / largest : 0.0f);
        for (int half = 0; half < 2; ++half) {
            F16 total = set1(0.0f);
            for (int i = kSumStretch * half; i < kSumStretch * (half + 1); i += 16) {
                F16 rounded = round_even(load(values + i) * inverse);
                total = total + rounded;
                store_i8(q + first + i, rounded);
            }
            sums[2 * g + half] = sum(total);
        }
        bias += scale[g] * (sums[2 * g] + sums[2 * g + 1]);
    }
    return bias;
}

// Rows of activations quantised once and read by many products.
class IntRows {
   public:
    static size_t bytes(size_t tokens, int cols) {
        const size_t width = padded_activations(cols), groups = activation_groups(cols);
        return Scratch::aligned(tokens * width) + Scratch::aligned(4 * tokens * groups) + Scratch::aligned(8 * tokens * groups) +
               Scratch::aligned(tokens * sizeof(IntRow));
    }
    const IntRow* rows() const { return rows_; }

    // x[m] (cols,) float32 → row m, in memory from `scratch`, on `threads`.
    void quantise(const float* const* x, int tokens, int cols, Scratch& scratch, int threads) {
        const size_t width = padded_activations(cols), groups = activation_groups(cols);
        int8_t* all_q = scratch.take<int8_t>(tokens * width);
        float *all_scales = scratch.take<float>(tokens * groups), *all_sums = scratch.take<float>(2 * tokens * groups);
        rows_ = scratch.take<IntRow>(tokens);
        const int per_task = std::max<int>(1, 8192 / width);
        parallel_for((tokens + per_task - 1) / per_task, threads, [&](int task) {
            for (int m = task * per_task; m < std::min(tokens, (task + 1) * per_task); ++m) {
                int8_t* q = all_q + m * width;
                float *scale = all_scales + m * groups, *sums = all_sums + 2 * m * groups;
                float bias = quantise_row(x[m], cols, q, scale, sums);
                rows_[m] = {q, scale, sums, bias};
            }
        });
    }

   private:
    IntRow* rows_ = nullptr;
};

// Whether a matrix as it is stored has an integer path.
inline bool integer_weights(const Matrix& w) { return is_scaled(w.format); }

// How the codes of a line become unsigned bytes, four columns at a time.
template <Format F>
struct Unsigned;
template <>
struct Unsigned<Format::int8> {
    static constexpr float kOffset = 128.0f;
    static Line get(Line line, int) { return flip_sign(line); }
};
template <>
struct Unsigned<Format::int4> {
    static constexpr float kOffset = 0.0f;
    static Line get(Line line, int part) { return part ? high_nibbles(line) : low_nibbles(line); }
};
template <>
struct Unsigned<Format::mxfp4> {  // twice the E2M1 number, from -12 to 12
    static constexpr float kOffset = 12.0f;
    static constexpr uint8_t kTable[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    static Line get(Line line, int part) { return lookup_bytes(kTable, part ? high_nibbles(line) : low_nibbles(line)); }
};

// dots[m][b] = exact sum over columns first … last of (q_w + offset) * q_x, for B row blocks that lie `stride` bytes apart.
template <Format F, int M, int B>
inline void int_dots(const uint8_t* block, int64_t stride, int first, int last, const IntRow* x, I32 (&dots)[M][B]) {
    constexpr int kColumns = line_columns(F), kParts = kColumns / 4;
    COLIBRI_UNROLL for (int m = 0; m < M; ++m)
        COLIBRI_UNROLL for (int b = 0; b < B; ++b) dots[m][b] = zero_i32();
    const uint8_t* line = block + first / kColumns * 64;
    int k = first;
    if constexpr (M * B == 1) {  // four chains hide the latency; integer sums do not care
        constexpr int kLines = 4 / kParts;
        I32 more[3] = {zero_i32(), zero_i32(), zero_i32()};
        for (; k + 16 <= last; k += 16, line += 64 * kLines) {
            COLIBRI_UNROLL for (int i = 0; i < kLines; ++i) {
                prefetch_ahead<64>(line + 64 * i);
                Line w = load_unsigned(line + 64 * i);
                COLIBRI_UNROLL for (int part = 0; part < kParts; ++part) {
                    const int chain = kParts * i + part;
                    I32& dot = chain == 0 ? dots[0][0] : more[chain - 1];
                    dot = dot4(dot, Unsigned<F>::get(w, part), four_bytes(x[0].q + k + 4 * chain));
                }
            }
        }
        dots[0][0] = (dots[0][0] + more[0]) + (more[1] + more[2]);
    }
    for (; k < last; k += kColumns, line += 64) {
        Line w[B];
        COLIBRI_UNROLL for (int b = 0; b < B; ++b) w[b] = load_unsigned(line + b * stride);
        COLIBRI_UNROLL for (int part = 0; part < kParts; ++part) {
            Line u[B];
            COLIBRI_UNROLL for (int b = 0; b < B; ++b) u[b] = Unsigned<F>::get(w[b], part);
            COLIBRI_UNROLL for (int m = 0; m < M; ++m) {
                int32_t q = four_bytes(x[m].q + k + 4 * part);
                COLIBRI_UNROLL for (int b = 0; b < B; ++b) dots[m][b] = dot4(dots[m][b], u[b], q);
            }
        }
    }
}

// Lines of the next row blocks, asked for little by little while many tokens pass over the present ones.
struct Ahead {
    const uint8_t* line = nullptr;
    int lines = 0;  // a stretch of columns
    void some() {
        for (int i = 0; i < lines; ++i, line += 64) __builtin_prefetch(line, 0, 2);
    }
};

// B row blocks from `block` on, times M tokens; sums[m][b] = y of sixteen rows, the factor aside.
template <Format F, int M, int B>
inline void int_tile(const Matrix& w, int block, const IntRow* x, F16 (&sums)[M][B], Ahead& ahead) {
    const uint8_t* data = w.data + block * w.block_bytes();
    const int stretch = w.group == kSumStretch ? kSumStretch : kActivationGroup;
    const F16 offset = set1(Unsigned<F>::kOffset);
    COLIBRI_UNROLL for (int m = 0; m < M; ++m)
        COLIBRI_UNROLL for (int b = 0; b < B; ++b) sums[m][b] = set1(0.0f);
    for (int first = 0; first < w.cols; first += stretch) {
        ahead.some();
        I32 dots[M][B];
        int_dots<F, M, B>(data, w.block_bytes(), first, std::min(w.cols, first + stretch), x, dots);
        const int g = first / kActivationGroup, s = first / kSumStretch;
        if (w.group == 0) {  // the offset goes out here, where it is exact, and not where large sums would cancel
            COLIBRI_UNROLL for (int m = 0; m < M; ++m) {
                F16 sx = set1(x[m].scale[g]), extra = set1(Unsigned<F>::kOffset * (x[m].sums[s] + x[m].sums[s + 1]));
                COLIBRI_UNROLL for (int b = 0; b < B; ++b) {
                    F16 dot = to_float(dots[m][b]);
                    if constexpr (Unsigned<F>::kOffset != 0.0f) dot = dot - extra;
                    sums[m][b] = fma(dot, sx, sums[m][b]);
                }
            }
            continue;
        }
        F16 scale[B], shift[B];
        COLIBRI_UNROLL for (int b = 0; b < B; ++b) {
            scale[b] = w.scale_of(block + b, first / w.group);
            shift[b] = w.zero_of(block + b, first / w.group) + offset;
        }
        COLIBRI_UNROLL for (int m = 0; m < M; ++m) {
            F16 total = set1(stretch == kSumStretch ? x[m].sums[s] : x[m].sums[s] + x[m].sums[s + 1]), sx = set1(x[m].scale[g]);
            COLIBRI_UNROLL for (int b = 0; b < B; ++b)
                sums[m][b] = fma(to_float(dots[m][b]) - shift[b] * total, scale[b] * sx, sums[m][b]);
        }
    }
    if (w.group) return;
    COLIBRI_UNROLL for (int b = 0; b < B; ++b) {
        F16 scale = w.scale_of(block + b, 0), zero = w.zero_of(block + b, 0);
        COLIBRI_UNROLL for (int m = 0; m < M; ++m) sums[m][b] = (sums[m][b] - zero * set1(x[m].bias)) * scale;
    }
}

template <Format F, int M, int B, class Write>
inline void int_tile_out(const Matrix& w, int block, const IntRow* x, int token, Write& write, Ahead& ahead) {
    F16 sums[M][B];
    int_tile<F, M, B>(w, block, x + token, sums, ahead);
    for (int m = 0; m < M; ++m)
        for (int b = 0; b < B; ++b) write(token + m, 16 * (block + b), sums[m][b] * set1(w.factor));
}

// Tokens t0 … t1 - 1 times B row blocks, in tiles as large as there are tokens for.
template <Format F, int B, class Write>
inline void int_tiles(const Matrix& w, int block, const IntRow* x, int t0, int t1, Write& write, Ahead ahead) {
    constexpr int kHalf = kIntTokens / 2;
    int t = t0;
    for (; t + kIntTokens <= t1; t += kIntTokens) int_tile_out<F, kIntTokens, B>(w, block, x, t, write, ahead);
    if constexpr (kHalf > 1)
        for (; t + kHalf <= t1; t += kHalf) int_tile_out<F, kHalf, B>(w, block, x, t, write, ahead);
    for (; t < t1; ++t) int_tile_out<F, 1, B>(w, block, x, t, write, ahead);
}

template <Format F, class Write>
void int_blocks(const Matrix& w, int first, int last, const IntRow* x, int tokens, Write& write) {
    constexpr int kSuper = 96;  // tokens whose rows should stay in L2 while a stretch of W passes
    for (int t0 = 0; t0 < tokens; t0 += kSuper) {
        const int t1 = std::min(tokens, t0 + kSuper), steps = (t1 - t0 + kIntTokens - 1) / kIntTokens * activation_groups(w.cols);
        int b = first;
        if (t1 - t0 >= kIntTokens)
            for (const int64_t bytes = kIntBlocks * w.block_bytes(); b + kIntBlocks <= last; b += kIntBlocks) {
                const uint8_t* next = w.data + b * w.block_bytes() + bytes;
                const bool more = b + kIntBlocks < last;
                int_tiles<F, kIntBlocks>(w, b, x, t0, t1, write, {next, more ? static_cast<int>(bytes / 64 / steps) + 1 : 0});
            }
        for (; b < last; ++b) int_tiles<F, 1>(w, b, x, t0, t1, write, {});
    }
}

// Row blocks [first, last) of W times `tokens` quantised rows; `write(token, row, sixteen outputs)`.
template <class Write>
void int8_blocks(const Matrix& w, int first, int last, const IntRow* x, int tokens, Write&& write) {
    switch (w.format) {
        case Format::int8: return int_blocks<Format::int8>(w, first, last, x, tokens, write);
        case Format::int4: return int_blocks<Format::int4>(w, first, last, x, tokens, write);
        case Format::mxfp4: return int_blocks<Format::mxfp4>(w, first, last, x, tokens, write);
        default: return;  // integer_weights() is false for these
    }
}

}  // namespace colibri

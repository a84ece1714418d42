// Expert feed-forward: down(silu(gate x) * up x) for a step's tokens, grouped by expert.
//
// Tokens are bucketed by expert before the call: rows offsets[a] … offsets[a+1] belong to active expert a and name the
// token each row reads. Two passes over (expert, stretch of output rows) tasks: gate and up into `hidden`, then down into
// `out`. `combine` then adds a token's experts in router order, so the sum does not depend on which expert was computed
// first. Nothing is allocated: buckets belong to the caller, scratch too where one is lent.
#pragma once
#include "gemm_core.hpp"
#include "include/activation.hpp"

namespace colibri {

struct Expert {
    Matrix gate, up, down;
};

// Scratch that a call takes besides the table of experts: where each token's and each bucket row's numbers lie, and those
// numbers as integers (a token once however many experts want it) or their sums, whichever is more.
inline size_t ffn_scratch_bytes(int tokens, int rows, int hidden, int inner) {
    const size_t n = rows, float_bytes = Scratch::aligned(sizeof(float) * n * ColumnSums::size(hidden)) +
                                         Scratch::aligned(sizeof(float) * n * ColumnSums::size(inner));
    const size_t int_bytes = Scratch::aligned(sizeof(IntRow) * n) + IntRows::bytes(tokens, hidden) + IntRows::bytes(n, inner);
    return Scratch::aligned(sizeof(float*) * tokens) + 2 * Scratch::aligned(sizeof(float*) * n) + std::max(int_bytes, float_bytes);
}

inline bool integer_expert(const Expert& e) {
    return integer_weights(e.gate) && integer_weights(e.up) && integer_weights(e.down);
}

// x (tokens, hidden) → out (rows, hidden). token_of[r] = row of x; experts[a] covers rows [offsets[a], offsets[a+1]).
// `middle` (rows, intermediate) is room for what is between; `scratch` has begun, with ffn_scratch_bytes left. With
// `int8_activations` experts of integer weights read activations rounded to int8.
inline void expert_ffn(const float* x, int tokens, const int32_t* token_of, const Expert* experts, const int32_t* offsets,
                       int active, Scratch& scratch, float* middle, float* out, int threads, int block_size, bool exact,
                       bool int8_activations) {
    if (active == 0) return;
    const int hidden = experts[0].down.rows, inner = experts[0].gate.rows, rows = offsets[active];
    const bool integer = int8_activations && std::all_of(experts, experts + active, integer_expert);
    const int64_t x_stride = ColumnSums::size(hidden), hidden_stride = ColumnSums::size(inner);
    bool zero_in = false, zero_mid = false;
    for (int a = 0; a < active; ++a) {
        zero_in |= has_zero_points(experts[a].gate.format) || has_zero_points(experts[a].up.format);
        zero_mid |= has_zero_points(experts[a].down.format);
    }
    const float** token_at = scratch.take<const float*>(tokens);
    const float **x_rows = scratch.take<const float*>(rows), **hidden_rows = scratch.take<const float*>(rows);
    IntRow* x_ints = nullptr;
    float *x_sums = nullptr, *hidden_sums = nullptr;
    IntRows token_ints, hidden_ints;
    if (integer) {
        x_ints = scratch.take<IntRow>(rows);
        for (int t = 0; t < tokens; ++t) token_at[t] = x + static_cast<int64_t>(t) * hidden;
        token_ints.quantise(token_at, tokens, hidden, scratch, threads);
    } else {
        x_sums = scratch.take<float>(rows * x_stride), hidden_sums = scratch.take<float>(rows * hidden_stride);
    }
    for (int r = 0; r < rows; ++r) {
        x_rows[r] = x + static_cast<int64_t>(token_of[r]) * hidden;
        hidden_rows[r] = middle + static_cast<int64_t>(r) * inner;
        if (integer) x_ints[r] = token_ints.rows()[token_of[r]];
        else if (zero_in) ColumnSums::fill(x_rows[r], hidden, x_sums + r * x_stride);
    }
    const int inner_blocks = experts[0].gate.blocks(), out_blocks = experts[0].down.blocks();
    const int inner_step = blocks_per_task(block_size, inner_blocks, active, rows, threads);
    const int out_step = blocks_per_task(block_size, out_blocks, active, rows, threads);
    const int inner_tasks = (inner_blocks + inner_step - 1) / inner_step, out_tasks = (out_blocks + out_step - 1) / out_step;

    parallel_for(active * inner_tasks, threads, [&](int task) {
        int a = task / inner_tasks, first = task % inner_tasks * inner_step, last = std::min(inner_blocks, first + inner_step);
        int r0 = offsets[a], n = offsets[a + 1] - r0;
        auto product = [&](const Matrix& w, auto write) {
            if (integer) int8_blocks(w, first, last, x_ints + r0, n, write);
            else gemm_any(w, first, last, x_rows + r0, x_sums + r0 * x_stride, n, write);
        };
        auto at = [&](int m, int row) { return middle + static_cast<int64_t>(r0 + m) * inner + row; };
        product(experts[a].gate, [&](int m, int row, F16 value) { store_rows(at(m, row), silu(value, exact), inner - row); });
        product(experts[a].up, [&](int m, int row, F16 value) {
            float* to = at(m, row);
            float gate[16] = {};
            std::copy(to, to + std::min(16, inner - row), gate);
            store_rows(to, load(gate) * value, inner - row);
        });
    });
    if (integer) hidden_ints.quantise(hidden_rows, rows, inner, scratch, threads);
    else if (zero_mid)
        parallel_for(rows, threads,
                     [&](int r) { ColumnSums::fill(hidden_rows[r], inner, hidden_sums + r * hidden_stride); });
    parallel_for(active * out_tasks, threads, [&](int task) {
        int a = task / out_tasks, first = task % out_tasks * out_step, last = std::min(out_blocks, first + out_step);
        int r0 = offsets[a], n = offsets[a + 1] - r0;
        auto write = [&](int m, int row, F16 value) {
            store_rows(out + static_cast<int64_t>(r0 + m) * hidden + row, value, hidden - row);
        };
        if (integer) int8_blocks(experts[a].down, first, last, hidden_ints.rows() + r0, n, write);
        else gemm_any(experts[a].down, first, last, hidden_rows + r0, hidden_sums + r0 * hidden_stride, n, write);
    });
}

// y[t] = sum over rank of weights[t, rank] * rows[row_of[t, rank]], in rank order. row_of -1 contributes nothing.
inline void combine(const float* rows, const int32_t* row_of, const float* weights, int tokens, int k, int hidden, float* y,
                    int threads) {
    parallel_for(tokens, threads, [&](int t) {
        float* to = y + static_cast<int64_t>(t) * hidden;
        std::fill(to, to + hidden, 0.0f);
        for (int rank = 0; rank < k; ++rank) {
            int r = row_of[t * k + rank];
            if (r < 0) continue;
            const float* from = rows + static_cast<int64_t>(r) * hidden;
            float w = weights[t * k + rank];
            for (int i = 0; i < hidden; ++i) to[i] += w * from[i];
        }
    });
}

// Groups (token, rank) assignments by expert: a counting sort that keeps token order inside an expert.
// local[t * k + rank] is the expert's place among `active` experts, or -1 to leave the assignment out.
// Fills offsets (active + 1), token_of (rows) and row_of (tokens * k); returns the number of rows.
inline int fill_buckets(const int32_t* local, int tokens, int k, int active, int32_t* offsets, int32_t* token_of,
                        int32_t* row_of, int32_t* cursor) {
    std::fill(offsets, offsets + active + 1, 0);
    for (int i = 0; i < tokens * k; ++i)
        if (local[i] >= 0) ++offsets[local[i] + 1];
    for (int a = 0; a < active; ++a) offsets[a + 1] += offsets[a], cursor[a] = offsets[a];
    for (int i = 0; i < tokens * k; ++i) {
        row_of[i] = -1;
        if (local[i] < 0) continue;
        row_of[i] = cursor[local[i]]++;
        token_of[row_of[i]] = i / k;
    }
    return offsets[active];
}

}  // namespace colibri

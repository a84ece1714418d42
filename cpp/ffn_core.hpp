// Expert feed-forward: down(silu(gate x) * up x) for a step's tokens, grouped by expert.
//
// Tokens are bucketed by expert before the call: rows offsets[a] … offsets[a+1] belong to active expert a and name the
// token each row reads. Two passes over (expert, stretch of output rows) tasks: gate and up into `hidden`, then down into
// `out`. `combine` then adds a token's experts in router order, so the sum does not depend on which expert was computed
// first. Nothing is allocated: buckets and scratch belong to the caller.
#pragma once
#include "gemm_core.hpp"
#include "include/activation.hpp"

namespace colibri {

struct Expert {
    Matrix gate, up, down;
};

// Scratch of one calling thread; it grows to the largest step and is then reused.
struct FfnScratch {
    std::vector<const float*> tokens, x_rows, hidden_rows;  // row of x of each token; of each bucket row; its hidden row
    std::vector<float> x_sums, hidden_sums;                 // ColumnSums of each row, for zero points
    std::vector<IntRow> x_ints;                             // each bucket row's quantised token
    IntRows token_ints, hidden_ints;

    void fit(int tokens_needed, int rows, int64_t x_stride, int64_t hidden_stride) {
        if (tokens.size() < static_cast<size_t>(tokens_needed)) tokens.resize(tokens_needed);
        if (x_sums.size() < static_cast<size_t>(rows * x_stride)) x_sums.resize(rows * x_stride);
        if (hidden_sums.size() < static_cast<size_t>(rows * hidden_stride)) hidden_sums.resize(rows * hidden_stride);
        if (x_rows.size() < static_cast<size_t>(rows)) x_rows.resize(rows), hidden_rows.resize(rows), x_ints.resize(rows);
    }
};

inline bool integer_expert(const Expert& e) {
    return integer_weights(e.gate) && integer_weights(e.up) && integer_weights(e.down);
}

// x (tokens, hidden) → out (rows, hidden). token_of[r] = row of x; experts[a] covers rows [offsets[a], offsets[a+1]).
// `middle` (rows, intermediate) is scratch. With `int8_activations` experts of integer weights read activations rounded to
// int8, each token once however many experts want it.
inline void expert_ffn(const float* x, int tokens, const int32_t* token_of, const Expert* experts, const int32_t* offsets,
                       int active, FfnScratch& s, float* middle, float* out, int threads, int block_size, bool exact,
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
    s.fit(tokens, rows, x_stride, hidden_stride);
    if (integer) {
        for (int t = 0; t < tokens; ++t) s.tokens[t] = x + static_cast<int64_t>(t) * hidden;
        s.token_ints.quantise(s.tokens.data(), tokens, hidden, threads);
    }
    for (int r = 0; r < rows; ++r) {
        s.x_rows[r] = x + static_cast<int64_t>(token_of[r]) * hidden;
        s.hidden_rows[r] = middle + static_cast<int64_t>(r) * inner;
        if (integer) s.x_ints[r] = s.token_ints.rows()[token_of[r]];
        else if (zero_in) ColumnSums::fill(s.x_rows[r], hidden, s.x_sums.data() + r * x_stride);
    }
    const int inner_blocks = experts[0].gate.blocks(), out_blocks = experts[0].down.blocks();
    const int inner_step = blocks_per_task(block_size, inner_blocks, active, rows, threads);
    const int out_step = blocks_per_task(block_size, out_blocks, active, rows, threads);
    const int inner_tasks = (inner_blocks + inner_step - 1) / inner_step, out_tasks = (out_blocks + out_step - 1) / out_step;

    parallel_for(active * inner_tasks, threads, [&](int task) {
        int a = task / inner_tasks, first = task % inner_tasks * inner_step, last = std::min(inner_blocks, first + inner_step);
        int r0 = offsets[a], n = offsets[a + 1] - r0;
        auto product = [&](const Matrix& w, auto write) {
            if (integer) int8_blocks(w, first, last, s.x_ints.data() + r0, n, write);
            else gemm_any(w, first, last, s.x_rows.data() + r0, s.x_sums.data() + r0 * x_stride, n, write);
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
    if (integer) s.hidden_ints.quantise(s.hidden_rows.data(), rows, inner, threads);
    else if (zero_mid)
        parallel_for(rows, threads,
                     [&](int r) { ColumnSums::fill(s.hidden_rows[r], inner, s.hidden_sums.data() + r * hidden_stride); });
    parallel_for(active * out_tasks, threads, [&](int task) {
        int a = task / out_tasks, first = task % out_tasks * out_step, last = std::min(out_blocks, first + out_step);
        int r0 = offsets[a], n = offsets[a + 1] - r0;
        auto write = [&](int m, int row, F16 value) {
            store_rows(out + static_cast<int64_t>(r0 + m) * hidden + row, value, hidden - row);
        };
        if (integer) int8_blocks(experts[a].down, first, last, s.hidden_ints.rows() + r0, n, write);
        else gemm_any(experts[a].down, first, last, s.hidden_rows.data() + r0, s.hidden_sums.data() + r0 * hidden_stride, n, write);
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

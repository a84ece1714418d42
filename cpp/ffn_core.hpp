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

struct FfnScratch {
    const float** x_rows;       // (rows,) row of x each bucket row reads
    const float** hidden_rows;  // (rows,)
    float* x_sums;              // (rows,) chain sums for int8 zero points
    float* hidden_sums;         // (rows,)
    float* hidden;              // (rows, intermediate)
};

// x (tokens, hidden) → out (rows, hidden). token_of[r] = row of x; experts[a] covers rows [offsets[a], offsets[a+1]).
inline void expert_ffn(const float* x, const int32_t* token_of, const Expert* experts, const int32_t* offsets, int active,
                       const FfnScratch& s, float* out, int threads, int block_size, bool exact) {
    if (active == 0) return;
    const int hidden = experts[0].down.rows, inner = experts[0].gate.rows;
    const int rows = offsets[active];
    for (int r = 0; r < rows; ++r) {
        s.x_rows[r] = x + static_cast<int64_t>(token_of[r]) * hidden;
        s.hidden_rows[r] = s.hidden + static_cast<int64_t>(r) * inner;
        s.x_sums[r] = chain_sum(s.x_rows[r], hidden);
    }
    const int per_task = std::max(1, block_size / kBlockRows);
    const int inner_blocks = experts[0].gate.blocks(), out_blocks = experts[0].down.blocks();
    const int inner_tasks = (inner_blocks + per_task - 1) / per_task, out_tasks = (out_blocks + per_task - 1) / per_task;

    parallel_for(active * inner_tasks, threads, [&](int task) {
        int a = task / inner_tasks, first = task % inner_tasks * per_task, last = std::min(inner_blocks, first + per_task);
        int r0 = offsets[a], n = offsets[a + 1] - r0;
        auto at = [&](int m, int row) { return s.hidden + static_cast<int64_t>(r0 + m) * inner + row; };
        gemm_any(experts[a].gate, first, last, s.x_rows + r0, s.x_sums + r0, n,
                 [&](int m, int row, F16 value) { store_rows(at(m, row), silu(value, exact), inner - row); });
        gemm_any(experts[a].up, first, last, s.x_rows + r0, s.x_sums + r0, n, [&](int m, int row, F16 value) {
            float* to = at(m, row);
            int count = std::min(16, inner - row);
            float gate[16] = {};
            std::copy(to, to + count, gate);
            store_rows(to, load(gate) * value, count);
        });
    });
    if (experts[0].down.format == Format::int8)
        parallel_for(rows, threads, [&](int r) { s.hidden_sums[r] = chain_sum(s.hidden_rows[r], inner); });
    parallel_for(active * out_tasks, threads, [&](int task) {
        int a = task / out_tasks, first = task % out_tasks * per_task, last = std::min(out_blocks, first + per_task);
        int r0 = offsets[a], n = offsets[a + 1] - r0;
        gemm_any(experts[a].down, first, last, s.hidden_rows + r0, s.hidden_sums + r0, n, [&](int m, int row, F16 value) {
            store_rows(out + static_cast<int64_t>(r0 + m) * hidden + row, value, hidden - row);
        });
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

// Attention for prefill: sixteen tokens of one head at a time, a token in each vector lane.
//
// With tokens in the lanes a key's number is broadcast and meets sixteen queries at once, so there are no sums across lanes
// and the softmax of sixteen tokens is computed together. Queries and sums are kept transposed, [head_dim][16 tokens]. A lane
// never sees another: a token's result depends on its own position only, not on its neighbours in the tile.
#pragma once
#include "attention_core.hpp"

namespace colibri {

constexpr int kTokenLanes = 16;
constexpr int kTileAtLeast = 4;  // fewer tokens than this are cheaper one by one
constexpr int kRows = 4;         // keys or values at a time, to load queries and sums once for all of them

// f(position, rows, n) with n = 1 … kRows consecutive rows as floats.
template <class T, class F>
inline void each_rows(const KvPages& kv, const uint8_t* base, int head, int first, int last, F&& f) {
    float buffer[kRows][kMaxHeadDim];
    const float* rows[kRows];
    int n = 0, start = first;
    each_row<T>(kv, base, head, first, last, [&](int position, const T* row) {
        if constexpr (sizeof(T) == 4) rows[n] = row;
        else {
            int i = 0;
            for (; i + 16 <= kv.head_dim; i += 16) store(buffer[n] + i, wide(row + i));
            for (; i < kv.head_dim; ++i) buffer[n][i] = widen(row[i]);
            rows[n] = buffer[n];
        }
        if (++n < kRows && position < last) return;
        f(start, rows, n);
        start = position + 1, n = 0;
    });
}

// 1 in the lanes whose token sees the key at `position`; lane l stands at first_position + l.
inline F16 lanes_that_see(int position, int first_position, int window) {
    float sees[kTokenLanes];
    for (int l = 0; l < kTokenLanes; ++l) {
        int at = first_position + l;
        sees[l] = position <= at && (window == 0 || position > at - window) ? 1.0f : 0.0f;
    }
    return load(sees);
}

// q, out: rows of `step` floats per token, already at this head. Tokens 0 … count - 1 stand at `position` and after it.
template <class T>
inline void attend_tile(const float* q, const KvPages& kv, int head, int count, int position, int window, float scale,
                        float* out, int64_t step) {
    const int d = kv.head_dim;
    alignas(64) float queries[kMaxHeadDim * kTokenLanes], sums[kMaxHeadDim * kTokenLanes];
    for (int i = 0; i < d; ++i)
        for (int l = 0; l < kTokenLanes; ++l) queries[i * kTokenLanes + l] = l < count ? q[l * step + i] * scale : 0.0f;
    std::fill(sums, sums + d * kTokenLanes, 0.0f);
    const F16 nothing = set1(-1e30f);
    F16 best = nothing, total = set1(0.0f);
    const int first = window > 0 ? std::max(0, position - window + 1) : 0, last = position + count - 1;
    for (int tile = first / kKeyTile * kKeyTile; tile <= last; tile += kKeyTile) {
        const int from = std::max(tile, first), to = std::min(tile + kKeyTile - 1, last);
        const bool all_see = to <= position && (window == 0 || from > last - window);
        F16 score[kKeyTile], sees[kKeyTile], top = best;
        each_rows<T>(kv, kv.k, head, from, to, [&](int j, const float* const* keys, int n) {
            F16 acc[kRows] = {set1(0.0f), set1(0.0f), set1(0.0f), set1(0.0f)};
            if (n == kRows)
                for (int i = 0; i < d; ++i) {
                    F16 x = load(queries + i * kTokenLanes);
                    COLIBRI_UNROLL for (int r = 0; r < kRows; ++r) acc[r] = fma(x, set1(keys[r][i]), acc[r]);
                }
            else
                for (int r = 0; r < n; ++r)
                    for (int i = 0; i < d; ++i) acc[r] = fma(load(queries + i * kTokenLanes), set1(keys[r][i]), acc[r]);
            for (int r = 0; r < n; ++r) {
                int at = j + r - from;
                score[at] = acc[r];
                if (!all_see) {
                    sees[at] = lanes_that_see(j + r, position, window);
                    score[at] = fma(score[at], sees[at], nothing * (set1(1.0f) - sees[at]));
                }
                top = vmax(top, score[at]);
            }
        });
        const F16 shrink = exp(best - top);
        total = total * shrink;
        for (int i = 0; i < d; ++i) store(sums + i * kTokenLanes, load(sums + i * kTokenLanes) * shrink);
        best = top;
        each_rows<T>(kv, kv.v, head, from, to, [&](int j, const float* const* values, int n) {
            F16 p[kRows];
            for (int r = 0; r < n; ++r) {
                p[r] = exp(score[j + r - from] - best);
                if (!all_see) p[r] = p[r] * sees[j + r - from];
                total = total + p[r];
            }
            for (int i = 0; i < d; ++i) {
                F16 sum = load(sums + i * kTokenLanes);
                if (n == kRows) {
                    COLIBRI_UNROLL for (int r = 0; r < kRows; ++r) sum = fma(p[r], set1(values[r][i]), sum);
                } else
                    for (int r = 0; r < n; ++r) sum = fma(p[r], set1(values[r][i]), sum);
                store(sums + i * kTokenLanes, sum);
            }
        });
    }
    float totals[kTokenLanes];
    store(totals, total);
    for (int l = 0; l < count; ++l) {
        const float inverse = 1.0f / totals[l];
        for (int i = 0; i < d; ++i) out[l * step + i] = sums[i * kTokenLanes + l] * inverse;
    }
}

// q, out (tokens, heads, head_dim); token t stands at position past + t and sees `window` keys (0: all of them).
template <class T>
inline void attend_prefill(const float* q, const KvPages& kv, int tokens, int heads, int past, int window, float scale,
                           float* out, int threads) {
    const int group = heads / kv.kv_heads, tiles = (tokens + kTokenLanes - 1) / kTokenLanes;
    const int64_t step = static_cast<int64_t>(heads) * kv.head_dim;
    parallel_for(tiles * heads, threads, [&](int task) {
        // Last tiles first: they see the most keys, and the longest work should not start last.
        int tile = tiles - 1 - task / heads, h = task % heads;
        int t0 = tile * kTokenLanes, count = std::min(kTokenLanes, tokens - t0);
        int64_t at = t0 * step + h * kv.head_dim;
        attend_tile<T>(q + at, kv, h / group, count, past + t0, window, scale, out + at, step);
    });
}

// By tiles where there are tokens enough, else one by one.
template <class T>
inline void attend_any(const float* q, const KvPages& kv, int tokens, int heads, int past, int window, float scale, float* out,
                       int threads) {
    bool tiles = tokens >= kTileAtLeast && kv.head_dim <= kMaxHeadDim;
    (tiles ? attend_prefill<T> : attend<T>)(q, kv, tokens, heads, past, window, scale, out, threads);
}

}  // namespace colibri

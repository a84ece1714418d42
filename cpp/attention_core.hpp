// Causal grouped-query attention over a paged KV cache, softmax computed online (Milakov and Gimelshein 2018; tiles as in
// FlashAttention, Dao et al. 2022), and the rotary embedding that goes before it (Su et al. 2021).
//
// Keys are visited in tiles of 64 counted from position 0, wherever pages begin, and every (token, head) is finished by
// one thread. The result therefore does not depend on page size, on how the prompt was cut into chunks, or on threads.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "include/simd.hpp"
#include "include/threads.hpp"

namespace colibri {

constexpr int kKeyTile = 64;
constexpr int kMaxHeadDim = 512;

inline float dot(const float* a, const float* b, int n) {
    F16 acc = set1(0.0f);
    int i = 0;
    for (; i + 16 <= n; i += 16) acc = fma(load(a + i), load(b + i), acc);
    float tail = 0.0f;
    for (; i < n; ++i) tail = std::fma(a[i], b[i], tail);
    return sum(acc) + tail;
}

inline void scale_add(float* to, const float* from, float weight, int n) {  // to += weight * from
    F16 w = set1(weight);
    int i = 0;
    for (; i + 16 <= n; i += 16) store(to + i, fma(load(from + i), w, load(to + i)));
    for (; i < n; ++i) to[i] = std::fma(from[i], weight, to[i]);
}

struct KvCache {
    const float* k;  // (pages, page_size, kv_heads, head_dim)
    const float* v;
    const int32_t* pages;  // page_table: pages[i] holds positions i * page_size …
    int page_size, kv_heads, head_dim;

    int64_t at(int position, int head) const {
        int64_t page = pages[position / page_size];
        return ((page * page_size + position % page_size) * kv_heads + head) * head_dim;
    }
};

// One query head of one token at `position`: keys first … position inclusive.
inline void attend_one(const float* q, const KvCache& kv, int head, int first, int position, float scale, float* out) {
    const int d = kv.head_dim;
    float best = -INFINITY, total = 0.0f;
    std::fill(out, out + d, 0.0f);
    for (int tile = first / kKeyTile * kKeyTile; tile <= position; tile += kKeyTile) {
        int from = std::max(tile, first), to = std::min(tile + kKeyTile - 1, position);
        float score[kKeyTile];
        float top = best;
        for (int j = from; j <= to; ++j) {
            score[j - from] = dot(q, kv.k + kv.at(j, head), d) * scale;
            top = std::max(top, score[j - from]);
        }
        if (top > best) {
            float shrink = std::exp(best - top);  // 0 on the first tile
            total *= shrink;
            for (int i = 0; i < d; ++i) out[i] *= shrink;
            best = top;
        }
        for (int j = from; j <= to; ++j) {
            float p = std::exp(score[j - from] - best);
            total += p;
            scale_add(out, kv.v + kv.at(j, head), p, d);
        }
    }
    float inverse = 1.0f / total;
    for (int i = 0; i < d; ++i) out[i] *= inverse;
}

// q, out (tokens, heads, head_dim); token t stands at position past + t and sees `window` keys (0: all of them).
inline void attend(const float* q, const KvCache& kv, int tokens, int heads, int past, int window, float scale, float* out,
                   int threads) {
    const int group = heads / kv.kv_heads;
    parallel_for(tokens * heads, threads, [&](int task) {
        int t = task / heads, h = task % heads, position = past + t;
        int first = window > 0 ? std::max(0, position - window + 1) : 0;
        int64_t at = static_cast<int64_t>(task) * kv.head_dim;
        attend_one(q + at, kv, h / group, first, position, scale, out + at);
    });
}

// Rotates the first `dims` of every head in place. x (tokens, heads, head_dim); cos, sin (tokens, dims / 2).
// Pairs are (j, j + dims/2), or neighbours (2j, 2j + 1) when interleaved.
inline void rotate(float* x, const float* cos, const float* sin, int tokens, int heads, int head_dim, int dims, bool interleaved) {
    const int half = dims / 2;
    for (int t = 0; t < tokens; ++t) {
        const float *c = cos + t * half, *s = sin + t * half;
        for (int h = 0; h < heads; ++h) {
            float* p = x + (static_cast<int64_t>(t) * heads + h) * head_dim;
            for (int j = 0; j < half; ++j) {
                float &a = p[interleaved ? 2 * j : j], &b = p[interleaved ? 2 * j + 1 : j + half];
                float a0 = a, b0 = b;
                a = a0 * c[j] - b0 * s[j];
                b = b0 * c[j] + a0 * s[j];
            }
        }
    }
}

}  // namespace colibri

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

// Keys and values are stored as float or as IEEE half; either way they are computed with as floats.
using Half = uint16_t;
inline F16 wide(const float* p) { return load(p); }
inline F16 wide(const Half* p) { return load_fp16(p); }
inline float widen(float x) { return x; }
inline float widen(Half x) { return fp16_to_float(x); }

template <class T>
inline float dot(const float* a, const T* b, int n) {
    F16 acc = set1(0.0f);
    int i = 0;
    for (; i + 16 <= n; i += 16) acc = fma(load(a + i), wide(b + i), acc);
    float tail = 0.0f;
    for (; i < n; ++i) tail = std::fma(a[i], widen(b[i]), tail);
    return sum(acc) + tail;
}

template <class T>
inline void scale_add(float* to, const T* from, float weight, int n) {  // to += weight * from
    F16 w = set1(weight);
    int i = 0;
    for (; i + 16 <= n; i += 16) store(to + i, fma(wide(from + i), w, load(to + i)));
    for (; i < n; ++i) to[i] = std::fma(widen(from[i]), weight, to[i]);
}

// One layer's keys and values: pages of (page_size, kv_heads, head_dim), page number p at p * stride bytes.
struct KvPages {
    const uint8_t *k, *v;  // where page 0 would begin
    int64_t stride;
    const int32_t* table;  // table[i]: number of the page that holds positions i * page_size …
    int page_size, kv_heads, head_dim;
};

// f(position, row) for first … last, where row is that position's T (head_dim,) of `head`, out of `base` = kv.k or kv.v.
template <class T, class F>
inline void each_row(const KvPages& kv, const uint8_t* base, int head, int first, int last, F&& f) {
    const int step = kv.kv_heads * kv.head_dim;
    for (int position = first; position <= last;) {
        int page = position / kv.page_size, at = position - page * kv.page_size;
        int stop = std::min(last + 1, (page + 1) * kv.page_size);
        auto row = reinterpret_cast<const T*>(base + kv.table[page] * kv.stride) + static_cast<int64_t>(at) * step + head * kv.head_dim;
        for (; position < stop; ++position, row += step) f(position, row);
    }
}

// One query head of one token at `position`: keys first … position inclusive.
template <class T>
inline void attend_one(const float* q, const KvPages& kv, int head, int first, int position, float scale, float* out) {
    const int d = kv.head_dim;
    float best = -INFINITY, total = 0.0f;
    std::fill(out, out + d, 0.0f);
    for (int tile = first / kKeyTile * kKeyTile; tile <= position; tile += kKeyTile) {
        int from = std::max(tile, first), to = std::min(tile + kKeyTile - 1, position);
        float score[kKeyTile];  // then, in place, the weights
        float top = best;
        each_row<T>(kv, kv.k, head, from, to, [&](int j, const T* key) {
            score[j - from] = dot(q, key, d) * scale;
            top = std::max(top, score[j - from]);
        });
        if (top > best) {
            float shrink = std::exp(best - top);  // 0 on the first tile
            total *= shrink;
            for (int i = 0; i < d; ++i) out[i] *= shrink;
            best = top;
        }
        const int n = to - from + 1;
        std::fill(score + n, score + kKeyTile, best);
        for (int i = 0; i < n; i += 16) store(score + i, exp(load(score + i) - set1(best)));
        std::fill(score + n, score + kKeyTile, 0.0f);
        total += sum((load(score) + load(score + 16)) + (load(score + 32) + load(score + 48)));
        each_row<T>(kv, kv.v, head, from, to, [&](int j, const T* value) { scale_add(out, value, score[j - from], d); });
    }
    float inverse = 1.0f / total;
    for (int i = 0; i < d; ++i) out[i] *= inverse;
}

// q, out (tokens, heads, head_dim); token t stands at position past + t and sees `window` keys (0: all of them).
template <class T>
inline void attend(const float* q, const KvPages& kv, int tokens, int heads, int past, int window, float scale, float* out,
                   int threads) {
    const int group = heads / kv.kv_heads;
    parallel_for(tokens * heads, threads, [&](int task) {
        int t = task / heads, h = task % heads, position = past + t;
        int first = window > 0 ? std::max(0, position - window + 1) : 0;
        int64_t at = static_cast<int64_t>(task) * kv.head_dim;
        attend_one<T>(q + at, kv, h / group, first, position, scale, out + at);
    });
}

inline void narrow(const float* from, float* to, int n) { std::copy(from, from + n, to); }
inline void narrow(const float* from, Half* to, int n) {
    int i = 0;
    for (; i + 16 <= n; i += 16) store_fp16(to + i, load(from + i));
    for (; i < n; ++i) to[i] = float_to_fp16(from[i]);
}

// Writes rows (tokens, kv_heads, head_dim) to positions past … of the pages of `base` = kv.k or kv.v.
template <class T>
inline void write_rows(const float* rows, const KvPages& kv, const uint8_t* base, int tokens, int past) {
    const int step = kv.kv_heads * kv.head_dim;
    each_row<T>(kv, base, 0, past, past + tokens - 1, [&](int position, const T* row) {
        narrow(rows + static_cast<int64_t>(position - past) * step, const_cast<T*>(row), step);
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

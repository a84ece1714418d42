// Sixteen dot products of four bytes at a time: unsigned weights times signed activations, summed in 32-bit integers.
//
// AVX-512 VNNI and ARM dot product have an instruction for it; elsewhere the bytes are widened. Integer sums are exact, so
// every path and every order gives the same number.
#pragma once
#include <cstdint>
#include <cstring>

#include "simd.hpp"

namespace colibri {

inline int32_t four_bytes(const int8_t* x) {
    int32_t packed;
    std::memcpy(&packed, x, 4);
    return packed;
}

#if defined(COLIBRI_SIMD_AVX512)

#if defined(__AVX512VNNI__)
constexpr const char* kInt8Path = "avx512vnni";
#else
constexpr const char* kInt8Path = "avx512";
#endif
constexpr int kIntTokens = 6, kIntBlocks = 2;  // tile of tokens x row blocks that keeps all sums in registers

struct Line {  // 16 rows x 4 columns, unsigned
    __m512i v;
};
struct I32 {
    __m512i v;
};
inline I32 zero_i32() { return {_mm512_setzero_si512()}; }
inline I32 operator+(I32 a, I32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline F16 to_float(I32 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline Line load_unsigned(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline Line flip_sign(Line a) { return {_mm512_xor_si512(a.v, _mm512_set1_epi8(-128))}; }  // q → q + 128
inline Line low_nibbles(Line a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline Line high_nibbles(Line a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }
inline Line lookup_bytes(const uint8_t* table, Line index) {
    __m128i t = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(t), index.v)};
}
inline void store_i8(int8_t* to, F16 whole) {  // sixteen whole numbers from -128 to 127
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(whole.v)));
}
inline I32 dot4(I32 acc, Line w, int32_t x) {
    __m512i b = _mm512_set1_epi32(x);
#if defined(__AVX512VNNI__)
    // The instruction by name: gcc 12 gives the intrinsic only half the registers and then spills sums in inner loops.
    asm("vpdpbusd %2, %1, %0" : "+v"(acc.v) : "v"(w.v), "v"(b));
    return acc;
#else
    // Even and odd bytes as 16-bit numbers; their pair sums cannot overflow.
    __m512i even_w = _mm512_and_si512(w.v, _mm512_set1_epi16(255)), odd_w = _mm512_srli_epi16(w.v, 8);
    __m512i even_x = _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8), odd_x = _mm512_srai_epi16(b, 8);
    return {_mm512_add_epi32(acc.v, _mm512_add_epi32(_mm512_madd_epi16(even_w, even_x), _mm512_madd_epi16(odd_w, odd_x)))};
#endif
}

#elif defined(COLIBRI_SIMD_AVX2)

constexpr const char* kInt8Path = "avx2";
constexpr int kIntTokens = 2, kIntBlocks = 1;
struct Line {
    __m256i a, b;
};
struct I32 {
    __m256i a, b;
};
inline I32 zero_i32() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline I32 operator+(I32 x, I32 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline F16 to_float(I32 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline Line load_unsigned(const uint8_t* p) {
    auto q = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline Line flip_sign(Line x) {
    __m256i top = _mm256_set1_epi8(-128);
    return {_mm256_xor_si256(x.a, top), _mm256_xor_si256(x.b, top)};
}
inline Line low_nibbles(Line x) {
    __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
inline Line high_nibbles(Line x) { return low_nibbles({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)}); }
inline Line lookup_bytes(const uint8_t* table, Line index) {
    __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return {_mm256_shuffle_epi8(t, index.a), _mm256_shuffle_epi8(t, index.b)};
}
inline __m256i dot4_half(__m256i acc, __m256i w, __m256i x) {
    __m256i even_w = _mm256_and_si256(w, _mm256_set1_epi16(255)), odd_w = _mm256_srli_epi16(w, 8);
    __m256i even_x = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), odd_x = _mm256_srai_epi16(x, 8);
    return _mm256_add_epi32(acc, _mm256_add_epi32(_mm256_madd_epi16(even_w, even_x), _mm256_madd_epi16(odd_w, odd_x)));
}
inline I32 dot4(I32 acc, Line w, int32_t x) {
    __m256i b = _mm256_set1_epi32(x);
    return {dot4_half(acc.a, w.a, b), dot4_half(acc.b, w.b, b)};
}

#else

constexpr int kIntTokens = 1, kIntBlocks = 1;
struct Line {
    uint8_t v[64];
};
struct I32 {
    int32_t v[16];
};
inline I32 zero_i32() { return I32{}; }
inline I32 operator+(I32 a, I32 b) {
    for (int i = 0; i < 16; ++i) a.v[i] += b.v[i];
    return a;
}
inline F16 to_float(I32 a) {
    float out[16];
    for (int i = 0; i < 16; ++i) out[i] = static_cast<float>(a.v[i]);
    return load(out);
}
inline Line load_unsigned(const uint8_t* p) {
    Line out;
    std::memcpy(out.v, p, 64);
    return out;
}
inline Line flip_sign(Line a) {
    for (uint8_t& b : a.v) b ^= 128;
    return a;
}
inline Line low_nibbles(Line a) {
    for (uint8_t& b : a.v) b &= 15;
    return a;
}
inline Line high_nibbles(Line a) {
    for (uint8_t& b : a.v) b >>= 4;
    return a;
}
inline Line lookup_bytes(const uint8_t* table, Line index) {
    for (uint8_t& b : index.v) b = table[b];
    return index;
}
#if defined(COLIBRI_SIMD_NEON) && defined(__ARM_FEATURE_DOTPROD)
constexpr const char* kInt8Path = "neon-dotprod";
// The instruction wants equal signs: (w - 128) . x + 128 * sum(x), both exact.
inline I32 dot4(I32 acc, Line w, int32_t x) {
    int8x16_t b = vreinterpretq_s8_s32(vdupq_n_s32(x));
    int32x4_t correction = vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(1), b), 7);
    for (int i = 0; i < 4; ++i) {
        int8x16_t q = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(w.v + 16 * i), vdupq_n_u8(128)));
        vst1q_s32(acc.v + 4 * i, vaddq_s32(correction, vdotq_s32(vld1q_s32(acc.v + 4 * i), q, b)));
    }
    return acc;
}
#else
constexpr const char* kInt8Path = kSimdPath;
inline I32 dot4(I32 acc, Line w, int32_t x) {
    int8_t b[4];
    std::memcpy(b, &x, 4);
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 4; ++j) acc.v[i] += w.v[4 * i + j] * b[j];
    return acc;
}
#endif
#endif

#if !defined(COLIBRI_SIMD_AVX512)
inline void store_i8(int8_t* to, F16 whole) {  // sixteen whole numbers from -128 to 127
    float lanes[16];
    store(lanes, whole);
    for (int i = 0; i < 16; ++i) to[i] = static_cast<int8_t>(lanes[i]);
}
#endif

}  // namespace colibri

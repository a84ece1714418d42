// Sixteen floats at a time, whatever the machine: AVX-512, AVX2, NEON or plain C++.
//
// The path is fixed when a kernel is compiled: COLIBRI_SIMD_SCALAR, _AVX2, _AVX512, _NEON force one, otherwise the best
// the compiler may use. Every path does the same operations on the same lanes in the same order with fused
// multiply-add, so the paths differ at most where a division or a conversion rounds differently.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if !defined(COLIBRI_SIMD_SCALAR) && !defined(COLIBRI_SIMD_AVX2) && !defined(COLIBRI_SIMD_AVX512) && \
    !defined(COLIBRI_SIMD_NEON)
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define COLIBRI_SIMD_AVX512
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define COLIBRI_SIMD_AVX2
#elif defined(__aarch64__)
#define COLIBRI_SIMD_NEON
#else
#define COLIBRI_SIMD_SCALAR
#endif
#endif

#if defined(COLIBRI_SIMD_AVX512) || defined(COLIBRI_SIMD_AVX2)
#include <immintrin.h>
#elif defined(COLIBRI_SIMD_NEON)
#include <arm_neon.h>
#endif

// Before a loop of fixed length whose array should live in registers: gcc otherwise keeps it in memory.
#define COLIBRI_UNROLL _Pragma("GCC unroll 16")

namespace colibri {

inline float bf16_to_float(uint16_t bits) {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float out;
    std::memcpy(&out, &wide, 4);
    return out;
}

// 2^(e - 127): a scale of the MX formats. e = 0 is subnormal, 255 (NaN there) comes out as infinity.
inline float e8m0_to_float(uint8_t e) {
    uint32_t wide = e ? static_cast<uint32_t>(e) << 23 : 0x00400000u;
    float out;
    std::memcpy(&out, &wide, 4);
    return out;
}

// Nearest half, ties to even, by hand; beyond its range comes infinity.
inline uint16_t float_to_fp16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);   // NaN
    if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and more round to infinity
    if (magnitude < 0x38800000u) {  // below 2^-14: a subnormal half is a multiple of 2^-24, and so is 0.5 + x as a float
        float lifted = std::fabs(x) + 0.5f;
        std::memcpy(&bits, &lifted, 4);
        return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
    }
    magnitude += 0xfffu + (magnitude >> 13 & 1);
    return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u) >> 13));
}

// IEEE half to float by hand, for machines without the instruction.
inline float fp16_to_float(uint16_t h) {
    uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ffu, wide;
    if (exponent == 31) wide = sign | 0x7f800000u | (fraction << 13);
    else if (exponent) wide = sign | ((exponent + 112) << 23) | (fraction << 13);
    else {  // zero or subnormal: fraction * 2^-24
        float value = static_cast<float>(fraction) * 5.9604644775390625e-8f;
        return sign ? -value : value;
    }
    float out;
    std::memcpy(&out, &wide, 4);
    return out;
}

#if defined(COLIBRI_SIMD_AVX512)

constexpr const char* kSimdPath = "avx512";
constexpr int kTokenTile = 4;  // tokens per micro-kernel: 4 tokens x 4 chains = 16 of 32 registers
struct F16 {
    __m512 v;
};
inline F16 set1(float x) { return {_mm512_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 vmax(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 vmin(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F16 round_even(F16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F16 pow2(F16 n) {  // 2^n for whole n in [-126, 127]
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}
inline F16 load_bf16(const uint16_t* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline F16 load_fp16(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store_fp16(uint16_t* p, F16 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// Sixteen rows x four consecutive k of int8, one 64-byte line: column k of the line as floats.
struct I8Line {
    __m512i v;
};
inline I8Line load_line(const int8_t* p) { return {_mm512_loadu_si512(p)}; }
template <int K>
inline F16 column(I8Line line) {
    __m512i top = K == 3 ? line.v : _mm512_slli_epi32(line.v, 24 - 8 * K);
    return {_mm512_cvtepi32_ps(_mm512_srai_epi32(top, 24))};
}
// Of every byte the low or the high four bits, a 4-bit code; entry [byte] of a table of 16.
inline I8Line low_codes(I8Line a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline I8Line high_codes(I8Line a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }
inline I8Line lookup(const int8_t* table, I8Line index) {
    __m128i t = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(t), index.v)};
}
inline F16 load_i8(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline F16 load_e8m0(const uint8_t* p) {  // 2^(e - 127), of which e = 0 is subnormal
    __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_slli_epi32(e, 23), _mm512_set1_epi32(0x00400000)))};
}

#elif defined(COLIBRI_SIMD_AVX2)

constexpr const char* kSimdPath = "avx2";
constexpr int kTokenTile = 1;
struct F16 {
    __m256 a, b;
};
inline F16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F16 x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
inline F16 fma(F16 x, F16 y, F16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F16 operator+(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F16 operator-(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F16 operator*(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F16 operator/(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F16 vmax(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F16 vmin(F16 x, F16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F16 round_even(F16 x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline __m256 pow2_half(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline F16 pow2(F16 n) { return {pow2_half(n.a), pow2_half(n.b)}; }
inline __m256 bf16_half(const uint16_t* p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline F16 load_bf16(const uint16_t* p) { return {bf16_half(p), bf16_half(p + 8)}; }
inline F16 load_fp16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline void store_fp16(uint16_t* p, F16 x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
struct I8Line {
    __m256i a, b;
};
inline I8Line load_line(const int8_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
template <int K>
inline __m256 column_half(__m256i x) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(x, 24 - 8 * K), 24));
}
template <int K>
inline F16 column(I8Line line) {
    return {column_half<K>(line.a), column_half<K>(line.b)};
}
inline I8Line low_codes(I8Line x) {
    __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
inline I8Line high_codes(I8Line x) { return low_codes({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)}); }
inline I8Line lookup(const int8_t* table, I8Line index) {
    __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return {_mm256_shuffle_epi8(t, index.a), _mm256_shuffle_epi8(t, index.b)};
}
inline __m128i eight_bytes(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
inline F16 load_i8(const int8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight_bytes(p))), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight_bytes(p + 8)))};
}
inline __m256 e8m0_half(const uint8_t* p) {
    __m256i e = _mm256_slli_epi32(_mm256_cvtepu8_epi32(eight_bytes(p)), 23);
    return _mm256_castsi256_ps(_mm256_max_epi32(e, _mm256_set1_epi32(0x00400000)));
}
inline F16 load_e8m0(const uint8_t* p) { return {e8m0_half(p), e8m0_half(p + 8)}; }

#elif defined(COLIBRI_SIMD_NEON)

constexpr const char* kSimdPath = "neon";
constexpr int kTokenTile = 1;
struct F16 {
    float32x4_t v[4];
};
#define COLIBRI_EACH(expression)            \
    F16 out;                                \
    for (int i = 0; i < 4; ++i) out.v[i] = (expression); \
    return out
inline F16 set1(float x) { COLIBRI_EACH(vdupq_n_f32(x)); }
inline F16 load(const float* p) { COLIBRI_EACH(vld1q_f32(p + 4 * i)); }
inline void store(float* p, F16 a) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
}
inline F16 fma(F16 a, F16 b, F16 c) { COLIBRI_EACH(vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
inline F16 operator+(F16 a, F16 b) { COLIBRI_EACH(vaddq_f32(a.v[i], b.v[i])); }
inline F16 operator-(F16 a, F16 b) { COLIBRI_EACH(vsubq_f32(a.v[i], b.v[i])); }
inline F16 operator*(F16 a, F16 b) { COLIBRI_EACH(vmulq_f32(a.v[i], b.v[i])); }
inline F16 operator/(F16 a, F16 b) { COLIBRI_EACH(vdivq_f32(a.v[i], b.v[i])); }
inline F16 vmax(F16 a, F16 b) { COLIBRI_EACH(vmaxq_f32(a.v[i], b.v[i])); }
inline F16 vmin(F16 a, F16 b) { COLIBRI_EACH(vminq_f32(a.v[i], b.v[i])); }
inline F16 round_even(F16 a) { COLIBRI_EACH(vrndnq_f32(a.v[i])); }
inline F16 pow2(F16 n) {
    COLIBRI_EACH(vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n.v[i]), vdupq_n_s32(127)), 23)));
}
inline F16 load_bf16(const uint16_t* p) { COLIBRI_EACH(vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16))); }
inline F16 load_fp16(const uint16_t* p) { COLIBRI_EACH(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)))); }
inline void store_fp16(uint16_t* p, F16 a) {
    for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
}
struct I8Line {
    int32x4_t v[4];
};
inline I8Line load_line(const int8_t* p) {
    I8Line out;
    for (int i = 0; i < 4; ++i) out.v[i] = vreinterpretq_s32_s8(vld1q_s8(p + 16 * i));
    return out;
}
template <int K>
inline F16 column(I8Line line) {
    COLIBRI_EACH(vcvtq_f32_s32(vshrq_n_s32(vshlq_s32(line.v[i], vdupq_n_s32(24 - 8 * K)), 24)));
}
inline I8Line low_codes(I8Line x) {
    for (int i = 0; i < 4; ++i) x.v[i] = vandq_s32(x.v[i], vdupq_n_s32(0x0f0f0f0f));
    return x;
}
inline I8Line high_codes(I8Line x) {
    for (int i = 0; i < 4; ++i) x.v[i] = vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(x.v[i]), 4));
    return x;
}
inline I8Line lookup(const int8_t* table, I8Line index) {
    for (int i = 0; i < 4; ++i) index.v[i] = vreinterpretq_s32_s8(vqtbl1q_s8(vld1q_s8(table), vreinterpretq_u8_s32(index.v[i])));
    return index;
}
inline F16 load_i8(const int8_t* p) {
    int16x8_t low = vmovl_s8(vld1_s8(p)), high = vmovl_s8(vld1_s8(p + 8));
    COLIBRI_EACH(vcvtq_f32_s32(vmovl_s16(i < 2 ? (i & 1 ? vget_high_s16(low) : vget_low_s16(low))
                                               : (i & 1 ? vget_high_s16(high) : vget_low_s16(high)))));
}
inline F16 load_e8m0(const uint8_t* p) {
    float v[16];
    for (int i = 0; i < 16; ++i) v[i] = e8m0_to_float(p[i]);
    return load(v);
}
#undef COLIBRI_EACH

#else

constexpr const char* kSimdPath = "scalar";
constexpr int kTokenTile = 1;
struct F16 {
    float v[16];
};
#define COLIBRI_EACH(expression)            \
    F16 out;                                \
    for (int i = 0; i < 16; ++i) out.v[i] = (expression); \
    return out
inline F16 set1(float x) { COLIBRI_EACH(x); }
inline F16 load(const float* p) { COLIBRI_EACH(p[i]); }
inline void store(float* p, F16 a) {
    for (int i = 0; i < 16; ++i) p[i] = a.v[i];
}
inline F16 fma(F16 a, F16 b, F16 c) { COLIBRI_EACH(std::fma(a.v[i], b.v[i], c.v[i])); }
inline F16 operator+(F16 a, F16 b) { COLIBRI_EACH(a.v[i] + b.v[i]); }
inline F16 operator-(F16 a, F16 b) { COLIBRI_EACH(a.v[i] - b.v[i]); }
inline F16 operator*(F16 a, F16 b) { COLIBRI_EACH(a.v[i] * b.v[i]); }
inline F16 operator/(F16 a, F16 b) { COLIBRI_EACH(a.v[i] / b.v[i]); }
inline F16 vmax(F16 a, F16 b) { COLIBRI_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline F16 vmin(F16 a, F16 b) { COLIBRI_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline F16 round_even(F16 a) { COLIBRI_EACH(std::nearbyint(a.v[i])); }
inline F16 pow2(F16 n) { COLIBRI_EACH(std::ldexp(1.0f, static_cast<int>(n.v[i]))); }
inline F16 load_bf16(const uint16_t* p) { COLIBRI_EACH(bf16_to_float(p[i])); }
inline F16 load_fp16(const uint16_t* p) { COLIBRI_EACH(fp16_to_float(p[i])); }
inline void store_fp16(uint16_t* p, F16 a) {
    for (int i = 0; i < 16; ++i) p[i] = float_to_fp16(a.v[i]);
}
struct I8Line {
    int8_t v[64];
};
inline I8Line load_line(const int8_t* p) {
    I8Line out;
    std::memcpy(out.v, p, 64);
    return out;
}
template <int K>
inline F16 column(I8Line line) { COLIBRI_EACH(static_cast<float>(line.v[4 * i + K])); }
inline I8Line low_codes(I8Line x) {
    for (int8_t& byte : x.v) byte &= 15;
    return x;
}
inline I8Line high_codes(I8Line x) {
    for (int8_t& byte : x.v) byte = (byte >> 4) & 15;
    return x;
}
inline I8Line lookup(const int8_t* table, I8Line index) {
    for (int8_t& byte : index.v) byte = table[byte & 15];
    return index;
}
inline F16 load_i8(const int8_t* p) { COLIBRI_EACH(static_cast<float>(p[i])); }
inline F16 load_e8m0(const uint8_t* p) { COLIBRI_EACH(e8m0_to_float(p[i])); }
#undef COLIBRI_EACH

#endif

// Sum of the sixteen lanes, as a tree of fixed shape: the same bits on every path.
inline float sum(F16 a) {
#if defined(COLIBRI_SIMD_AVX512)
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
#elif defined(COLIBRI_SIMD_AVX2)
    __m256 eight = _mm256_add_ps(a.a, a.b);
#endif
#if defined(COLIBRI_SIMD_AVX512) || defined(COLIBRI_SIMD_AVX2)
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
    float v[16];
    store(v, a);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; ++i) v[i] += v[i + width];
    return v[0];
#endif
}

// e^x with relative error below 2e-7 on [-87, 88]; smaller x gives 0 to within 1e-38, larger x saturates.
// Cody-Waite reduction to [-ln2/2, ln2/2] and the degree-5 minimax polynomial of the Cephes library's expf.
inline F16 exp(F16 x) {
    x = vmin(vmax(x, set1(-87.3f)), set1(88.0f));
    F16 n = round_even(x * set1(1.44269504088896341f));
    F16 r = fma(n, set1(-0.693359375f), x);
    r = fma(n, set1(2.12194440e-4f), r);
    F16 p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, r * r, r + set1(1.0f));
    return p * pow2(n);
}

}  // namespace colibri

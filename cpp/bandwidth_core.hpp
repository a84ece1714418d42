// What this machine can do at best: bytes read per second from a working set, and multiply-adds per second.
//
// Every thread works on memory of its own; all start together. The arithmetic loops keep enough independent chains in
// registers to hide an instruction's latency, so what is left is how many can be issued.
#pragma once
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "include/simd.hpp"

namespace colibri {

struct Timed {
    double seconds = 0;  // from the first thread's start to the last one's end
    double held = 1;     // least share of that time for which a thread had a core
};

inline double seconds_of(clockid_t clock) {
    timespec t;
    clock_gettime(clock, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Runs work(0) … work(threads - 1) at the same time, each on a thread of its own.
template <class Work>
Timed together(int threads, Work&& work) {
    struct Span {
        double start, end, cpu;
    };
    std::vector<Span> spans(threads);
    std::atomic<int> ready{0};
    std::atomic<bool> failed{false};
    auto body = [&](int i) {
        ++ready;
        while (ready < threads && !failed) std::this_thread::yield();
        if (failed) return;
        double start = seconds_of(CLOCK_MONOTONIC), cpu = seconds_of(CLOCK_THREAD_CPUTIME_ID);
        work(i);
        spans[i] = {start, seconds_of(CLOCK_MONOTONIC), seconds_of(CLOCK_THREAD_CPUTIME_ID) - cpu};
    };
    std::vector<std::thread> others;
    others.reserve(threads);
    try {
        for (int i = 1; i < threads; ++i) others.emplace_back(body, i);
    } catch (...) {
        failed = true;
        for (auto& t : others) t.join();
        throw;
    }
    body(0);
    for (auto& t : others) t.join();
    double start = spans[0].start, end = spans[0].end;
    for (const Span& s : spans) start = std::min(start, s.start), end = std::max(end, s.end);
    Timed found{end - start, 1};
    for (const Span& s : spans) found.held = std::min(found.held, s.cpu / found.seconds);
    return found;
}

typedef uint64_t Line __attribute__((vector_size(64), aligned(8), may_alias));
constexpr int64_t kLine = 64;

// Reads whole cache lines from `from` on, 8 of them a turn; the result only keeps the loads from being left out.
inline uint64_t read_lines(const uint8_t* from, int64_t bytes) {
    Line a{}, b{}, c{}, d{};
    auto at = [&](int64_t i) -> const Line& { return *reinterpret_cast<const Line*>(from + i); };
    for (int64_t i = 0; i + 8 * kLine <= bytes; i += 8 * kLine) {
        __builtin_prefetch(from + i + 2048);
        a ^= at(i), b ^= at(i + kLine), c ^= at(i + 2 * kLine), d ^= at(i + 3 * kLine);
        __builtin_prefetch(from + i + 2048 + 4 * kLine);
        a ^= at(i + 4 * kLine), b ^= at(i + 5 * kLine), c ^= at(i + 6 * kLine), d ^= at(i + 7 * kLine);
    }
    a ^= b, c ^= d, a ^= c;
    return a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7];
}

// Chains of multiply-adds that do not wait for each other: as many as fit the register file of each path.
#if defined(COLIBRI_SIMD_AVX512)
constexpr int kChains = 12;
#elif defined(COLIBRI_SIMD_SCALAR)
constexpr int kChains = 1;
#else
constexpr int kChains = 6;
#endif

// rounds x kChains x 16 multiply-adds in float32. The chains converge, so no value ever becomes a slow denormal.
inline float multiply_adds(int64_t rounds, float seed) {
    F16 chain[kChains], half = set1(0.5f), one = set1(1.0f);
    for (int j = 0; j < kChains; ++j) chain[j] = set1(seed + static_cast<float>(j));
    for (int64_t i = 0; i < rounds; ++i)
        for (int j = 0; j < kChains; ++j) chain[j] = fma(chain[j], half, one);
    F16 total = set1(0.0f);
    for (int j = 0; j < kChains; ++j) total = total + chain[j];
    return sum(total);
}

// Products of bytes added up in 32-bit lanes by one instruction, where the CPU has it and the path may use it.
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
constexpr int kDotProducts = 64 * 12;  // multiply-adds a round
inline int32_t byte_dots(int64_t rounds, int32_t seed) {
    __m512i chain[12], x = _mm512_set1_epi32(seed), y = _mm512_set1_epi32(0x01010101);
    for (auto& c : chain) c = _mm512_setzero_si512();
    for (int64_t i = 0; i < rounds; ++i)
        for (auto& c : chain) c = _mm512_dpbusd_epi32(c, x, y);
    __m512i total = _mm512_setzero_si512();
    for (auto& c : chain) total = _mm512_add_epi32(total, c);
    return _mm512_reduce_add_epi32(total);
}
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int kDotProducts = 16 * 16;
inline int32_t byte_dots(int64_t rounds, int32_t seed) {
    int32x4_t chain[16], total = vdupq_n_s32(0);
    int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(seed)), y = vdupq_n_s8(1);
    for (auto& c : chain) c = vdupq_n_s32(0);
    for (int64_t i = 0; i < rounds; ++i)
        for (auto& c : chain) c = vdotq_s32(c, x, y);
    for (auto& c : chain) total = vaddq_s32(total, c);
    return vaddvq_s32(total);
}
#else
constexpr int kDotProducts = 0;
inline int32_t byte_dots(int64_t, int32_t) { return 0; }
#endif

}  // namespace colibri

// A weight matrix as it lies in a container file or a cache slot, and how a kernel reads it.
//
// Layout "rows16": output rows in blocks of 16, padded with zeros to a multiple of 16 rows and 4 columns.
//   fp32, fp16, bf16   block = [K][16 rows]              one load = 16 rows of one column
//   int8               block = [K/4][16 rows][4 columns] one 64-byte line = 16 rows of four columns
// int8 dequantises as (q - zero[row]) * scale[row] * factor.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

#include "simd.hpp"

namespace colibri {

enum class Format : int { fp32 = 0, fp16 = 1, bf16 = 2, int8 = 3 };
constexpr int kFormats = 4;
constexpr int kBlockRows = 16;

inline int format_bytes(Format f) { return f == Format::fp32 ? 4 : f == Format::int8 ? 1 : 2; }

struct Matrix {
    const uint8_t* data = nullptr;
    const float* scale = nullptr;   // (rows,), int8 only
    const int8_t* zero = nullptr;   // (rows,), int8 only
    float factor = 1.0f;            // one per expert
    int rows = 0, cols = 0;
    Format format = Format::fp32;

    int padded_cols() const { return (cols + 3) / 4 * 4; }
    int blocks() const { return (rows + kBlockRows - 1) / kBlockRows; }
    int64_t block_bytes() const { return static_cast<int64_t>(padded_cols()) * kBlockRows * format_bytes(format); }
    int64_t bytes() const { return block_bytes() * blocks(); }
};

// One row of the descriptor tables that Python passes: where a matrix lies inside a byte region.
enum Field { kRows, kCols, kFormat, kData, kScale, kZero, kFields };

inline void expect_inside(int64_t offset, int64_t bytes, int64_t region, int align, const char* what) {
    if (offset < 0 || bytes < 0 || offset > region - bytes || offset % align)
        throw std::invalid_argument(std::string(what) + " at offset " + std::to_string(offset) + " with " +
                                    std::to_string(bytes) + " bytes does not fit a region of " + std::to_string(region) +
                                    " bytes, or is not aligned to " + std::to_string(align));
}

inline Matrix matrix_at(const uint8_t* base, int64_t region, const int64_t* d, float factor) {
    if (d[kRows] < 1 || d[kCols] < 1 || d[kRows] > (1 << 30) || d[kCols] > (1 << 30) || d[kFormat] < 0 || d[kFormat] >= kFormats)
        throw std::invalid_argument("matrix descriptor: rows, cols, format are " + std::to_string(d[kRows]) + ", " +
                                    std::to_string(d[kCols]) + ", " + std::to_string(d[kFormat]) +
                                    "; expected positive sizes and a format code below " + std::to_string(kFormats));
    Matrix m;
    m.rows = static_cast<int>(d[kRows]), m.cols = static_cast<int>(d[kCols]), m.format = static_cast<Format>(d[kFormat]);
    m.factor = factor;
    expect_inside(d[kData], m.bytes(), region, 4, "matrix data");
    m.data = base + d[kData];
    if (m.format == Format::int8) {
        expect_inside(d[kScale], 4 * d[kRows], region, 4, "scales");
        expect_inside(d[kZero], d[kRows], region, 1, "zero points");
        m.scale = reinterpret_cast<const float*>(base + d[kScale]);
        m.zero = reinterpret_cast<const int8_t*>(base + d[kZero]);
    }
    return m;
}

// Four consecutive columns of a 16-row block.
template <Format F>
struct Columns;

template <>
struct Columns<Format::fp32> {
    F16 w[4];
    explicit Columns(const uint8_t* p) {
        auto q = reinterpret_cast<const float*>(p);
        for (int j = 0; j < 4; ++j) w[j] = load(q + 16 * j);
    }
};
template <>
struct Columns<Format::fp16> {
    F16 w[4];
    explicit Columns(const uint8_t* p) {
        auto q = reinterpret_cast<const uint16_t*>(p);
        for (int j = 0; j < 4; ++j) w[j] = load_fp16(q + 16 * j);
    }
};
template <>
struct Columns<Format::bf16> {
    F16 w[4];
    explicit Columns(const uint8_t* p) {
        auto q = reinterpret_cast<const uint16_t*>(p);
        for (int j = 0; j < 4; ++j) w[j] = load_bf16(q + 16 * j);
    }
};
template <>
struct Columns<Format::int8> {
    F16 w[4];
    explicit Columns(const uint8_t* p) {
        I8Line line = load_line(reinterpret_cast<const int8_t*>(p));
        w[0] = column<0>(line), w[1] = column<1>(line), w[2] = column<2>(line), w[3] = column<3>(line);
    }
};

}  // namespace colibri

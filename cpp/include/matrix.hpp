// A weight matrix as it lies in a container file or a cache slot, and how a kernel reads it.
//
// Layout "rows16": output rows in blocks of 16, padded with zeros to a multiple of 16 rows and of whole lines of columns.
//   fp32, fp16, bf16   block = [K][16 rows]               one load = 16 rows of one column
//   int8               block = [K/4][16 rows][4 columns]  one 64-byte line = 16 rows of four columns
//   int4, mxfp4        block = [K/8][16 rows][4 bytes]    byte j of line g: column 8g + j in the low four bits, 8g + 4 + j in
//                                                         the high four
//   scales, zeros      block = [groups][16 rows]          a group is 32, 64 or 128 columns, or (group 0) the whole row
// int8 and int4 dequantise as (q - zero) * scale * factor, int4 codes being 0 … 15; mxfp4 as E2M1[code] * scale * factor.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>

#include "simd.hpp"

namespace colibri {

enum class Format : int { fp32 = 0, fp16 = 1, bf16 = 2, int8 = 3, int4 = 4, mxfp4 = 5 };
constexpr int kFormats = 6;
constexpr int kBlockRows = 16;
constexpr int kAbsent = -1;  // offset of what a format does not store

constexpr bool is_scaled(Format f) { return f >= Format::int8; }
constexpr bool has_zero_points(Format f) { return f == Format::int8 || f == Format::int4; }
constexpr bool is_four_bit(Format f) { return f >= Format::int4; }
constexpr int line_columns(Format f) { return is_four_bit(f) ? 8 : 4; }  // columns in the smallest stretch that is padded to
constexpr int line_bytes(Format f) { return f == Format::fp32 ? 256 : is_scaled(f) ? 64 : 128; }

// Weights are read once and in order: every line of a stretch is asked for this far ahead, longer than memory takes to answer.
constexpr int kPrefetchBytes = 4096;
template <int kBytes>
inline void prefetch_ahead(const uint8_t* line) {
    COLIBRI_UNROLL for (int at = 0; at < kBytes; at += 64) __builtin_prefetch(line + kPrefetchBytes + at);
}

struct Matrix {
    const uint8_t* data = nullptr;
    const uint8_t* scale = nullptr;  // float32 (group 0), float16 (groups), or E8M0 (mxfp4)
    const int8_t* zero = nullptr;    // absent in symmetric formats
    float factor = 1.0f;             // one per expert
    int rows = 0, cols = 0, group = 0;
    Format format = Format::fp32;

    int blocks() const { return (rows + kBlockRows - 1) / kBlockRows; }
    int groups() const { return group ? (cols + group - 1) / group : 1; }
    int group_columns() const { return group ? group : cols; }
    int64_t block_bytes() const {
        return static_cast<int64_t>((cols + line_columns(format) - 1) / line_columns(format)) * line_bytes(format);
    }
    int64_t bytes() const { return block_bytes() * blocks(); }
    int64_t scales() const { return static_cast<int64_t>(blocks()) * kBlockRows * groups(); }
    int scale_bytes() const { return format == Format::mxfp4 ? 1 : group ? 2 : 4; }

    // Scales and zero points of group g of a block's sixteen rows.
    F16 scale_of(int block, int g) const {
        int64_t at = (static_cast<int64_t>(block) * groups() + g) * kBlockRows;
        if (format == Format::mxfp4) return load_e8m0(scale + at) * set1(0.5f);  // Columns gives twice the numbers
        return group ? load_fp16(reinterpret_cast<const uint16_t*>(scale) + at) : load(reinterpret_cast<const float*>(scale) + at);
    }
    F16 zero_of(int block, int g) const {
        if (!zero) return set1(format == Format::int4 ? 8.0f : 0.0f);
        return load_i8(zero + (static_cast<int64_t>(block) * groups() + g) * kBlockRows);
    }
};

// One row of the descriptor tables that Python passes: where a matrix lies inside a byte region.
enum Field { kRows, kCols, kFormat, kData, kScale, kZero, kGroup, kFields };
constexpr const char* kFieldNames = "rows, cols, format, data, scale, zero, group";

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
    bool whole_row = d[kGroup] == 0 && m.format != Format::mxfp4, mx = d[kGroup] == 32 && m.format == Format::mxfp4;
    bool grouped = has_zero_points(m.format) && (d[kGroup] == 32 || d[kGroup] == 64 || d[kGroup] == 128);
    if (!whole_row && !mx && !grouped)
        throw std::invalid_argument("matrix descriptor: group is " + std::to_string(d[kGroup]) +
                                    "; expected 0, for int8 and int4 also 32, 64 or 128, for mxfp4 always 32");
    m.group = static_cast<int>(d[kGroup]);
    expect_inside(d[kData], m.bytes(), region, 4, "matrix data");
    m.data = base + d[kData];
    if (is_scaled(m.format)) {
        expect_inside(d[kScale], m.scales() * m.scale_bytes(), region, m.scale_bytes(), "scales");
        m.scale = base + d[kScale];
    }
    if (has_zero_points(m.format) && d[kZero] != kAbsent) {
        expect_inside(d[kZero], m.scales(), region, 1, "zero points");
        m.zero = reinterpret_cast<const int8_t*>(base + d[kZero]);
    }
    return m;
}

// One line of a 16-row block: get(part) gives columns 4 * part … 4 * part + 3 of its four or eight.
template <Format F>
struct Columns;

template <>
struct Columns<Format::fp32> {
    const float* p;
    explicit Columns(const uint8_t* at) : p(reinterpret_cast<const float*>(at)) {}
    void get(int, F16* w) const {
        for (int j = 0; j < 4; ++j) w[j] = load(p + 16 * j);
    }
};
template <>
struct Columns<Format::fp16> {
    const uint16_t* p;
    explicit Columns(const uint8_t* at) : p(reinterpret_cast<const uint16_t*>(at)) {}
    void get(int, F16* w) const {
        for (int j = 0; j < 4; ++j) w[j] = load_fp16(p + 16 * j);
    }
};
template <>
struct Columns<Format::bf16> {
    const uint16_t* p;
    explicit Columns(const uint8_t* at) : p(reinterpret_cast<const uint16_t*>(at)) {}
    void get(int, F16* w) const {
        for (int j = 0; j < 4; ++j) w[j] = load_bf16(p + 16 * j);
    }
};

inline void four_columns(I8Line line, F16* w) {
    w[0] = column<0>(line), w[1] = column<1>(line), w[2] = column<2>(line), w[3] = column<3>(line);
}
template <>
struct Columns<Format::int8> {
    I8Line line;
    explicit Columns(const uint8_t* at) : line(load_line(reinterpret_cast<const int8_t*>(at))) {}
    void get(int, F16* w) const { four_columns(line, w); }
};
template <>
struct Columns<Format::int4> {
    I8Line line;
    explicit Columns(const uint8_t* at) : line(load_line(reinterpret_cast<const int8_t*>(at))) {}
    void get(int part, F16* w) const { four_columns(part ? high_codes(line) : low_codes(line), w); }
};
template <>
struct Columns<Format::mxfp4> {  // twice the E2M1 number: a small integer
    static constexpr int8_t kTwice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    I8Line line;
    explicit Columns(const uint8_t* at) : line(load_line(reinterpret_cast<const int8_t*>(at))) {}
    void get(int part, F16* w) const { four_columns(lookup(kTwice, part ? high_codes(line) : low_codes(line)), w); }
};

}  // namespace colibri

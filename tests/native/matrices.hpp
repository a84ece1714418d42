// Random matrices as a container stores them, each part in memory of exactly its size, and the numbers they stand for.
#pragma once
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "expect.hpp"
#include "include/matrix.hpp"
#include "threads_core.hpp"

namespace colibri {

using Random = std::mt19937;

inline double uniform(Random& random, double low, double high) { return std::uniform_real_distribution<double>(low, high)(random); }

inline std::vector<float> noise(Random& random, size_t n) {
    std::vector<float> out(n);
    for (float& x : out) x = static_cast<float>(uniform(random, -2, 2));
    out.shrink_to_fit();
    return out;
}

// The threads that the kernels share, as the binding sets them up.
inline void use_threads() {
    static PoolTable table{&ThreadPool::instance(),
                           [](void* self, int tasks, int threads, void (*fn)(void*, int), void* arg, bool (*poll)(), std::atomic<bool>* cancel) {
                               static_cast<ThreadPool*>(self)->run(tasks, threads, fn, arg, poll, cancel);
                           }};
    pool_table() = &table;
}

struct Stored {
    std::unique_ptr<uint8_t[]> data, scale, zero;
    Matrix matrix;
    std::vector<double> values;  // (rows, cols)

    double value(int row, int col) const { return values[static_cast<size_t>(row) * matrix.cols + col]; }
};

// Columns are padded to whole lines and rows to sixteen; what is stored there must not reach any result, so it is large.
inline Stored stored(Format format, int group, int rows, int cols, Random& random, bool symmetric = false) {
    Stored s;
    Matrix& m = s.matrix;
    m.format = format, m.group = group, m.rows = rows, m.cols = cols, m.factor = 0.5f;
    s.data.reset(new uint8_t[m.bytes()]);
    m.data = s.data.get();
    if (is_scaled(format)) {
        s.scale.reset(new uint8_t[m.scales() * m.scale_bytes()]);
        m.scale = s.scale.get();
        if (has_zero_points(format) && !symmetric) {
            s.zero.reset(new uint8_t[m.scales()]);
            m.zero = reinterpret_cast<int8_t*>(s.zero.get());
        }
    }
    s.values.resize(static_cast<size_t>(rows) * cols);
    const int padded_cols = static_cast<int>(m.block_bytes() / line_bytes(format)) * line_columns(format);
    std::vector<double> scale(m.scales()), zero(m.scales());
    for (int64_t i = 0; i < m.scales() && is_scaled(format); ++i) {
        float value = static_cast<float>(uniform(random, 0.001, 0.01));
        if (format == Format::mxfp4) {
            s.scale[i] = 120;
            value = std::ldexp(1.0f, 120 - 127);
        } else if (group) {
            uint16_t half = float_to_fp16(value);
            reinterpret_cast<uint16_t*>(s.scale.get())[i] = half;
            value = fp16_to_float(half);
        } else {
            reinterpret_cast<float*>(s.scale.get())[i] = value;
        }
        scale[i] = value;
        int z = format == Format::int4 ? static_cast<int>(random() % 16) : static_cast<int>(random() % 256) - 128;
        if (m.zero) reinterpret_cast<int8_t*>(s.zero.get())[i] = static_cast<int8_t>(z);
        zero[i] = m.zero ? z : format == Format::int4 ? 8 : 0;
    }
    static const double e2m1[16] = {0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6};
    for (int row = 0; row < 16 * m.blocks(); ++row)
        for (int col = 0; col < padded_cols; ++col) {
            const bool inside = row < rows && col < cols;
            uint8_t* block = s.data.get() + row / 16 * m.block_bytes();
            const int r = row % 16;
            double w = inside ? uniform(random, -1, 1) : 1e4;
            const int64_t at = (static_cast<int64_t>(row / 16) * m.groups() + std::min(col, cols - 1) / m.group_columns()) * 16 + r;
            if (format == Format::fp32) {
                float f = static_cast<float>(w);
                reinterpret_cast<float*>(block)[col * 16 + r] = f, w = f;
            } else if (format == Format::fp16) {
                uint16_t half = float_to_fp16(static_cast<float>(w));
                reinterpret_cast<uint16_t*>(block)[col * 16 + r] = half, w = fp16_to_float(half);
            } else if (format == Format::bf16) {
                float f = static_cast<float>(w);
                uint32_t bits;
                std::memcpy(&bits, &f, 4);
                reinterpret_cast<uint16_t*>(block)[col * 16 + r] = static_cast<uint16_t>(bits >> 16);
                w = bf16_to_float(static_cast<uint16_t>(bits >> 16));
            } else if (format == Format::int8) {
                int q = inside ? static_cast<int>(random() % 256) - 128 : 127;
                reinterpret_cast<int8_t*>(block)[col / 4 * 64 + r * 4 + col % 4] = static_cast<int8_t>(q);
                w = (q - zero[at]) * scale[at];
            } else {
                int q = inside ? static_cast<int>(random() % 16) : 15;
                uint8_t& byte = block[col / 8 * 64 + r * 4 + col % 4];
                byte = col % 8 < 4 ? static_cast<uint8_t>((byte & 240) | q) : static_cast<uint8_t>((byte & 15) | q << 4);
                w = format == Format::int4 ? (q - zero[at]) * scale[at] : e2m1[q] * scale[at];
            }
            if (inside) s.values[static_cast<size_t>(row) * cols + col] = w * m.factor;
        }
    return s;
}

struct Kind {
    Format format;
    int group;
    bool symmetric;
};
inline const Kind kKinds[] = {{Format::fp32, 0, false}, {Format::fp16, 0, false}, {Format::bf16, 0, false},
                              {Format::int8, 0, false}, {Format::int8, 0, true},  {Format::int8, 32, false},
                              {Format::int8, 64, true}, {Format::int4, 0, false}, {Format::int4, 64, false},
                              {Format::int4, 32, true}, {Format::int4, 128, false}, {Format::mxfp4, 32, true}};

// x as the integer path rounds it: groups of 64 columns, largest magnitude / 127 as the step.
inline std::vector<double> rounded(const float* x, int cols) {
    std::vector<double> out(cols);
    for (int first = 0; first < cols; first += 64) {
        int last = std::min(cols, first + 64);
        float top = 0;
        for (int i = first; i < last; ++i) top = std::max(top, std::fabs(x[i]));
        for (int i = first; i < last; ++i) out[i] = top > 0 ? std::nearbyint(x[i] * (127.0f / top)) * (top / 127.0f) : 0;
    }
    return out;
}

inline std::vector<double> exactly(const float* x, int cols) { return std::vector<double>(x, x + cols); }

// sum of w[row] * x, and of the magnitudes, which the error of a sum in float32 is proportional to.
inline std::pair<double, double> product(const Stored& w, int row, const std::vector<double>& x) {
    double sum = 0, size = 0;
    for (int k = 0; k < w.matrix.cols; ++k) sum += w.value(row, k) * x[k], size += std::fabs(w.value(row, k) * x[k]);
    return {sum, size};
}

}  // namespace colibri

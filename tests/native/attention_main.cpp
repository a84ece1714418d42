// Attention over pages in any order, both kinds of storage, windows, and rotation, against plain softmax in double.
#include "attention_core.hpp"

#include "matrices.hpp"

using namespace colibri;

template <class T>
static T store_as(float x);
template <>
float store_as<float>(float x) { return x; }
template <>
Half store_as<Half>(float x) { return float_to_fp16(x); }

template <class T>
static void agrees(int head_dim, int tokens, int past, int page_size, int window, Random& random) {
    const int heads = 6, kv_heads = 2, positions = past + tokens, pages = (positions + page_size - 1) / page_size;
    const int64_t stride = static_cast<int64_t>(page_size) * kv_heads * head_dim * sizeof(T);
    std::vector<T> k(pages * stride / sizeof(T)), v(k.size());
    std::vector<int32_t> table(pages);
    for (int i = 0; i < pages; ++i) table[i] = i;
    std::shuffle(table.begin(), table.end(), random);
    KvPages kv{reinterpret_cast<uint8_t*>(k.data()), reinterpret_cast<uint8_t*>(v.data()), stride, table.data(), page_size, kv_heads, head_dim};
    const size_t step = static_cast<size_t>(kv_heads) * head_dim;
    std::vector<float> keys = noise(random, positions * step), values = noise(random, positions * step);
    write_rows<T>(keys.data(), kv, kv.k, positions, 0);
    write_rows<T>(values.data(), kv, kv.v, positions, 0);
    std::vector<float> q = noise(random, static_cast<size_t>(tokens) * heads * head_dim), out(q.size()), again(q.size());
    const float scale = 1 / std::sqrt(static_cast<float>(head_dim));
    attend<T>(q.data(), kv, tokens, heads, past, window, scale, out.data(), 1);
    attend<T>(q.data(), kv, tokens, heads, past, window, scale, again.data(), 3);
    EXPECT(out == again);
    for (int t = 0; t < tokens; ++t)
        for (int h = 0; h < heads; ++h) {
            const int last = past + t, first = window ? std::max(0, last - window + 1) : 0;
            const float* query = q.data() + (static_cast<size_t>(t) * heads + h) * head_dim;
            std::vector<double> score(positions), wanted(head_dim);
            double top = -1e300, total = 0;
            for (int j = first; j <= last; ++j) {
                for (int i = 0; i < head_dim; ++i)
                    score[j] += double(query[i]) * widen(store_as<T>(keys[j * step + h / 3 * head_dim + i])) * scale;
                top = std::max(top, score[j]);
            }
            for (int j = first; j <= last; ++j) {
                double p = std::exp(score[j] - top);
                total += p;
                for (int i = 0; i < head_dim; ++i) wanted[i] += p * widen(store_as<T>(values[j * step + h / 3 * head_dim + i]));
            }
            for (int i = 0; i < head_dim; ++i)
                EXPECT(std::fabs(out[(static_cast<size_t>(t) * heads + h) * head_dim + i] - wanted[i] / total) <= 2e-5);
        }
}

static void turns(int tokens, int head_dim, int dims, bool interleaved, Random& random) {
    const int heads = 3, half = dims / 2;
    std::vector<float> x = noise(random, static_cast<size_t>(tokens) * heads * head_dim), angle = noise(random, static_cast<size_t>(tokens) * half), c(angle.size()), s(angle.size()), y = x;
    for (size_t i = 0; i < angle.size(); ++i) c[i] = std::cos(angle[i]), s[i] = std::sin(angle[i]);
    rotate(y.data(), c.data(), s.data(), tokens, heads, head_dim, dims, interleaved);
    for (int t = 0; t < tokens; ++t)
        for (int h = 0; h < heads; ++h)
            for (int j = 0; j < head_dim; ++j) {
                const size_t at = (static_cast<size_t>(t) * heads + h) * head_dim;
                const bool second = interleaved ? j % 2 : j >= half;
                const int pair = interleaved ? j / 2 : j % std::max(1, half), partner = interleaved ? j ^ 1 : second ? j - half : j + half;
                double wanted = x[at + j];
                if (j < dims) wanted = c[t * half + pair] * x[at + j] + (second ? 1 : -1) * s[t * half + pair] * x[at + partner];
                EXPECT(std::fabs(y[at + j] - wanted) <= 1e-5);
            }
}

int main() {
    use_threads();
    Random random(3);
    for (int head_dim : {1, 31, 33, 63, 65, 257})
        for (int tokens : {1, 31, 65})
            for (int page_size : {1, 33, 256}) {
                if (tokens == 65 && head_dim != 33) continue;
                agrees<float>(head_dim, tokens, 63, page_size, page_size == 33 ? 31 : 0, random);
                agrees<Half>(head_dim, tokens, 1, page_size, 0, random);
            }
    for (int tokens : {1, 31})
        for (int dims : {2, 30, 64})
            for (bool interleaved : {false, true}) turns(tokens, 65, dims, interleaved, random);
}

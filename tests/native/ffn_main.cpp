// Buckets, experts and the weighted sum of a step, against plain loops over tokens in double.
#include "ffn_core.hpp"

#include "matrices.hpp"

using namespace colibri;

struct OwnExpert {
    Stored gate, up, down;
    OwnExpert(const Kind& k, int hidden, int width, Random& random)
        : gate(stored(k.format, k.group, width, hidden, random, k.symmetric)),
          up(stored(k.format, k.group, width, hidden, random, k.symmetric)),
          down(stored(k.format, k.group, hidden, width, random, k.symmetric)) {}
};

static std::vector<double> plain(const OwnExpert& e, const std::vector<double>& x, double& size) {
    const int width = e.gate.matrix.rows, hidden = e.down.matrix.rows;
    std::vector<double> middle(width), out(hidden);
    for (int i = 0; i < width; ++i) {
        double g = product(e.gate, i, x).first;
        middle[i] = g / (1 + std::exp(-g)) * product(e.up, i, x).first;
    }
    for (int i = 0; i < hidden; ++i) {
        auto [sum, magnitudes] = product(e.down, i, middle);
        out[i] = sum, size = std::max(size, magnitudes);
    }
    return out;
}

static void step(const Kind& kind, int hidden, int width, int tokens, bool integer, Random& random) {
    const int experts = 4, k = 2;
    std::vector<OwnExpert> own;
    std::vector<Expert> table;
    for (int e = 0; e < experts; ++e) own.emplace_back(kind, hidden, width, random);
    for (const OwnExpert& e : own) table.push_back({e.gate.matrix, e.up.matrix, e.down.matrix});
    std::vector<float> x = noise(random, static_cast<size_t>(tokens) * hidden), weights = noise(random, static_cast<size_t>(tokens) * k);
    std::vector<int32_t> local(static_cast<size_t>(tokens) * k), offsets(experts + 1), token_of(tokens * k), row_of(tokens * k), cursor(experts);
    for (int t = 0; t < tokens; ++t) {
        local[t * k] = static_cast<int>(random() % experts);
        local[t * k + 1] = t % 5 == 4 ? -1 : (local[t * k] + 1 + static_cast<int>(random() % (experts - 1))) % experts;
    }
    int rows = fill_buckets(local.data(), tokens, k, experts, offsets.data(), token_of.data(), row_of.data(), cursor.data());
    Scratch scratch;
    std::vector<float> middle(static_cast<size_t>(rows) * width), out(static_cast<size_t>(rows) * hidden), again(out.size());
    std::vector<float> y(static_cast<size_t>(tokens) * hidden);
    scratch.begin(ffn_scratch_bytes(tokens, rows, hidden, width));
    expert_ffn(x.data(), tokens, token_of.data(), table.data(), offsets.data(), experts, scratch, middle.data(), out.data(), 1, 16, true, integer);
    scratch.begin(ffn_scratch_bytes(tokens, rows, hidden, width));
    expert_ffn(x.data(), tokens, token_of.data(), table.data(), offsets.data(), experts, scratch, middle.data(), again.data(), 3, 64, true, integer);
    EXPECT(out == again);
    combine(out.data(), row_of.data(), weights.data(), tokens, k, hidden, y.data(), 3);
    for (int t = 0; t < tokens && !integer; ++t) {
        std::vector<double> wanted(hidden);
        double size = 0;
        for (int r = 0; r < k; ++r) {
            if (local[t * k + r] < 0) continue;
            auto part = plain(own[local[t * k + r]], exactly(x.data() + static_cast<size_t>(t) * hidden, hidden), size);
            for (int i = 0; i < hidden; ++i) wanted[i] += weights[t * k + r] * part[i];
        }
        for (int i = 0; i < hidden; ++i) EXPECT(std::fabs(y[static_cast<size_t>(t) * hidden + i] - wanted[i]) <= 2e-3 * (size + 1));
    }
}

int main() {
    use_threads();
    Random random(2);
    const int sizes[] = {1, 31, 33, 63, 65, 257};
    for (const Kind& kind : kKinds)
        for (int i = 0; i < 6; ++i)
            for (int tokens : {1, 9}) {
                step(kind, sizes[i], sizes[5 - i], tokens, false, random);
                if (is_scaled(kind.format)) step(kind, sizes[i], sizes[5 - i], tokens, true, random);
            }
    for (float x = -30; x < 30; x += 0.37f) {
        float lanes[16];
        for (bool exact : {true, false}) {
            store(lanes, silu(set1(x), exact));
            EXPECT(std::fabs(lanes[7] - x / (1 + std::exp(-static_cast<double>(x)))) <= 1e-4 * std::max(1.0f, std::fabs(x)));
        }
    }
}

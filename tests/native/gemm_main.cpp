// Matrix products of every stored format at awkward sizes, on one thread and on three, against plain sums in double.
#include "gemm_core.hpp"

#include "matrices.hpp"

using namespace colibri;

static void agrees(const Kind& kind, int rows, int cols, int tokens, bool integer, Random& random) {
    Stored w = stored(kind.format, kind.group, rows, cols, random, kind.symmetric);
    std::vector<float> x = noise(random, static_cast<size_t>(tokens) * cols), bias = noise(random, rows);
    std::vector<float> out(static_cast<size_t>(tokens) * rows), again(out.size()), alone(rows);
    Scratch scratch;
    matmul(x.data(), tokens, w.matrix, bias.data(), out.data(), scratch, 1, 16, integer);
    matmul(x.data(), tokens, w.matrix, bias.data(), again.data(), scratch, 3, 48, integer);
    EXPECT(out == again);  // threads and block size change no bit
    const bool bytes = integer && integer_weights(w.matrix);
    for (int t = 0; t < tokens; ++t) {
        const float* row_of_x = x.data() + static_cast<size_t>(t) * cols;
        std::vector<double> wanted_x = bytes ? rounded(row_of_x, cols) : exactly(row_of_x, cols);
        for (int r = 0; r < rows; ++r) {
            auto [sum, size] = product(w, r, wanted_x);
            // Zero points are subtracted from sums, so the sums themselves set the size of the error.
            double limit = 1e-5 * (size + 2 * cols * (is_scaled(kind.format) ? 1.3 : 0.0) + 4);
            EXPECT(std::fabs(out[static_cast<size_t>(t) * rows + r] - (sum + bias[r])) <= limit);
        }
    }
    matmul(x.data(), 1, w.matrix, bias.data(), alone.data(), scratch, 1, 64, integer);
    for (int r = 0; r < rows; ++r) EXPECT(alone[r] == out[r]);  // nor does the number of tokens
}

int main() {
    use_threads();
    Random random(1);
    const int sizes[] = {1, 31, 33, 63, 65, 257};
    for (const Kind& kind : kKinds)
        for (int i = 0; i < 6; ++i)
            for (int tokens : {1, 7, 65})
                if (tokens < 65 || i == 2) {
                    agrees(kind, sizes[i], sizes[5 - i], tokens, false, random);
                    agrees(kind, sizes[i], sizes[i], tokens, false, random);
                    if (is_scaled(kind.format)) agrees(kind, sizes[i], sizes[5 - i], tokens, true, random);
                }
}

// RMS norm of rows of awkward lengths, in place and not, against double.
#include "norm_core.hpp"

#include "matrices.hpp"

using namespace colibri;

int main() {
    use_threads();
    Random random(4);
    for (int n : {1, 31, 33, 63, 65, 257, 5000})
        for (int rows : {1, 3, 65}) {
            std::vector<float> x = noise(random, static_cast<size_t>(rows) * n), weight = noise(random, n), out(x.size()), place = x;
            rms_norm(x.data(), weight.data(), rows, n, 1e-5f, out.data(), 1);
            rms_norm(place.data(), weight.data(), rows, n, 1e-5f, place.data(), 3);
            EXPECT(out == place);
            for (int r = 0; r < rows; ++r) {
                double squares = 0;
                for (int i = 0; i < n; ++i) squares += double(x[r * n + i]) * x[r * n + i];
                for (int i = 0; i < n; ++i)
                    EXPECT(std::fabs(out[r * n + i] - x[r * n + i] * weight[i] / std::sqrt(squares / n + 1e-5)) <= 2e-5);
            }
        }
}

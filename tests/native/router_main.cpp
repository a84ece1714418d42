// Expert choice of every router kind against sorting: scores, ties, groups, biases, and the largest number of experts.
#include "router_core.hpp"

#include <numeric>

#include "matrices.hpp"

using namespace colibri;

static void agrees(RouterKind kind, int experts, int k, int groups, int top_groups, bool renormalise, bool biased, bool ties, Random& random) {
    const int tokens = 33;
    std::vector<float> logits = noise(random, static_cast<size_t>(tokens) * experts), bias = noise(random, experts), weights(tokens * k);
    if (ties)
        for (float& x : logits) x = std::round(x);
    std::vector<uint16_t> ids(tokens * k);
    Router router{kind, experts, k, biased ? bias.data() : nullptr, groups, top_groups, renormalise, 2.5f};
    route(router, logits.data(), tokens, ids.data(), weights.data(), 3);
    for (int t = 0; t < tokens; ++t) {
        const float* mine = logits.data() + static_cast<size_t>(t) * experts;
        std::vector<float> score(mine, mine + experts);
        if (kind == RouterKind::softmax) softmax(mine, experts, score.data());
        if (kind == RouterKind::sigmoid_group)
            for (float& s : score) s = 1.0f / (1.0f + std::exp(-s));
        std::vector<float> choice = score;
        for (int i = 0; i < experts && biased; ++i) choice[i] += bias[i];
        std::vector<bool> open(experts, true);
        if (kind == RouterKind::sigmoid_group && groups > 1) {
            const int size = experts / groups;
            std::vector<std::pair<float, int>> best(groups);
            for (int g = 0; g < groups; ++g) {
                std::vector<float> part(choice.begin() + g * size, choice.begin() + (g + 1) * size);
                std::sort(part.rbegin(), part.rend());
                best[g] = {-(size > 1 ? part[0] + part[1] : part[0]), g};
            }
            std::sort(best.begin(), best.end());
            std::fill(open.begin(), open.end(), false);
            for (int g = 0; g < top_groups; ++g) std::fill_n(open.begin() + best[g].second * size, size, true);
        }
        std::vector<int> order(experts);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return open[a] != open[b] ? open[a] > open[b] : choice[a] > choice[b]; });
        double total = 0;
        for (int r = 0; r < k; ++r) total += kind == RouterKind::topk_softmax ? std::exp(double(score[order[r]])) : score[order[r]];
        for (int r = 0; r < k; ++r) {
            EXPECT(ids[t * k + r] == order[r]);
            double w = kind == RouterKind::topk_softmax ? std::exp(double(score[order[r]])) / total : renormalise ? score[order[r]] / total : score[order[r]];
            EXPECT(std::fabs(weights[t * k + r] - 2.5 * w) <= 1e-5);
        }
    }
}

int main() {
    use_threads();
    Random random(5);
    for (int experts : {1, 31, 33, 63, 65, 257, kMaxExperts})
        for (int k : {1, 8, 31}) {
            if (k > experts) continue;
            for (bool ties : {false, true}) {
                agrees(RouterKind::softmax, experts, k, 1, 1, false, false, ties, random);
                agrees(RouterKind::softmax, experts, k, 1, 1, true, true, ties, random);
                agrees(RouterKind::topk_softmax, experts, k, 1, 1, false, false, ties, random);
                agrees(RouterKind::sigmoid_group, experts, k, 1, 1, true, true, ties, random);
            }
        }
    for (int groups : {3, 8, 33}) agrees(RouterKind::sigmoid_group, 264, 4, groups, 2, true, true, false, random);
}

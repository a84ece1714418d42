// From router logits to expert ids and weights. Higher score first; among equals the lower id, so that ties are stable.
//
//   softmax        p = softmax(logits); top-k of p; optionally w /= sum(w)                 Mixtral, OLMoE, Qwen MoE
//   topk_softmax   top-k of logits; w = softmax over those k                               gpt-oss, Granite
//   sigmoid_group  s = sigmoid(logits); c = s + bias; a group scores the sum of its two largest c; the best groups stay;
//                  top-k of c among them; w = s, optionally w /= (sum(w) + 1e-20)          DeepSeek-V3, GLM-4.5
// Weights are multiplied by `scale` at the end. Softmax subtracts the maximum, as everybody does.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "include/threads.hpp"

namespace colibri {

enum class RouterKind : int { softmax = 0, topk_softmax = 1, sigmoid_group = 2 };
constexpr int kMaxExperts = 1024;

struct Router {
    RouterKind kind;
    int experts, k;
    const float* bias;  // (experts,) or null: chooses, never weighs
    int groups, top_groups;
    bool renormalise;
    float scale;
};

// Indices of the k largest of `score`, in that order; `taken` entries are skipped. k is small, so k scans win.
inline void top_k(const float* score, int n, int k, uint16_t* ids, bool* taken) {
    for (int r = 0; r < k; ++r) {
        int best = -1;
        for (int i = 0; i < n; ++i)
            if (!taken[i] && (best < 0 || score[i] > score[best])) best = i;
        ids[r] = static_cast<uint16_t>(best);
        taken[best] = true;
    }
}

inline void softmax(const float* x, int n, float* p) {
    float top = *std::max_element(x, x + n), total = 0.0f;
    for (int i = 0; i < n; ++i) total += p[i] = std::exp(x[i] - top);
    for (int i = 0; i < n; ++i) p[i] /= total;
}

inline void route_one(const Router& r, const float* logits, uint16_t* ids, float* weights) {
    float score[kMaxExperts], choice[kMaxExperts];
    bool taken[kMaxExperts] = {};
    if (r.kind == RouterKind::softmax) softmax(logits, r.experts, score);
    else if (r.kind == RouterKind::topk_softmax) std::copy(logits, logits + r.experts, score);
    else
        for (int i = 0; i < r.experts; ++i) score[i] = 1.0f / (1.0f + std::exp(-logits[i]));
    for (int i = 0; i < r.experts; ++i) choice[i] = r.bias ? score[i] + r.bias[i] : score[i];

    if (r.kind == RouterKind::sigmoid_group && r.groups > 1) {
        int size = r.experts / r.groups;
        float group_score[kMaxExperts];
        uint16_t kept[kMaxExperts];
        bool group_taken[kMaxExperts] = {};
        for (int g = 0; g < r.groups; ++g) {
            float first = -INFINITY, second = -INFINITY;
            for (int i = g * size; i < (g + 1) * size; ++i) {
                if (choice[i] > first) second = first, first = choice[i];
                else if (choice[i] > second) second = choice[i];
            }
            group_score[g] = size > 1 ? first + second : first;
        }
        top_k(group_score, r.groups, r.top_groups, kept, group_taken);
        for (int i = 0; i < r.experts; ++i) taken[i] = !group_taken[i / size];
    }
    top_k(choice, r.experts, r.k, ids, taken);

    float total = 0.0f;
    for (int j = 0; j < r.k; ++j) total += weights[j] = score[ids[j]];
    if (r.kind == RouterKind::topk_softmax) softmax(weights, r.k, weights);
    else if (r.renormalise)
        for (int j = 0; j < r.k; ++j) weights[j] /= r.kind == RouterKind::sigmoid_group ? total + 1e-20f : total;
    for (int j = 0; j < r.k; ++j) weights[j] *= r.scale;
}

inline void route(const Router& r, const float* logits, int tokens, uint16_t* ids, float* weights, int threads) {
    constexpr int kPerTask = 32;
    parallel_for((tokens + kPerTask - 1) / kPerTask, threads, [&](int task) {
        for (int t = task * kPerTask; t < std::min(tokens, (task + 1) * kPerTask); ++t)
            route_one(r, logits + static_cast<int64_t>(t) * r.experts, ids + t * r.k, weights + t * r.k);
    });
}

}  // namespace colibri

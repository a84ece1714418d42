// Predictors for replay. After each event they name blocks that the layer `lead` ahead will want, within a budget; a
// modelled channel says when those have arrived. All but the oracle learn only from events that are already over.
//
//   same      the experts of the target layer's last event
//   markov    the experts y with the largest sum, over this event's experts x, of how often y followed x
//   popular   the experts the target layer used most so far
//   oracle    the target layer's next event itself
#pragma once
#include <deque>

#include "stream_core.hpp"

namespace colibri {

enum class Predictor : uint8_t { none, same, markov, popular, oracle };

struct PrefetchSettings {
    Predictor predictor = Predictor::none;
    int budget = 0;          // blocks predicted per event
    int lead = 1;            // layers ahead, wrapping into the next token
    double bandwidth = 0;    // blocks the channel loads in the time of one event; 0 = all arrive at once
};

struct PrefetchScore {
    int64_t predicted = 0, correct = 0, wanted = 0;  // precision = correct / predicted, recall = correct / wanted
};

class Prefetcher {
public:
    Prefetcher(const Stream& s, const PrefetchSettings& p)
        : s_(s), p_(p), events_(s.layers), run_(s.layers, 0), predicted_(s.layers), score_of_(s.blocks) {
        for (int64_t e = 0; e < s.events(); ++e) events_[s.layer[e]].push_back(e);
        if (p.predictor == Predictor::markov) follows_.assign(size_t(s.layers) * s.blocks * s.blocks, 0);
        if (p.predictor == Predictor::popular) used_.assign(size_t(s.layers) * s.blocks, 0);
    }
    const PrefetchScore& score() const { return score_; }
    void forget() {  // the cache was reset: nothing is under way
        queue_.clear();
        for (auto& list : predicted_) list.clear();
    }
    // Before event e: tell the pools what has arrived by now.
    template <class Core> void arrive(Core& core, int64_t e) {
        for (; !queue_.empty() && queue_.front().ready <= double(e); queue_.pop_front())
            core.pool(queue_.front().layer).loaded(queue_.front().id);
    }
    // After event e, which missed `misses` blocks: learn from it, then fetch ahead for the layer `lead` further on.
    template <class Core, class Log> void advance(Core& core, int64_t e, int64_t misses, Log& log) {
        int layer = s_.layer[e];
        ++run_[layer];
        judge(e, layer);
        learn(e, layer);
        double step = p_.bandwidth > 0 ? 1 / p_.bandwidth : 0;
        free_ = std::max(free_, double(e)) + double(misses) * step;
        int target = (layer + p_.lead) % s_.layers;
        predict(e, target, predicted_[target]);
        for (int block : predicted_[target]) {
            int id = core.base(target) + block;
            if (!core.prefetch(target, id, log)) continue;
            free_ += step;
            auto same = [&](const Flight& f) {
                return f.layer == target && f.id == id;
            };  // evicted under way, wanted again
            queue_.erase(std::remove_if(queue_.begin(), queue_.end(), same), queue_.end());
            queue_.push_back({target, id, free_});
        }
    }

private:
    struct Flight {
        int layer, id;
        double ready;  // in events
    };
    int block(int64_t i) const { return s_.ids[i] % s_.blocks; }

    void judge(int64_t e, int layer) {
        auto& guess = predicted_[layer];
        if (guess.empty()) return;
        score_.predicted += int64_t(guess.size());
        score_.wanted += s_.offsets[e + 1] - s_.offsets[e];
        for (int64_t i = s_.offsets[e]; i < s_.offsets[e + 1]; ++i)
            score_.correct += std::find(guess.begin(), guess.end(), block(i)) != guess.end();
        guess.clear();
    }
    void learn(int64_t e, int layer) {
        if (!used_.empty())
            for (int64_t i = s_.offsets[e]; i < s_.offsets[e + 1]; ++i) ++used_[size_t(layer) * s_.blocks + block(i)];
        if (follows_.empty()) return;
        int source = ((layer - p_.lead) % s_.layers + s_.layers) % s_.layers;
        int64_t before = run_[source] - (source == layer ? 2 : 1);
        if (before < 0) return;
        int64_t b = events_[source][before];
        for (int64_t i = s_.offsets[b]; i < s_.offsets[b + 1]; ++i) {
            uint32_t* row = &follows_[(size_t(layer) * s_.blocks + block(i)) * s_.blocks];
            for (int64_t j = s_.offsets[e]; j < s_.offsets[e + 1]; ++j) ++row[block(j)];
        }
    }
    void predict(int64_t e, int target, std::vector<int>& guess) {
        guess.clear();
        int64_t event = -1;
        if (p_.predictor == Predictor::same && run_[target] > 0) event = events_[target][run_[target] - 1];
        if (p_.predictor == Predictor::oracle && run_[target] < int64_t(events_[target].size()))
            event = events_[target][run_[target]];
        if (event >= 0) {
            for (int64_t i = s_.offsets[event]; i < s_.offsets[event + 1]; ++i)
                if (int(guess.size()) < p_.budget) guess.push_back(s_.asked[i]);
            return;
        }
        if (follows_.empty() && used_.empty()) return;
        std::fill(score_of_.begin(), score_of_.end(), 0);
        if (!used_.empty())
            for (int y = 0; y < s_.blocks; ++y) score_of_[y] = used_[size_t(target) * s_.blocks + y];
        else
            for (int64_t i = s_.offsets[e]; i < s_.offsets[e + 1]; ++i) {
                const uint32_t* row = &follows_[(size_t(target) * s_.blocks + block(i)) * s_.blocks];
                for (int y = 0; y < s_.blocks; ++y) score_of_[y] += row[y];
            }
        for (int y = 0; y < s_.blocks; ++y)
            if (score_of_[y] > 0) guess.push_back(y);
        auto better = [&](int a, int b) {
            return score_of_[a] > score_of_[b] || (score_of_[a] == score_of_[b] && a < b);
        };
        size_t keep = std::min(guess.size(), size_t(p_.budget));
        std::partial_sort(guess.begin(), guess.begin() + keep, guess.end(), better);
        guess.resize(keep);
    }

    const Stream& s_;
    PrefetchSettings p_;
    std::vector<std::vector<int64_t>> events_;  // of each layer
    std::vector<int64_t> run_;                  // events of each layer that are over
    std::vector<std::vector<int>> predicted_;   // for each layer's next event
    std::vector<int64_t> score_of_;             // (blocks,)
    std::vector<uint32_t> follows_, used_;
    std::deque<Flight> queue_;                  // by time of arrival
    double free_ = 0;                           // when the channel is idle again
    PrefetchScore score_;
};

}  // namespace colibri

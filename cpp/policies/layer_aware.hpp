// layer-aware: lru for one pool under all layers, without lru's collapse below one token's cycle.
//   age of x:  how often its layer has run since x was used (0: used in the layer's last run)
//   ahead:     how many layers will run before the layer of x runs again; a whole cycle for the layer that runs now
//   victim:    max of (age, ahead); ties by oldest use, then id
// Each layer keeps an lru list, so a choice compares one block per layer: O(layers). In a layer's own pool it is lru.
#pragma once
#include "list.hpp"

namespace colibri {

class LayerAware {
public:
    explicit LayerAware(const PolicySetup& setup)
        : blocks_(setup.blocks), layers_(setup.ids / setup.blocks), lists_(setup.ids, layers_), last_(setup.ids) {}
    void clear() { lists_.clear(); }
    void resize(int) {}
    void miss(const Access& a) { run(a); }
    template <class Pinned> int victim(const Pinned& pins) const {
        int best = -1;
        int64_t best_age = 0;
        int best_ahead = 0;
        for (int layer = 0; layer < layers_; ++layer) {
            int id = lists_.oldest(pins, layer);
            if (id < 0) continue;
            int64_t age = pass_ - last_[id] - (layer > layer_);
            int ahead = layer > layer_ ? layer - layer_ : layer - layer_ + layers_;
            if (best < 0 || age > best_age || (age == best_age && ahead > best_ahead))
                best = id, best_age = age, best_ahead = ahead;
        }
        return best;
    }
    void evict(int id) { lists_.remove(id); }
    void insert(const Access& a) {
        run(a);
        last_[a.id] = a.pass;
        lists_.push_front(a.id, layer_);
    }
    void hit(const Access& a) {
        run(a);
        last_[a.id] = a.pass;
        lists_.to_front(a.id);
    }

private:
    void run(const Access& a) {
        pass_ = a.pass;
        layer_ = a.id / blocks_;
    }
    int blocks_, layers_;
    Lists lists_;
    std::vector<int64_t> last_;  // pass of the last use
    int64_t pass_ = 0;
    int layer_ = 0;
};

}  // namespace colibri

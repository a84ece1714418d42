// colibri-lfru: frequency first, recency only among equals, as the colibri engine's slot key says it.
//   hit(x), insert(x): heat[x] += 1; last[x] = accesses of all layers so far
//   evict(x):          heat[x] is kept
//   victim:            min of heat * 256 + max(0, 255 - accesses since last); ties by id
// Age counts accesses of all layers, so it saturates within a few tokens. Each use also queues its own saturation;
// before a choice those that are due drop to recency 0, which keeps the heap's keys those of the rule.
#pragma once
#include <deque>

#include "heap.hpp"

namespace colibri {

class ColibriLfru {
public:
    explicit ColibriLfru(const PolicySetup& setup) : heap_(setup.ids), heat_(setup.ids), last_(setup.ids) {}
    void clear() {
        heap_.clear();
        ageing_.clear();
        heat_.assign(heat_.size(), 0);
    }
    void resize(int) {}
    void miss(const Access& a) { access_ = a.access; }
    template <class Pinned> int victim(const Pinned& pins) {
        for (; !ageing_.empty() && ageing_.front().when + 255 <= access_; ageing_.pop_front()) {
            auto [id, when] = ageing_.front();
            if (heap_.has(id) && last_[id] == when) heap_.change(id, heat_[id] << 38);
        }
        return heap_.smallest(pins);
    }
    void evict(int id) { heap_.remove(id); }
    void insert(const Access& a) { heap_.push(a.id, use(a)); }
    void hit(const Access& a) { heap_.change(a.id, use(a)); }

private:
    struct Use {
        int id;
        int64_t when;
    };
    uint64_t use(const Access& a) {
        access_ = last_[a.id] = a.access;
        ageing_.push_back({a.id, a.access});
        return ++heat_[a.id] << 38 | uint64_t(a.access + 1);
    }
    Heap<uint64_t> heap_;
    std::vector<uint64_t> heat_;
    std::vector<int64_t> last_;
    std::deque<Use> ageing_;
    int64_t access_ = 0;
};

}  // namespace colibri

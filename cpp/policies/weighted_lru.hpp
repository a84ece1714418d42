// weighted-lru: few hits and a long time unused, together, make a block leave.
//   insert(x): hits[x] = 1
//   hit(x):    hits[x] += 1
//   victim:    min of hits * 2^(-age / half_life); age in forward passes since the last use
// The logarithm, log2(hits) + last_pass / half_life - now / half_life, orders blocks the same way at every `now`, so a
// heap keeps it. The counter lives in the slot: a block that comes back starts at 1.
#pragma once
#include "heap.hpp"

namespace colibri {

class WeightedLru {
public:
    explicit WeightedLru(const PolicySetup& setup)
        : heap_(setup.ids), hits_(setup.ids), half_life_(setup.param("half_life", 8, 1e-3, 1e9)) {}
    void clear() { heap_.clear(); }
    void resize(int) {}
    void miss(const Access&) {}
    template <class Pinned> int victim(const Pinned& pins) { return heap_.smallest(pins); }
    void evict(int id) { heap_.remove(id); }
    void insert(const Access& a) { heap_.push(a.id, score(hits_[a.id] = 1, a)); }
    void hit(const Access& a) { heap_.change(a.id, score(++hits_[a.id], a)); }

private:
    int64_t score(int64_t hits, const Access& a) const {
        return on_grid(std::log2(double(hits)) + double(a.pass) / half_life_);
    }
    Heap<int64_t> heap_;
    std::vector<int64_t> hits_;
    double half_life_;
};

}  // namespace colibri

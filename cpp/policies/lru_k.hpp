// lru-k: the block whose k-th last use is oldest leaves; one used less than k times before all others.
//   hit(x), insert(x): remember the time of this use and of the k - 1 before
//   evict(x):          the times are kept
//   victim:            min of (time of k-th last use or -1, time of last use, id)
// O'Neil, O'Neil, Weikum, "The LRU-K Page Replacement Algorithm for Database Disk Buffering", SIGMOD 1993.
#pragma once
#include <utility>

#include "heap.hpp"

namespace colibri {

class LruK {
public:
    explicit LruK(const PolicySetup& setup)
        : k_(int(setup.param("k", 2, 1, 16))), heap_(setup.ids), times_(size_t(setup.ids) * k_, -1) {}
    void clear() {
        heap_.clear();
        times_.assign(times_.size(), -1);
    }
    void resize(int) {}
    void miss(const Access&) {}
    template <class Pinned> int victim(const Pinned& pins) { return heap_.smallest(pins); }
    void evict(int id) { heap_.remove(id); }
    void insert(const Access& a) { heap_.push(a.id, use(a)); }
    void hit(const Access& a) { heap_.change(a.id, use(a)); }

private:
    using Key = std::pair<int64_t, int64_t>;
    Key use(const Access& a) {
        int64_t* t = &times_[size_t(a.id) * k_];  // newest first
        for (int i = k_ - 1; i > 0; --i) t[i] = t[i - 1];
        t[0] = a.now;
        return {t[k_ - 1], t[0]};
    }
    int k_;
    Heap<Key> heap_;
    std::vector<int64_t> times_;
};

}  // namespace colibri

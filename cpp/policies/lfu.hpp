// lfu: the block with the fewest uses since the start leaves ("perfect" LFU: uses are counted out of the cache too).
//   hit(x), insert(x): uses[x] += 1; last[x] = now
//   evict(x):          uses[x] is kept
//   victim:            min of (uses, last, id)
// lfu-in-cache: the same with uses[x] = 1 at every insert, so that what leaves is forgotten.
#pragma once
#include "heap.hpp"

namespace colibri {

template <bool keeps_history> class CountedLfu {
public:
    explicit CountedLfu(const PolicySetup& setup) : heap_(setup.ids), uses_(setup.ids) {}
    void clear() {
        heap_.clear();
        uses_.assign(uses_.size(), 0);
    }
    void resize(int) {}
    void miss(const Access&) {}
    int victim(const Pins& pins) { return heap_.smallest(pins); }
    void evict(int id) { heap_.remove(id); }
    void insert(const Access& a) {
        uses_[a.id] = keeps_history ? uses_[a.id] + 1 : 1;
        heap_.push(a.id, key(a));
    }
    void hit(const Access& a) {
        ++uses_[a.id];
        heap_.change(a.id, key(a));
    }

private:
    uint64_t key(const Access& a) const { return uint64_t(uses_[a.id]) << 36 | uint64_t(a.now); }
    Heap<uint64_t> heap_;
    std::vector<uint32_t> uses_;
};

using Lfu = CountedLfu<true>;
using LfuInCache = CountedLfu<false>;

}  // namespace colibri

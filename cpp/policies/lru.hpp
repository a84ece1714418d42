// lru: the least recently used block leaves.
//   hit(x):    move x to the front
//   insert(x): put x at the front
//   victim:    the block at the back
// Members of one event are touched in ascending id order, so among them the lowest id is the older one.
#pragma once
#include "list.hpp"

namespace colibri {

class Lru {
public:
    explicit Lru(const PolicySetup& setup) : list_(setup.ids) {}
    void clear() { list_.clear(); }
    void resize(int) {}
    void miss(const Access&) {}
    template <class Pinned> int victim(const Pinned& pins) const { return list_.oldest(pins); }
    void evict(int id) { list_.remove(id); }
    void insert(const Access& a) { list_.push_front(a.id); }
    void hit(const Access& a) { list_.to_front(a.id); }
    // An access to a full pool, hit or miss, without a branch that the processor would guess wrong every other time.
    // Returns the block that gave its place, which on a hit is the block itself.
    int turn(int id, bool resident) {
        int out = resident ? id : list_.back();
        list_.replace(out, id);
        return out;
    }

private:
    Lists list_;
};

}  // namespace colibri

// slru: two lru lists; what is used twice is protected.
//   insert(x): put x at the front of probation
//   hit(x):    put x at the front of protected; while that holds more than share * slots, its back goes to the front of
//              probation
//   victim:    the back of probation, else the back of protected
// Karedla, Love, Wherry, "Caching Strategies to Improve Disk System Performance", 1994.
#pragma once
#include "list.hpp"

namespace colibri {

class Slru {
public:
    explicit Slru(const PolicySetup& setup) : lists_(setup.ids, 2), share_(setup.param("protected", 0.5, 0, 1)) {
        resize(setup.slots);
    }
    void clear() { lists_.clear(); }
    void resize(int slots) {
        most_ = int(share_ * slots);
        demote();
    }
    void miss(const Access&) {}
    template <class Pinned> int victim(const Pinned& pins) const {
        int id = lists_.oldest(pins, probation);
        return id >= 0 ? id : lists_.oldest(pins, safe);
    }
    void evict(int id) { lists_.remove(id); }
    void insert(const Access& a) { lists_.push_front(a.id, probation); }
    void hit(const Access& a) {
        if (lists_.list(a.id) == safe) return lists_.to_front(a.id);
        lists_.remove(a.id);
        lists_.push_front(a.id, safe);
        demote();
    }

private:
    enum { probation, safe };
    void demote() {
        while (lists_.size(safe) > most_) {
            int id = lists_.back(safe);
            lists_.remove(id);
            lists_.push_front(id, probation);
        }
    }
    Lists lists_;
    double share_;
    int most_ = 0;
};

}  // namespace colibri

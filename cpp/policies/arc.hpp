// arc: an lru list of blocks used once (t1), one of blocks used again (t2), and memories of what left each (b1, b2).
//   hit(x):    to the front of t2
//   miss(x):   x in b1: target += max(1, |b2| / |b1|);  x in b2: target -= max(1, |b1| / |b2|)
//   insert(x): remembered: to the front of t2; else of t1. Then |t1| + |b1| <= slots and all four <= 2 slots
//   victim:    the back of t1 if |t1| > target, or = target and x came from b2; else the back of t2. Remember it
// Memories adapt once per missed member, in ascending id order, before room is made for the event.
// Megiddo, Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003.
#pragma once
#include <algorithm>

#include "list.hpp"

namespace colibri {

class Arc {
public:
    explicit Arc(const PolicySetup& setup) : lists_(setup.ids, 4), again_(setup.ids), slots_(setup.slots) {}
    void clear() {
        lists_.clear();
        again_.assign(again_.size(), 0);
        target_ = 0;
    }
    void resize(int slots) {
        slots_ = slots;
        target_ = std::min(target_, double(slots));
        trim();
    }
    void miss(const Access& a) {
        int list = lists_.list(a.id);
        if (list != b1 && list != b2) return;
        double one = lists_.size(b1), two = lists_.size(b2);
        if (list == b1) target_ = std::min(double(slots_), target_ + std::max(1.0, two / one));
        else target_ = std::max(0.0, target_ - std::max(1.0, one / two));
        from_b2_ |= list == b2;
        again_[a.id] = 1;
        lists_.remove(a.id);
    }
    template <class Pinned> int victim(const Pinned& pins) const {
        double once = lists_.size(t1);
        bool from_t1 = once > target_ || (from_b2_ && once == target_);
        int id = lists_.oldest(pins, from_t1 ? t1 : t2);
        return id >= 0 ? id : lists_.oldest(pins, from_t1 ? t2 : t1);
    }
    void evict(int id) {
        int memory = lists_.list(id) == t1 ? b1 : b2;
        lists_.remove(id);
        lists_.push_front(id, memory);
    }
    void insert(const Access& a) {
        from_b2_ = false;
        if (lists_.list(a.id) != Lists::none) lists_.remove(a.id);
        lists_.push_front(a.id, again_[a.id] ? t2 : t1);
        again_[a.id] = 0;
        trim();
    }
    void hit(const Access& a) {
        from_b2_ = false;
        lists_.remove(a.id);
        lists_.push_front(a.id, t2);
    }

private:
    enum { t1, t2, b1, b2 };
    void trim() {
        while (lists_.size(b1) > 0 && lists_.size(t1) + lists_.size(b1) > slots_) lists_.remove(lists_.back(b1));
        while (lists_.size(b2) > 0 &&
               lists_.size(t1) + lists_.size(b1) + lists_.size(t2) + lists_.size(b2) > 2 * slots_)
            lists_.remove(lists_.back(b2));
    }
    Lists lists_;
    std::vector<uint8_t> again_;
    int slots_;
    double target_ = 0;  // wanted size of t1
    bool from_b2_ = false;
};

}  // namespace colibri

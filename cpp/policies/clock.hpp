// clock: fifo with a second chance; an n-bit counter per block, 1 bit by default.
//   hit(x):    counter[x] += 1, at most 2^bits - 1
//   insert(x): counter[x] = 0; put x at the front
//   victim:    from the back: a member of the event moves to the front, a block with counter > 0 loses 1 and moves to
//              the front, else it leaves
// The front is the place just behind the clock's hand, so moving there is what the hand's passing by means.
// F. J. Corbato, "A Paging Experiment with the Multics System", 1968.
#pragma once
#include "list.hpp"

namespace colibri {

class Clock {
public:
    explicit Clock(const PolicySetup& setup)
        : list_(setup.ids), counter_(setup.ids), most_(uint8_t((1 << int(setup.param("bits", 1, 1, 7))) - 1)) {}
    void clear() { list_.clear(); }
    void resize(int) {}
    void miss(const Access&) {}
    template <class Pinned> int victim(const Pinned& pins) {
        for (;;) {
            int id = list_.back();
            if (!pins(id)) {
                if (counter_[id] == 0) return id;
                --counter_[id];
            }
            list_.to_front(id);
        }
    }
    void evict(int id) { list_.remove(id); }
    void insert(const Access& a) {
        counter_[a.id] = 0;
        list_.push_front(a.id);
    }
    void hit(const Access& a) { counter_[a.id] += counter_[a.id] < most_; }

private:
    Lists list_;
    std::vector<uint8_t> counter_;
    uint8_t most_;
};

}  // namespace colibri

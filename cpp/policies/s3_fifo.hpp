// s3-fifo: a small fifo that newcomers must survive, a main fifo, and a memory of what left the small one.
//   hit(x):    count[x] = min(count[x] + 1, 3)
//   insert(x): count[x] = 0; remembered: to the front of main; else of small
//   victim:    small holds >= small * slots: its back moves to main with count 0 if count >= threshold, else leaves
//              and is remembered; otherwise the back of main goes round with count - 1 while count > 0, else leaves
// Small is max(1, round(small * slots)) blocks, the memory as many blocks as main. Members of the event are passed
// over; when small holds only those, main gives.
// Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023.
#pragma once
#include <cmath>

#include "list.hpp"

namespace colibri {

class S3Fifo {
public:
    explicit S3Fifo(const PolicySetup& setup)
        : lists_(setup.ids, 3), again_(setup.ids), count_(setup.ids), share_(setup.param("small", 0.1, 0, 1)),
          threshold_(int(setup.param("threshold", 2, 1, 3))) {
        resize(setup.slots);
    }
    void clear() {
        lists_.clear();
        again_.assign(again_.size(), 0);
    }
    void resize(int slots) {
        small_slots_ = std::max(1, int(std::lround(share_ * slots)));
        memory_ = std::max(1, slots - small_slots_);
        trim();
    }
    void miss(const Access& a) {
        if (lists_.list(a.id) != ghost) return;
        lists_.remove(a.id);
        again_[a.id] = 1;
    }
    template <class Pinned> int victim(const Pinned& pins) {
        for (;;) {
            int s = lists_.oldest(pins, small), m = lists_.oldest(pins, main);
            if (s >= 0 && (lists_.size(small) >= small_slots_ || m < 0)) {
                if (count_[s] < threshold_) return s;
                count_[s] = 0;
                lists_.remove(s);
                lists_.push_front(s, main);
            } else {
                if (count_[m] == 0) return m;
                --count_[m];
                lists_.to_front(m);
            }
        }
    }
    void evict(int id) {
        bool newcomer = lists_.list(id) == small;
        lists_.remove(id);
        if (!newcomer) return;
        lists_.push_front(id, ghost);
        trim();
    }
    void insert(const Access& a) {
        if (lists_.list(a.id) == ghost) lists_.remove(a.id);
        lists_.push_front(a.id, again_[a.id] ? main : small);
        again_[a.id] = count_[a.id] = 0;
    }
    void hit(const Access& a) { count_[a.id] += count_[a.id] < 3; }

private:
    enum { small, main, ghost };
    void trim() {
        while (lists_.size(ghost) > memory_) lists_.remove(lists_.back(ghost));
    }
    Lists lists_;
    std::vector<uint8_t> again_, count_;
    double share_;
    int threshold_, small_slots_ = 1, memory_ = 1;
};

}  // namespace colibri

// 2q: newcomers wait in a fifo; only those asked for again after leaving it enter the main lru list.
//   hit(x):    in main: to its front; in the fifo: nothing
//   insert(x): remembered (left the fifo lately): to the front of main; else to the front of the fifo
//   victim:    the back of the fifo if that holds more than in * slots, and remember it; else the back of main
//   memory:    the last out * slots blocks that left the fifo
// Johnson, Shasha, "2Q: A Low Overhead High Performance Buffer Management Replacement Algorithm", VLDB 1994 (full
// version).
#pragma once
#include <cmath>

#include "list.hpp"

namespace colibri {

class TwoQ {
public:
    explicit TwoQ(const PolicySetup& setup)
        : lists_(setup.ids, 3), again_(setup.ids), in_share_(setup.param("in", 0.25, 0, 1)),
          out_share_(setup.param("out", 0.5, 0, 100)) {
        resize(setup.slots);
    }
    void clear() {
        lists_.clear();
        again_.assign(again_.size(), 0);
    }
    void resize(int slots) {
        most_in_ = std::max(1, int(std::lround(in_share_ * slots)));
        most_out_ = std::max(1, int(std::lround(out_share_ * slots)));
        trim();
    }
    void miss(const Access& a) {
        if (lists_.list(a.id) != out) return;
        lists_.remove(a.id);
        again_[a.id] = 1;
    }
    template <class Pinned> int victim(const Pinned& pins) const {
        bool from_in = lists_.size(in) > most_in_;
        int id = lists_.oldest(pins, from_in ? in : main);
        return id >= 0 ? id : lists_.oldest(pins, from_in ? main : in);
    }
    void evict(int id) {
        bool newcomer = lists_.list(id) == in;
        lists_.remove(id);
        if (!newcomer) return;
        lists_.push_front(id, out);
        trim();
    }
    void insert(const Access& a) {
        if (lists_.list(a.id) == out) lists_.remove(a.id);
        lists_.push_front(a.id, again_[a.id] ? main : in);
        again_[a.id] = 0;
    }
    void hit(const Access& a) {
        if (lists_.list(a.id) == main) lists_.to_front(a.id);
    }

private:
    enum { in, main, out };
    void trim() {
        while (lists_.size(out) > most_out_) lists_.remove(lists_.back(out));
    }
    Lists lists_;
    std::vector<uint8_t> again_;
    double in_share_, out_share_;
    int most_in_ = 1, most_out_ = 1;
};

}  // namespace colibri

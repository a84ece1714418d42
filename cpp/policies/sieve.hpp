// sieve: fifo whose hand forgives in place, so what survives keeps its position.
//   hit(x):    visited[x] = true
//   insert(x): visited[x] = false; put x at the front
//   victim:    the hand walks from back to front, round and round: members of the event it passes by, visited blocks
//              become unvisited, the first unvisited one leaves and the hand waits behind it
// Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024.
#pragma once
#include "list.hpp"

namespace colibri {

class Sieve {
public:
    explicit Sieve(const PolicySetup& setup) : list_(setup.ids), visited_(setup.ids), hand_(list_.end()) {}
    void clear() {
        list_.clear();
        hand_ = list_.end();
    }
    void resize(int) {}
    void miss(const Access&) {}
    template <class Pinned> int victim(const Pinned& pins) {
        for (;;) {
            if (hand_ == list_.end()) hand_ = list_.back();
            if (!pins(hand_)) {
                if (!visited_[hand_]) return hand_;
                visited_[hand_] = 0;
            }
            hand_ = list_.prev(hand_);
        }
    }
    void evict(int id) {
        if (hand_ == id) hand_ = list_.prev(id);
        list_.remove(id);
    }
    void insert(const Access& a) {
        visited_[a.id] = 0;
        list_.push_front(a.id);
    }
    void hit(const Access& a) { visited_[a.id] = 1; }

private:
    Lists list_;
    std::vector<uint8_t> visited_;
    int hand_;
};

}  // namespace colibri

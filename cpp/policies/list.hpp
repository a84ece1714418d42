// Doubly linked lists over dense block ids: one node array, several lists, every operation O(1). A block is in at most
// one list. The front is where a list receives, the back is where it gives.
#pragma once
#include <cstdint>
#include <vector>

#include "policy.hpp"

namespace colibri {

class Lists {
public:
    explicit Lists(int ids, int lists = 1) : ids_(ids), node_(ids + lists), list_(ids), size_(lists) { clear(); }

    void clear() {
        for (int l = 0; l < int(size_.size()); ++l) node_[ids_ + l] = {ids_ + l, ids_ + l}, size_[l] = 0;
        list_.assign(list_.size(), none);
    }
    static constexpr int16_t none = -1;
    int list(int id) const { return list_[id]; }      // `none` when in no list
    int size(int l = 0) const { return size_[l]; }
    int back(int l = 0) const { return node_[ids_ + l].prev; }  // end(l) when the list is empty
    int end(int l = 0) const { return ids_ + l; }               // what stands before the front
    int prev(int id) const { return node_[id].prev; }           // one step from the back towards the front

    void push_front(int id, int l = 0) {
        link(id, l);
        list_[id] = int16_t(l);
        ++size_[l];
    }
    void remove(int id) {
        unlink(id);
        --size_[list_[id]];
        list_[id] = none;
    }
    // Block `in` takes the place of `out`, at the front; the two may be one.
    void replace(int out, int in, int l = 0) {
        unlink(out);
        list_[out] = none;
        link(in, l);
        list_[in] = int16_t(l);
    }
    void to_front(int id) {  // of the list it is in
        unlink(id);
        link(id, list_[id]);
    }
    // From the back of list l, the first block not pinned, or -1.
    template <class Pinned> int oldest(const Pinned& pins, int l = 0) const {
        int id = back(l);
        while (id != end(l) && pins(id)) id = prev(id);
        return id == end(l) ? -1 : id;
    }

private:
    struct Node {
        int32_t prev, next;
    };
    void link(int id, int l) {
        int head = ids_ + l, first = node_[head].next;
        node_[id] = {head, first};
        node_[first].prev = id;
        node_[head].next = id;
    }
    void unlink(int id) {
        Node n = node_[id];
        node_[n.prev].next = n.next;
        node_[n.next].prev = n.prev;
    }
    int ids_;
    std::vector<Node> node_;
    std::vector<int16_t> list_;
    std::vector<int32_t> size_;
};

}  // namespace colibri

// A 4-ary min-heap over dense block ids whose keys can change: push, remove, change in O(log n). Equal keys are
// ordered by id, so the block on top is the same whatever the history of the heap.
#pragma once
#include <cstdint>
#include <vector>

#include "policy.hpp"

namespace colibri {

template <class Key> class Heap {
public:
    explicit Heap(int ids) : place_(ids, -1) {}
    void clear() {
        for (const Item& item : items_) place_[item.id] = -1;
        items_.clear();
    }
    int size() const { return int(items_.size()); }
    bool has(int id) const { return place_[id] >= 0; }
    int top() const { return items_[0].id; }
    const Key& key(int id) const { return items_[place_[id]].key; }

    void push(int id, Key key) {
        items_.push_back({key, id});
        place_[id] = size() - 1;
        up(size() - 1);
    }
    void remove(int id) {
        int at = place_[id];
        Item last = items_.back();
        items_.pop_back();
        place_[id] = -1;
        if (last.id == id) return;
        items_[at] = last;
        place_[last.id] = at;
        up(at);
        down(place_[last.id]);
    }
    void change(int id, Key key) {
        int at = place_[id];
        items_[at].key = key;
        up(at);
        down(place_[id]);
    }
    // The smallest block not pinned. Pinned ones above it step aside and come back.
    template <class Pinned> int smallest(const Pinned& pins) {
        while (pins(top())) {
            aside_.push_back(items_[0]);
            remove(top());
        }
        int found = top();
        for (const Item& item : aside_) push(item.id, item.key);
        aside_.clear();
        return found;
    }

private:
    struct Item {
        Key key;
        int id;
        bool operator<(const Item& other) const {
            return key < other.key || (!(other.key < key) && id < other.id);
        }
    };
    void put(int at, const Item& item) {
        items_[at] = item;
        place_[item.id] = at;
    }
    void up(int at) {
        Item item = items_[at];
        while (at > 0 && item < items_[(at - 1) / 4]) {
            put(at, items_[(at - 1) / 4]);
            at = (at - 1) / 4;
        }
        put(at, item);
    }
    void down(int at) {
        Item item = items_[at];
        for (int n = size();;) {
            int first = 4 * at + 1, best = first, last = first + 4 < n ? first + 4 : n;
            if (first >= n) break;
            for (int child = first + 1; child < last; ++child)
                if (items_[child] < items_[best]) best = child;
            if (!(items_[best] < item)) break;
            put(at, items_[best]);
            at = best;
        }
        put(at, item);
    }
    std::vector<Item> items_;
    std::vector<int> place_;
    std::vector<Item> aside_;
};

}  // namespace colibri

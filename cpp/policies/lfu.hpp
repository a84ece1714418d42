// lfu: the block with the fewest uses since the start leaves ("perfect" LFU: uses are counted out of the cache too).
//   hit(x), insert(x): uses[x] += 1; last[x] = now
//   evict(x):          uses[x] is kept
//   victim:            min of (uses, last, id)
// lfu-in-cache: the same with uses[x] = 1 at every insert, so that what leaves is forgotten.
// Blocks with equal uses form a list in order of last use, and a bit tree holds the counts that occur: O(1) but for
// the tree.
#pragma once
#include "bit_tree.hpp"
#include "policy.hpp"

namespace colibri {

template <bool keeps_history> class CountedLfu {
public:
    explicit CountedLfu(const PolicySetup& setup) : node_(setup.ids), uses_(setup.ids, 0), list_(256), counts_(256) {
        clear();
    }
    void clear() {
        counts_.clear();
        std::fill(list_.begin(), list_.end(), Ends{none, none});
        std::fill(uses_.begin(), uses_.end(), 0);
    }
    void resize(int) {}
    void miss(const Access&) {}
    template <class Pinned> int victim(const Pinned& pins) const {
        for (int64_t count = counts_.least();; count = counts_.above(count))
            for (int id = list_[count].oldest; id != none; id = node_[id].younger)
                if (!pins(id)) return id;
    }
    void evict(int id) { unlink(id); }
    void insert(const Access& a) {
        uses_[a.id] = keeps_history ? uses_[a.id] + 1 : 1;
        link(a.id);
    }
    void hit(const Access& a) {
        unlink(a.id);
        ++uses_[a.id];
        link(a.id);
    }

private:
    static constexpr int none = -1;
    struct Node {
        int older, younger;
    };
    struct Ends {
        int oldest, youngest;
    };
    void link(int id) {
        uint32_t count = uses_[id];
        if (count >= list_.size()) grow();
        Ends& ends = list_[count];
        node_[id] = {ends.youngest, none};
        if (ends.youngest == none) {
            ends.oldest = id;
            counts_.add(count);
        } else {
            node_[ends.youngest].younger = id;
        }
        ends.youngest = id;
    }
    void unlink(int id) {
        Node n = node_[id];
        Ends& ends = list_[uses_[id]];
        (n.older == none ? ends.oldest : node_[n.older].younger) = n.younger;
        (n.younger == none ? ends.youngest : node_[n.younger].older) = n.older;
        if (ends.oldest == none) counts_.remove(uses_[id]);
    }
    void grow() {
        list_.resize(list_.size() * 4, Ends{none, none});
        counts_.resize(int64_t(list_.size()));
        for (size_t count = 0; count < list_.size(); ++count)
            if (list_[count].oldest != none) counts_.add(int64_t(count));
    }
    std::vector<Node> node_;
    std::vector<uint32_t> uses_;
    std::vector<Ends> list_;  // by count
    BitTree counts_;          // counts whose list is not empty
};

using Lfu = CountedLfu<true>;
using LfuInCache = CountedLfu<false>;

}  // namespace colibri

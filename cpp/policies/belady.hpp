// belady: the block whose next use is furthest away leaves; needs the future, so it is a bound and not a policy.
//   hit(x), insert(x): next[x] = position of the next request for x
//   victim:            a block never used again, lowest id first; else max of next
// belady-bypass is the same rule under bypass admission: after an event the blocks with the nearest next uses stay. It
// is the only bound that holds for every policy (equal block sizes, atomic contract).
// Resident blocks are bits at the position of their next use, in words of words (64-ary tree), so a choice costs a few
// instructions. L. A. Belady, "A Study of Replacement Algorithms for a Virtual-Storage Computer", 1966.
#pragma once
#include "bit_tree.hpp"
#include "policy.hpp"

namespace colibri {

class Belady {
public:
    explicit Belady(const PolicySetup& setup)
        : future_(known(setup)),
          ids_(setup.ids),
          waiting_(int64_t(setup.future->size())),
          dead_(setup.ids),
          next_(setup.ids) {}
    void clear() { waiting_.clear(), dead_.clear(); }
    void resize(int) {}
    void miss(const Access&) {}
    template <class Pinned> int victim(const Pinned& pins) const {
        if (!dead_.empty())
            for (int64_t x = dead_.greatest(); x >= 0; x = dead_.below(x))
                if (int id = ids_ - 1 - int(x); !pins(id)) return id;
        int64_t position = waiting_.greatest();
        while (pins(future_[position])) position = waiting_.below(position);
        return future_[position];
    }
    void evict(int id) {
        if (next_[id] == never) dead_.remove(ids_ - 1 - id);
        else waiting_.remove(next_[id]);
    }
    void insert(const Access& a) {
        next_[a.id] = a.next;
        if (a.next == never) dead_.add(ids_ - 1 - a.id);
        else waiting_.add(a.next);
    }
    void hit(const Access& a) {
        evict(a.id);
        insert(a);
    }

private:
    static const int32_t* known(const PolicySetup& setup) {
        if (!setup.future)
            throw std::invalid_argument("policy belady must know the future: replay a trace, or give the cache one");
        return setup.future->data();
    }
    const int32_t* future_;  // block at each position
    int ids_;
    BitTree waiting_;  // positions of next uses
    BitTree dead_;     // ids_ - 1 - id of blocks never used again, so that the lowest id is the largest
    std::vector<int32_t> next_;
};

}  // namespace colibri

// fifo: the block that has been resident longest leaves.
//   hit(x):    nothing
//   insert(x): put x at the front
//   victim:    the block at the back
#pragma once
#include "list.hpp"

namespace colibri {

class Fifo {
public:
    explicit Fifo(const PolicySetup& setup) : list_(setup.ids) {}
    void clear() { list_.clear(); }
    void resize(int) {}
    void miss(const Access&) {}
    template <class Pinned> int victim(const Pinned& pins) const { return list_.oldest(pins); }
    void evict(int id) { list_.remove(id); }
    void insert(const Access& a) { list_.push_front(a.id); }
    void hit(const Access&) {}

private:
    Lists list_;
};

}  // namespace colibri

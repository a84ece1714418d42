// random: any resident block may leave, all with the same chance, seeded.
//   hit(x):    nothing
//   insert(x): append x to the residents
//   victim:    residents[random], drawn again while it is a member of the event
#pragma once
#include "policy.hpp"

namespace colibri {

class RandomVictim {
public:
    explicit RandomVictim(const PolicySetup& setup) : place_(setup.ids, -1), seed_(setup.seed), random_(setup.seed) {}
    void clear() {
        residents_.clear();
        random_ = Random(seed_);
    }
    void resize(int) {}
    void miss(const Access&) {}
    template <class Pinned> int victim(const Pinned& pins) {
        int id;
        do id = residents_[random_.below(uint32_t(residents_.size()))];
        while (pins(id));
        return id;
    }
    void evict(int id) {
        int last = residents_.back();
        residents_[place_[id]] = last;
        place_[last] = place_[id];
        residents_.pop_back();
    }
    void insert(const Access& a) {
        place_[a.id] = int(residents_.size());
        residents_.push_back(a.id);
    }
    void hit(const Access&) {}

private:
    std::vector<int> residents_, place_;
    uint64_t seed_;
    Random random_;
};

}  // namespace colibri

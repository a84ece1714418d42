// lfu-aged: uses count less the longer ago they are.
//   hit(x), insert(x): mass[x] = mass[x] * 2^(-passes since its last use / half_life) + 1
//   evict(x):          mass[x] is kept
//   victim:            min of mass[x] as decayed by now; ties by id
// gate-weighted: the same with the router's weight instead of 1: decayed probability mass.
// All masses decay alike, so log2(mass at last use) + last pass / half_life orders blocks the same way at every time.
// half_life is in forward passes (tokens while decoding).
#pragma once
#include "heap.hpp"

namespace colibri {

template <bool by_gate> class DecayedMass {
public:
    explicit DecayedMass(const PolicySetup& setup)
        : heap_(setup.ids), mass_(setup.ids), last_(setup.ids), half_life_(setup.param("half_life", 16, 1e-3, 1e9)) {}
    void clear() {
        heap_.clear();
        mass_.assign(mass_.size(), 0);
    }
    void resize(int) {}
    void miss(const Access&) {}
    template <class Pinned> int victim(const Pinned& pins) { return heap_.smallest(pins); }
    void evict(int id) { heap_.remove(id); }
    void insert(const Access& a) { heap_.push(a.id, use(a)); }
    void hit(const Access& a) { heap_.change(a.id, use(a)); }

private:
    int64_t use(const Access& a) {
        double decay = std::exp2(-double(a.pass - last_[a.id]) / half_life_);
        mass_[a.id] = mass_[a.id] * decay + (by_gate ? weight(a.gate) : 1.0);
        last_[a.id] = a.pass;
        return on_grid(std::log2(mass_[a.id]) + double(a.pass) / half_life_);
    }
    static double weight(float gate) { return gate > 0 ? gate : 0.0; }  // NaN and negative count nothing
    Heap<int64_t> heap_;
    std::vector<double> mass_;
    std::vector<int64_t> last_;
    double half_life_;
};

using LfuAged = DecayedMass<false>;
using GateWeighted = DecayedMass<true>;

}  // namespace colibri

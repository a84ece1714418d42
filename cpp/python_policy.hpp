// A policy written in Python, for experiments: the same contract as the C++ ones, at the speed of Python calls.
//
// The cache is given a callable, `make(slots)`, and asks it for one object per pool. Of the object's methods
//   victim(candidates) -> (layer, block)   is needed; candidates are the (layer, block) pairs that may leave, ascending
//   insert(layer, block, now, weight), hit(layer, block, now, weight), evict(layer, block), clear()   are optional
#pragma once
#include <nanobind/nanobind.h>

#include <set>

#include "policies/policy.hpp"

namespace colibri {

class PythonPolicy {
public:
    PythonPolicy(const nanobind::object& make, const PolicySetup& setup)
        : blocks_(setup.blocks), layer_(setup.first_layer) {
        nanobind::gil_scoped_acquire gil;
        policy_ = make(setup.slots);
        if (!nanobind::hasattr(policy_, "victim"))
            throw std::invalid_argument(
                "a policy in Python must have a method victim(candidates); the object made by it has none");
        for (const char* name : {"hit", "insert", "evict", "clear"})
            if (nanobind::hasattr(policy_, name)) has_.insert(name);
    }
    PythonPolicy(PythonPolicy&&) = default;
    ~PythonPolicy() {
        nanobind::gil_scoped_acquire gil;
        policy_.reset();
    }
    void clear() {
        held_.clear();
        if (!has_.count("clear")) return;
        nanobind::gil_scoped_acquire gil;
        policy_.attr("clear")();
    }
    void resize(int) {}
    void miss(const Access&) {}
    int victim(const Pins& pins) {
        nanobind::gil_scoped_acquire gil;
        nanobind::list candidates;
        for (int id : held_)
            if (!pins(id)) candidates.append(pair(id));
        nanobind::object chosen = policy_.attr("victim")(candidates);
        if (PySequence_Contains(candidates.ptr(), chosen.ptr()) != 1)
            throw std::invalid_argument("victim(candidates) must return one of the " +
                                        std::to_string(nanobind::len(candidates)) + " candidates, got " +
                                        nanobind::repr(chosen).c_str());
        return (nanobind::cast<int>(chosen[0]) - layer_) * blocks_ + nanobind::cast<int>(chosen[1]);
    }
    void evict(int id) {
        held_.erase(id);
        if (!has_.count("evict")) return;
        nanobind::gil_scoped_acquire gil;
        policy_.attr("evict")(layer_ + id / blocks_, id % blocks_);
    }
    void insert(const Access& a) {
        held_.insert(a.id);
        tell("insert", a);
    }
    void hit(const Access& a) { tell("hit", a); }

private:
    nanobind::object pair(int id) const { return nanobind::make_tuple(layer_ + id / blocks_, id % blocks_); }
    void tell(const char* name, const Access& a) {
        if (!has_.count(name)) return;
        nanobind::gil_scoped_acquire gil;
        policy_.attr(name)(layer_ + a.id / blocks_, a.id % blocks_, a.now, a.gate);
    }
    nanobind::object policy_;
    std::set<std::string> has_;
    std::set<int> held_;
    int blocks_, layer_;
};

}  // namespace colibri

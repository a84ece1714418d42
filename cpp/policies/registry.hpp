// From a policy's name to its class. `with_policy` is the one place that knows them all.
#pragma once
#include "lru.hpp"
#include "weighted_lru.hpp"

namespace colibri {

template <class P> struct Tag {
    using type = P;
};

// f(Tag<P>{}) for the class called `name`. Raises std::invalid_argument for a name without one.
template <class F> auto with_policy(const std::string& name, F&& f) {
    if (name == "lru") return f(Tag<Lru>{});
    if (name == "weighted-lru") return f(Tag<WeightedLru>{});
    throw std::invalid_argument("unknown policy '" + name + "'; colibri_lab.cache.policies lists them");
}

inline AnyPolicy make_policy(const std::string& name, const PolicySetup& setup) {
    return with_policy(name, [&](auto tag) { return AnyPolicy::of<typename decltype(tag)::type>(setup); });
}

}  // namespace colibri

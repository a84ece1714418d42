// From a policy's name to its class. `with_policy` is the one place that knows them all; colibri_lab.cache.policies
// describes them to people.
#pragma once
#include "arc.hpp"
#include "belady.hpp"
#include "clock.hpp"
#include "colibri_lfru.hpp"
#include "fifo.hpp"
#include "layer_aware.hpp"
#include "lfru.hpp"
#include "lfu.hpp"
#include "lfu_aged.hpp"
#include "lru.hpp"
#include "lru_k.hpp"
#include "random.hpp"
#include "s3_fifo.hpp"
#include "sieve.hpp"
#include "slru.hpp"
#include "two_q.hpp"
#include "weighted_lru.hpp"

namespace colibri {

template <class P> struct Tag {
    using type = P;
};

// Policies worth their own copy of the replay loop: f(Tag<P>{}), or nothing and false.
template <class F> bool with_fast_policy(const std::string& name, F&& f) {
    if (name == "lru" || name == "least-stale" || name == "static-pin" || name == "pin+lru") return f(Tag<Lru>{}), true;
    if (name == "fifo") return f(Tag<Fifo>{}), true;
    if (name == "clock") return f(Tag<Clock>{}), true;
    if (name == "sieve") return f(Tag<Sieve>{}), true;
    if (name == "lfu") return f(Tag<Lfu>{}), true;
    if (name == "lfu-in-cache") return f(Tag<LfuInCache>{}), true;
    if (name == "slru") return f(Tag<Slru>{}), true;
    if (name == "2q") return f(Tag<TwoQ>{}), true;
    if (name == "arc") return f(Tag<Arc>{}), true;
    if (name == "s3-fifo") return f(Tag<S3Fifo>{}), true;
    if (name == "belady" || name == "belady-bypass") return f(Tag<Belady>{}), true;
    return false;
}

// f(Tag<P>{}) for the class called `name`. Raises std::invalid_argument for a name without one.
template <class F> void with_policy(const std::string& name, F&& f) {
    if (with_fast_policy(name, f)) return;
    if (name == "random") return f(Tag<RandomVictim>{});
    if (name == "lfu-aged") return f(Tag<LfuAged>{});
    if (name == "gate-weighted") return f(Tag<GateWeighted>{});
    if (name == "weighted-lru") return f(Tag<WeightedLru>{});
    if (name == "lfru") return f(Tag<Lfru>{});
    if (name == "colibri-lfru") return f(Tag<ColibriLfru>{});
    if (name == "lru-k") return f(Tag<LruK>{});
    if (name == "layer-aware") return f(Tag<LayerAware>{});
    throw std::invalid_argument("unknown policy '" + name + "'; colibri_lab.cache.policies lists them");
}

inline AnyPolicy make_policy(const std::string& name, const PolicySetup& setup) {
    AnyPolicy policy;
    with_policy(name, [&](auto tag) { policy = AnyPolicy::of<typename decltype(tag)::type>(setup); });
    return policy;
}

// Parameter names that `setup` was given and no policy read. Call after making the policy.
inline void refuse_unread(const std::string& name, const PolicySetup& setup) {
    for (const auto& [param, value] : setup.params)
        if (!setup.read.count(param))
            throw std::invalid_argument("policy '" + name + "' has no parameter '" + param + "'");
}

}  // namespace colibri

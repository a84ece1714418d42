// What a replacement policy is told, and what it must answer. Every policy of this folder is a plain class with
//
//   clear()             forget everything, history too
//   resize(slots)       the number of blocks that may stay changed
//   miss(access)        a member of the event is not resident; called before room is made (ghost lists listen here)
//   victim(pins) -> id  which of the blocks it holds should leave; never one in `pins` (Pins or NoPins), and there
//                       always is another
//   evict(id)           that block leaves (ghost lists remember it)
//   insert(access)      the block is resident from now on
//   hit(access)         a block it holds was asked for again
//
// The pool (expert_cache_core.hpp) decides when to call which, so one policy serves the atomic and the serial contract.
// Blocks are dense ids, block = layer base + expert; among equals the lowest id leaves first.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace colibri {

struct Access {
    int id;           // block inside its pool
    int64_t now;      // events of this pool so far (accesses under the serial contract)
    int64_t pass;     // forward passes so far: age in tokens while decoding
    int64_t access;   // accesses of all layers together
    float gate;       // router weight, 1 when the router gave none
    int32_t next;     // position of the next request for this block in the pool's future, or `never`
};

constexpr int32_t never = INT32_MAX;

// The members of one event, which may not be evicted by it. Emptied in O(1) by moving on to the next epoch.
class Pins {
public:
    explicit Pins(int ids = 0) : mark_(ids, 0) {}
    void clear() { ++epoch_; }
    void add(int id) { mark_[id] = epoch_; }
    bool operator()(int id) const { return mark_[id] == epoch_; }

private:
    std::vector<uint64_t> mark_;
    uint64_t epoch_ = 1;
};

// For a choice among all blocks.
struct NoPins {
    bool operator()(int) const { return false; }
};

struct PolicySetup {
    int ids = 0;      // blocks of the pool
    int slots = 1;    // blocks that may stay
    int blocks = 1;   // blocks per layer; layer of a block = first_layer + id / blocks
    int first_layer = 0;
    uint64_t seed = 0;
    std::map<std::string, double> params;
    const std::vector<int32_t>* future = nullptr;  // block at each position of the pool's future (Belady)

    mutable std::set<std::string> read;            // parameters that a policy asked for

    // Parameter `name`, or its default. Raises std::invalid_argument outside [low, high].
    double param(const std::string& name, double fallback, double low, double high) const {
        read.insert(name);
        auto found = params.find(name);
        double value = found == params.end() ? fallback : found->second;
        if (!(value >= low && value <= high))
            throw std::invalid_argument("policy parameter " + name + " must be " + text(low) + " to " + text(high) +
                                        ", got " + text(value));
        return value;
    }

    static std::string text(double value) {
        std::string s = std::to_string(value);
        s.erase(s.find_last_not_of('0') + 1);
        if (s.back() == '.') s.pop_back();
        return s;
    }
};

// A score on a grid of 2^-30, so that equal scores reached by different roundings are ties and not chance.
inline int64_t on_grid(double score) {
    constexpr double limit = 4e18;
    return int64_t(std::floor(std::min(std::max(score * (1 << 30), -limit), limit) + 0.5));
}

// The small deterministic generator behind `random` policy and `random` order (splitmix64, Steele et al. 2014).
class Random {
public:
    explicit Random(uint64_t seed = 0) : state_(seed) {}
    uint64_t next() {
        uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }
    uint32_t below(uint32_t n) { return uint32_t(((next() >> 32) * n) >> 32); }

private:
    uint64_t state_;
};

// Any policy behind virtual calls: what the live engine holds, so that its kernel compiles once and not once a policy.
class AnyPolicy {
public:
    template <class P, class... Args> static AnyPolicy of(Args&&... args) {
        AnyPolicy any;
        any.held_ = std::make_unique<Held<P>>(std::forward<Args>(args)...);
        return any;
    }
    void clear() { held_->clear(); }
    void resize(int slots) { held_->resize(slots); }
    void miss(const Access& a) { held_->miss(a); }
    int victim(const Pins& pins) { return held_->victim(pins); }
    void evict(int id) { held_->evict(id); }
    void insert(const Access& a) { held_->insert(a); }
    void hit(const Access& a) { held_->hit(a); }

private:
    struct Base {
        virtual ~Base() = default;
        virtual void clear() = 0;
        virtual void resize(int) = 0;
        virtual void miss(const Access&) = 0;
        virtual int victim(const Pins&) = 0;
        virtual void evict(int) = 0;
        virtual void insert(const Access&) = 0;
        virtual void hit(const Access&) = 0;
    };
    template <class P> struct Held final : Base {
        P policy;
        template <class... Args> explicit Held(Args&&... args) : policy(std::forward<Args>(args)...) {}
        void clear() override { policy.clear(); }
        void resize(int slots) override { policy.resize(slots); }
        void miss(const Access& a) override { policy.miss(a); }
        int victim(const Pins& pins) override { return policy.victim(pins); }
        void evict(int id) override { policy.evict(id); }
        void insert(const Access& a) override { policy.insert(a); }
        void hit(const Access& a) override { policy.hit(a); }
    };
    std::unique_ptr<Base> held_;
};

}  // namespace colibri

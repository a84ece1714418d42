// lfru: uses over age.
//   hit(x), insert(x): uses[x] += 1; last[x] = pass
//   evict(x):          uses[x] is kept
//   victim:            min of uses / (pass - last + 1), age in forward passes; ties by id
// The order of two blocks can change while both only age: uses / age curves cross once at most. A kinetic tournament
// (Basch, Guibas, Hershberger 1997) keeps the winner of each match and the pass from which the result would differ.
#pragma once
#include <algorithm>

#include "policy.hpp"

namespace colibri {

class Lfru {
public:
    explicit Lfru(const PolicySetup& setup) : uses_(setup.ids), last_(setup.ids) {
        while (leaves_ < setup.ids) leaves_ *= 2;
        match_.resize(2 * leaves_);
        clear();
    }
    void clear() {
        std::fill(uses_.begin(), uses_.end(), 0);
        std::fill(match_.begin(), match_.end(), Match{-1, INT64_MAX});
    }
    void resize(int) {}
    void miss(const Access& a) { pass_ = a.pass; }
    template <class Pinned> int victim(const Pinned& pins) {
        refresh(1);
        while (pins(match_[1].winner)) {
            aside_.push_back(match_[1].winner);
            leave(match_[1].winner);
            refresh(1);
        }
        int found = match_[1].winner;
        for (int id : aside_) enter(id);
        aside_.clear();
        return found;
    }
    void evict(int id) { leave(id); }
    void insert(const Access& a) { use(a); }
    void hit(const Access& a) { use(a); }

private:
    struct Match {
        int winner;      // the block that would leave, -1 when there is none below
        int64_t until;   // first pass at which some match below must be played again
    };
    void use(const Access& a) {
        pass_ = a.pass;
        ++uses_[a.id];
        last_[a.id] = a.pass;
        enter(a.id);
    }
    void enter(int id) {
        match_[leaves_ + id].winner = id;
        replay_path(id);
    }
    void leave(int id) {
        match_[leaves_ + id].winner = -1;
        replay_path(id);
    }
    void replay_path(int id) {
        for (int m = (leaves_ + id) / 2; m >= 1; m /= 2) play(m);
    }
    void refresh(int m) {
        if (m >= leaves_ || match_[m].until > pass_) return;
        refresh(2 * m);
        refresh(2 * m + 1);
        play(m);
    }
    // Sign of uses_a / age_a - uses_b / age_b at `pass`, as a difference of products.
    int64_t compare(int a, int b, int64_t pass) const {
        return uses_[a] * (pass - last_[b] + 1) - uses_[b] * (pass - last_[a] + 1);
    }
    void play(int m) {
        const Match &x = match_[2 * m], &y = match_[2 * m + 1];
        int64_t until = std::min(x.until, y.until);
        int a = x.winner, b = y.winner;
        if (a < 0 || b < 0) {
            match_[m] = {a < 0 ? b : a, until};
            return;
        }
        int64_t d = compare(a, b, pass_);
        if (d > 0 || (d == 0 && b < a)) std::swap(a, b), d = -d;
        // a leaves first now; that ends when the difference, which grows by uses_a - uses_b a pass, turns positive.
        int64_t growth = uses_[a] - uses_[b];
        if (growth > 0) until = std::min(until, pass_ + (-d) / growth + (b < a && (-d) % growth == 0 ? 0 : 1));
        match_[m] = {a, until};
    }
    std::vector<int64_t> uses_, last_;
    std::vector<Match> match_;
    std::vector<int> aside_;
    int leaves_ = 1;
    int64_t pass_ = 0;
};

}  // namespace colibri

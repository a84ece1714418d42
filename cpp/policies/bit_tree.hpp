// A set of integers below n as bits in words of words: members, neighbours, least and greatest in O(log64 n).
#pragma once
#include <cstdint>
#include <vector>

namespace colibri {

class BitTree {
public:
    explicit BitTree(int64_t n) { resize(n); }
    // Room for integers below n; empties the set.
    void resize(int64_t n) {
        levels_ = 0;
        int64_t total = 0;
        do {
            n = (n + 63) / 64;
            start_[levels_++] = total;
            total += n > 0 ? n : 1;
        } while (n > 1);
        size_ = (total > 1 ? start_[1] : 1) * 64;
        words_.assign(size_t(total), 0);
    }
    int64_t size() const { return size_; }
    bool empty() const { return words_.back() == 0; }
    void clear() { words_.assign(words_.size(), 0); }
    void add(int64_t x) {
        for (int l = 0; l < levels_; ++l, x >>= 6) {
            uint64_t& word = words_[start_[l] + (x >> 6)];
            uint64_t had = word;
            word = had | 1ull << (x & 63);
            if (had) return;
        }
    }
    void remove(int64_t x) {
        for (int l = 0; l < levels_; ++l, x >>= 6) {
            uint64_t& word = words_[start_[l] + (x >> 6)];
            word &= ~(1ull << (x & 63));
            if (word) return;
        }
    }
    // The set must not be empty.
    int64_t greatest() const { return descend<true>(levels_ - 1, 0); }
    int64_t least() const { return descend<false>(levels_ - 1, 0); }
    // The next member below or above x, or -1.
    int64_t below(int64_t x) const {
        for (int l = 0; l < levels_; ++l, x >>= 6) {
            uint64_t rest = words_[start_[l] + (x >> 6)] & ((1ull << (x & 63)) - 1);
            if (rest) return descend<true>(l - 1, (x & ~int64_t(63)) + 63 - __builtin_clzll(rest));
        }
        return -1;
    }
    int64_t above(int64_t x) const {
        for (int l = 0; l < levels_; ++l, x >>= 6) {
            uint64_t rest = words_[start_[l] + (x >> 6)] & ~((2ull << (x & 63)) - 1);
            if (rest) return descend<false>(l - 1, (x & ~int64_t(63)) + __builtin_ctzll(rest));
        }
        return -1;
    }

private:
    template <bool high> int64_t descend(int level, int64_t x) const {
        for (; level >= 0; --level) {
            uint64_t word = words_[start_[level] + x];
            x = x * 64 + (high ? 63 - __builtin_clzll(word) : __builtin_ctzll(word));
        }
        return x;
    }
    std::vector<uint64_t> words_;
    int64_t start_[8];
    int64_t size_ = 0;
    int levels_ = 0;
};

}  // namespace colibri

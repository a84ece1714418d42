// Which blocks of a region are taken: one bit a block, and above it one bit a word of 64 blocks that says "all taken".
//
// Searching a run of free blocks goes word by word and skips taken stretches 4096 blocks at a time, so a nearly full
// region is searched about as fast as an empty one. Inside a word, runs are found by folding (x & x >> n), not bit by
// bit.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace colibri {

class BlockMap {
   public:
    explicit BlockMap(int64_t blocks) : blocks_(blocks), words_((blocks + 63) / 64), taken_(words_, 0), full_((words_ + 63) / 64, 0) {
        if (blocks % 64) taken_.back() = ~0ull << (blocks % 64);  // what lies behind the end is never free
        if (words_ % 64) full_.back() = ~0ull << (words_ % 64);
    }

    int64_t size() const { return blocks_; }
    bool taken(int64_t i) const { return taken_[i / 64] >> (i % 64) & 1; }

    void take(int64_t first, int64_t count) {
        each_word(first, count, [&](int64_t w, uint64_t bits) {
            taken_[w] |= bits;
            if (taken_[w] == ~0ull) full_[w / 64] |= 1ull << (w % 64);
        });
    }
    void give(int64_t first, int64_t count) {
        each_word(first, count, [&](int64_t w, uint64_t bits) {
            taken_[w] &= ~bits;
            full_[w / 64] &= ~(1ull << (w % 64));
        });
    }

    // Lowest taken block in [from, to), or `to`.
    int64_t next_taken(int64_t from, int64_t to) const {
        if (from >= to) return to;
        int64_t w = from / 64;
        uint64_t bits = taken_[w] & ~0ull << (from % 64);
        while (!bits) {
            if (++w * 64 >= to) return to;
            bits = taken_[w];
        }
        return std::min(to, w * 64 + lowest(bits));
    }
    // Lowest free block in [from, to), or `to`.
    int64_t next_free(int64_t from, int64_t to) const {
        if (from >= to) return to;
        int64_t w = from / 64;
        uint64_t free = ~taken_[w] & ~0ull << (from % 64);
        if (!free) {
            w = next_open(w + 1);
            if (w * 64 >= to) return to;
            free = ~taken_[w];
        }
        return std::min(to, w * 64 + lowest(free));
    }
    // Highest taken block in [from, to), or -1.
    int64_t last_taken(int64_t from, int64_t to) const {
        if (from >= to) return -1;
        int64_t w = (to - 1) / 64;
        uint64_t bits = taken_[w] & ~0ull >> (63 - (to - 1) % 64);
        while (!bits) {
            if (w-- * 64 <= from) return -1;
            bits = taken_[w];
        }
        int64_t found = w * 64 + highest(bits);
        return found >= from ? found : -1;
    }
    // Highest free block below `to`, or -1.
    int64_t last_free(int64_t to) const {
        if (to <= 0) return -1;
        int64_t w = (to - 1) / 64;
        uint64_t free = ~taken_[w] & ~0ull >> (63 - (to - 1) % 64);
        if (free) return w * 64 + highest(free);
        int64_t s = w / 64;
        uint64_t open = ~full_[s] & ((1ull << (w % 64)) - 1);
        while (!open) {
            if (--s < 0) return -1;
            open = ~full_[s];
        }
        w = s * 64 + highest(open);
        return w * 64 + highest(~taken_[w]);
    }

    // First block of the lowest run of `count` free blocks, or -1.
    int64_t lowest_run(int64_t count) const {
        int64_t run = 0;  // free blocks that end where word w begins
        for (int64_t w = next_open(0); w < words_;) {
            uint64_t free = ~taken_[w];
            int low = ~free ? lowest(~free) : 64;
            if (run + low >= count) return w * 64 - run;
            if (count < 64)
                if (uint64_t at = starts(free, int(count))) return w * 64 + lowest(at);
            run = ~free ? 63 - highest(~free) : run + 64;
            int64_t next = next_open(w + 1);
            if (next != w + 1) run = 0;
            w = next;
        }
        return -1;
    }

    // First block of the highest run of `count` free blocks that begins a whole number of `unit`s before the end, or
    // -1.
    int64_t highest_run(int64_t count, int64_t unit) const {
        for (int64_t end = blocks_;;) {
            int64_t at = blocks_ - (blocks_ - end + count + unit - 1) / unit * unit;
            if (at < 0) return -1;
            int64_t in_the_way = last_taken(at, at + count);
            if (in_the_way < 0) return at;
            end = last_free(in_the_way) + 1;
        }
    }

    struct Runs {
        int64_t count = 0, largest = 0;
    };
    // The free runs there are, and the length of the longest.
    Runs free_runs() const {
        Runs runs;
        for (int64_t from, end = 0; (from = next_free(end, blocks_)) < blocks_;) {
            end = next_taken(from, blocks_);
            ++runs.count;
            runs.largest = std::max(runs.largest, end - from);
        }
        return runs;
    }

   private:
    static int lowest(uint64_t bits) { return __builtin_ctzll(bits); }
    static int highest(uint64_t bits) { return 63 - __builtin_clzll(bits); }
    // Bits at which `count` ones begin; runs that reach beyond the word do not count.
    static uint64_t starts(uint64_t ones, int count) {
        for (int have = 1; have < count;) {
            int step = std::min(have, count - have);
            ones &= ones >> step;
            have += step;
        }
        return ones;
    }
    // First word from `w` on with a free block, or words_.
    int64_t next_open(int64_t w) const {
        if (w >= words_) return words_;
        int64_t s = w / 64;
        uint64_t open = ~full_[s] & ~0ull << (w % 64);
        while (!open) {
            if (++s >= int64_t(full_.size())) return words_;
            open = ~full_[s];
        }
        return s * 64 + lowest(open);
    }
    template <class F>
    static void each_word(int64_t first, int64_t count, F&& f) {
        for (int64_t at = first, end = first + count; at < end;) {
            int64_t w = at / 64, stop = std::min(end, (w + 1) * 64);
            int64_t n = stop - at;
            f(w, (n == 64 ? ~0ull : (1ull << n) - 1) << (at % 64));
            at = stop;
        }
    }

    int64_t blocks_, words_;
    std::vector<uint64_t> taken_, full_;
};

}  // namespace colibri

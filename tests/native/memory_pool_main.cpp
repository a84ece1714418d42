// The pool and its block map against a plain array of flags, at sizes around the word limits.
#include "memory_pool_core.hpp"

#include <map>
#include <random>

#include "expect.hpp"

using namespace colibri;

struct Plain {  // a flag per block, searched one by one
    std::vector<char> taken;
    bool free(int64_t at, int64_t n) const {
        for (int64_t i = at; i < at + n; ++i)
            if (taken[i]) return false;
        return true;
    }
    int64_t size() const { return int64_t(taken.size()); }
    int64_t lowest_run(int64_t n) const {
        for (int64_t at = 0; at + n <= size(); ++at)
            if (free(at, n)) return at;
        return -1;
    }
    int64_t highest_run(int64_t n, int64_t unit) const {
        for (int64_t end = size(); end >= n; end -= unit) {
            int64_t at = end - (n + unit - 1) / unit * unit;
            if (at >= 0 && free(at, n)) return at;
        }
        return -1;
    }
    BlockMap::Runs runs() const {
        BlockMap::Runs r;
        for (int64_t at = 0, length = 0; at <= size(); ++at) {
            if (at < size() && !taken[at]) ++length;
            else if (length) ++r.count, r.largest = std::max(r.largest, length), length = 0;
        }
        return r;
    }
    int64_t highest_free(int64_t to) const {
        for (int64_t i = to - 1; i >= 0; --i)
            if (!taken[i]) return i;
        return -1;
    }
};

static void map_agrees(int64_t blocks, std::mt19937_64& random) {
    BlockMap map(blocks);
    Plain plain{std::vector<char>(blocks, 0)};
    auto below = [&](int64_t n) { return int64_t(random() % uint64_t(n)); };
    for (int step = 0; step < 400; ++step) {
        int64_t first = below(blocks), n = 1 + below(std::min<int64_t>(blocks - first, step % 3 ? 9 : 200));
        bool give = below(100) < 45;
        for (int64_t i = first; i < first + n; ++i) plain.taken[i] = !give;
        give ? map.give(first, n) : map.take(first, n);
        int64_t count = 1 + below(step % 2 ? 5 : blocks), unit = 1 + below(7);
        EXPECT(map.lowest_run(count) == plain.lowest_run(count));
        EXPECT(map.highest_run(count, unit) == plain.highest_run(count, unit));
        EXPECT(map.last_free(first + n) == plain.highest_free(first + n));
        auto a = map.free_runs(), b = plain.runs();
        EXPECT(a.count == b.count && a.largest == b.largest);
        int64_t to = first + n, next = first, last = to - 1, free = first;
        while (next < to && !plain.taken[next]) ++next;
        while (last >= first && !plain.taken[last]) --last;
        while (free < to && plain.taken[free]) ++free;
        EXPECT(map.next_taken(first, to) == next);
        EXPECT(map.next_free(first, to) == free);
        EXPECT(map.last_taken(first, to) == (last < first ? -1 : last));
    }
}

// Every byte of a live run belongs to it alone: each is filled with the run's number and still holds it at release.
static void pool_holds(int64_t bytes, int64_t unit, bool huge, std::mt19937_64& random) {
    MemoryPool pool(bytes, unit, huge, true);
    std::map<int64_t, std::pair<int64_t, uint8_t>> live;  // offset → bytes asked for, fill
    int64_t used = 0;
    for (int step = 0; step < 600; ++step) {
        if (random() % 100 < 55 || live.empty()) {
            bool coarse = random() % 3 == 0;
            int64_t want = 1 + int64_t(random() % uint64_t(coarse ? 3 * unit : 5 * kBlockBytes));
            int64_t at = pool.allocate(want, coarse ? PoolView::coarse : PoolView::fine, 1 + step % 7);
            if (at < 0) continue;
            EXPECT(at % kBlockBytes == 0 && at + want <= pool.size());
            if (coarse) EXPECT((pool.size() - at) % pool.unit_bytes() == 0 && pool.run_bytes(at) % pool.unit_bytes() == 0);
            EXPECT(pool.run_bytes(at) >= want);
            used += pool.run_bytes(at);
            live[at] = {want, uint8_t(step)};
            std::memset(pool.base() + at, step & 255, want);
        } else {
            auto gone = std::next(live.begin(), random() % live.size());
            auto [want, fill] = gone->second;
            for (int64_t i = 0; i < want; ++i) EXPECT(pool.base()[gone->first + i] == fill);
            used -= pool.run_bytes(gone->first);
            pool.release(gone->first);
            EXPECT_THROW(pool.release(gone->first), std::invalid_argument, "no live run begins at offset");
            live.erase(gone);
        }
        EXPECT(pool.counts().used * kBlockBytes == used);
        int64_t tagged = 0;
        for (uint8_t tag : pool.tags()) tagged += tag != 0;
        EXPECT(tagged * kBlockBytes == used);
    }
    while (!live.empty()) pool.release(live.begin()->first), live.erase(live.begin());
    const PoolCounts& c = pool.counts();
    EXPECT(c.used == 0 && c.wasted == 0 && c.allocations == c.releases);
    for (int64_t blocks : c.tag_used) EXPECT(blocks == 0);
    EXPECT(pool.free_runs().largest * kBlockBytes == pool.size());
}

int main() {
    std::mt19937_64 random(1);
    for (int64_t blocks : {1, 31, 33, 63, 64, 65, 127, 257, 4095, 4096, 4097, 4161}) map_agrees(blocks, random);
    for (int64_t bytes : {int64_t(1), 63 * kBlockBytes, 65 * kBlockBytes + 1, 257 * kBlockBytes, int64_t(5) << 20})
        for (int64_t unit : {int64_t(1), kBlockBytes, 3 * kBlockBytes - 5, 64 * kBlockBytes})
            for (bool huge : {false, true}) pool_holds(bytes, unit, huge, random);

    MemoryPool pool(8192, 1, false, false);
    EXPECT(pool.allocate(8193, PoolView::fine, 1) == -1 && pool.counts().refusals == 1);
    EXPECT_THROW(pool.allocate(0, PoolView::fine, 1), std::invalid_argument, "bytes must be positive");
    EXPECT_THROW(pool.allocate(1, PoolView::fine, 0), std::invalid_argument, "tag 1 to 7");
    EXPECT_THROW(pool.release(-4096), std::invalid_argument, "no live run");
    EXPECT_THROW(pool.release(1 << 20), std::invalid_argument, "no live run");
    EXPECT_THROW(MemoryPool(0, 1, false, false), std::invalid_argument, "bytes must be 1 to");
    EXPECT_THROW(MemoryPool(int64_t(1) << 46, 1, false, false), std::runtime_error, "the system gives no");
}

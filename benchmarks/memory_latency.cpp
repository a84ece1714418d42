// Time of one allocation and its release, the pool against malloc, at several degrees of occupancy. Prints CSV.
//
// The pool (1 GiB) is filled with runs of 1 to 64 blocks at random and thinned out at random to the wanted occupancy,
// which leaves it about as fragmented as it gets. malloc gets the same history. "first fit by block" is the search a
// bitmap without words and second level would make.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>

#include "memory_pool_core.hpp"

using namespace colibri;
using Clock = std::chrono::steady_clock;

static double ns(Clock::time_point from) { return std::chrono::duration<double, std::nano>(Clock::now() - from).count(); }

template <class F>
static void measure(const char* name, int64_t bytes, double occupancy, int times, F&& once) {
    constexpr int kBatch = 16;  // the clock itself takes some 25 ns
    std::vector<double> taken;
    for (int i = 0; i < times; ++i) {
        auto start = Clock::now();
        bool served = true;
        for (int j = 0; j < kBatch; ++j) served &= once();
        if (!served) break;
        taken.push_back(ns(start) / kBatch);
    }
    if (taken.empty()) return;
    std::sort(taken.begin(), taken.end());
    std::printf("%s,%lld,%.4f,%.0f,%.0f,%zu\n", name, static_cast<long long>(bytes), occupancy, taken[taken.size() / 2],
                taken[taken.size() * 99 / 100], taken.size());
}

static int64_t by_block(const std::vector<uint8_t>& tags, int64_t count) {
    int64_t run = 0;
    for (int64_t i = 0; i < int64_t(tags.size()); ++i) {
        run = tags[i] ? 0 : run + 1;
        if (run == count) return i - run + 1;
    }
    return -1;
}

int main() {
    std::printf("allocator,bytes,occupancy,median_ns,p99_ns,n\n");
    for (double wanted : {0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99}) {
        std::mt19937_64 random(7);
        MemoryPool pool(int64_t(1) << 30, 2 << 20, false, false);
        std::vector<std::pair<int64_t, void*>> live;
        while (wanted > 0) {
            int64_t bytes = (1 + int64_t(random() % 64)) * kBlockBytes, at = pool.allocate(bytes, PoolView::fine, 1);
            if (at < 0) break;
            live.push_back({at, std::malloc(bytes)});
        }
        std::shuffle(live.begin(), live.end(), random);
        while (!live.empty() && double(pool.counts().used) > wanted * double(pool.blocks())) {
            pool.release(live.back().first);
            std::free(live.back().second);
            live.pop_back();
        }
        double occupancy = double(pool.counts().used) / double(pool.blocks());
        for (int64_t bytes : {int64_t(4096), int64_t(65536), int64_t(1) << 20}) {
            measure("pool", bytes, occupancy, 2000, [&] {
                int64_t at = pool.allocate(bytes, PoolView::fine, 1);
                if (at >= 0) pool.release(at);
                return at >= 0;
            });
            measure("malloc", bytes, occupancy, 2000, [&] {
                void* volatile p = std::malloc(bytes);
                std::free(p);
                return true;
            });
            measure("first fit by block", bytes, occupancy, 50, [&] { return by_block(pool.tags(), MemoryPool::blocks_of(bytes)) >= 0; });
        }
        for (auto [at, memory] : live) std::free(memory);
    }
}

// One region of memory for everything the engine computes with, handed out in runs of 4 KiB blocks.
//
// Two views of the one block map, so that no byte can belong to both: `fine` takes the lowest run that fits (arenas, KV
// pages), `coarse` the highest one that begins a whole number of units before the end (expert slots; a unit is a slot).
// Sizes are rounded up. There is no realloc: a run neither moves nor grows while somebody may point into it; release it
// and allocate another. Not thread-safe.
#pragma once
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "include/block_map.hpp"

namespace colibri {

constexpr int64_t kBlockBytes = 4096;
constexpr int64_t kHugePage = 2 << 20;
constexpr int kTags = 8;  // tag 0 is "free"

enum class PoolView { fine, coarse };

struct PoolCounts {
    int64_t used = 0, peak = 0;                     // blocks
    int64_t wasted = 0;                             // bytes that rounding up took, of live runs
    int64_t allocations = 0, releases = 0, refusals = 0;
    int64_t tag_used[kTags] = {}, tag_peak[kTags] = {};  // blocks by what they are for
};

// Anonymous memory of `bytes`, on a multiple of a huge page when those are asked for. Nothing is touched yet.
class Region {
   public:
    Region(int64_t bytes, bool huge_pages) : bytes_(bytes), length_(bytes + (huge_pages ? kHugePage : 0)) {
        void* got = ::mmap(nullptr, length_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (got == MAP_FAILED)
            throw std::runtime_error("the system gives no " + std::to_string(length_) + " bytes: " + std::strerror(errno));
        mapped_ = base_ = static_cast<uint8_t*>(got);
#ifdef MADV_HUGEPAGE
        if (huge_pages) {
            base_ += -reinterpret_cast<uintptr_t>(mapped_) % kHugePage;
            huge_pages_ = ::madvise(base_, bytes, MADV_HUGEPAGE) == 0;
        }
#endif
    }
    Region(const Region&) = delete;
    ~Region() { ::munmap(mapped_, length_); }

    // Let the system back every page with memory now.
    void touch() {
#ifdef MADV_POPULATE_WRITE
        if (::madvise(base_, bytes_, MADV_POPULATE_WRITE) == 0) return;
#endif
        for (int64_t i = 0; i < bytes_; i += kBlockBytes) const_cast<volatile uint8_t*>(base_)[i] = 0;
    }
    uint8_t* base() const { return base_; }
    bool huge_pages() const { return huge_pages_; }

   private:
    int64_t bytes_;
    size_t length_;
    uint8_t *mapped_ = nullptr, *base_ = nullptr;
    bool huge_pages_ = false;
};

class MemoryPool {
   public:
    // `bytes` are rounded up to blocks; `unit` is the coarse view's, in bytes. Nothing is touched unless `prefault`.
    MemoryPool(int64_t bytes, int64_t unit, bool huge_pages, bool prefault)
        : unit_(blocks_of(checked(unit, "unit"))),
          region_(blocks_of(checked(bytes, "bytes")) * kBlockBytes, huge_pages),
          map_(blocks_of(bytes)),
          starts_(map_.size()),
          tag_(map_.size(), 0),
          waste_(map_.size(), 0) {
        if (prefault) region_.touch();
    }
    static int64_t blocks_of(int64_t bytes) { return (bytes + kBlockBytes - 1) / kBlockBytes; }

    // Offset of a run of at least `bytes`, or -1 when no run is long enough. Coarse runs are whole units.
    int64_t allocate(int64_t bytes, PoolView view, int tag) {
        if (bytes < 1 || tag < 1 || tag >= kTags)
            throw std::invalid_argument("allocate: bytes must be positive and tag 1 to " + std::to_string(kTags - 1) + ", got " +
                                        std::to_string(bytes) + " and " + std::to_string(tag));
        int64_t need = blocks_of(bytes);
        if (view == PoolView::coarse) need = (need + unit_ - 1) / unit_ * unit_;
        int64_t at = need > free() ? -1 : view == PoolView::fine ? map_.lowest_run(need) : map_.highest_run(need, unit_);
        if (at < 0) {
            ++counts_.refusals;
            return -1;
        }
        map_.take(at, need);
        starts_.take(at, 1);
        std::fill(tag_.begin() + at, tag_.begin() + at + need, uint8_t(tag));
        waste_[at] = uint32_t(std::min<int64_t>(need * kBlockBytes - bytes, UINT32_MAX));
        counts_.wasted += waste_[at];
        count(tag, need);
        ++counts_.allocations;
        return at * kBlockBytes;
    }

    // Gives a run back. Throws for an offset that is not the start of a live run: freed before, or never given out.
    void release(int64_t offset) {
        int64_t at = offset / kBlockBytes;
        if (offset < 0 || offset % kBlockBytes || at >= map_.size() || !starts_.taken(at))
            throw std::invalid_argument("release: no live run begins at offset " + std::to_string(offset) +
                                        "; it was released before or never allocated");
        int64_t length = length_of(at);
        counts_.wasted -= waste_[at];
        count(tag_[at], -length);
        ++counts_.releases;
        map_.give(at, length);
        starts_.give(at, 1);
        std::fill(tag_.begin() + at, tag_.begin() + at + length, uint8_t(0));
    }

    // Bytes of the run that begins at `offset`.
    int64_t run_bytes(int64_t offset) const { return length_of(offset / kBlockBytes) * kBlockBytes; }

    uint8_t* base() const { return region_.base(); }
    int64_t size() const { return map_.size() * kBlockBytes; }
    int64_t unit_bytes() const { return unit_ * kBlockBytes; }
    int64_t blocks() const { return map_.size(); }
    int64_t free() const { return map_.size() - counts_.used; }
    bool huge_pages() const { return region_.huge_pages(); }
    const PoolCounts& counts() const { return counts_; }
    BlockMap::Runs free_runs() const { return map_.free_runs(); }
    const std::vector<uint8_t>& tags() const { return tag_; }  // a tag per block, 0 where it is free

    // resident[i]: whether the system backs block i with memory. False where the system does not tell.
    bool residency(std::vector<uint8_t>& resident) const {
        resident.assign(map_.size(), 0);
#ifdef __linux__
        return ::mincore(base(), size(), resident.data()) == 0;
#else
        return false;
#endif
    }

   private:
    static int64_t checked(int64_t bytes, const char* what) {
        if (bytes < 1 || bytes > (int64_t(1) << 46))
            throw std::invalid_argument(std::string("pool: ") + what + " must be 1 to 2^46, got " + std::to_string(bytes));
        return bytes;
    }
    // A run ends at the next start or at the next free block.
    int64_t length_of(int64_t at) const { return starts_.next_taken(at + 1, map_.next_free(at, map_.size())) - at; }
    void count(int tag, int64_t blocks) {
        counts_.used += blocks;
        counts_.tag_used[tag] += blocks;
        counts_.peak = std::max(counts_.peak, counts_.used);
        counts_.tag_peak[tag] = std::max(counts_.tag_peak[tag], counts_.tag_used[tag]);
    }
    int64_t unit_;   // blocks
    Region region_;  // before the tables: a size the system refuses must not cost memory for them
    BlockMap map_, starts_;  // taken blocks; first blocks of live runs
    std::vector<uint8_t> tag_;
    std::vector<uint32_t> waste_;  // by first block
    PoolCounts counts_;
};

}  // namespace colibri

// Scratch memory of one phase of one request: allocating is aligning and adding, nothing is freed singly.
//
// `rewind(mark)` gives back everything allocated since the mark, `reset` everything; the high-water mark stays. Memory
// comes in chunks from the caller. When they are full `allocate` answers null; the caller may add a chunk, which moves
// nothing that was handed out. Positions are counted over all chunks. Not thread-safe: every request has arenas of its
// own.
//
// With `checks`, memory that is not handed out holds the byte 0xff (NaN as a float, -1 as an integer) and each
// allocation is followed by a red zone of it. A write past an end or after a rewind is then found at the next rewind or
// allocation. Under AddressSanitizer every such access is caught at once.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, bytes) ((void)0)
#define ASAN_UNPOISON_MEMORY_REGION(at, bytes) ((void)0)
#endif

namespace colibri {

constexpr int64_t kArenaAlign = 64;  // a cache line, and a vector register
constexpr uint8_t kPoison = 0xff;

class Arena {
   public:
    explicit Arena(bool checks = false) : checks_(checks) {}
    ~Arena() {
        for (const Chunk& c : chunks_) ASAN_UNPOISON_MEMORY_REGION(c.memory, c.bytes);
    }
    Arena(const Arena&) = delete;

    // `memory` must be aligned to kArenaAlign and outlive the arena.
    void add_chunk(uint8_t* memory, int64_t bytes) {
        if (bytes < kArenaAlign || reinterpret_cast<uintptr_t>(memory) % kArenaAlign)
            throw std::invalid_argument("arena: a chunk must have at least " + std::to_string(kArenaAlign) +
                                        " bytes and lie on a multiple of it, got " + std::to_string(bytes));
        chunks_.push_back({memory, bytes / kArenaAlign * kArenaAlign, capacity()});
        forbid(memory, chunks_.back().bytes);
    }
    // Hands all chunks back to the caller; nothing may be allocated.
    void drop_chunks() {
        if (used_) throw std::logic_error("arena: chunks cannot leave while " + std::to_string(used_) + " bytes are in use");
        for (const Chunk& c : chunks_) ASAN_UNPOISON_MEMORY_REGION(c.memory, c.bytes);
        chunks_.clear();
        current_ = 0;
    }

    // What an allocation takes of a chunk.
    int64_t size_of(int64_t bytes) const {
        return (bytes + kArenaAlign - 1) / kArenaAlign * kArenaAlign + (checks_ ? kArenaAlign : 0);
    }

    // Null when the chunks have no room. The memory is not cleared.
    uint8_t* allocate(int64_t bytes) {
        if (bytes < 1) throw std::invalid_argument("arena: bytes must be positive, got " + std::to_string(bytes));
        int64_t size = size_of(bytes);
        size_t c = current_;
        int64_t at = at_;
        while (c < chunks_.size() && at + size > chunks_[c].start + chunks_[c].bytes)
            if (++c < chunks_.size()) at = chunks_[c].start;
        if (c == chunks_.size()) return nullptr;
        uint8_t* memory = chunks_[c].memory + (at - chunks_[c].start);
        if (checks_) {
            if (spoiled(memory, size))
                throw std::logic_error("arena: memory at " + std::to_string(at) + " was written after it had been given back");
            live_.push_back({at, bytes});
        }
        ASAN_UNPOISON_MEMORY_REGION(memory, bytes);
        current_ = c;
        at_ = at + size;
        used_ += size;
        requested_ += bytes;
        ++allocations_;
        if (used_ > high_water_) high_water_ = used_, high_request_ = requested_;
        note();
        return memory;
    }

    struct Mark {
        int64_t at, used, requested;
    };
    Mark mark() const { return {at_, used_, requested_}; }
    void rewind(Mark mark) {
        if (mark.at < 0 || mark.at > at_)
            throw std::invalid_argument("arena: cannot rewind to " + std::to_string(mark.at) + ", which is beyond " + std::to_string(at_));
        std::string fault = checks_ ? overflow_since(mark.at) : "";
        for (const Chunk& chunk : chunks_) {
            int64_t from = std::max(mark.at, chunk.start), to = std::min(at_, chunk.start + chunk.bytes);
            if (from < to) forbid(chunk.memory + (from - chunk.start), to - from);
        }
        while (current_ > 0 && chunks_[current_].start >= mark.at) --current_;
        at_ = mark.at, used_ = mark.used, requested_ = mark.requested;
        note();
        if (!fault.empty()) throw std::logic_error(fault);
    }
    void reset() { rewind({0, 0, 0}); }

    int64_t used() const { return used_; }                  // bytes handed out, alignment included
    int64_t high_water() const { return high_water_; }      // the most of them at once; one chunk of so many would do
    int64_t high_request() const { return high_request_; }  // bytes asked for at that moment, without alignment
    int64_t capacity() const { return chunks_.empty() ? 0 : chunks_.back().start + chunks_.back().bytes; }
    int64_t allocations() const { return allocations_; }
    size_t chunks() const { return chunks_.size(); }
    // Which chunk holds this allocation, and where in it.
    size_t chunk_of(const uint8_t* memory) const {
        size_t c = 0;
        while (memory < chunks_[c].memory || memory >= chunks_[c].memory + chunks_[c].bytes) ++c;
        return c;
    }
    int64_t offset_in(size_t chunk, const uint8_t* memory) const { return memory - chunks_[chunk].memory; }

    // Remember (time, bytes in use) of up to `most` allocations and rewinds from now on; 0 stops and forgets.
    struct Sample {
        int64_t ns, used;
    };
    void record(size_t most) {
        samples_.clear();
        samples_.reserve(most);  // recording allocates nothing
        most_samples_ = most;
    }
    const std::vector<Sample>& samples() const { return samples_; }

   private:
    struct Chunk {
        uint8_t* memory;
        int64_t bytes, start;  // start: bytes of the chunks before
    };
    struct Live {
        int64_t at, bytes;
    };

    void forbid(uint8_t* memory, int64_t bytes) {
        ASAN_UNPOISON_MEMORY_REGION(memory, bytes);
        if (checks_) std::memset(memory, kPoison, bytes);
        ASAN_POISON_MEMORY_REGION(memory, bytes);
    }
    // First of `bytes` bytes that is not poison, or null.
    static const uint8_t* spoiled(uint8_t* memory, int64_t bytes) {
        ASAN_UNPOISON_MEMORY_REGION(memory, bytes);
        const uint8_t* bad = std::find_if(memory, memory + bytes, [](uint8_t b) { return b != kPoison; });
        ASAN_POISON_MEMORY_REGION(memory, bytes);
        return bad == memory + bytes ? nullptr : bad;
    }
    uint8_t* address(int64_t at) const {
        size_t c = chunks_.size() - 1;
        while (chunks_[c].start > at) --c;
        return chunks_[c].memory + (at - chunks_[c].start);
    }
    // Forgets the allocations from `from` on. The lowest one whose red zone was written, as a sentence; "" for none.
    std::string overflow_since(int64_t from) {
        std::string fault;
        for (; !live_.empty() && live_.back().at >= from; live_.pop_back()) {
            const Live& l = live_.back();
            int64_t behind = (l.bytes + kArenaAlign - 1) / kArenaAlign * kArenaAlign + kArenaAlign - l.bytes;
            if (spoiled(address(l.at + l.bytes - 1) + 1, behind))
                fault = "arena: the " + std::to_string(l.bytes) + " bytes allocated at " + std::to_string(l.at) +
                        " were written past their end";
        }
        return fault;
    }
    void note() {
        if (samples_.size() < most_samples_)
            samples_.push_back({std::chrono::steady_clock::now().time_since_epoch().count(), used_});
    }

    bool checks_;
    std::vector<Chunk> chunks_;
    size_t current_ = 0;
    int64_t at_ = 0, used_ = 0, requested_ = 0, high_water_ = 0, high_request_ = 0, allocations_ = 0;
    std::vector<Live> live_;
    std::vector<Sample> samples_;
    size_t most_samples_ = 0;
};

}  // namespace colibri

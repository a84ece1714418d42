// Arenas: alignment, rewinding, chunks that are added while pointers live, and misuse that must not pass.
#include "arena_core.hpp"

#include <memory>
#include <random>

#include "expect.hpp"

using namespace colibri;

struct Memory {  // `bytes` on a multiple of 64
    explicit Memory(int64_t n) : bytes(n), raw(new uint8_t[n + kArenaAlign]), at(raw.get() + -reinterpret_cast<uintptr_t>(raw.get()) % kArenaAlign) {}
    int64_t bytes;
    std::unique_ptr<uint8_t[]> raw;
    uint8_t* at;
};

// Random allocations, marks and rewinds; live memory keeps what was written to it, whatever else happens.
static void keeps(bool checks, std::mt19937_64& random) {
    std::vector<std::unique_ptr<Memory>> chunks;
    Arena arena(checks);
    auto add = [&](int64_t bytes) {
        chunks.push_back(std::make_unique<Memory>(bytes));
        arena.add_chunk(chunks.back()->at, bytes);
    };
    add(1024);
    struct Live {
        uint8_t* at;
        int64_t bytes;
        uint8_t fill;
    };
    std::vector<Live> live;
    std::vector<std::pair<Arena::Mark, size_t>> marks;
    int64_t top = 0;  // the most that was ever in use
    for (int step = 0; step < 3000; ++step) {
        int what = int(random() % 10);
        if (what < 6) {
            int64_t bytes = 1 + int64_t(random() % (step % 50 ? 300 : 5000));
            uint8_t* at = arena.allocate(bytes);
            if (!at) {
                int64_t before = arena.used();
                add(std::max<int64_t>(1024, arena.size_of(bytes)));
                EXPECT(arena.used() == before);
                at = arena.allocate(bytes);
            }
            EXPECT(at && reinterpret_cast<uintptr_t>(at) % kArenaAlign == 0);
            std::memset(at, step & 255, bytes);
            live.push_back({at, bytes, uint8_t(step)});
        } else if (what < 8) {
            marks.push_back({arena.mark(), live.size()});
        } else if (what < 9 && !marks.empty()) {
            size_t which = random() % marks.size();
            arena.rewind(marks[which].first);
            EXPECT(arena.used() == marks[which].first.used);
            live.resize(marks[which].second);
            marks.resize(which + 1);
        } else if (step % 97 == 0) {
            arena.reset();
            live.clear(), marks.clear();
            EXPECT(arena.used() == 0);
        }
        top = std::max(top, arena.used());
        EXPECT(arena.high_water() == top && arena.used() <= arena.capacity());
        for (const Live& l : live)
            for (int64_t i = 0; i < l.bytes; i += l.bytes > 64 ? 61 : 1) EXPECT(l.at[i] == l.fill);
    }
    if (arena.used()) EXPECT_THROW(arena.drop_chunks(), std::logic_error, "cannot leave");
    arena.reset();
    arena.drop_chunks();
    EXPECT(arena.capacity() == 0 && !arena.allocate(1));
}

static int right() {
    std::mt19937_64 random(1);
    keeps(false, random);
    keeps(true, random);

    Memory memory(4096);
    Arena arena;
    EXPECT(!arena.allocate(1));
    EXPECT_THROW(arena.add_chunk(memory.at, 63), std::invalid_argument, "at least 64");
    EXPECT_THROW(arena.add_chunk(memory.at + 1, 1000), std::invalid_argument, "multiple");
    arena.add_chunk(memory.at, 4096);
    EXPECT_THROW(arena.allocate(0), std::invalid_argument, "must be positive");
    uint8_t *a = arena.allocate(1), *b = arena.allocate(64), *c = arena.allocate(65);
    EXPECT(b == a + 64 && c == b + 64 && arena.used() == 256 && arena.high_request() == 130);
    EXPECT_THROW(arena.rewind({257, 0, 0}), std::invalid_argument, "cannot rewind to 257");
    EXPECT(!arena.allocate(4096));

    Arena checked(true);
    Memory other(4096);
    checked.add_chunk(other.at, 4096);
    EXPECT(checked.allocate(8)[7] == kPoison);
    checked.record(3);
    for (int i = 0; i < 5; ++i) checked.allocate(8);
    EXPECT(checked.samples().size() == 3 && checked.samples()[2].used == 4 * 128);
    checked.record(0);
    checked.allocate(8);
    EXPECT(checked.samples().empty());
    return 0;
}

// AddressSanitizer must end the program in each of these.
static int wrong(const std::string& how) {
    Memory memory(4096);
    Arena arena;
    arena.add_chunk(memory.at, 4096);
    Arena::Mark start = arena.mark();
    volatile uint8_t* a = arena.allocate(100);
    if (how == "overflow") a[100] = 1;
    if (how == "unallocated") memory.at[2048] = 1;
    if (how == "after-rewind") {
        arena.allocate(10);
        arena.rewind(start);
        return a[50];
    }
    if (how == "after-reset") {
        arena.reset();
        a[0] = 1;
    }
    return 0;
}

int main(int count, char** words) { return count > 1 ? wrong(words[1]) : right(); }

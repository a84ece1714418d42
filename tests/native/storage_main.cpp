// Loader threads that read blocks of odd sizes into memory of exactly that size, in every mode, with files that fail.
#include "storage_core.hpp"

#include <fstream>
#include <memory>

#include "expect.hpp"

using namespace colibri;

static uint8_t byte_at(int file, int64_t i) { return static_cast<uint8_t>(i * 31 + file * 7 + i / 251); }

struct Aligned {
    uint8_t* at = nullptr;
    explicit Aligned(size_t bytes) { EXPECT(posix_memalign(reinterpret_cast<void**>(&at), kDirectAlign, bytes) == 0); }
    ~Aligned() { std::free(at); }
};

int main(int count, char** words) {
    EXPECT(count == 2);
    const std::string folder = words[1];
    const int64_t sizes[] = {1, 31, 33, 63, 65, 257, 4096, 4097, 65536 + 5};
    std::vector<BlockFile> files;
    for (int i = 0; i < 9; ++i) {
        std::string path = folder + "/block" + std::to_string(i);
        std::ofstream out(path, std::ios::binary);
        std::string content(kDirectAlign + sizes[i], '\0');
        for (int64_t j = 0; j < sizes[i]; ++j) content[kDirectAlign + j] = static_cast<char>(byte_at(i, j));
        out << content;
        files.push_back({path, kDirectAlign, sizes[i]});
    }
    std::vector<BlockFile> broken = {{folder + "/none", 0, 10}, {files[1].path, kDirectAlign, sizes[1] + 1}};
    for (ReadMode mode : {ReadMode::mmap, ReadMode::pread, ReadMode::direct}) {
        if (mode == ReadMode::direct && !direct_refusal(files[0]).empty()) continue;
        for (int lanes : {1, 3}) {
            std::vector<BlockFile> all = files;
            all.insert(all.end(), broken.begin(), broken.end());
            std::vector<std::unique_ptr<uint8_t[]>> exact;
            std::vector<std::unique_ptr<Aligned>> pages;
            std::vector<std::pair<int, uint8_t*>> reads;
            Loader loader(all, mode, lanes);  // ends first: what it may still be reading into must outlive it
            for (int repeat = 0; repeat < 5; ++repeat)
                for (int i = 0; i < 9; ++i) {
                    if (mode == ReadMode::direct) {
                        pages.push_back(std::make_unique<Aligned>((sizes[i] + kDirectAlign - 1) / kDirectAlign * kDirectAlign));
                        reads.push_back({i, pages.back()->at});
                    } else {
                        exact.emplace_back(new uint8_t[sizes[i]]);
                        reads.push_back({i, exact.back().get()});
                    }
                }
            int64_t first = loader.submit(reads, true);
            for (size_t i = 0; i < reads.size(); ++i)
                while (!loader.wait_for(first + static_cast<int64_t>(i), std::chrono::milliseconds(50))) {
                }
            EXPECT(loader.take_faults().empty() && loader.loads() == 45);
            for (auto [file, to] : reads)
                for (int64_t j = 0; j < sizes[file]; ++j) EXPECT(to[j] == byte_at(file, j));
            alignas(kDirectAlign) static uint8_t nowhere[kDirectAlign];
            int64_t last = loader.submit({{9, nowhere}, {10, nowhere}}, false) + 1;
            while (!loader.wait_for(last, std::chrono::milliseconds(50)) || !loader.done(last - 1)) {
            }
            EXPECT(loader.take_faults().size() == 2);
            loader.submit(reads, false);  // still queued when the loader ends
        }
    }
}

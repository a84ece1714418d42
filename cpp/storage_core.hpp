// Reads expert blocks from their files into cache buffers on a few loader threads, while the caller computes.
//
// A load is "file f → this buffer". `submit` queues it and returns a ticket; `wait` blocks until a ticket is done. Two
// clocks are kept apart: service (how long loader threads were reading, summed) and waiting (what the caller sees, measured
// by the caller). A failed read is remembered with its file and reason, and reported by `wait`: a loader thread never dies.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace colibri {

struct BlockFile {
    std::string path;
    int64_t offset = 0;  // where the payload starts
    int64_t bytes = 0;   // how much of it there is
};

// mmap copies out of a mapping, pread reads through the page cache, direct (O_DIRECT) goes past it.
enum class ReadMode { mmap, pread, direct };
constexpr int64_t kDirectAlign = 4096;  // offset, length and address of an O_DIRECT read

// What one read did. device_bytes: how much of it was not in the page cache; -1 where the system does not tell.
struct ReadResult {
    std::string fault;
    int64_t device_bytes = -1;
};

inline ReadResult failed(std::string reason) { return {std::move(reason), -1}; }

inline int open_for_reading(const std::string& path, bool direct) {
#ifdef O_DIRECT
    return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | (direct ? O_DIRECT : 0));
#else
    if (direct) return errno = EINVAL, -1;
    return ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
#endif
}

// Reads [offset, offset + bytes) into `to`; with `rounded` > bytes the last read may run into the file's end.
inline std::string read_fully(int fd, uint8_t* to, int64_t offset, int64_t bytes, int64_t rounded) {
    for (int64_t done = 0; done < bytes;) {
        ssize_t n = ::pread(fd, to + done, rounded - done, offset + done);
        if (n > 0) done += n;
        else if (n == 0) return "file ended after " + std::to_string(offset + done) + " bytes";
        else if (errno != EINTR) return std::strerror(errno);
    }
    return "";
}

// How many leading bytes the page cache can give without waiting, copied to `to`; -1 where that cannot be asked.
inline int64_t read_cached(int fd, uint8_t* to, int64_t offset, int64_t bytes) {
#ifdef RWF_NOWAIT
    int64_t done = 0;
    while (done < bytes) {
        struct iovec part{to + done, static_cast<size_t>(bytes - done)};
        ssize_t n = ::preadv2(fd, &part, 1, offset + done, RWF_NOWAIT);
        if (n > 0) done += n;
        else if (n < 0 && errno == EINTR) continue;
        else if (n < 0 && errno != EAGAIN) return -1;
        else break;
    }
    return done;
#else
    (void)fd, (void)to, (void)offset, (void)bytes;
    return -1;
#endif
}

// Bytes of a fresh mapping that are not in the page cache; -1 where that cannot be asked.
inline int64_t absent_bytes(void* map, int64_t first, int64_t bytes) {
    long page = ::sysconf(_SC_PAGESIZE);
    int64_t start = first / page * page, pages = (first + bytes - start + page - 1) / page;
    std::vector<unsigned char> present(pages);
#ifdef __linux__
    if (::mincore(static_cast<uint8_t*>(map) + start, pages * page, present.data()) != 0) return -1;
#else
    return -1;
#endif
    int64_t absent = 0;
    for (unsigned char p : present) absent += (p & 1) ? 0 : page;
    return std::min(absent, bytes);
}

// One block into `to`. For direct reads `to` is aligned and has room for whole pages.
inline ReadResult read_block(const BlockFile& f, ReadMode mode, uint8_t* to) {
    int fd = open_for_reading(f.path, mode == ReadMode::direct);
    if (fd < 0) return failed(std::strerror(errno));
    ReadResult result;
    struct stat info;
    if (::fstat(fd, &info) != 0) result = failed(std::strerror(errno));
    else if (info.st_size < f.offset + f.bytes)  // a mapping past the end would kill the process
        result = failed("file has " + std::to_string(info.st_size) + " bytes, " + std::to_string(f.offset + f.bytes) + " expected");
    else if (mode == ReadMode::mmap) {
        void* map = ::mmap(nullptr, f.offset + f.bytes, PROT_READ, MAP_SHARED, fd, 0);
        if (map == MAP_FAILED) result = failed(std::strerror(errno));
        else {
            result.device_bytes = absent_bytes(map, f.offset, f.bytes);
            ::madvise(map, f.offset + f.bytes, MADV_SEQUENTIAL);
            std::memcpy(to, static_cast<uint8_t*>(map) + f.offset, f.bytes);
            ::munmap(map, f.offset + f.bytes);
        }
    } else if (mode == ReadMode::direct) {
        int64_t rounded = (f.bytes + kDirectAlign - 1) / kDirectAlign * kDirectAlign;
        result = {read_fully(fd, to, f.offset, f.bytes, rounded), f.bytes};
    } else {
        int64_t cached = read_cached(fd, to, f.offset, f.bytes), done = std::max<int64_t>(cached, 0);
        std::string fault = read_fully(fd, to + done, f.offset + done, f.bytes - done, f.bytes - done);
        result = {std::move(fault), cached < 0 ? -1 : f.bytes - cached};
    }
    ::close(fd);
    return result;
}

// Why O_DIRECT cannot serve this file, or "" when it can.
inline std::string direct_refusal(const BlockFile& f) {
    if (f.offset % kDirectAlign) return "its payload does not start on a page";
    int fd = open_for_reading(f.path, true);
    if (fd < 0) return std::strerror(errno);
    void* buffer = nullptr;
    std::string reason;
    if (::posix_memalign(&buffer, kDirectAlign, kDirectAlign) != 0) reason = "no memory";
    else if (::pread(fd, buffer, kDirectAlign, f.offset) < 0) reason = std::strerror(errno);
    std::free(buffer);
    ::close(fd);
    return reason;
}

class Loader {
   public:
    Loader(std::vector<BlockFile> files, ReadMode mode, int lanes) : files_(std::move(files)), mode_(mode) {
        for (int i = 0; i < lanes; ++i) threads_.emplace_back([this] { work(); });
    }
    ~Loader() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            closing_ = true;
            queue_.clear(), later_.clear();
        }
        wake_.notify_all();
        for (auto& t : threads_) t.join();
    }

    // Queues reads in order; returns the first ticket, the others follow it. Urgent reads go before all that are not.
    int64_t submit(const std::vector<std::pair<int, uint8_t*>>& reads, bool urgent) {
        int64_t first;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            first = issued_;
            for (auto [file, to] : reads) (urgent ? queue_ : later_).push_back({issued_++, file, to});
        }
        if (reads.size() > 1) wake_.notify_all();
        else wake_.notify_one();
        return first;
    }

    // True once `ticket` is done, false after `patience`. Tickets finish out of order when there are several lanes.
    bool wait_for(int64_t ticket, std::chrono::milliseconds patience) {
        std::unique_lock<std::mutex> lock(mutex_);
        return done_.wait_for(lock, patience, [&] { return is_done(ticket); });
    }

    bool done(int64_t ticket) {
        std::lock_guard<std::mutex> lock(mutex_);
        return is_done(ticket);
    }

    void drain() {
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [&] { return floor_ == issued_; });
        faults_.clear();
    }

    // Faults since the last call, as "path: reason".
    std::vector<std::string> take_faults() {
        std::lock_guard<std::mutex> lock(mutex_);
        return std::exchange(faults_, {});
    }

    int64_t service_ns() const { return service_ns_.load(); }
    int64_t bytes_read() const { return bytes_read_.load(); }
    // Of bytes_read, those that came from the device and not from the page cache; -1 where the system does not tell.
    int64_t device_bytes() const { return untold_ ? -1 : device_bytes_.load(); }
    int64_t loads() const { return loads_.load(); }
    const std::vector<BlockFile>& files() const { return files_; }
    int lanes() const { return static_cast<int>(threads_.size()); }

   private:
    struct Request {
        int64_t ticket;
        int file;
        uint8_t* to;
    };

    bool is_done(int64_t ticket) const {
        if (ticket < floor_) return true;
        size_t i = static_cast<size_t>(ticket - floor_);
        return i < finished_.size() && finished_[i];
    }

    void work() {
        for (;;) {
            Request request;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return closing_ || !queue_.empty() || !later_.empty(); });
                auto& next = queue_.empty() ? later_ : queue_;
                if (next.empty()) return;
                request = next.front();
                next.pop_front();
            }
            auto start = std::chrono::steady_clock::now();
            ReadResult read = read_block(files_[request.file], mode_, request.to);
            auto spent = std::chrono::steady_clock::now() - start;
            service_ns_ += std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count();
            ++loads_;
            if (read.fault.empty()) bytes_read_ += files_[request.file].bytes;
            if (read.device_bytes >= 0) device_bytes_ += read.device_bytes;
            else if (read.fault.empty()) untold_ = true;
            std::lock_guard<std::mutex> lock(mutex_);
            if (!read.fault.empty()) faults_.push_back(files_[request.file].path + ": " + read.fault);
            size_t i = static_cast<size_t>(request.ticket - floor_);
            if (finished_.size() <= i) finished_.resize(i + 1, false);
            finished_[i] = true;
            while (!finished_.empty() && finished_.front()) finished_.pop_front(), ++floor_;
            done_.notify_all();
        }
    }

    std::vector<BlockFile> files_;
    ReadMode mode_;
    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::deque<Request> queue_, later_;
    std::deque<bool> finished_;  // tickets floor_, floor_ + 1, …
    int64_t issued_ = 0, floor_ = 0;
    std::vector<std::string> faults_;
    std::atomic<int64_t> service_ns_{0}, bytes_read_{0}, device_bytes_{0}, loads_{0};
    std::atomic<bool> untold_{false};
    bool closing_ = false;
};

}  // namespace colibri

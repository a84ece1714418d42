// Reads expert blocks from their files into cache buffers on a few loader threads, while the caller computes.
//
// A load is "file f → this buffer". `submit` queues it and returns a ticket; `wait` blocks until a ticket is done. Two
// clocks are kept apart: service (how long loader threads were reading, summed) and waiting (what the caller sees, measured
// by the caller). A failed read is remembered with its file and reason, and reported by `wait`: a loader thread never dies.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
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

enum class ReadMode { mmap, pread };

// One block into `to`. Returns "" or the reason it failed.
inline std::string read_block(const BlockFile& f, ReadMode mode, uint8_t* to) {
    int fd = ::open(f.path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return std::strerror(errno);
    std::string fault;
    struct stat info;
    if (::fstat(fd, &info) != 0) fault = std::strerror(errno);
    else if (info.st_size < f.offset + f.bytes)  // a mapping past the end would kill the process
        fault = "file has " + std::to_string(info.st_size) + " bytes, " + std::to_string(f.offset + f.bytes) + " expected";
    else if (mode == ReadMode::mmap) {
        void* map = ::mmap(nullptr, f.offset + f.bytes, PROT_READ, MAP_SHARED, fd, 0);
        if (map == MAP_FAILED) fault = std::strerror(errno);
        else {
            ::madvise(map, f.offset + f.bytes, MADV_SEQUENTIAL);
            std::memcpy(to, static_cast<uint8_t*>(map) + f.offset, f.bytes);
            ::munmap(map, f.offset + f.bytes);
        }
    } else {
        for (int64_t done = 0; done < f.bytes && fault.empty();) {
            ssize_t n = ::pread(fd, to + done, f.bytes - done, f.offset + done);
            if (n > 0) done += n;
            else if (n == 0) fault = "file ended after " + std::to_string(f.offset + done) + " bytes";
            else if (errno != EINTR) fault = std::strerror(errno);
        }
    }
    ::close(fd);
    return fault;
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
            queue_.clear();
        }
        wake_.notify_all();
        for (auto& t : threads_) t.join();
    }

    // Queues reads in order; returns the first ticket, the others follow it.
    int64_t submit(const std::vector<std::pair<int, uint8_t*>>& reads) {
        int64_t first;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            first = issued_;
            for (auto [file, to] : reads) queue_.push_back({issued_++, file, to});
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
                wake_.wait(lock, [&] { return closing_ || !queue_.empty(); });
                if (queue_.empty()) return;
                request = queue_.front();
                queue_.pop_front();
            }
            auto start = std::chrono::steady_clock::now();
            std::string fault = read_block(files_[request.file], mode_, request.to);
            auto spent = std::chrono::steady_clock::now() - start;
            service_ns_ += std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count();
            ++loads_;
            if (fault.empty()) bytes_read_ += files_[request.file].bytes;
            std::lock_guard<std::mutex> lock(mutex_);
            if (!fault.empty()) faults_.push_back(files_[request.file].path + ": " + fault);
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
    std::deque<Request> queue_;
    std::deque<bool> finished_;  // tickets floor_, floor_ + 1, …
    int64_t issued_ = 0, floor_ = 0;
    std::vector<std::string> faults_;
    std::atomic<int64_t> service_ns_{0}, bytes_read_{0}, loads_{0};
    bool closing_ = false;
};

}  // namespace colibri

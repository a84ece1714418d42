// The compute thread pool behind parallel_for (include/threads.hpp).
//
// Workers are started on first need and then wait: a short spin, since the next kernel of a forward pass usually comes
// within microseconds, then a sleep, so that an idle engine costs nothing. A task is claimed with one atomic increment;
// nobody waits for a worker that has not woken up. One caller uses the workers at a time; a second runs alone.
#pragma once
#include <pthread.h>

#include <algorithm>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "include/threads.hpp"

namespace colibri {

inline void spin_pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class ThreadPool {
   public:
    static ThreadPool& instance() {
        static ThreadPool* pool = new ThreadPool();  // never destroyed: its threads may outlive static destruction
        return *pool;
    }

    void run(int tasks, int threads, void (*fn)(void*, int), void* arg, bool (*poll)(), std::atomic<bool>* cancel) {
        std::unique_lock<std::mutex> only(caller_, std::try_to_lock);
        int helpers = std::min({threads, tasks, kMaxThreads}) - 1;
        if (!only.owns_lock() || helpers <= 0 || forked_.load()) {
            PollClock clock;
            for (int task = 0; task < tasks && !*cancel; ++task) {
                fn(arg, task);
                if (poll && clock.due() && poll()) *cancel = true;
            }
            return;
        }
        grow(helpers);
        fn_ = fn, arg_ = arg, tasks_ = tasks, cancel_ = cancel, helpers_ = helpers;
        next_ = 0;
        open_ = true;
        generation_.fetch_add(1);
        if (sleeping_.load() > 0) {
            std::lock_guard<std::mutex> lock(sleep_);
            wake_.notify_all();
        }
        PollClock clock;
        for (int task; (task = next_.fetch_add(1)) < tasks && !*cancel;) {
            fn(arg, task);
            if (poll && clock.due() && poll()) *cancel = true;
        }
        open_ = false;
        // A helper that claimed a task is inside; one that has not woken will find the job closed.
        for (int spins = 0; inside_.load() != 0; ++spins) {
            if (spins < 4000) spin_pause();
            else std::this_thread::yield();
        }
    }

    int started() const { return static_cast<int>(workers_.size()); }

   private:
    static constexpr int kMaxThreads = 256;
    static constexpr int kSpins = 6000;  // about 120 us

    ThreadPool() {
        // A forked child has this object but none of its threads: it computes alone.
        pthread_atfork(nullptr, nullptr, [] { instance().forked_ = true; });
    }

    void grow(int helpers) {
        while (static_cast<int>(workers_.size()) < helpers) {
            int index = static_cast<int>(workers_.size());
            workers_.emplace_back([this, index] { work(index); });
            workers_.back().detach();
        }
    }

    void work(int index) {
        uint64_t seen = 0;
        for (;;) {
            for (int spins = 0; generation_.load() == seen && spins < kSpins; ++spins) spin_pause();
            if (generation_.load() == seen) {
                std::unique_lock<std::mutex> lock(sleep_);
                sleeping_.fetch_add(1);
                wake_.wait(lock, [&] { return generation_.load() != seen; });
                sleeping_.fetch_sub(1);
            }
            seen = generation_.load();
            inside_.fetch_add(1);
            if (open_.load() && index < helpers_) {
                for (int task; (task = next_.fetch_add(1)) < tasks_ && !*cancel_;) fn_(arg_, task);
            }
            inside_.fetch_sub(1);
        }
    }

    std::mutex caller_, sleep_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
    std::atomic<uint64_t> generation_{0};
    std::atomic<int> next_{0}, inside_{0}, sleeping_{0};
    std::atomic<bool> open_{false}, forked_{false};
    void (*fn_)(void*, int) = nullptr;
    void* arg_ = nullptr;
    int tasks_ = 0, helpers_ = 0;
    std::atomic<bool>* cancel_ = nullptr;
};

}  // namespace colibri

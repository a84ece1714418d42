// One pool of compute threads for the whole process, shared by every kernel through a plain function table.
//
// `parallel_for(tasks, threads, fn)` runs fn(0) … fn(tasks-1), each exactly once, on the caller and up to threads-1
// workers. Which thread runs which task is not fixed, so a task must write only what no other task writes; results then
// do not depend on the number of threads. Kernels are separate extension modules: each gets the table from the
// "threads" kernel when it is loaded and runs serially until then.
#pragma once
#include <atomic>
#include <chrono>

namespace colibri {

struct PoolTable {
    void* self;
    // Runs tasks until all are done or `*cancel` becomes true. `poll` (may be null) is asked now and then on the
    // calling thread; when it answers true, `*cancel` is set.
    void (*run)(void* self, int tasks, int threads, void (*fn)(void*, int), void* arg, bool (*poll)(), std::atomic<bool>* cancel);
};

inline PoolTable*& pool_table() {
    static PoolTable* table = nullptr;
    return table;
}

// Set by the binding around a call that should notice Ctrl-C (binding.hpp); read by parallel_for on the same thread.
struct Interrupt {
    bool (*poll)() = nullptr;
    std::atomic<bool> cancelled{false};
};

inline Interrupt& interrupt() {
    static thread_local Interrupt state;
    return state;
}

// Asks `poll` at most every 50 ms: a signal check needs the GIL, which another thread may hold.
struct PollClock {
    std::chrono::steady_clock::time_point last = std::chrono::steady_clock::now();
    bool due() {
        auto now = std::chrono::steady_clock::now();
        if (now - last < std::chrono::milliseconds(50)) return false;
        last = now;
        return true;
    }
};

template <class F>
void parallel_for(int tasks, int threads, F&& fn) {
    Interrupt& state = interrupt();
    if (state.cancelled.load(std::memory_order_relaxed)) return;
    if (pool_table() && threads > 1 && tasks > 1) {
        auto call = [](void* arg, int task) { (*static_cast<std::remove_reference_t<F>*>(arg))(task); };
        pool_table()->run(pool_table()->self, tasks, threads, call, &fn, state.poll, &state.cancelled);
        return;
    }
    PollClock clock;
    for (int task = 0; task < tasks; ++task) {
        fn(task);
        if (state.poll && clock.due() && state.poll()) {
            state.cancelled = true;
            return;
        }
    }
}

}  // namespace colibri

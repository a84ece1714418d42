// One piece of kernel work, named on the command line, between two marks that benchmarks/instructions.py counts between.
//
//     instructions CASE        does the work in measured(); run under callgrind with --toggle-collect
//     instructions CASE step   does it in a child process and counts its instructions one by one (x86-64 Linux)
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "attention_core.hpp"
#include "ffn_core.hpp"
#include "norm_core.hpp"

#if defined(__linux__) && defined(__x86_64__)
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>
#define COLIBRI_CAN_STEP
#endif

using namespace colibri;

constexpr int kHigh = 32, kWide = 512, kKeys = 256, kHeadDim = 128;

struct Work {
    std::string kind;
    int tokens = 1;
    bool integer = false;
    Matrix w;
    std::vector<uint8_t> memory = std::vector<uint8_t>(4 * kHigh * kWide + (1 << 16), 0x3C);
    std::vector<float> x = std::vector<float>(kKeys * kHeadDim, 0.5f), y = std::vector<float>(kKeys * kHeadDim), weight = x;
    std::vector<int32_t> table = {0};
    Scratch scratch;

    // "gemm FORMAT GROUP TOKENS INTEGER", "attention", "norm", "silu EXACT"
    explicit Work(const char* text) {
        char name[16] = {};
        int a = 0, b = 0, c = 0, d = 0;
        std::sscanf(text, "%15s %d %d %d %d", name, &a, &b, &c, &d);
        kind = name;
        if (kind == "gemm") {
            w.format = static_cast<Format>(a), w.group = b, tokens = c, integer = d != 0;
            w.rows = kHigh, w.cols = kWide, w.data = memory.data();
            w.scale = memory.data() + 4 * kHigh * kWide, w.zero = reinterpret_cast<const int8_t*>(w.scale) + (1 << 15);
            run();  // so that scratch has its size
        } else {
            tokens = a;
        }
    }

    void run() {
        if (kind == "gemm") matmul(x.data(), tokens, w, nullptr, y.data(), scratch, 1, kHigh, integer);
        if (kind == "norm") rms_norm(x.data(), weight.data(), 1, kWide, 1e-5f, y.data(), 1);
        if (kind == "silu")
            for (int i = 0; i < kWide; i += 16) store(&y[i], silu(load(&x[i]), tokens != 0));
        if (kind == "attention") {
            auto bytes = reinterpret_cast<const uint8_t*>(x.data());
            KvPages kv{bytes, bytes, 0, table.data(), kKeys, 1, kHeadDim};
            attend<float>(x.data(), kv, 1, 1, kKeys - 1, 0, 0.1f, y.data(), 1);
        }
    }
};

__attribute__((noinline)) void measured(Work& work) { work.run(); }

#ifdef COLIBRI_CAN_STEP
// Steps a child from its first breakpoint to its second; -1 when this system does not let us.
static long count(Work& work) {
    pid_t child = fork();
    if (child == 0) {
        if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(1);
        asm volatile("int3" ::: "memory");
        measured(work);
        asm volatile("int3" ::: "memory");
        _exit(0);
    }
    int status = 0;
    if (waitpid(child, &status, 0) != child || !WIFSTOPPED(status) || WSTOPSIG(status) != SIGTRAP) return -1;
    for (long steps = 0;; ++steps) {
        if (ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr) != 0 || waitpid(child, &status, 0) != child) return -1;
        if (!WIFSTOPPED(status) || WSTOPSIG(status) != SIGTRAP) return -1;
        siginfo_t info;
        if (ptrace(PTRACE_GETSIGINFO, child, nullptr, &info) != 0) return -1;
        if (info.si_code == SI_KERNEL) {  // a breakpoint, and not the end of a step
            kill(child, SIGKILL), waitpid(child, &status, 0);
            return steps;
        }
    }
}
#endif

int main(int argc, char** argv) {
    if (argc < 2) return 2;
    Work work(argv[1]);
    if (argc == 2) return measured(work), 0;
#ifdef COLIBRI_CAN_STEP
    std::printf("%ld\n", count(work));
#else
    std::printf("-1\n");
#endif
}

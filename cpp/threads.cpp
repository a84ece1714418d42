// cppimport: the compute thread pool, owned here and lent to every other kernel.
#include "threads_core.hpp"

#include "include/binding.hpp"

using namespace colibri;

static void run_on_pool(void* self, int tasks, int threads, void (*fn)(void*, int), void* arg, bool (*poll)(),
                        std::atomic<bool>* cancel) {
    static_cast<ThreadPool*>(self)->run(tasks, threads, fn, arg, poll, cancel);
}

NB_MODULE(threads, m) {
    m.doc() = "The process-wide compute threads that all kernels share.";
    static PoolTable table{&ThreadPool::instance(), run_on_pool};
    pool_table() = &table;
    m.def("pool", [] { return nb::capsule(&table, "colibri.PoolTable"); }, "The function table other kernels call.");
    m.def("started", [] { return ThreadPool::instance().started(); }, "Worker threads started so far.");
    m.def("square", [](Array<const double, 1> x, Array<double, 1> out, int threads) {
        expect_size("out.shape[0]", out.shape(0), x.shape(0), "length of x");
        expect_threads(threads);
        const double* in = x.data();
        double* to = out.data();
        int tasks = static_cast<int>(x.shape(0));
        without_gil([&] { parallel_for(tasks, threads, [&](int i) { to[i] = in[i] * in[i]; }); });
    }, array("x"), array("out"), nb::arg("threads"), "out = x * x with one task per element: shows the pool at work.");
}

/*
<%
import colibri_lab.kernels as k
k.configure(cfg)
%>
*/

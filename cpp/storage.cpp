// cppimport: loader threads that bring expert blocks from files into cache buffers.
#include "storage_core.hpp"

#include <nanobind/stl/vector.h>

#include <memory>
#include <numeric>

#include "include/binding.hpp"

using namespace colibri;

namespace {

// Owns the loader and keeps the buffers alive that its threads write into.
class BlockLoader {
   public:
    BlockLoader(std::vector<std::string> paths, std::vector<int64_t> offsets, std::vector<int64_t> bytes, const std::string& mode,
                int lanes, nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> memory)
        : memory_(memory) {
        expect_size("offsets", offsets.size(), paths.size(), "one per path");
        expect_size("bytes", bytes.size(), paths.size(), "one per path");
        expect(mode == "mmap" || mode == "pread" || mode == "direct", "mode must be mmap, pread or direct, got " + mode);
        expect(lanes >= 1 && lanes <= 64, "lanes must be 1 to 64, got " + std::to_string(lanes));
        std::vector<BlockFile> files;
        for (size_t i = 0; i < paths.size(); ++i) {
            expect(offsets[i] >= 0 && bytes[i] >= 1 && static_cast<size_t>(bytes[i]) <= memory.shape(1),
                   paths[i] + " needs " + std::to_string(bytes[i]) + " bytes, a buffer holds " + std::to_string(memory.shape(1)));
            files.push_back({paths[i], offsets[i], bytes[i]});
        }
        mode_ = mode == "mmap" ? ReadMode::mmap : mode == "direct" ? ReadMode::direct : ReadMode::pread;
        if (mode_ == ReadMode::direct) {
            bool aligned = reinterpret_cast<uintptr_t>(memory.data()) % kDirectAlign == 0 && memory.shape(1) % kDirectAlign == 0;
            refusal_ = !aligned ? "the buffers are not page-aligned" : files.empty() ? "" : direct_refusal(files[0]);
            if (!refusal_.empty()) mode_ = ReadMode::pread;
        }
        loader_ = std::make_unique<Loader>(std::move(files), mode_, lanes);
    }

    std::vector<int64_t> submit(const std::vector<int>& files, const std::vector<int>& buffers, bool urgent) {
        expect_size("buffers", buffers.size(), files.size(), "one per file");
        std::vector<std::pair<int, uint8_t*>> reads;
        for (size_t i = 0; i < files.size(); ++i) {
            int file = files[i], buffer = buffers[i];
            expect(file >= 0 && static_cast<size_t>(file) < loader_->files().size(), "file " + std::to_string(file) + " of " + std::to_string(loader_->files().size()) + " does not exist");
            expect(buffer >= 0 && static_cast<size_t>(buffer) < memory_.shape(0), "buffer " + std::to_string(buffer) + " of " + std::to_string(memory_.shape(0)) + " does not exist");
            reads.push_back({file, memory_.data() + static_cast<size_t>(buffer) * memory_.shape(1)});
        }
        std::vector<int64_t> tickets(files.size());
        std::iota(tickets.begin(), tickets.end(), loader_->submit(reads, urgent));
        return tickets;
    }

    // Waits for every ticket; returns the faults. Ctrl-C raises after the reads in flight have landed, so no buffer is
    // written to behind the caller's back.
    std::vector<std::string> wait(std::vector<int64_t> tickets) {
        bool interrupted = false;
        for (int64_t ticket : tickets) {
            for (bool done = false; !done;) {
                {
                    nb::gil_scoped_release released;
                    done = loader_->wait_for(ticket, std::chrono::milliseconds(50));
                }
                if (!done && !interrupted && PyErr_CheckSignals() != 0) {
                    interrupted = true;
                    PyErr_Clear();
                }
            }
        }
        if (interrupted) {
            PyErr_SetNone(PyExc_KeyboardInterrupt);
            throw nb::python_error();
        }
        return loader_->take_faults();
    }

    bool done(int64_t ticket) { return loader_->done(ticket); }

    // Waits for everything that was submitted, whatever came of it.
    void drain() {
        nb::gil_scoped_release released;
        loader_->drain();
    }

    nb::dict counters() const {
        nb::dict out;
        out["loads"] = loader_->loads();
        out["bytes_read"] = loader_->bytes_read();
        int64_t device = loader_->device_bytes();
        out["device_bytes"] = device < 0 ? nb::object(nb::none()) : nb::object(nb::int_(device));
        out["service_ns"] = loader_->service_ns();
        return out;
    }

    const char* mode() const { return mode_ == ReadMode::mmap ? "mmap" : mode_ == ReadMode::direct ? "direct" : "pread"; }
    const std::string& refusal() const { return refusal_; }


   private:
    ReadMode mode_;
    std::string refusal_;
    nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> memory_;
    std::unique_ptr<Loader> loader_;
};

}  // namespace

NB_MODULE(storage, m) {
    nb::class_<BlockLoader>(m, "BlockLoader", "Loader threads for one model's expert blocks.")
        .def(nb::init<std::vector<std::string>, std::vector<int64_t>, std::vector<int64_t>, const std::string&, int, nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>>(),
             nb::arg("paths"), nb::arg("offsets"), nb::arg("bytes"), nb::arg("mode"), nb::arg("lanes"), array("memory"),
             "File i holds its block at offsets[i], bytes[i] long. memory (buffers, buffer_bytes) u8 receives the blocks.")
        .def("submit", &BlockLoader::submit, nb::arg("files"), nb::arg("buffers"), nb::arg("urgent") = true,
             "Queue reads in order; returns their tickets. Urgent reads go before all that are not.")
        .def("wait", &BlockLoader::wait, nb::arg("tickets"), "Block until all are done; returns faults as 'path: reason'.")
        .def("done", &BlockLoader::done, nb::arg("ticket"), "Whether this read has finished.")
        .def("drain", &BlockLoader::drain, "Wait until no read is queued or under way; faults are dropped.")
        .def("counters", &BlockLoader::counters, "loads, bytes_read, device_bytes (not served by the page cache; None where the system does not tell) and\n"
             "service_ns (summed over loader threads) so far.")
        .def_prop_ro("mode", &BlockLoader::mode, "How blocks are read in fact: mmap, pread or direct.")
        .def_prop_ro("refusal", &BlockLoader::refusal, "Why direct reads fell back to pread; empty when they did not.");
}

/*
<%
import colibri_lab.kernels as k
k.configure(cfg)
%>
*/

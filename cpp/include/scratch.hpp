// Working memory of one call: bytes that are laid out anew each time. The caller lends them; where nobody does, they are
// kept here and grow to the largest call.
#pragma once
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace colibri {

class Scratch {
   public:
    static constexpr size_t kAlign = 64;
    static constexpr size_t aligned(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

    Scratch() = default;
    Scratch(uint8_t* base, size_t bytes) : lent_(true), at_(base), bytes_(bytes) {
        if (reinterpret_cast<uintptr_t>(base) % kAlign) throw std::invalid_argument("scratch must begin on a multiple of 64");
    }

    // A new layout of `bytes`, each array of which counts as aligned(its size).
    void begin(size_t bytes) {
        used_ = 0;
        if (bytes <= bytes_) return;
        if (lent_)
            throw std::invalid_argument("scratch has " + std::to_string(bytes_) + " bytes, " + std::to_string(bytes) + " are needed");
        own_.resize(bytes + kAlign);
        at_ = own_.data() + (kAlign - reinterpret_cast<uintptr_t>(own_.data()) % kAlign) % kAlign, bytes_ = bytes;
    }

    // n uninitialised elements, valid until the next layout.
    template <class T>
    T* take(size_t n) {
        T* array = reinterpret_cast<T*>(at_ + used_);
        used_ += aligned(n * sizeof(T));
        return array;
    }

   private:
    bool lent_ = false;
    uint8_t* at_ = nullptr;
    size_t bytes_ = 0, used_ = 0;
    std::vector<uint8_t> own_;
};

}  // namespace colibri

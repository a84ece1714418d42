// Between numpy arrays and C++ vectors, with the checks every binding of the cache and of replay makes.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

namespace colibri {

inline int between(const char* name, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high)
        throw std::invalid_argument(std::string(name) + " must be " + std::to_string(low) + " to " +
                                    std::to_string(high) + ", got " + std::to_string(value));
    return int(value);
}

inline int at_least(const char* name, int64_t value, int64_t low) {
    if (value < low)
        throw std::invalid_argument(std::string(name) + " must be at least " + std::to_string(low) + ", got " +
                                    std::to_string(value));
    return int(value);
}

// Position of `value` among the `known`.
inline int choice(const char* name, const std::string& value, std::initializer_list<const char*> known) {
    int at = 0;
    std::string all;
    for (const char* k : known) {
        if (value == k) return at;
        all += (at++ ? ", " : "") + std::string(k);
    }
    throw std::invalid_argument(std::string(name) + " must be one of " + all + "; got '" + value + "'");
}

template <class T> struct View {
    const T* data;
    size_t size;
    const T* begin() const { return data; }
    const T* end() const { return data + size; }
    T operator[](size_t i) const { return data[i]; }
};

// The elements of a contiguous array of exactly T and `ndim`. Raises std::invalid_argument with both values.
template <class T> View<T> view(const char* name, const nanobind::ndarray<nanobind::ro>& array, size_t ndim) {
    if (array.dtype() != nanobind::dtype<T>()) {
        auto want = nanobind::dtype<T>();
        const char* kinds[] = {"int", "uint", "float"};
        auto spell = [&](nanobind::dlpack::dtype t) {
            return (t.code < 3 ? std::string(kinds[t.code]) : "dtype code " + std::to_string(t.code) + " of ") +
                   std::to_string(t.bits);
        };
        throw std::invalid_argument(std::string(name) + " must be " + spell(want) + ", got " + spell(array.dtype()));
    }
    if (array.ndim() != ndim)
        throw std::invalid_argument(std::string(name) + " must have " + std::to_string(ndim) + " dimension(s), got " +
                                    std::to_string(array.ndim()));
    int64_t step = 1;
    for (size_t d = array.ndim(); d-- > 0; step *= int64_t(array.shape(d)))
        if (array.shape(d) > 1 && array.stride(d) != step)
            throw std::invalid_argument(std::string(name) +
                                        " must be C-contiguous; pass numpy.ascontiguousarray of it");
    return {static_cast<const T*>(array.data()), array.size()};
}

// A numpy array that owns a copy of `values`.
template <class T> nanobind::object array(std::vector<T> values, std::vector<size_t> shape) {
    auto* kept = new std::vector<T>(std::move(values));
    nanobind::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return nanobind::cast(nanobind::ndarray<nanobind::numpy, T>(kept->data(), shape.size(), shape.data(), owner));
}

}  // namespace colibri

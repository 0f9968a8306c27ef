// Working memory that a calling thread keeps from call to call, so that decoding allocates nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace paged {

inline std::atomic<int64_t>& scratch_total_bytes() {
  static std::atomic<int64_t> total{0};
  return total;
}

class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { release(); }

  // At least `bytes` bytes, aligned to a cache line, contents undefined; null when memory is short. Valid
  // until the next call. Grows by half at least, so that a growing context does not reallocate at every step.
  char* reserve(int64_t bytes) {
    if (bytes > bytes_) {
      const int64_t wanted = ((bytes > bytes_ * 3 / 2 ? bytes : bytes_ * 3 / 2) + 63) / 64 * 64;
      release();
      data_ = static_cast<char*>(std::aligned_alloc(64, static_cast<std::size_t>(wanted)));
      if (data_ == nullptr) return nullptr;
      bytes_ = wanted;
      scratch_total_bytes() += bytes_;
    }
    return data_;
  }

 private:
  void release() {
    std::free(data_);
    scratch_total_bytes() -= bytes_;
    data_ = nullptr;
    bytes_ = 0;
  }

  char* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace paged

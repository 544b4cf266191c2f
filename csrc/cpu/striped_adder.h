// Adds whole arrays of integers from several threads. Each stripe of the array has its own lock, and each
// thread starts at another stripe. So threads that finish together rarely wait.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <span>

namespace uefl::cpu {

class StripedAdder {
 public:
  // Adds `from` to `to`. Thread-safe.
  void add(std::span<const int64_t> from, std::span<int64_t> to) {
    const size_t size = from.size(), stripes = std::clamp<size_t>(size / kLeast, 1, kMost);
    const size_t begin = threads_.fetch_add(1, std::memory_order_relaxed);
    for (size_t i = 0; i < stripes; ++i) {
      const size_t stripe = (begin + i) % stripes, lo = stripe * size / stripes,
                   hi = (stripe + 1) * size / stripes;
      const std::lock_guard<std::mutex> lock(locks_[stripe]);
      for (size_t j = lo; j < hi; ++j) to[j] += from[j];
    }
  }

 private:
  static constexpr size_t
      kMost = 64,
      kLeast = 512;  // stripes, and elements of a stripe: a lock costs about as much as adding 512 elements
  std::array<std::mutex, kMost> locks_;
  std::atomic<size_t> threads_ = 0;
};

}  // namespace uefl::cpu

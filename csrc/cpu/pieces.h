// Sums of whole arrays by several threads at once. Each piece of the array has a lock of its own, and each
// thread begins at another piece, so threads that end together do not wait for one another. For integers,
// whose sum does not depend on the order.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

namespace uefl::cpu {

class Pieces {
 public:
  // to += from. Thread-safe.
  void add(const std::vector<int64_t>& from, std::vector<int64_t>& to) {
    const size_t size = from.size(), pieces = std::clamp<size_t>(size / kLeast, 1, kMost);
    const size_t begin = threads_.fetch_add(1, std::memory_order_relaxed);
    for (size_t i = 0; i < pieces; ++i) {
      const size_t piece = (begin + i) % pieces, lo = piece * size / pieces, hi = (piece + 1) * size / pieces;
      const std::lock_guard<std::mutex> lock(locks_[piece]);
      for (size_t j = lo; j < hi; ++j) to[j] += from[j];
    }
  }

 private:
  static constexpr size_t kMost = 64,
                          kLeast = 512;  // pieces, and elements of one: a microsecond is worth a lock
  std::array<std::mutex, kMost> locks_;
  std::atomic<size_t> threads_ = 0;
};

}  // namespace uefl::cpu

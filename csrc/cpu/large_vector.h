// Vectors that use huge pages if they are large and the system offers such pages on request. Their first use
// then takes one page fault for 2 MB instead of 512.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace uefl::cpu {

template <class T>
class HugePages {
 public:
  using value_type = T;

  T* allocate(size_t count) {
    const size_t bytes = count * sizeof(T), align = alignment(count);
    void* const memory = ::operator new(bytes, std::align_val_t{align});
#if defined(__linux__)
    // This is advice: nothing changes if it fails, or for the rest of the last page.
    if (align == kPage) madvise(memory, (bytes + kPage - 1) / kPage * kPage, MADV_HUGEPAGE);
#endif
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, size_t count) { ::operator delete(memory, std::align_val_t{alignment(count)}); }
  bool operator==(const HugePages&) const = default;

 private:
  static constexpr size_t kPage = 2 << 20, kLine = 64;

  static size_t alignment(size_t count) { return count * sizeof(T) < kPage ? kLine : kPage; }
};

template <class T>
using LargeVector = std::vector<T, HugePages<T>>;

}  // namespace uefl::cpu

// Memory of many gigabytes in which only the touched pages are present, for offsets that need more than 32
// bits.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <new>

template <class T>
class Far {
 public:
  explicit Far(int64_t count) : bytes_(count > 0 ? count * sizeof(T) : 1) {
    void* found =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<T*>(found);
  }
  Far(const Far&) = delete;
  Far& operator=(const Far&) = delete;
  ~Far() { munmap(data_, bytes_); }

  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }
  T* data() { return data_; }
  const T* data() const { return data_; }

 private:
  size_t bytes_;
  T* data_;
};

// Runs body, unless the system grants no more memory than it has.
template <class Body>
void with_far_memory(const Body& body) {
  try {
    body();
  } catch (const std::bad_alloc&) {
    std::printf("skipped: no addresses for many gigabytes\n");
  }
}

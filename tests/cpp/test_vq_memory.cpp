// A search and the forward pass of a layer allocate the codebook and tiles of rows in addition to their
// results. They allocate no memory that grows with the rows.
#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "check.h"
#include "cpu/vq.h"

using namespace uefl::cpu;

static std::atomic<int64_t> held, most;  // bytes

static void* count(void* memory) {
  if (!memory) throw std::bad_alloc();
  held += malloc_usable_size(memory);
  most = std::max(most.load(), held.load());
  return memory;
}

static void give_back(void* memory) {
  held -= malloc_usable_size(memory);
  std::free(memory);
}

void* operator new(size_t size) { return count(std::malloc(size)); }
void* operator new(size_t size, std::align_val_t alignment) {
  const size_t to = static_cast<size_t>(alignment);
  return count(std::aligned_alloc(to, (size + to - 1) / to * to));
}
void operator delete(void* memory) noexcept { give_back(memory); }
void operator delete(void* memory, size_t) noexcept { give_back(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { give_back(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { give_back(memory); }

// Returns the peak memory of work() in bytes.
template <class Body>
static int64_t peak(const Body& work) {
  const int64_t before = held;
  most = before;
  work();
  return most - before;
}

void run() {
  std::mt19937 random(5);
  const int64_t few = 2048, many = 16384, d = 64, k = 256;
  const auto x = normal<float>(many * d, random), codewords = normal<float>(k * d, random);
  const Codebooks codebooks{codewords.data(), Dtype::f32, 1, k, d};
  std::vector<float> quantized(many * d);
  std::vector<int64_t> indices(many), counts(k);
  std::vector<double> sums(k * d);
  const auto rows = [&](int64_t n) { return StridedRows{x.data(), Dtype::f32, n, 1, d, d, 0, 1}; };
  const auto search = [&](int64_t n) {
    return peak([&] { Search(codebooks, Metric::l2, true).assign(rows(n), 0, n, indices.data()); });
  };
  const auto forward = [&](int64_t n) {
    return peak([&] {
      const Search search(codebooks, Metric::l2, true);
      Vq vq(search, codebooks, codewords.data(), rows(n),
            {quantized.data(), indices.data(), counts.data(), sums.data()});
      vq.run(0, vq.blocks());
      vq.add(0, vq.blocks());
      vq.write_sums(0, vq.codeword_count());
    });
  };
  const int64_t bytes_of_x = many * d * sizeof(float);
  for (const auto& [least, largest] :
       {std::pair{search(few), search(many)}, std::pair{forward(few), forward(many)}}) {
    CHECK(largest - least < bytes_of_x / 100, "%ld bytes for %ld rows, %ld for %ld", static_cast<long>(least),
          static_cast<long>(few), static_cast<long>(largest), static_cast<long>(many));
    CHECK(k * d * 8 < least && largest < bytes_of_x / 2, "%ld bytes in addition to the %ld bytes of x",
          static_cast<long>(largest), static_cast<long>(bytes_of_x));
  }
}

// The arrays of a packed codebook as ops/cuda/vq_assign.cu allocates them, for the tests of the searches.
#pragma once

#include <algorithm>
#include <vector>

#include "cuda/vq_assign_pack.h"
#include "emulation.h"

namespace {

// The arrays begin as NaN, or as a number that never occurs, where the kernels must write before they read.
struct TestCodebook {
  std::vector<__uint128_t> halves;  // aligned to 16 bytes
  std::vector<__uint128_t> starts;
  std::vector<double> exact, bounds, longest;
  std::vector<long long> ones;  // an array that the kernel zeroes
  std::vector<float> center, sampled;
  std::vector<uefl::cuda::Listed> listed;
  uefl::cuda::PackedCodebook packed{};

  // Allocates the arrays and packs the codebook. x has the rows to measure.
  template <class T, class Row>
  TestCodebook(const std::vector<T>& codebook, const uefl::cuda::Shape& shape, const Row* x,
               unsigned blocks = 3)
      : starts(shape.codebooks * shape.padded_k / uefl::cuda::kBlockCodewords * uefl::cuda::kStarts / 4),
        exact(shape.codebooks * shape.k * shape.d, NAN),
        bounds(4 * shape.codebooks, NAN),
        longest(shape.codebooks * shape.padded_k / uefl::cuda::kPackCodewords, NAN),
        ones(1000, 1),
        center(shape.codebooks * shape.d, NAN),
        sampled(shape.codebooks * uefl::cuda::kSampledRows, NAN) {
    namespace cuda = uefl::cuda;
    const int64_t width = (shape.d + cuda::kBlockElements - 1) / cuda::kBlockElements * cuda::kBlockElements;
    halves.resize(shape.codebooks * shape.padded_k * width / 8);
    packed.exact = exact.data(), packed.bounds = bounds.data(), packed.center = center.data();
    packed.halves = reinterpret_cast<uint16_t*>(halves.data());
    packed.starts = reinterpret_cast<float*>(starts.data());
    packed.longest = longest.data(), packed.sampled = sampled.data();
    emulation::launch_cooperative(blocks, cuda::kThreads, cuda::pack_codebook<T, Row>, codebook.data(), x,
                                  shape, packed,
                                  cuda::Spans{{ones.data()}, {static_cast<int64_t>(ones.size())}});
  }
  TestCodebook(const TestCodebook&) = delete;  // packed points into this object

  // Empties the lists of open rows and gives them this room.
  void make_lists(int64_t rows) {
    listed.assign(rows, {-1, {-1, -1}});
    packed.listed = listed.data();
  }
  // Returns the outputs that a search has left open after its first phase.
  std::vector<int64_t> open() const {
    std::vector<int64_t> found;
    for (const uefl::cuda::Listed& row : listed) {
      if (row.output >= 0) found.push_back(row.output);
    }
    return found;
  }
};

}  // namespace

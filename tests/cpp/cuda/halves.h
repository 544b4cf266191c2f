// The arrays of PackedHalves, for the tests of the searches on tensor cores.
#pragma once

#include <algorithm>
#include <vector>

#include "cuda/vq_assign_halves.h"
#include "emulation.h"

namespace {

struct Halves {
  std::vector<__uint128_t> codes;  // aligned to 16 bytes
  std::vector<float> half_norms;
  std::vector<double> rest;
  std::vector<long long> counts;
  std::vector<int64_t> listed;
  uefl::cuda::PackedHalves arrays;

  Halves(const uefl::cuda::Shape& shape, const uefl::cuda::Packed& packed, int64_t padded_k, int width, bool blocks)
      : codes((shape.books * padded_k * width + 7) / 8),
        half_norms(shape.books * padded_k, NAN),
        rest(shape.books),
        counts(shape.books),
        listed(shape.outputs, -1),
        arrays{reinterpret_cast<uint16_t*>(codes.data()),
               half_norms.data(),
               rest.data(),
               counts.data(),
               listed.data(),
               padded_k,
               width,
               blocks} {
    const auto warps = static_cast<unsigned>((shape.books * padded_k + 1) / 2);
    emulation::launch(warps, 64, uefl::cuda::pack_halves, shape, packed, arrays);
  }

  static Halves in_blocks(const uefl::cuda::Shape& shape, const uefl::cuda::Packed& packed) {
    const auto up = [](int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; };
    return Halves(shape, packed, up(shape.k, uefl::cuda::kBlockCodes), static_cast<int>(up(shape.d, uefl::cuda::kBlockElements)), true);
  }

  Halves(const Halves&) = delete;  // arrays points into it

  uefl::cuda::Selection selection() const { return {listed.data(), counts.data()}; }
  void clear() { std::fill(counts.begin(), counts.end(), 0); }
};

}  // namespace

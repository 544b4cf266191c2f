#if defined(__x86_64__)
// GCC 12 warns about the deliberately undefined operands in its own AVX-512 headers (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <cstdint>

namespace uefl::cpu {
namespace {

struct Simd {
  using Float = __m512;
  typedef int Int __attribute__((vector_size(64)));
  static constexpr int width = 16;

  static __mmask16 first(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
  // The first n elements, -infinity in the other lanes.
  static void load_first(const float* from, int64_t n, Float& out) {
    out = _mm512_mask_loadu_ps(_mm512_set1_ps(-__builtin_inff()), first(n), from);
  }
  static void store_first(const Float& value, int64_t n, float* to) { _mm512_mask_storeu_ps(to, first(n), value); }
  static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static float max_across(Float a) { return _mm512_reduce_max_ps(a); }
  static float min_across(Float a) { return _mm512_reduce_min_ps(a); }
  static float sum_across(Float a) { return _mm512_reduce_add_ps(a); }
};

}  // namespace
}  // namespace uefl::cpu

#define UEFL_KERNEL_BODY
#include "cpu/softmax_kernel.h"

namespace uefl::cpu {
const SoftmaxKernel softmax_avx512 = kKernel;
}
#endif

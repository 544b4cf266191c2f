#if defined(__x86_64__)
// GCC 12 warns about the deliberately undefined operands in its own AVX-512 headers (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

namespace uefl::cpu {
namespace {

struct Simd {
  using Float = __m512;
  typedef int Int __attribute__((vector_size(64)));
  static constexpr int width = 16;

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

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
  static constexpr int width = 16, rows = 12;  // 12 x 2 sums, 2 codewords and a row element fill 27 of 32 registers

  static Float broadcast(float value) { return _mm512_set1_ps(value); }
  static Float subtract_product(Float sum, Float a, Float b) { return _mm512_fnmadd_ps(a, b, sum); }
  static Float min(Float a, Float b) { return _mm512_min_ps(a, b); }
  static Float max(Float a, Float b) { return _mm512_max_ps(a, b); }
  static float min_across(Float a) { return _mm512_reduce_min_ps(a); }
  static int first_equal(Float a, float value) {
    const unsigned equal = _mm512_cmp_ps_mask(a, broadcast(value), _CMP_EQ_OQ);
    return equal ? __builtin_ctz(equal) : 0;
  }
  static Float with_infinity(Float a, int lane) { return _mm512_mask_mov_ps(a, 1u << lane, broadcast(__builtin_inff())); }
};

}  // namespace
}  // namespace uefl::cpu

#define UEFL_KERNEL_BODY
#include "cpu/vq_assign_kernel.h"

namespace uefl::cpu {
const VqAssignKernel vq_assign_avx512 = kKernel;
}
#endif

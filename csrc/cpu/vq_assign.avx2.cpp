#if defined(__x86_64__)
#include <immintrin.h>

namespace uefl::cpu {
namespace {

struct Simd {
  using Float = __m256;
  typedef int Int __attribute__((vector_size(32)));
  static constexpr int width = 8, rows = 6;  // 6 x 2 sums, 2 codewords and a row element fill 15 of 16 registers

  static Float broadcast(float value) { return _mm256_set1_ps(value); }
  static Float subtract_product(Float sum, Float a, Float b) { return _mm256_fnmadd_ps(a, b, sum); }
  static Float min(Float a, Float b) { return _mm256_min_ps(a, b); }
  static Float max(Float a, Float b) { return _mm256_max_ps(a, b); }
  static float min_across(Float a) {
    __m128 m = _mm_min_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    m = _mm_min_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_min_ss(m, _mm_shuffle_ps(m, m, 1)));
  }
  static int first_equal(Float a, float value) {
    const unsigned equal = _mm256_movemask_ps(_mm256_cmp_ps(a, broadcast(value), _CMP_EQ_OQ));
    return equal ? __builtin_ctz(equal) : 0;
  }
  static Float with_infinity(Float a, int lane) {
    a[lane] = __builtin_inff();
    return a;
  }
};

}  // namespace
}  // namespace uefl::cpu

#define UEFL_KERNEL_BODY
#include "cpu/vq_assign_kernel.h"

namespace uefl::cpu {
const VqAssignKernel vq_assign_avx2 = kKernel;
}
#endif

#if defined(__x86_64__)
#include <immintrin.h>

namespace uefl::cpu {
namespace {

struct Simd {
  using Float = __m256;
  typedef int Int __attribute__((vector_size(32)));
  static constexpr int width = 8;

  static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static float max_across(Float a) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
  }
  static float min_across(Float a) { return -max_across(-a); }
  static float sum_across(Float a) {
    __m128 m = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    m = _mm_add_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_add_ss(m, _mm_shuffle_ps(m, m, 1)));
  }
};

}  // namespace
}  // namespace uefl::cpu

#define UEFL_KERNEL_BODY
#include "cpu/softmax_kernel.h"

namespace uefl::cpu {
const SoftmaxKernel softmax_avx2 = kKernel;
}
#endif

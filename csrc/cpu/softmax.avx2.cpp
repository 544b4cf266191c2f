#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>

namespace uefl::cpu {
namespace {

struct Simd {
  using Float = __m256;
  typedef int Int __attribute__((vector_size(32)));
  static constexpr int width = 8;

  static __m256i first(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  // The first n elements, -infinity in the other lanes.
  static void load_first(const float* from, int64_t n, Float& out) {
    const __m256i mask = first(n);
    out = _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()), _mm256_maskload_ps(from, mask), _mm256_castsi256_ps(mask));
  }
  static void store_first(const Float& value, int64_t n, float* to) { _mm256_maskstore_ps(to, first(n), value); }
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

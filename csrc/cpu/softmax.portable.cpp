// Four lanes in GCC's vector types: SSE2, NEON, or whatever the compiler makes of them.
#include <cstdint>

namespace uefl::cpu {
namespace {

struct Simd {
  typedef float Float __attribute__((vector_size(16)));
  typedef int Int __attribute__((vector_size(16)));
  static constexpr int width = 4;

  // The first n elements, -infinity in the other lanes.
  static void load_first(const float* from, int64_t n, Float& out) {
    out = Float{} - __builtin_inff();
    for (int64_t i = 0; i < n; ++i) out[i] = from[i];
  }
  static void store_first(const Float& value, int64_t n, float* to) {
    for (int64_t i = 0; i < n; ++i) to[i] = value[i];
  }
  static Float fma(Float a, Float b, Float c) { return a * b + c; }
  static float max_across(Float a) {
    const float low = a[0] > a[1] ? a[0] : a[1], high = a[2] > a[3] ? a[2] : a[3];
    return low > high ? low : high;
  }
  static float min_across(Float a) { return -max_across(-a); }
  static float sum_across(Float a) { return (a[0] + a[2]) + (a[1] + a[3]); }
};

}  // namespace
}  // namespace uefl::cpu

#define UEFL_KERNEL_BODY
#include "cpu/softmax_kernel.h"

namespace uefl::cpu {
const SoftmaxKernel softmax_portable = kKernel;
}

// Four lanes in GCC's vector types: SSE2, NEON, or whatever the compiler makes of them.
namespace uefl::cpu {
namespace {

struct Simd {
  typedef float Float __attribute__((vector_size(16)));
  typedef int Int __attribute__((vector_size(16)));
  static constexpr int width = 4, rows = 4;

  static Float broadcast(float value) { return Float{} + value; }
  static Float subtract_product(Float sum, Float a, Float b) { return sum - a * b; }
  static Float min(Float a, Float b) { return a < b ? a : b; }
  static Float max(Float a, Float b) { return a > b ? a : b; }
  static float min_across(Float a) {
    const float low = a[0] < a[1] ? a[0] : a[1], high = a[2] < a[3] ? a[2] : a[3];
    return low < high ? low : high;
  }
  static int first_equal(Float a, float value) {
    for (int lane = 0; lane < width; ++lane) {
      if (a[lane] == value) return lane;
    }
    return 0;
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
const VqAssignKernel vq_assign_portable = kKernel;
}

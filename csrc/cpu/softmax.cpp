#include "cpu/softmax.h"

#include "cpu/features.h"

namespace uefl::cpu {

const SoftmaxKernel& softmax_kernel() { return pick<&softmax_portable, &softmax_avx2, &softmax_avx512>(); }

std::vector<double> read_row(const StridedRows& logits, int64_t n) {
  std::vector<double> z(logits.dim);
  with_type(logits.dtype, [&]<class T>(const T*) {
    const T* row = reinterpret_cast<const T*>(element(logits, n, 0));
    for (int64_t k = 0; k < logits.dim; ++k) z[k] = static_cast<double>(widen(row[k * logits.dim_stride]));
  });
  return z;
}

void write_row(const std::vector<double>& values, Dtype dtype, void* to, int64_t n) {
  with_type(dtype, [&]<class T>(const T*) {
    T* row = static_cast<T*>(to) + n * static_cast<int64_t>(values.size());
    for (size_t k = 0; k < values.size(); ++k) row[k] = narrow<T>(values[k]);
  });
}

}  // namespace uefl::cpu

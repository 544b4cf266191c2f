// Few rows against a codebook as it lies in memory: each codeword is read once for a group of rows.
#include "cpu/simd.h"
#include "cpu/variant.h"
#include "cpu/vq_assign_few_kernel.h"

namespace uefl::cpu {
namespace {

constexpr int kRows = 4;  // of a group
constexpr int kWide =
    4 * kLanes;  // elements of a step of a single row: four sums hide the latency of an addition

int64_t pitch(int64_t d) { return (d + kLanes - 1) / kLanes * kLanes; }

// Adds the part of one vector of elements to the sums of a row: of squared differences, or of products.
template <bool euclidean>
UEFL_INLINE void add(const Floats& x, const Floats& code, Floats& sum) {
  if constexpr (euclidean) {
    const Floats difference = x - code;
    sum = fused(difference, difference, sum);
  } else {
    sum = fused(x, code, sum);
  }
}

// The sums of kCount rows with one codeword; rest: its last elements, which fill no vector, and zeros.
template <bool euclidean, int kCount>
UEFL_INLINE void sum_rows(const float* rows, int64_t pitch, const float* code, const Floats& rest, int64_t d,
                          float* out) {
  constexpr int kSums = kCount == 1 ? 4 : 1;
  Floats sum[kCount][kSums] = {}, x, c;
  int64_t j = 0;
  if constexpr (kCount == 1) {
    for (; j + kWide <= d; j += kWide) {
#pragma GCC unroll 4
      for (int part = 0; part < kSums; ++part) {
        load(rows + j + part * kLanes, x), load(code + j + part * kLanes, c);
        add<euclidean>(x, c, sum[0][part]);
      }
    }
  }
  for (; j + kLanes <= d; j += kLanes) {
    load(code + j, c);
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r) {
      load(rows + r * pitch + j, x);
      add<euclidean>(x, c, sum[r][0]);
    }
  }
  if (j < d) {
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r) {
      load(rows + r * pitch + j, x);
      add<euclidean>(x, rest, sum[r][0]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kCount; ++r) {
    Floats total = sum[r][0];
    if constexpr (kSums == 4) total = (total + sum[r][1]) + (sum[r][2] + sum[r][3]);
    const float sum_of_all = sum_across(total);
    out[r] = sum_of_all + (sum_of_all - sum_of_all);  // NaN for infinity: the caller looks at that codeword
  }
}

UEFL_INLINE float square_of(const float* code, const Floats& rest, int64_t d) {
  Floats sum = rest * rest, c;
  for (int64_t j = 0; j + kLanes <= d; j += kLanes) {
    load(code + j, c);
    sum = fused(c, c, sum);
  }
  return sum_across(sum);
}

template <bool euclidean>
void score_codes(const FewRun& run, int64_t lo, int64_t hi) {
  constexpr float kNaN = __builtin_nanf("");
  float* const wide = run.dtype == Dtype::f32 ? nullptr : new float[run.d];
  with_type(run.dtype, [&]<class T>(const T*) {
    for (int64_t k = lo; k < hi; ++k) {
      const T* given = static_cast<const T*>(run.codes) + k * run.d;
      const float* code = wide;
      if constexpr (sizeof(T) == 4) {
        code = reinterpret_cast<const float*>(given);
      } else {
        for (int64_t j = 0; j < run.d; ++j) wide[j] = static_cast<float>(widen(given[j]));
      }
      float last[kLanes] = {};
      for (int64_t j = run.d / kLanes * kLanes, i = 0; j < run.d; ++j, ++i) last[i] = code[j];
      Floats rest;
      load(last, rest);
      float* out = run.scores + k;
      float sums[kRows], factor = 1;
      if constexpr (!euclidean) {
        const float square = square_of(code, rest, run.d);
        factor = square >= 0x1p-100f && square <= 0x1p100f ? -1 / __builtin_sqrtf(square) : kNaN;
      }
      int64_t r = 0;
      for (; r + kRows <= run.count; r += kRows) {
        sum_rows<euclidean, kRows>(run.rows + r * run.pitch, run.pitch, code, rest, run.d, sums);
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) out[(r + i) * run.score_pitch] = sums[i] * factor;
      }
      for (; r < run.count; ++r) {
        sum_rows<euclidean, 1>(run.rows + r * run.pitch, 0, code, rest, run.d, sums);
        out[r * run.score_pitch] = sums[0] * factor;
      }
    }
  });
  delete[] wide;
}

void score(const FewRun& run, int64_t lo, int64_t hi) {
  run.euclidean ? score_codes<true>(run, lo, hi) : score_codes<false>(run, lo, hi);
}

}  // namespace

const VqAssignFewKernel UEFL_VARIANT(vq_assign_few){pitch, score};

}  // namespace uefl::cpu

// Exponentials of a row of logits in float32, and the ops that use them.
#include "cpu/simd.h"
#include "cpu/softmax_kernel.h"
#include "cpu/variant.h"

namespace uefl::cpu {
namespace {

// Computes row = exp(z - max z), and zeros from k on.
template <class T>
UEFL_INLINE void exponentials(const StridedRows& logits, int64_t n, float* row) {
  const int64_t k = logits.dim, end = padded(k);
  const T* z = reinterpret_cast<const T*>(element(logits, n, 0));
  Floats most = Floats{} - __builtin_inff(), value;
  for (int64_t j = 0; j < end; j += kLanes) {
    const int64_t left = k - j < kLanes ? k - j : kLanes;
    if (sizeof(T) == sizeof(float) && logits.dim_stride == 1) {
      load_first(reinterpret_cast<const float*>(z + j), left, value);
    } else {
      value = Floats{} - __builtin_inff();
      for (int64_t i = 0; i < left; ++i) value[i] = static_cast<float>(widen(z[(j + i) * logits.dim_stride]));
    }
    most = value > most ? value : most;
    store(value, row + j);
  }
  const float shift = most_across(most);
  for (int64_t j = 0; j < end; j += kLanes) {
    load(row + j, value);
    value = value - shift;
    small_exponential(value);
    store(value, row + j);
  }
}

UEFL_INLINE float dot(const float* a, const float* b, int64_t end) {
  Floats total{}, x, y;
  for (int64_t j = 0; j < end; j += kLanes) {
    load(a + j, x);
    load(b + j, y);
    total = fused(x, y, total);
  }
  return sum_across(total);
}

// Writes out[j] = row[j] for j < k.
template <class T>
UEFL_INLINE void write(const float* row, int64_t k, char* out) {
  T* to = reinterpret_cast<T*>(out);
  if constexpr (sizeof(T) == sizeof(float)) {
    for (int64_t j = 0; j < k; j += kLanes) {
      Floats value;
      load(row + j, value);
      store_first(value, k - j < kLanes ? k - j : kLanes, to + j);
    }
  } else {
    for (int64_t j = 0; j < k; ++j) to[j] = narrow<T>(row[j]);
  }
}

// Computes row = softmax(z), and zeros from k on.
template <class T>
UEFL_INLINE void probabilities(const StridedRows& logits, int64_t n, float* row) {
  const int64_t end = padded(logits.dim);
  exponentials<T>(logits, n, row);
  Floats total{}, e;
  for (int64_t j = 0; j < end; j += kLanes) {
    load(row + j, e);
    total = total + e;
  }
  const float inverse = 1 / sum_across(total);
  for (int64_t j = 0; j < end; j += kLanes) {
    load(row + j, e);
    store(e * inverse, row + j);
  }
}

template <class T>
int64_t nll_typed(const TransitionRun& run) {
  const int64_t k = run.logits.dim, end = padded(k), bytes = k * static_cast<int64_t>(sizeof(T));
  int64_t pending = 0;
  for (int64_t n = run.lo; n < run.hi; ++n) {
    if (run.targets[n] == run.ignore_index) {
      run.out[n] = 0;
      if (run.gradient) __builtin_memset(run.gradient + n * bytes, 0, bytes);
      continue;
    }
    const int64_t group = run.groups ? run.groups[n] : 0;
    const float* marginal = run.marginal + group * end;
    const float* target = run.matrix + (group * run.m + run.targets[n]) * end;
    exponentials<T>(run.logits, n, run.row);
    const float all = dot(run.row, marginal, end), own = dot(run.row, target, end);
    if (!(all >= kSmallest && own >= kSmallest)) {  // also true for NaN
      run.pending[pending++] = n;
      continue;
    }
    const double scale = static_cast<double>(run.marginal_scale[group]) -
                         run.matrix_scale[group * run.padded_m + run.targets[n]];
    run.out[n] = static_cast<float>(__builtin_log(static_cast<double>(all) / own) + scale);
    if (!run.gradient) continue;
    const float inverse_all = 1 / all, inverse_own = 1 / own;
    for (int64_t j = 0; j < end; j += kLanes) {
      Floats e, s, a;
      load(run.row + j, e);
      load(marginal + j, s);
      load(target + j, a);
      store(e * (s * inverse_all - a * inverse_own), run.row + j);
    }
    write<T>(run.row, k, run.gradient + n * bytes);
  }
  return pending;
}

// Computes out[r][j] = sum_i weights[r][i] table[i][j] for R rows and `Vectors` vectors of j. The order of
// the additions is the same for any R.
template <int R, int Vectors>
UEFL_INLINE void weighted_sums(const float* weights, int64_t row_stride, const float* table, int64_t count,
                               int64_t stride, float* out, int64_t out_stride) {
  Floats total[R][Vectors] = {};
  for (int64_t from = 0; from < count; from += kTerms) {
    const int64_t to = count < from + kTerms ? count : from + kTerms;
    Floats part[R][Vectors] = {};
    for (int64_t i = from; i < to; ++i) {
      Floats value[Vectors];
      for (int v = 0; v < Vectors; ++v) load(table + i * stride + v * kLanes, value[v]);
      for (int r = 0; r < R; ++r) {
        const Floats weight = Floats{} + weights[r * row_stride + i];
        for (int v = 0; v < Vectors; ++v) part[r][v] = fused(weight, value[v], part[r][v]);
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < Vectors; ++v) total[r][v] = total[r][v] + part[r][v];
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < Vectors; ++v) store(total[r][v], out + r * out_stride + v * kLanes);
  }
}

// Does the same for `width` columns of the table, a multiple of a vector.
template <int R>
UEFL_INLINE void multiply(const float* weights, int64_t row_stride, const float* table, int64_t count,
                          int64_t width, float* out) {
  constexpr int kVectors = R == 1 ? 4 : 2;  // enough sums at a time to hide the latency of an addition
  int64_t j = 0;
  for (; j + kVectors * kLanes <= width; j += kVectors * kLanes) {
    weighted_sums<R, kVectors>(weights, row_stride, table + j, count, width, out + j, width);
  }
  for (; j < width; j += kLanes)
    weighted_sums<R, 1>(weights, row_stride, table + j, count, width, out + j, width);
}

// Visits tiles of up to kTile consecutive rows of one group, with their exponentials in run.row. Calls
// body(first row, rows, group). Fewer than kTile rows are visited one at a time.
template <class T, class Body>
UEFL_INLINE void tiles(const TransitionRun& run, const Body& body) {
  for (int64_t n = run.lo; n < run.hi;) {
    const int64_t group = run.groups ? run.groups[n] : 0;
    int64_t rows = 1;
    while (rows < kTile && n + rows < run.hi && (!run.groups || run.groups[n + rows] == group)) ++rows;
    if (rows < kTile) rows = 1;
    const int64_t end = padded(run.logits.dim);
    for (int64_t r = 0; r < rows; ++r) exponentials<T>(run.logits, n + r, run.row + r * end);
    body(n, rows, group);
    n += rows;
  }
}

// Computes sets[r][m] = e_r.A_m for all sets.
UEFL_INLINE void set_sums(const TransitionRun& run, int64_t rows, int64_t group) {
  const int64_t k = run.logits.dim, end = padded(k);
  const float* table = run.transposed + group * k * run.padded_m;
  if (rows == kTile) {
    multiply<kTile>(run.row, end, table, k, run.padded_m, run.sets);
  } else {
    multiply<1>(run.row, end, table, k, run.padded_m, run.sets);
  }
}

// Returns true if every sum is large enough that no term was lost.
UEFL_INLINE bool is_safe(const float* sets, int64_t padded_m, float all) {
  bool safe = all >= kSmallest;
  for (int64_t i = 0; i < padded_m; i += kLanes) {
    Floats value;
    load(sets + i, value);
    safe = safe && least_across(value) >= kSmallest;
  }
  return safe;
}

template <class T>
int64_t probs_typed(const TransitionRun& run) {
  const int64_t end = padded(run.logits.dim);
  int64_t pending = 0;
  tiles<T>(run, [&](int64_t n, int64_t rows, int64_t group) {
    set_sums(run, rows, group);
    const float* scale = run.matrix_scale + group * run.padded_m;
    for (int64_t r = 0; r < rows; ++r) {
      float* sets = run.sets + r * run.padded_m;
      const float all = dot(run.row + r * end, run.marginal + group * end, end);
      if (!is_safe(sets, run.padded_m, all)) {
        run.pending[pending++] = n + r;
        continue;
      }
      for (int64_t i = 0; i < run.padded_m; i += kLanes) {
        Floats value, shift;
        load(sets + i, value);
        load(scale + i, shift);
        value = value / all;
        normal_logarithm(value);
        store(value + (shift - run.marginal_scale[group]), sets + i);
      }
      __builtin_memcpy(run.out + (n + r) * run.m, sets, run.m * sizeof(float));
    }
  });
  return pending;
}

template <class T>
int64_t probs_backward_typed(const TransitionRun& run) {
  const int64_t k = run.logits.dim, end = padded(k), bytes = k * static_cast<int64_t>(sizeof(T));
  int64_t pending = 0;
  tiles<T>(run, [&](int64_t n, int64_t rows, int64_t group) {
    set_sums(run, rows, group);
    const float *scale = run.matrix_scale + group * run.padded_m, *marginal = run.marginal + group * end;
    float inverse_all[kTile];
    for (int64_t r = 0; r < rows; ++r) {
      float* sets = run.sets + r * run.padded_m;
      const float all = dot(run.row + r * end, marginal, end), *grad = run.grad + (n + r) * run.m;
      const bool safe = is_safe(sets, run.padded_m, all);
      if (!safe) run.pending[pending++] = n + r;
      float total = 0;
      for (int64_t i = 0; i < run.m; ++i) {
        const float weight = !safe || scale[i] == -__builtin_inff() ? 0 : grad[i];
        total += weight;
        sets[i] = safe ? weight / sets[i] : 0;
      }
      inverse_all[r] = safe ? total / all : 0;
    }
    const float* table = run.matrix + group * run.m * end;
    if (rows == kTile) {
      multiply<kTile>(run.sets, run.padded_m, table, run.m, end, run.mix);
    } else {
      multiply<1>(run.sets, run.padded_m, table, run.m, end, run.mix);
    }
    for (int64_t r = 0; r < rows; ++r) {
      float* row = run.row + r * end;
      for (int64_t j = 0; j < end; j += kLanes) {
        Floats e, s, sum;
        load(row + j, e);
        load(marginal + j, s);
        load(run.mix + r * end + j, sum);
        store(e * (sum - s * inverse_all[r]), row + j);
      }
      write<T>(row, k, run.gradient + (n + r) * bytes);  // also for a pending row, which the definition
                                                         // overwrites
    }
  });
  return pending;
}

// Computes the exponentials twice, which costs less than storing them.
template <class T>
bool proportion_typed(const ProportionRun& run) {
  const int64_t k = run.logits.dim, end = padded(k), bytes = k * static_cast<int64_t>(sizeof(T));
  Floats p, sum, pull;
  for (int64_t j = 0; j < end; ++j) run.sums[j] = run.pull[j] = 0;
  for (int64_t n = run.lo; n < run.hi; ++n) {
    probabilities<T>(run.logits, n, run.row);
    for (int64_t j = 0; j < end; j += kLanes) {
      load(run.row + j, p);
      load(run.sums + j, sum);
      store(sum + p, run.sums + j);
    }
  }
  for (int64_t j = 0; j < k; ++j) {
    const bool wanted = run.proportions[j] > 0;
    if (!(wanted ? run.sums[j] >= kSmallest : run.sums[j] >= 0)) return false;  // also true for NaN
    if (wanted) run.pull[j] = run.proportions[j] / run.sums[j];
  }
  for (int64_t n = run.lo; run.gradient && n < run.hi; ++n) {
    probabilities<T>(run.logits, n, run.row);
    const float total = dot(run.row, run.pull, end);
    for (int64_t j = 0; j < end; j += kLanes) {
      load(run.row + j, p);
      load(run.pull + j, pull);
      store(p * (total - pull), run.row + j);
    }
    write<T>(run.row, k, run.gradient + n * bytes);
  }
  return true;
}

// float64 logits use the definition and are not handled here.
template <class Body>
inline void with_narrow_type(Dtype dtype, const Body& body) {
  if (dtype == Dtype::f32) return body(static_cast<const float*>(nullptr));
  if (dtype == Dtype::bf16) return body(static_cast<const BFloat16*>(nullptr));
  return body(static_cast<const Half*>(nullptr));
}

int64_t nll(const TransitionRun& run) {
  int64_t pending = 0;
  with_narrow_type(run.logits.dtype, [&]<class T>(const T*) { pending = nll_typed<T>(run); });
  return pending;
}

int64_t probs(const TransitionRun& run) {
  int64_t pending = 0;
  with_narrow_type(run.logits.dtype, [&]<class T>(const T*) { pending = probs_typed<T>(run); });
  return pending;
}

int64_t probs_backward(const TransitionRun& run) {
  int64_t pending = 0;
  with_narrow_type(run.logits.dtype, [&]<class T>(const T*) { pending = probs_backward_typed<T>(run); });
  return pending;
}

bool proportion(const ProportionRun& run) {
  bool done = false;
  with_narrow_type(run.logits.dtype, [&]<class T>(const T*) { done = proportion_typed<T>(run); });
  return done;
}

}  // namespace

const SoftmaxKernel UEFL_VARIANT(softmax){nll, probs, probs_backward, proportion};

}  // namespace uefl::cpu

#include "cpu/rvq.h"

#include <algorithm>

#include "cpu/row_buffer.h"
#include "cpu/vq.h"

namespace uefl::cpu {
namespace {

// Rounds as PyTorch does: narrower types are computed in float32.
template <class T>
T plus(T a, T b) {
  return narrow<T>(widen(a) + widen(b));
}
template <class T>
T minus(T a, T b) {
  return narrow<T>(widen(a) - widen(b));
}

// Adds the codewords of rows [lo, hi) of a stage to `total`, and writes x minus the codewords to `residual`,
// which may be null.
template <class T>
void subtract(const RvqStage& stage, const StridedRows& x, int64_t lo, int64_t hi, T* residual, T* total) {
  const int64_t d = stage.codebooks.d, segments = x.dim / d,
                step = stage.codebooks.count == 1 ? 0 : stage.codebooks.k;
  for (int64_t n = lo; n < hi; ++n) {
    for (int64_t s = 0; s < segments; ++s) {
      const int64_t place = n * segments + s;
      const T* code = static_cast<const T*>(stage.codewords) + (stage.indices[place] + s * step) * d;
      T* sum = total + place * d;
      for (int64_t j = 0; j < d; ++j) sum[j] = plus(sum[j], code[j]);
      if (!residual) continue;
      const T* source = reinterpret_cast<const T*>(element(x, n, s * d));
      T* rest = residual + place * d;
      if (x.dim_stride == 1) {
        for (int64_t j = 0; j < d; ++j) rest[j] = minus(source[j], code[j]);
      } else {
        for (int64_t j = 0; j < d; ++j) rest[j] = minus(source[j * x.dim_stride], code[j]);
      }
    }
  }
}

void subtract(const RvqRun& run, const RvqStage& stage, const StridedRows& x, bool last,
              const Parallel& blocks) {
  const int64_t rows = x.outer * x.inner, step = RowBuffer::rows_for(x.dim);
  const auto work = [&](int64_t lo, int64_t hi) {
    with_type(x.dtype, [&]<class T>(const T*) {
      subtract(stage, x, lo * step, std::min(hi * step, rows), last ? nullptr : static_cast<T*>(run.residual),
               static_cast<T*>(run.total));
    });
  };
  blocks((rows + step - 1) / step, work);
}

}  // namespace

std::vector<double> rvq(const RvqRun& run, const Parallel& by_codeword, const Parallel& blocks) {
  std::vector<double> errors;
  const int64_t rows = run.x.outer * run.x.inner, dim = run.x.dim;
  const StridedRows residual{run.residual, run.x.dtype, rows, 1, dim, dim, 0, 1};
  for (const RvqStage& stage : run.stages) {
    const StridedRows& x = errors.empty() ? run.x : residual;
    const Search search(stage.codebooks, run.metric, run.exact, "rvq", by_codeword, run.few);
    Vq vq(search, stage.codebooks, stage.codewords, x, {nullptr, stage.indices, stage.counts, stage.sums});
    blocks(vq.blocks(), [&](int64_t lo, int64_t hi) { vq.run(lo, hi); });
    if (stage.sums) {
      blocks(vq.blocks(), [&](int64_t lo, int64_t hi) { vq.add(lo, hi); });
      by_codeword(vq.codeword_count(), [&](int64_t lo, int64_t hi) { vq.write_sums(lo, hi); });
    }
    errors.push_back(vq.error());
    subtract(run, stage, x, errors.size() == run.stages.size(), blocks);
  }
  return errors;
}

}  // namespace uefl::cpu

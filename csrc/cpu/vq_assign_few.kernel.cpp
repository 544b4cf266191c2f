// Scores few rows with an unpacked codebook. Each codeword is read once for all rows.
#include "cpu/simd.h"
#include "cpu/variant.h"
#include "cpu/vq_assign_few_kernel.h"

namespace uefl::cpu {
namespace {

constexpr int kRows = 4;  // rows of a pass over a codeword, for rows that lie one after the other
constexpr int kWide =
    4 * kLanes;  // elements of a step for a single row; four sums hide the latency of an addition
// Groups of rows and codewords of a step, for rows in groups. Their sums, a vector of each group, one
// codeword and one difference fill the registers.
constexpr int kGroups = 2, kCodewords = kLanes == 16 ? 8 : 6;
constexpr int kUnroll =
    4;  // elements of a step of this loop, whose branch would otherwise take a third of it

// Adds one vector of elements to the sums of a row: of squared differences, or of products.
template <FewForm form>
UEFL_INLINE void add(const Floats& x, const Floats& code, Floats& sum) {
  if constexpr (form == FewForm::differences) {
    const Floats difference = x - code;
    sum = fused(difference, difference, sum);
  } else {
    sum = fused(x, code, sum);
  }
}

// Computes the sums of kCount rows with one codeword. `rest` has the last elements, which fill no vector, and
// zeros.
template <FewForm form, int kCount>
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
        add<form>(x, c, sum[0][part]);
      }
    }
  }
  for (; j + kLanes <= d; j += kLanes) {
    load(code + j, c);
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r) {
      load(rows + r * pitch + j, x);
      add<form>(x, c, sum[r][0]);
    }
  }
  if (j < d) {
#pragma GCC unroll 4
    for (int r = 0; r < kCount; ++r) {
      load(rows + r * pitch + j, x);
      add<form>(x, rest, sum[r][0]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kCount; ++r) {
    Floats total = sum[r][0];
    if constexpr (kSums == 4) total = (total + sum[r][1]) + (sum[r][2] + sum[r][3]);
    const float sum_of_all = sum_across(total);
    out[r] = sum_of_all + (sum_of_all - sum_of_all);  // turns infinity into NaN, which the caller evaluates
  }
}

// Returns |c|^2.
UEFL_INLINE float square_of(const float* code, int64_t d) {
  Floats sum[4] = {}, c;
  int64_t j = 0;
  for (; j + kWide <= d; j += kWide) {
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      load(code + j + part * kLanes, c);
      sum[part] = fused(c, c, sum[part]);
    }
  }
  for (; j + kLanes <= d; j += kLanes) {
    load(code + j, c);
    sum[0] = fused(c, c, sum[0]);
  }
  float square = sum_across((sum[0] + sum[1]) + (sum[2] + sum[3]));
  for (; j < d; ++j) square += code[j] * code[j];
  return square;
}

// Returns -1 / |c|, or NaN if the square is out of range.
UEFL_INLINE float cosine_factor(const float* code, int64_t d) {
  const float square = square_of(code, d);
  return square >= 0x1p-100f && square <= 0x1p100f ? -1 / __builtin_sqrtf(square) : __builtin_nanf("");
}

// Returns |c|^2 / 2, or NaN if it overflows.
UEFL_INLINE float half_square(const float* code, int64_t d) {
  const float half = square_of(code, d) / 2;
  return half + (half - half);
}

// Scores all rows, which lie one after the other, with one codeword.
template <FewForm form>
void score_code(const FewRun& run, const float* code, float* out) {
  float last[kLanes] = {};
  for (int64_t j = run.d / kLanes * kLanes, i = 0; j < run.d; ++j, ++i) last[i] = code[j];
  Floats rest;
  load(last, rest);
  const int64_t pitch = run.layout.row_pitch;
  const float factor = form == FewForm::cosine ? cosine_factor(code, run.d) : 1;
  int64_t r = 0;
  for (; r + kRows <= run.count; r += kRows)
    sum_rows<form, kRows>(run.rows + r * pitch, pitch, code, rest, run.d, out + r);
  for (; r < run.count; ++r) sum_rows<form, 1>(run.rows + r * pitch, 0, code, rest, run.d, out + r);
  for (r = 0; r < run.count; ++r) out[r] *= factor;
}

// The codewords of a step in float32, and the places of their scores, which are factor * sum + shift. If
// fewer codewords are left, the last one is repeated.
struct CodewordStep {
  const float* code[kCodewords];
  float* out[kCodewords];
  float factor[kCodewords], shift[kCodewords];
};

// Scores kCount groups of rows with the codewords of a step.
template <FewForm form, int kCount>
UEFL_INLINE void score_groups(const FewRun& run, int64_t group, const CodewordStep& step) {
  const int64_t pitch = run.layout.group_pitch;
  const float* const rows = run.rows + group * pitch;
  Floats sum[kCodewords][kCount] = {}, x[kCount];
  const auto add_element = [&](int64_t j) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int g = 0; g < kCount; ++g) load(rows + g * pitch + j * kLanes, x[g]);
#pragma GCC unroll 8
    for (int c = 0; c < kCodewords; ++c) {
      const Floats code = broadcast(step.code[c][j]);
#pragma GCC unroll 2
      for (int g = 0; g < kCount; ++g) add<form>(x[g], code, sum[c][g]);
    }
  };
  int64_t j = 0;
  for (; j + kUnroll <= run.d; j += kUnroll) {
#pragma GCC unroll 4
    for (int i = 0; i < kUnroll; ++i) add_element(j + i);
  }
  for (; j < run.d; ++j) add_element(j);
#pragma GCC unroll 8
  for (int c = 0; c < kCodewords; ++c) {
#pragma GCC unroll 2
    for (int g = 0; g < kCount; ++g) {
      Floats score = sum[c][g] + (sum[c][g] - sum[c][g]);  // turns infinity into NaN
      if constexpr (form != FewForm::differences)
        score = fused(score, broadcast(step.factor[c]), broadcast(step.shift[c]));
      store(score, step.out[c] + (group + g) * kLanes);
    }
  }
}

template <FewForm form>
void score_step(const FewRun& run, const CodewordStep& step) {
  const int64_t groups = run.layout.score_pitch / kLanes;
  int64_t group = 0;
  for (; group + kGroups <= groups; group += kGroups) score_groups<form, kGroups>(run, group, step);
  for (; group < groups; ++group) score_groups<form, 1>(run, group, step);
}

// Returns codeword k in float32: in place, or converted into `room`.
const float* float_code(const FewRun& run, int64_t k, float* room) {
  const float* found = room;
  with_type(run.dtype, [&]<class T>(const T*) {
    const T* given = static_cast<const T*>(run.codewords) + k * run.d;
    if constexpr (sizeof(T) == 4) {
      found = reinterpret_cast<const float*>(given);
    } else {
      for (int64_t j = 0; j < run.d; ++j) room[j] = static_cast<float>(widen(given[j]));
    }
  });
  return found;
}

template <FewForm form>
void score_codewords(const FewRun& run, int64_t lo, int64_t hi) {
  const int64_t pitch = run.layout.score_pitch;
  float* const room = run.dtype == Dtype::f32 ? nullptr : new float[kCodewords * run.d];
  if (run.layout.grouped) {
    for (int64_t k = lo; k < hi; k += kCodewords) {
      CodewordStep step;
      for (int c = 0; c < kCodewords; ++c) {
        const int64_t code = k + c < hi ? k + c : hi - 1;
        step.code[c] = float_code(run, code, room + c * run.d);
        step.out[c] = run.scores + code * pitch;
        step.factor[c] = form == FewForm::cosine ? cosine_factor(step.code[c], run.d) : -1;
        step.shift[c] = form == FewForm::products ? half_square(step.code[c], run.d) : 0;
      }
      score_step<form>(run, step);
    }
  } else {
    for (int64_t k = lo; k < hi; ++k) score_code<form>(run, float_code(run, k, room), run.scores + k * pitch);
  }
  delete[] room;
}

void score(const FewRun& run, int64_t lo, int64_t hi) {
  switch (run.form) {
    case FewForm::differences:
      return score_codewords<FewForm::differences>(run, lo, hi);
    case FewForm::products:
      return score_codewords<FewForm::products>(run, lo, hi);
    case FewForm::cosine:
      return score_codewords<FewForm::cosine>(run, lo, hi);
  }
}

void squares(const FewRun& run, float* out) {
  for (int64_t r = 0; r < run.count; r += kLanes) {
    const float* const rows = run.rows + r * run.d;
    Floats sum{}, x;
    for (int64_t j = 0; j < run.d; ++j) {
      load(rows + j * kLanes, x);
      sum = fused(x, x, sum);
    }
    store(sum, out + r);
  }
}

// Returns the number of vectors with scores. A vector has scores of one codeword and a group of rows, or of
// several codewords and all rows.
int64_t vectors_of(const FewRun& run) {
  const int64_t pitch = run.layout.score_pitch;
  return run.layout.grouped ? pitch / kLanes : 1;
}
int64_t steps_of(const FewRun& run) {
  const int64_t in_step = run.layout.grouped ? 1 : kLanes / run.layout.score_pitch;
  return (run.k + in_step - 1) / in_step;
}

void least(const FewRun& run, float* out) {
  const int64_t vectors = vectors_of(run), steps = steps_of(run), pitch = run.layout.score_pitch;
  for (int64_t v = 0; v < vectors; ++v) {
    Floats found = broadcast(__builtin_inff()), scores;
    for (int64_t step = 0; step < steps; ++step) {
      load(run.scores + (step * vectors + v) * kLanes, scores);
      found = uefl::cpu::least(scores, found);
    }
    float lane[kLanes];
    store(found, lane);
    for (int64_t r = v * kLanes, i = 0; i < kLanes; ++i) {
      const int64_t row = r + i % pitch;
      if (row >= run.count) continue;
      if (i < pitch || lane[i] < out[row]) out[row] = lane[i];
    }
  }
}

int64_t pick(const FewRun& run, const float* limits, int64_t* codes) {
  int64_t total = 0;
  const int64_t vectors = vectors_of(run), steps = steps_of(run), pitch = run.layout.score_pitch;
  for (int64_t r = 0; r < run.count; ++r) codes[r] = kNoCode;
  for (int64_t v = 0; v < vectors; ++v) {
    float lane[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) {
      const int64_t row = v * kLanes + i % pitch;
      lane[i] = row < run.count ? limits[row] : -__builtin_inff();
    }
    Floats limit, scores;
    load(lane, limit);
    for (int64_t step = 0; step < steps; ++step) {
      const int64_t place = (step * vectors + v) * kLanes;
      load(run.scores + place, scores);
      // `most` turns NaN into the limit.
      for (uint32_t found = lanes_not_above(most(scores, limit), limit); found; found &= found - 1) {
        const int64_t at = place + __builtin_ctz(found), row = at % pitch, code = at / pitch;
        if (row >= run.count || code >= run.k) continue;
        codes[row] = codes[row] == kNoCode ? code : kSeveralCodes;
        ++total;
      }
    }
  }
  return total;
}

}  // namespace

const VqAssignFewKernel UEFL_VARIANT(vq_assign_few){kLanes, score, squares, least, pick};

}  // namespace uefl::cpu

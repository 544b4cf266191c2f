// The lists of candidates, shared by all prefilters.
#pragma once

#include "cpu/simd.h"
#include "cpu/vq_prefilter.h"

namespace uefl::cpu {
namespace {

// Adds a codeword to the list. If the list is full, it first drops the codewords that the best score so far
// excludes.
__attribute__((noinline)) void note(CandidateLists& found, int64_t row, int code, float score) {
  int& count = found.count[row];
  if (count == CandidateLists::kMost) {
    const float limit = found.best[row] + found.margin[row];
    int kept = 0;
    for (int i = 0; i < count; ++i) {
      if (!(found.score[row][i] <= limit)) continue;
      found.code[row][kept] = found.code[row][i];
      found.score[row][kept++] = found.score[row][i];
    }
    count = kept;
  }
  if (count < CandidateLists::kMost) {
    found.code[row][count] = code;
    found.score[row][count] = score;
  } else {
    count = CandidateLists::kMost;  // mark the list as too long
  }
  ++count;
}

void score_candidates(const char* source, Dtype dtype, int64_t d, const float* mean, const float* codewords,
                      const float* half_squares, const int* code, int count, float* y, float* score) {
  constexpr int kSums = 4, kStep = kSums * kLanes;
  const int64_t pitch = centered_pitch(d);
  const auto fetch = [&](int i, int64_t j) __attribute__((always_inline)) {
    if (i < count) __builtin_prefetch(codewords + code[i] * pitch + j);
  };
  for (int64_t j = 0; j < pitch && j < 256; j += 16) fetch(0, j);
  with_type(dtype, [&]<class T>(const T*) {
    const T* x = reinterpret_cast<const T*>(source);
    for (int64_t j = 0; j < d; ++j) y[j] = center(x[j], mean[j]);
  });
  for (int64_t j = d; j < pitch; ++j) y[j] = 0;
  for (int i = 0; i < count; ++i) {
    const float* b = codewords + code[i] * pitch;
    Floats sum[kSums] = {}, left, right;
    int64_t j = 0;
    for (; j + kStep <= pitch; j += kStep) {
      for (int64_t line = 0; line < kStep; line += 16) fetch(i + 1, j + line);
#pragma GCC unroll 4
      for (int p = 0; p < kSums; ++p) {
        load(y + j + p * kLanes, left);
        load(b + j + p * kLanes, right);
        subtract_product(left, right, sum[p]);
      }
    }
    for (; j < pitch; j += kLanes) {
      load(y + j, left);
      load(b + j, right);
      subtract_product(left, right, sum[0]);
    }
    score[i] = half_squares[code[i]] + sum_across((sum[0] + sum[1]) + (sum[2] + sum[3]));
  }
}

}  // namespace
}  // namespace uefl::cpu

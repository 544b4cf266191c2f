// Residual vector quantization on the CPU. Each stage runs vq.h on the residual of the stages before it, and
// gives the same bits as a call of vq.
//
// The residual and the sum of the codewords have the dtype of x. Both are rounded to it after each stage.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "cpu/strided_rows.h"
#include "cpu/threads.h"
#include "cpu/vq_assign.h"

namespace uefl::cpu {

struct RvqStage {
  Codebooks codebooks;
  const void* codewords;  // the codebook in the dtype of x
  int64_t* indices;       // [N, S]
  int64_t* counts;        // [codebooks, k], zeroed by the caller
  double* sums;           // [codebooks, k, d], or null
};

struct RvqRun {
  StridedRows x;
  std::vector<RvqStage> stages;
  Metric metric;
  bool exact, few;  // few: Search::few() of all stages
  void* residual;   // [N, D] in the dtype of x; workspace for the residual
  void* total;      // [N, D] in the dtype of x: the sum of the codewords, zeroed by the caller
};

// Writes indices, counts, sums and total. Returns the sum of (x - q)^2 of each stage. `by_codeword` divides
// the codewords of a codebook among threads, and `blocks` divides blocks of rows.
std::vector<double> rvq(const RvqRun& run, const Parallel& by_codeword, const Parallel& blocks);

}  // namespace uefl::cpu

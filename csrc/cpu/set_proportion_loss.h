// set_proportion_loss on the CPU: cross-entropy between the class proportions of a set and the mean of its
// softmax.
//
// With T_k the sum of p_nk over the set: loss = -sum_k t_k log(T_k / n), gradient_nk = p_nk (sum_j p_nj t_j /
// T_j - t_k / T_k). Where some T_k that matters is so small that terms underflow, as in float64 and where a
// row is not finite, a set is evaluated by the definition, in log space and float64. Sets do not depend on
// each other, so neither do results on threads.
#pragma once

#include <cstdint>

#include "cpu/strided_rows.h"

namespace uefl::cpu {

// Contiguous: offsets [sets + 1], proportions [sets, k], double where the logits are and else float.
struct Sets {
  const int64_t* offsets;
  const void* proportions;
  int64_t sets, k;
};

// Throws std::runtime_error when the sets do not cover the rows, one is empty, a proportion is negative or
// not finite, or those of a set do not sum to 1 within 1e-3.
void check(const Sets& sets, const StridedRows& logits);

// Sets [lo, hi): loss [sets], double where the logits are and else float; gradient [N, k] in the dtype of the
// logits, or null.
void set_proportion_loss(const Sets& sets, const StridedRows& logits, int64_t lo, int64_t hi, void* loss,
                         void* gradient);

}  // namespace uefl::cpu

// set_proportion_loss on the CPU: the cross-entropy between the class proportions of a set and the mean of
// its softmax.
//
// With T_k the sum of p_nk over the set, loss = -sum_k t_k log(T_k / n) and gradient_nk = p_nk (sum_j p_nj
// t_j / T_j - t_k / T_k). The definition, in log space and float64, evaluates float64 logits, sets with a row
// that is not finite, and sets in which a T_k with t_k > 0 is so small that terms underflow. Sets are
// independent, so results do not depend on the number of threads.
#pragma once

#include <cstdint>

#include "cpu/strided_rows.h"

namespace uefl::cpu {

// Contiguous offsets [sets + 1] and proportions [sets, k]. The proportions are double for double logits,
// otherwise float.
struct Sets {
  const int64_t* offsets;
  const void* proportions;
  int64_t sets, k;
};

// Throws std::runtime_error if the sets do not cover the rows, a set is empty, a proportion is negative or
// not finite, or the proportions of a set do not sum to 1 within 1e-3.
void check(const Sets& sets, const StridedRows& logits);

// Computes sets [lo, hi). loss [sets] is double for double logits, otherwise float. gradient [N, k] has the
// dtype of the logits, or is null.
void set_proportion_loss(const Sets& sets, const StridedRows& logits, int64_t lo, int64_t hi, void* loss,
                         void* gradient);

}  // namespace uefl::cpu

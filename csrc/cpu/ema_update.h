// The moving averages of csrc/common/ema_update.h on the CPU. The order of the calls is move_averages for all
// codewords, total_size, set_codewords for all codewords.
#pragma once

#include "common/ema_update.h"

namespace uefl::cpu {

// Writes the new sizes and averages of codewords [lo, hi) of all codebooks. Thread-safe.
template <class T>
void move_averages(const EmaUpdate<T>& run, int64_t lo, int64_t hi);

// Returns the sum of the new sizes of a codebook.
template <class T>
T total_size(const EmaUpdate<T>& run, int64_t codebook);

// Writes the new codewords [lo, hi) of all codebooks. Thread-safe.
template <class T>
void set_codewords(const EmaUpdate<T>& run, const T* totals, int64_t lo, int64_t hi);

}  // namespace uefl::cpu

// Copies rows with scattered elements, such as the rows of a channels-first map, into contiguous memory, some
// rows at a time. Without a copy, each element of a row costs a cache line. In maps with a power of two of
// pixels, all these lines are in the same few cache sets.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/strided_rows.h"

namespace uefl::cpu {

// The rows first, first + 1, ... of `rows`.
struct BufferedRows {
  StridedRows rows;
  int64_t first;
};

class RowBuffer {
 public:
  explicit RowBuffer(const StridedRows& rows) : rows_(rows) {}

  // Returns rows [lo, hi) with contiguous elements. They stay in place if they are contiguous already.
  // Otherwise they are in memory that the next call reuses. read() fills this memory. After place(), the
  // caller fills it, and write() copies the rows back.
  BufferedRows read(int64_t lo, int64_t hi);
  BufferedRows place(int64_t lo, int64_t hi);
  void write();

  // Returns a number of rows that is small enough for all tensors of a pass to stay in the second-level
  // cache, and large enough to fill cache lines.
  static int64_t rows_for(int64_t dim) { return dim < 256 ? 64 : dim < 1024 ? 32 : 16; }

 private:
  // Returns the elements from row to row. It is not a power of two, which would put a column into one set of
  // the cache.
  int64_t pitch() const { return rows_.dim + 64 / element_size(rows_.dtype); }
  bool in_place() const { return rows_.dim_stride == 1 || rows_.dim == 1; }

  const StridedRows rows_;
  int64_t lo_ = 0, hi_ = 0;
  std::vector<char> memory_;
};

}  // namespace uefl::cpu

// Copies rows with scattered elements, such as the rows of a channels-first map, into contiguous memory, some
// rows at a time. In place, each element of a row costs a cache line, and in maps with a power of two of
// pixels all these lines fall into the same few cache sets.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/strided_rows.h"

namespace uefl::cpu {

// Rows first, first + 1, ... of `rows`.
struct Span {
  StridedRows rows;
  int64_t first;
};

class RowBuffer {
 public:
  explicit RowBuffer(const StridedRows& rows) : rows_(rows) {}

  // Rows [lo, hi) with contiguous elements: in place if they are so already, else in memory that the next
  // call reuses. read() fills the memory. After place() the caller fills it, and write() copies the rows
  // back.
  Span read(int64_t lo, int64_t hi);
  Span place(int64_t lo, int64_t hi);
  void write();

  // Number of rows: few enough that all tensors of a pass stay in the second-level cache, and enough to fill
  // cache lines.
  static int64_t rows_for(int64_t dim) { return dim < 256 ? 64 : dim < 1024 ? 32 : 16; }

 private:
  // Elements from row to row; not a power of two, which would put a column into one set of the cache.
  int64_t pitch() const { return rows_.dim + 64 / element_size(rows_.dtype); }
  bool in_place() const { return rows_.dim_stride == 1 || rows_.dim == 1; }

  const StridedRows rows_;
  int64_t lo_ = 0, hi_ = 0;
  std::vector<char> memory_;
};

}  // namespace uefl::cpu

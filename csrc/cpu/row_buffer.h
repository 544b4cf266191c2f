// Rows whose elements lie apart in memory, as in a channels-first map, brought side by side some rows at a
// time: read in place, an element of a row is a cache line of its own, and maps with a power of two of pixels
// have all of them in the same few sets.
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

  // Rows [lo, hi) with their elements side by side: in place where they are, else in memory that the next
  // call takes again. read() fills it; after place() the caller does, and write() takes the rows to where
  // they belong.
  Span read(int64_t lo, int64_t hi);
  Span place(int64_t lo, int64_t hi);
  void write();

  // So many rows of every tensor of a pass stay in the second-level cache, and fill their cache lines.
  static int64_t rows_for(int64_t dim) { return dim < 256 ? 64 : dim < 1024 ? 32 : 16; }

 private:
  // From row to row, in elements; not a power of two, which would put a column into one set of the cache.
  int64_t pitch() const { return rows_.dim + 64 / element_size(rows_.dtype); }
  bool in_place() const { return rows_.dim_stride == 1 || rows_.dim == 1; }

  const StridedRows rows_;
  int64_t lo_ = 0, hi_ = 0;
  std::vector<char> memory_;
};

}  // namespace uefl::cpu

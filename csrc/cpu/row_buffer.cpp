#include "cpu/row_buffer.h"

#include <algorithm>

namespace uefl::cpu {
namespace {

// Columns that are copied together: one cache line for each column of `rows`. All of them fit into the ways
// of a cache set.
constexpr int64_t kColumns = 8;

template <class T, bool write>
void copy_typed(const StridedRows& rows, int64_t lo, int64_t hi, T* memory, int64_t pitch) {
  for (int64_t first = 0; first < rows.dim; first += kColumns) {
    const int64_t columns = std::min(kColumns, rows.dim - first);
    for (int64_t n = lo; n < hi; ++n) {
      T *apart = reinterpret_cast<T*>(const_cast<char*>(element(rows, n, first))),
        *beside = memory + (n - lo) * pitch + first;
      for (int64_t j = 0; j < columns; ++j) {
        write ? apart[j * rows.dim_stride] = beside[j] : beside[j] = apart[j * rows.dim_stride];
      }
    }
  }
}

template <bool write>
void copy(const StridedRows& rows, int64_t lo, int64_t hi, void* memory, int64_t pitch) {
  switch (element_size(rows.dtype)) {
    case 2:
      return copy_typed<uint16_t, write>(rows, lo, hi, static_cast<uint16_t*>(memory), pitch);
    case 4:
      return copy_typed<uint32_t, write>(rows, lo, hi, static_cast<uint32_t*>(memory), pitch);
    default:
      return copy_typed<uint64_t, write>(rows, lo, hi, static_cast<uint64_t*>(memory), pitch);
  }
}

}  // namespace

BufferedRows RowBuffer::place(int64_t lo, int64_t hi) {
  if (in_place()) return {rows_, lo};
  lo_ = lo, hi_ = hi;
  memory_.resize((hi - lo) * pitch() * element_size(rows_.dtype));
  return {{memory_.data(), rows_.dtype, hi - lo, 1, rows_.dim, pitch(), 0, 1}, 0};
}

BufferedRows RowBuffer::read(int64_t lo, int64_t hi) {
  const BufferedRows span = place(lo, hi);
  if (!in_place()) copy<false>(rows_, lo, hi, memory_.data(), pitch());
  return span;
}

void RowBuffer::write() {
  if (!in_place()) copy<true>(rows_, lo_, hi_, memory_.data(), pitch());
}

}  // namespace uefl::cpu

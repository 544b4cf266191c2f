// The product in float32 on vectors. AMX has its own kernel, linear.amx.cpp.
//
// A tile of rows stays in the first-level cache while a packed group of units passes by from the second-level
// cache. Each result is one chain of additions, 256 inputs at a time, so its bits depend only on its row and
// its unit.
#include "cpu/linear_kernel.h"
#include "cpu/simd.h"
#include "cpu/variant.h"

namespace uefl::cpu {
namespace {

constexpr int64_t kDepth = 256;  // inputs that are summed before they are added to y
constexpr int kVectors = 2, kUnits = kVectors * kLanes;
#if defined(__AVX512F__)
constexpr int kRows = 14;  // 14 x 2 sums, 2 vectors of units and an element of a row take 31 of 32 registers
constexpr int64_t kMostUnits = 512;  // half a megabyte
#else
constexpr int kRows = kLanes == 8 ? 6 : 4;  // takes 15 of 16 registers with FMA
constexpr int64_t kMostUnits = 256;
#endif
constexpr int64_t kLine = 16;  // floats of a cache line

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Packs inputs [start, start + depth) of units [first, last) as [panels of kUnits][kDepth][kUnits]. An
// incomplete panel repeats the last unit.
void pack(const LinearOperands& op, int64_t first, int64_t last, int64_t start, int64_t depth,
          float* packed) {
  for (; first < last; first += kUnits, packed += kDepth * kUnits) {
    const float* unit[kUnits];
    for (int64_t i = 0; i < kUnits; ++i) unit[i] = op.weight + least(first + i, last - 1) * op.inputs + start;
    int64_t j = 0;
    for (; j + kLanes <= depth; j += kLanes) {
      for (int lane = 0; lane < kUnits; lane += kLanes) {
        Floats square[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) __builtin_memcpy(&square[i], unit[lane + i] + j, sizeof(Floats));
        transpose(square);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i)
          __builtin_memcpy(packed + (j + i) * kUnits + lane, &square[i], sizeof(Floats));
      }
    }
    for (; j < depth; ++j) {
      for (int lane = 0; lane < kUnits; ++lane) packed[j * kUnits + lane] = unit[lane][j];
    }
  }
}

// Adds the products of kTileRows rows and a panel of `columns` valid units to `before`.
template <int kTileRows>
void multiply(const float* tile, const float* packed, int64_t depth, const float* before,
              int64_t before_stride, int64_t columns, int64_t stride, float* y) {
  for (int r = 0; r < kTileRows; ++r) {
    for (int64_t line = 0; line < kUnits; line += kLine) __builtin_prefetch(y + r * stride + line, 1);
  }
  Floats sum[kTileRows][kVectors] = {};
  const Floats* units = reinterpret_cast<const Floats*>(packed);
#pragma GCC unroll 4
  for (int64_t j = 0; j < depth; ++j, units += kVectors) {
    for (int64_t line = 0; line < kUnits; line += kLine) __builtin_prefetch(packed + (j + 8) * kUnits + line);
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) multiply_add(units[v], tile[r * kDepth + j], sum[r][v]);
    }
  }
  float sums[kTileRows][kUnits];  // for the units of an incomplete panel
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      if (columns < kUnits) {
        __builtin_memcpy(sums[r] + v * kLanes, &sum[r][v], sizeof(Floats));
      } else {
        Floats total;
        __builtin_memcpy(&total, before + r * before_stride + v * kLanes, sizeof total);
        total += sum[r][v];
        __builtin_memcpy(y + r * stride + v * kLanes, &total, sizeof total);
      }
    }
  }
  if (columns >= kUnits) return;
  for (int r = 0; r < kTileRows; ++r) {
    for (int64_t c = 0; c < columns; ++c) y[r * stride + c] = before[r * before_stride + c] + sums[r][c];
  }
}

template <int kTileRows>
void multiply_rows(int64_t rows, const float* tile, const float* packed, int64_t depth, const float* before,
                   int64_t before_stride, int64_t columns, int64_t stride, float* y) {
  if (rows == kTileRows)
    return multiply<kTileRows>(tile, packed, depth, before, before_stride, columns, stride, y);
  if constexpr (kTileRows > 1)
    multiply_rows<kTileRows - 1>(rows, tile, packed, depth, before, before_stride, columns, stride, y);
}

// Prefetches a share of the next rows: line `part` of each, and every `parts` lines from there.
inline void ask_for(const float* x, int64_t rows, int64_t stride, int64_t depth, int64_t part,
                    int64_t parts) {
  for (int64_t j = part * kLine; j < depth; j += parts * kLine) {
    for (int64_t r = 0; r < rows; ++r) __builtin_prefetch(x + r * stride + j, 0, 2);
  }
}

// Computes rows [row_begin, row_end) for units [first, last).
void run_group(const LinearOperands& op, int64_t row_begin, int64_t row_end, int64_t first, int64_t last,
               float* work) {
  float *tile = work, *packed = work + kRows * kDepth;
  const int64_t panels = (last - first + kUnits - 1) / kUnits;
  int64_t start = 0;
  do {  // also runs once without inputs
    const int64_t depth = least(op.inputs - start, kDepth);
    pack(op, first, last, start, depth, packed);
    for (int64_t row = row_begin; row < row_end; row += kRows) {
      const int64_t rows = least(row_end - row, kRows);
      const float* x = op.x + row * op.inputs + start;
      for (int64_t r = 0; r < rows; ++r)
        __builtin_memcpy(tile + r * kDepth, x + r * op.inputs, depth * sizeof(float));
      for (int64_t panel = 0; panel < panels; ++panel) {
        const int64_t unit = first + panel * kUnits;
        float* y = op.y + row * op.outputs + unit;
        ask_for(x + kRows * op.inputs, least(row_end - row - kRows, kRows), op.inputs, depth, panel, panels);
        multiply_rows<kRows>(rows, tile, packed + panel * kDepth * kUnits, depth,
                             start == 0 ? op.bias + unit : y, start == 0 ? 0 : op.outputs, last - unit,
                             op.outputs, y);
      }
    }
  } while ((start += kDepth) < op.inputs);
}

void run(const LinearOperands& op, int64_t group_units, int64_t lo, int64_t hi, float* work) {
  const int64_t tiles = (op.rows + kRows - 1) / kRows;
  while (lo < hi) {
    const int64_t group = lo / tiles, before = group * tiles, end = least(hi, before + tiles);
    run_group(op, (lo - before) * kRows, least((end - before) * kRows, op.rows), group * group_units,
              least((group + 1) * group_units, op.outputs), work);
    lo = end;
  }
}

int64_t work_floats(int64_t group_units) { return (kRows + group_units) * kDepth; }

}  // namespace

const LinearKernel UEFL_VARIANT(linear){kRows, kMostUnits, work_floats, run};

}  // namespace uefl::cpu

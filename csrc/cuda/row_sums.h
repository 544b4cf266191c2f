// Sums the rows of each codeword, for vq together with its other results, and for a step of k-means.
//
// A thread block takes a range of rows and 64 columns, and sorts the row numbers by codeword in shared
// memory. Its warps then walk the sorted rows, an equal share each, one row at a time. A lane adds up two
// columns in registers, with eight rows under way, and adds its sums to memory where the codeword changes. So
// one reduction covers all rows of a codeword in a range, and all warps share the work of a codeword with
// most rows. If a range has few rows of each codeword, the rows are walked in their own order.
//
// The sort keeps the order of the rows of a codeword, so the error has the same bits in every run.
//
// Bytes: x once (and quantized), and 8 for an index for each 64 columns.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/mma.h"
#include "cuda/rows.h"
#include "cuda/sums.h"

namespace uefl::cuda {
namespace {

constexpr int kSumThreads = 384, kSumBlocks = 2;  // thread blocks to a multiprocessor
constexpr int kSumColumns = 64;                   // of a thread block; a lane has two
constexpr int kMostRows = 8192;                   // of a thread block that sorts; 4 bytes each
constexpr int kMostSorted = 2048;                 // codewords; 2 bytes each for each warp

template <class T, class Codeword>
struct RowSums {
  const int64_t* indices;    // [outputs]
  long long *counts, *sums;  // [codewords] and [codewords, d], zeroed
  const double* scales;      // units in 1.0: [codewords] for vq, [d] for k-means
  // k-means: a row adds round((x - middle) * weight * scale) to the sums and round(weight * mass_scale) to
  // the count.
  const double *middle, *weights, *mass_scale;  // [d], [outputs] or null for 1, [1]
  // vq: a row adds round(x * scale) to the sums and 1 to the count.
  const Codeword* codewords;  // [codewords, d]
  T* quantized;               // [outputs, d]
  long long* largest;  // [codewords], zeroed: the bits of the largest |x| as a double; infinity if a value is
                       // not finite
  Total error;
  int rows;     // of a thread block
  bool sorted;  // otherwise rows are walked in their own order
};

inline int64_t column_blocks(const Shape& shape) { return (shape.d + kSumColumns - 1) / kSumColumns; }

// Sets the number of rows of a thread block, for a grid of a multiple of resident_blocks thread blocks.
// Returns the number of thread blocks.
template <class T, class Codeword>
int64_t divide_rows(RowSums<T, Codeword>& wanted, const Shape& shape, int64_t resident_blocks) {
  const auto parts = [](int64_t whole, int64_t part) { return (whole + part - 1) / part; };
  const int64_t columns = column_blocks(shape), codewords = shape.codebooks * shape.k,
                ranges = parts(resident_blocks, columns);
  const int64_t waves = parts(shape.outputs, ranges * kMostRows);
  wanted.rows = static_cast<int>(parts(shape.outputs, ranges * waves));
  wanted.sorted = codewords <= kMostSorted && codewords <= wanted.rows;
  return parts(shape.outputs, wanted.rows) * columns;
}

// Returns the bytes of dynamic shared memory.
template <class T, class Codeword>
int64_t sort_bytes(const RowSums<T, Codeword>& wanted, const Shape& shape, int threads) {
  return wanted.sorted ? sizeof(uint16_t) * (2 * wanted.rows + threads / kWarp * shape.codebooks * shape.k)
                       : 0;
}

// The dynamic shared memory of a thread block that sorts.
struct Sort {
  uint16_t* order;   // [rows], filled: row numbers, ordered by codeword and then by number
  uint16_t* codes;   // [rows], filled: the codeword of each row
  uint16_t* places;  // [warps, codewords], workspace
};

// Turns the counts [warps, codewords] into the places of the first rows, ordered by codeword and then by
// warp.
__device__ inline void place_counts(uint16_t* places, int codewords) {
  __shared__ int of_warps[32];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  int all = 0;
  for (int base = 0; base < codewords; base += blockDim.x) {
    const int code = base + threadIdx.x;
    int own = 0;
    for (int i = 0; code < codewords && i < warps; ++i) own += places[i * codewords + code];
    int sum = own;
    for (int step = 1; step < kWarp; step *= 2) {
      const int other = __shfl_sync(kAllLanes, sum, (lane - step) & (kWarp - 1));
      if (lane >= step) sum += other;
    }
    if (lane == kWarp - 1) of_warps[warp] = sum;
    __syncthreads();
    int place = all + sum - own;
    for (int i = 0; i < warps; ++i) {
      if (i < warp) place += of_warps[i];
      all += of_warps[i];
    }
    for (int i = 0; code < codewords && i < warps; ++i) {
      const int count = places[i * codewords + code];
      places[i * codewords + code] = static_cast<uint16_t>(place);
      place += count;
    }
    __syncthreads();
  }
}

// Sorts the rows of the outputs from `first` on. A warp first counts its rows of each codeword, and then
// knows their places. Every thread of the thread block must call it.
__device__ inline void sort_rows(const Shape& shape, const int64_t* indices, int64_t first, int rows,
                                 const Sort& sort) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const int codewords = static_cast<int>(shape.codebooks * shape.k), part = (rows + warps - 1) / warps;
  const int begin = warp * part, end = begin + part < rows ? begin + part : rows;
  uint16_t* places = sort.places;
  for (int row = threadIdx.x; row < rows; row += blockDim.x)
    sort.codes[row] = static_cast<uint16_t>(code_of(shape, indices, first + row));
  for (int i = threadIdx.x; i < warps * codewords; i += blockDim.x) places[i] = 0;
  __syncthreads();

  // Rows of the same codeword among the 32 of a warp go behind the rows of lower lanes.
  const auto each = [&](const auto& put) {
    for (int base = begin; base < end; base += kWarp) {
      const int row = base + lane, code = row < end ? sort.codes[row] : -1;
      const unsigned same = __match_any_sync(kAllLanes, code);
      uint16_t* place = places + warp * codewords + code;
      const int before = code < 0 ? 0 : *place;
      __syncwarp();
      if (code >= 0) put(row, before + __popc(same & ((1u << lane) - 1)));
      if (code >= 0 && is_first_lane(same)) *place = static_cast<uint16_t>(before + __popc(same));
      __syncwarp();
    }
  };
  each([](int, int) {});
  __syncthreads();

  place_counts(places, codewords);
  each([&](int row, int place) { sort.order[place] = static_cast<uint16_t>(row); });
  __syncthreads();
}

// A row that a warp walks next, and the factors of a row with a weight.
struct alignas(16) RowStep {
  int64_t begin;
  int row, code;
};
struct alignas(16) Weight {
  double weight;
  long long mass;
};

// Returns the same pointer, and lets the compiler keep it in registers. Otherwise the compiler would compute
// it again for every row.
template <class T>
__device__ const T* kept(const T* pointer) {
#if defined(__CUDACC__)
  auto address = __cvta_generic_to_global(pointer);
  asm volatile("" : "+l"(address));
  return static_cast<const T*>(__cvta_global_to_generic(address));
#else
  return pointer;
#endif
}

// The sums of a warp for consecutive rows of one codeword. A lane has kOwn columns. kGather selects vq,
// otherwise k-means.
template <class T, bool kGather, class Codeword>
struct WarpSums {
  using Element = decltype(widen(T()));
  using Wide = std::conditional_t<sizeof(Codeword) == sizeof(double), double, Element>;
  static constexpr int kOwn = kSumColumns / kWarp;

  const RowSums<T, Codeword>& wanted;
  const int64_t d;
  const bool counting, weighted;
  // A lane after the last column reads the last column, and its results are not written.
  int column[kOwn];
  bool inside[kOwn];
  const T* own[kOwn];  // this column of the row that begins at 0
  double unit[kOwn], middle[kOwn];
  int current = -1;
  long long count = 0, sum[kOwn] = {};
  Wide codeword[kOwn] = {};
  T rounded[kOwn] = {};
  Element peak = 0;
  double error = 0;

  __device__ WarpSums(const T* x, const Shape& shape, const RowSums<T, Codeword>& of, int column_block)
      : wanted(of),
        d(shape.d),
        counting(column_block == 0 && threadIdx.x % kWarp == 0),
        weighted(!kGather && of.weights) {
    UEFL_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      column[i] = column_block * kSumColumns + i * kWarp + static_cast<int>(threadIdx.x % kWarp);
      inside[i] = column[i] < d;
      if (!inside[i]) column[i] = static_cast<int>(d) - 1;
      own[i] = kept(x + column[i] * shape.stride);
      unit[i] = kGather ? 0 : wanted.scales[column[i]];
      middle[i] = kGather ? 0 : wanted.middle[column[i]];
    }
  }

  __device__ void report() {
    if (current < 0) return;
    if (counting)
      add_to(wanted.counts + current,
             kGather || weighted ? count : count * __double2ll_rn(*wanted.mass_scale));
    count = 0;
    UEFL_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      if (inside[i]) add_to(wanted.sums + current * d + column[i], sum[i]);
      sum[i] = 0;
    }
    if constexpr (kGather) {
      for (int step = kWarp / 2; step > 0; step /= 2) {
        const Element other = __shfl_xor_sync(kAllLanes, peak, step);
        if (other > peak) peak = other;
      }
      if (threadIdx.x % kWarp == 0)
        raise_to(wanted.largest + current, __double_as_longlong(static_cast<double>(peak)));
      peak = 0;
    }
  }

  __device__ void begin_codeword(int code) {
    current = code;
    UEFL_UNROLL
    for (int i = 0; kGather && i < kOwn; ++i) {
      unit[i] = wanted.scales[code];
      codeword[i] = static_cast<Wide>(wanted.codewords[code * d + column[i]]);
      narrow(codeword[i], rounded[i]);
    }
  }

  // Adds a row. `target` is its row of `quantized`, for vq.
  template <bool kWeighted>
  __device__ void add_row(const T (&value)[kOwn], T* target, const Weight& with) {
    const double weight = kWeighted ? with.weight : 1;
    count += kWeighted ? with.mass : 1;
    Wide exact[kOwn];
    UEFL_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      const Element element = widen(value[i]);
      const double wide = static_cast<double>(element);
      sum[i] += __double2ll_rn(kGather ? wide * unit[i] : (wide - middle[i]) * weight * unit[i]);
      if (!kGather) continue;
      const Element magnitude = element < 0 ? -element : element;
      peak = !(magnitude < INFINITY) ? static_cast<Element>(INFINITY) : magnitude > peak ? magnitude : peak;
      exact[i] = inside[i] ? static_cast<Wide>(element) : codeword[i];
      if (inside[i]) target[column[i]] = rounded[i];
    }
    if (kGather && inside[0]) error += squares(exact, codeword);
  }

  // Adds the rows of steps `from` to `to`. Several rows are under way at once.
  template <bool kWeighted>
  __device__ void add_rows(const RowStep* steps, const Weight* weights, int64_t first, int from, int to) {
    constexpr int kBatch = sizeof(T) < sizeof(double) ? 8 : 4;
    for (; from < to; from += kBatch) {
      T value[kBatch][kOwn];
      UEFL_UNROLL
      for (int r = 0; r < kBatch; ++r) {
        if (from + r >= to) continue;
        const int64_t row = steps[from + r].begin;
        UEFL_UNROLL
        for (int i = 0; i < kOwn; ++i) value[r][i] = own[i][row];
      }
      UEFL_UNROLL
      for (int r = 0; r < kBatch; ++r) {
        if (from + r >= to) break;
        T* target = kGather ? wanted.quantized + (first + steps[from + r].row) * d : nullptr;
        add_row<kWeighted>(value[r], target, weights[from + r]);
      }
    }
  }
};

template <class T, bool kGather, class Codeword>
__global__ void __launch_bounds__(kSumThreads, kSumBlocks)
    row_sums(const T* x, Shape shape, RowSums<T, Codeword> wanted) {
  __shared__ RowStep all_steps[kSumThreads];
  __shared__ Weight all_weights[kSumThreads];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  RowStep* steps = all_steps + warp * kWarp;
  Weight* weights = all_weights + warp * kWarp;
  const int columns = static_cast<int>((shape.d + kSumColumns - 1) / kSumColumns);
  const int64_t first = int64_t{blockIdx.x / columns} * wanted.rows;
  const int rows =
      static_cast<int>(shape.outputs - first < wanted.rows ? shape.outputs - first : wanted.rows);
  uint16_t* memory = reinterpret_cast<uint16_t*>(dynamic_memory());
  const Sort sort{memory, memory + wanted.rows, memory + 2 * wanted.rows};
  if (wanted.sorted) sort_rows(shape, wanted.indices, first, rows, sort);

  WarpSums<T, kGather, Codeword> sums(x, shape, wanted, static_cast<int>(blockIdx.x % columns));
  const int begin = static_cast<int>(int64_t{rows} * warp / warps),
            end = static_cast<int>(int64_t{rows} * (warp + 1) / warps);
  for (int base = begin; base < end; base += kWarp) {
    const int there = end - base < kWarp ? end - base : kWarp;
    int code = -1;
    if (lane < there) {
      const int row = wanted.sorted ? sort.order[base + lane] : base + lane;
      code = wanted.sorted ? sort.codes[row] : code_of(shape, wanted.indices, first + row);
      steps[lane] = {shape.begin(first + row), row, code};
      if (sums.weighted) {
        const double weight = wanted.weights[first + row];
        weights[lane] = {weight, __double2ll_rn(weight * *wanted.mass_scale)};
      }
    }
    const int before = __shfl_sync(kAllLanes, code, lane == 0 ? 0 : lane - 1);
    const unsigned changes =
        __ballot_sync(kAllLanes, lane > 0 && code != before);  // set also behind the last row
    __syncwarp();
    for (int from = 0; from < there;) {
      const unsigned later = changes & ~((2u << from) - 1);
      const int to = later ? __ffs(later) - 1 : there;
      if (steps[from].code != sums.current) {
        sums.report();
        sums.begin_codeword(steps[from].code);
      }
      if (sums.weighted)
        sums.template add_rows<true>(steps, weights, first, from, to);
      else
        sums.template add_rows<false>(steps, weights, first, from, to);
      from = to;
    }
    __syncwarp();
  }
  sums.report();
  if (kGather) add_up(sums.error, wanted.error);
}

}  // namespace
}  // namespace uefl::cuda

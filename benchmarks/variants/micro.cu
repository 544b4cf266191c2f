// Micro-measurements: the rate of a unit of a multiprocessor, without and with products.
// benchmarks/gpu_variants.py states what each one decides.
//
// A kernel writes clocks. It uses no computed number, and the compiler cannot remove volatile instructions.
#include "instructions.h"

namespace uefl::variants {
namespace {

enum class Stream {
  none,
  fadd,
  ffma,
  vimnmx,
  vimnmx3,
  lop3,
  imad,
  imad_wide,
  shf,
  f2fp,
  viaddmnmx,
  prmt,
  hmma
};
constexpr int kLanes = 16, kRounds = 256;  // results of a thread that wait for each other; repetitions

// Runs one instruction for each of the results of a thread. kOdd alternates minima and maxima, because two
// minima in a row would become one of three numbers.
template <Stream kStream, bool kOdd>
__device__ void operate(uint32_t (&a)[kLanes], uint64_t (&wide)[kLanes / 2], uint32_t b, uint32_t c) {
  UEFL_UNROLL
  for (int i = 0; i < kLanes; ++i) {
    if constexpr (kStream == Stream::fadd) asm volatile("add.rn.f32 %0, %0, %1;" : "+r"(a[i]) : "r"(b));
    if constexpr (kStream == Stream::ffma)
      asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+r"(a[i]) : "r"(b), "r"(c));
    if constexpr (kStream == Stream::vimnmx && !kOdd)
      asm volatile("min.s32 %0, %0, %1;" : "+r"(a[i]) : "r"(b));
    if constexpr (kStream == Stream::vimnmx && kOdd)
      asm volatile("max.s32 %0, %0, %1;" : "+r"(a[i]) : "r"(c));
    if constexpr (kStream == Stream::vimnmx3) {
      a[i] = __vimin3_s32(a[i], b, c);
      asm volatile("" : "+r"(a[i]));
    }
    if constexpr (kStream == Stream::lop3)
      asm volatile("lop3.b32 %0, %0, %1, %2, 0x96;" : "+r"(a[i]) : "r"(b), "r"(c));
    if constexpr (kStream == Stream::imad)
      asm volatile("mad.lo.s32 %0, %0, %1, %2;" : "+r"(a[i]) : "r"(b), "r"(c));
    if constexpr (kStream == Stream::shf)
      asm volatile("shf.l.wrap.b32 %0, %0, %1, %2;" : "+r"(a[i]) : "r"(b), "r"(c));
    if constexpr (kStream == Stream::f2fp) asm volatile("cvt.rn.f16x2.f32 %0, %0, %1;" : "+r"(a[i]) : "r"(b));
    if constexpr (kStream == Stream::viaddmnmx) {
      a[i] = __viaddmin_s32(a[i], b, c);
      asm volatile("" : "+r"(a[i]));
    }
    if constexpr (kStream == Stream::prmt)
      asm volatile("prmt.b32 %0, %0, %1, %2;" : "+r"(a[i]) : "r"(b), "r"(c));
    if constexpr (kStream == Stream::imad_wide) {  // both halves of a product enter the next one, otherwise
                                                   // the compiler computes one half
      const uint32_t mixed = static_cast<uint32_t>(wide[i / 2] >> 32) ^ static_cast<uint32_t>(wide[i / 2]);
      if (i % 2 == 0) asm volatile("mul.wide.u32 %0, %1, %2;" : "=l"(wide[i / 2]) : "r"(mixed), "r"(b));
    }
    if constexpr (kStream == Stream::hmma) {
      if (i % 4 == 0) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %4, %5, %5}, {%4, %5}, "
            "{%0, %1, %2, %3};"
            : "+r"(a[i]), "+r"(a[i + 1]), "+r"(a[i + 2]), "+r"(a[i + 3])
            : "r"(b), "r"(c));
      }
    }
  }
}

// Sends products with warpgroup 0 until the other warpgroups have finished their stream, or some hundred if
// there are no others. Returns the number of products.
template <Stream kStream>
__device__ int send_products(uint64_t right, const int& done, bool& stop, int others, float (&sums)[64]) {
  uint32_t fragment[4] = {};
  int count = 0;
  // All four warps must leave the loop in the same round.
  do {
#pragma unroll 1
    for (int times = 0; times < 8; ++times) {
      warpgroup_fence_registers(sums);
      warpgroup_arrive();
      UEFL_UNROLL
      for (int i = 0; i < 4; ++i) multiply_group(sums, fragment, right + i * kOperandStep, true);
      warpgroup_commit();
      warpgroup_wait<0>();
      warpgroup_fence_registers(sums);
    }
    count += 32;
    group_sync();
    if (threadIdx.x == 0)
      stop =
          kStream == Stream::none ? count >= 4 * kRounds : *static_cast<const volatile int*>(&done) >= others;
    group_sync();
  } while (!*static_cast<volatile bool*>(&stop));
  return count;
}

// Runs the instructions of a stream, with products at the same time if kProducts.
// clocks: [blocks, 4, {clocks, products of the warpgroup, or rounds}].
template <Stream kStream, bool kProducts>
__device__ void stream(long long* clocks, uint32_t b, uint32_t c) {
  __shared__ int done;
  __shared__ bool stop;
  unsigned char* memory = dynamic_memory();
  for (unsigned i = threadIdx.x; i < 128 * 128 / 4; i += blockDim.x)
    reinterpret_cast<uint32_t*>(memory)[i] = 0;
  if (threadIdx.x == 0) done = 0;
  fence_proxy_async();
  __syncthreads();
  const int group = threadIdx.x / 128, others = (blockDim.x / 128 - 1) * 4;
  const auto note = [&](long long begin, long long count) {
    if (threadIdx.x % 128 != 0) return;
    clocks[(blockIdx.x * 4 + group) * 2] = now() - begin, clocks[(blockIdx.x * 4 + group) * 2 + 1] = count;
  };
  if (group == 0) {
    if (!kProducts) return;
    float sums[64] = {};
    const uint64_t right = operand(memory);
    const long long begin = now();
    note(begin, send_products<kStream>(right, done, stop, others, sums));
    float total = 0;
    UEFL_UNROLL
    for (int i = 0; i < 64; ++i) total += sums[i];
    if (total == 12345) clocks[0] = 0;  // otherwise the compiler removes the products
    return;
  }
  if constexpr (kStream != Stream::none) {
    uint32_t values[kLanes];
    uint64_t wide[kLanes / 2];
    UEFL_UNROLL
    for (int i = 0; i < kLanes; ++i) values[i] = threadIdx.x * kLanes + i, wide[i / 2] = values[i];
    const long long begin = now();
#pragma unroll 1
    for (int round = 0; round < kRounds; ++round) {
      UEFL_UNROLL
      for (int times = 0; times < 2; ++times) {
        operate<kStream, false>(values, wide, b, c);
        operate<kStream, true>(values, wide, b, c);
      }
    }
    note(begin, kRounds);
    uint32_t all = 0;
    UEFL_UNROLL
    for (int i = 0; i < kLanes; ++i)
      all ^= values[i] ^ static_cast<uint32_t>(wide[i / 2] >> 32) ^ static_cast<uint32_t>(wide[i / 2]);
    if (all == b) clocks[0] = 0;  // never true, but the compiler does not know this
    __syncwarp();
    if (threadIdx.x % 32 == 0) atomicAdd(&done, 1);
  }
}

}  // namespace

// Measurements M1, M3 and M7.
#define STREAM(name)                                             \
  extern "C" __global__ void __launch_bounds__(512, 1)           \
      stream_##name(long long* clocks, uint32_t b, uint32_t c) { \
    stream<Stream::name, false>(clocks, b, c);                   \
  }                                                              \
  extern "C" __global__ void __launch_bounds__(512, 1)           \
      beside_##name(long long* clocks, uint32_t b, uint32_t c) { \
    stream<Stream::name, true>(clocks, b, c);                    \
  }
STREAM(none)
STREAM(fadd)
STREAM(ffma)
STREAM(vimnmx)
STREAM(vimnmx3)
STREAM(lop3)
STREAM(imad)
STREAM(imad_wide)
STREAM(shf)
STREAM(f2fp)
STREAM(viaddmnmx)
STREAM(prmt)
STREAM(hmma)

// Measurement M4: loads of 16 bytes for a lane. Pattern 0 has adjacent lanes. Pattern 1 has four
// addresses, in lane t of a quad. Pattern 2 has one address.
extern "C" __global__ void loads(long long* clocks, int pattern) {
  unsigned char* memory = dynamic_memory();
  for (unsigned i = threadIdx.x; i < 4096; i += blockDim.x) reinterpret_cast<uint32_t*>(memory)[i] = i;
  __syncthreads();
  const int lane = threadIdx.x % 32, at = pattern == 0 ? lane * 16 : pattern == 1 ? lane % 4 * 144 : 0;
  uint32_t address = shared_address(memory) + at, all = 0;
  const long long begin = now();
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
    uint4 values[8];
    UEFL_UNROLL
    for (int i = 0; i < 8; ++i) {
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(values[i].x), "=r"(values[i].y), "=r"(values[i].z), "=r"(values[i].w)
                   : "r"(address + i * 16));
    }
    UEFL_UNROLL
    for (int i = 0; i < 8; ++i) all ^= values[i].x ^ values[i].w;
  }
  if (threadIdx.x % 32 == 0)
    clocks[blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32] = now() - begin + (all == 1);
}

// Measurement M5: additions to shared memory. Pattern 0 has 32 neighbors. Pattern 1 has a row of 64 cells of
// a codeword that is drawn for each warp. Pattern 2 has one cell. Pattern 3 exchanges 32 neighbors.
extern "C" __global__ void additions(long long* clocks, int pattern, int codewords) {
  uint32_t* cells = reinterpret_cast<uint32_t*>(dynamic_memory());
  for (int i = threadIdx.x; i < codewords * 64; i += blockDim.x) cells[i] = 0;
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t drawn = 12345 + warp * 7919 + blockIdx.x, all = 0;
  const long long begin = now();
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
    drawn = drawn * 1664525u + 1013904223u;
    const int row = pattern == 1 ? static_cast<int>((drawn >> 8) % codewords) : warp;
    uint32_t* target = cells + row * 64 + (pattern == 2 ? 0 : lane);
    UEFL_UNROLL
    for (int i = 0; i < 2; ++i)
      pattern == 3 ? (void)(all += atomicExch(target + 32 * i, drawn))
                   : (void)atomicAdd(target + 32 * i * (pattern != 2), drawn);
  }
  if (lane == 0) clocks[blockIdx.x * (blockDim.x / 32) + warp] = now() - begin + (all == 1);
}

// Measurement M6: every thread block reads a codebook of blocks of 16 KB several times, with some of them in
// flight at a time.
extern "C" __global__ void __launch_bounds__(32, 1)
    read_codebook(const unsigned char* codewords, int blocks, int times, int ahead, long long* clocks) {
  constexpr int kBytes = 16384;
  Barrier* full = reinterpret_cast<Barrier*>(dynamic_memory() + ahead * kBytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < ahead; ++i) barrier_init(full + i, 1);
    fence_barrier_init();
  }
  __syncthreads();
  const long long begin = now();
  const int total = blocks * times;
  const auto feed = [&](int number) {
    const int place = number % ahead;
    const unsigned char* source = codewords + static_cast<int64_t>(number % blocks) * kBytes;
    barrier_arrive_expecting(full + place, kBytes);
    copy_bulk(dynamic_memory() + place * kBytes, source, kBytes, full + place);
  };
  for (int number = 0; number < total; ++number) {
    if (threadIdx.x == 0 && number == 0) {
      for (int i = 0; i < ahead && i < total; ++i) feed(i);
    }
    barrier_wait(full + number % ahead, number / ahead % 2);
    __syncthreads();
    if (threadIdx.x == 0 && number + ahead < total) feed(number + ahead);
  }
  if (threadIdx.x == 0) clocks[blockIdx.x] = now() - begin;
}

// Measurement M8: computes sums [64, 128] = start + a [64, 16] b [128, 16]^T by one product of a warpgroup. a
// and b have the layout of operand().
extern "C" __global__ void __launch_bounds__(128, 1)
    product_wgmma(const uint32_t* a, const uint32_t* b, const float* start, float* sums) {
  unsigned char* memory = dynamic_memory();
  for (int i = threadIdx.x; i < 64 * 128 / 4; i += 128) reinterpret_cast<uint32_t*>(memory)[i] = a[i];
  for (int i = threadIdx.x; i < 128 * 128 / 4; i += 128)
    reinterpret_cast<uint32_t*>(memory + 64 * 128)[i] = b[i];
  fence_proxy_async();
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp * 16 + lane / 4, t = lane % 4;
  uint32_t fragment[4];
  load_fragment(fragment, memory, 0);
  float c[64];
  UEFL_UNROLL
  for (int i = 0; i < 64; ++i) c[i] = start[(row + i % 4 / 2 * 8) * 128 + i / 4 * 8 + 2 * t + i % 2];
  warpgroup_fence_registers(c);
  warpgroup_arrive();
  multiply_group(c, fragment, operand(memory + 64 * 128), true);
  warpgroup_commit();
  warpgroup_wait<0>();
  warpgroup_fence_registers(c);
  UEFL_UNROLL
  for (int i = 0; i < 64; ++i) sums[(row + i % 4 / 2 * 8) * 128 + i / 4 * 8 + 2 * t + i % 2] = c[i];
}

// Computes the same by mma.sync: sums [16, 8] = start + a [16, 16] b [8, 16]^T for each of the blocks. Rows
// of 32 bytes are adjacent.
extern "C" __global__ void __launch_bounds__(32, 1)
    product_mma(const uint32_t* a, const uint32_t* b, const float* start, float* sums) {
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  a += blockIdx.x * 16 * 8, b += blockIdx.x * 8 * 8, start += blockIdx.x * 128, sums += blockIdx.x * 128;
  const uint32_t left[4] = {a[g * 8 + t], a[(g + 8) * 8 + t], a[g * 8 + t + 4], a[(g + 8) * 8 + t + 4]};
  float c[4];
  UEFL_UNROLL
  for (int i = 0; i < 4; ++i) c[i] = start[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
  multiply_add(c, left, b[g * 8 + t], b[g * 8 + t + 4]);
  UEFL_UNROLL
  for (int i = 0; i < 4; ++i) sums[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = c[i];
}

// Measurement M9: the clocks of a named barrier between two warpgroups, of a wait for a completed mbarrier,
// and of an mbarrier between two threads. The warpgroups and the threads alternate.
extern "C" __global__ void __launch_bounds__(256, 1) barriers(long long* clocks) {
  __shared__ Barrier there[2], back[2];
  if (threadIdx.x == 0) {
    barrier_init(there, 1), barrier_init(back, 1), barrier_init(there + 1, 1), barrier_init(back + 1, 1);
    fence_barrier_init();
  }
  __syncthreads();
  const int group = threadIdx.x / 128;
  if (group == 0) turn_pass(1);
  long long begin = now();
#pragma unroll 1
  for (int i = 0; i < kRounds; ++i) {
    turn_wait(1 + group);
    turn_pass(2 - group);
  }
  if (threadIdx.x == 0) clocks[0] = (now() - begin) / (2 * kRounds);
  if (group == 0) turn_wait(1);
  __syncthreads();
  if (threadIdx.x == 0) barrier_arrive(there);
  __syncthreads();
  begin = now();
#pragma unroll 1
  for (int i = 0; i < kRounds; ++i) barrier_wait(there, 0);
  if (threadIdx.x == 0) clocks[1] = (now() - begin) / kRounds;
  __syncthreads();
  begin = now();
#pragma unroll 1
  for (int i = 0; i < kRounds && threadIdx.x % 128 == 0; ++i) {
    if (group == 0) barrier_arrive(there + 1), barrier_wait(back + 1, i % 2);
    if (group == 1) barrier_wait(there + 1, i % 2), barrier_arrive(back + 1);
  }
  if (threadIdx.x == 0) clocks[2] = (now() - begin) / (2 * kRounds);
}

// A kernel without work, and another one that lets the next kernel begin early, and waits for the kernel
// before it as late as possible.
extern "C" __global__ void nothing(long long* clocks) {
  if (clocks == nullptr) asm volatile("trap;");
}
extern "C" __global__ void nothing_early(long long* clocks) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (clocks == nullptr) asm volatile("trap;");
}

}  // namespace uefl::variants

// Measures the peak rate of one core's arithmetic units from registers. These rates are the ceilings of the
// roofline on a CPU. ops/limits.py compiles this file for the machine, or for the instruction set of --held,
// and runs it on all threads of the run.
#include <cstdint>

#include "cpu/simd.h"

using namespace uefl::cpu;

constexpr int kSums = 12;  // independent sums, so that no addition waits for the one before it

// Runs fused multiply-adds in float32. Returns the number of operations.
extern "C" int64_t float32_units(int64_t rounds) {
  Floats sums[kSums] = {}, factor = broadcast(0.5F), term = broadcast(1.0F);
  for (Floats& sum : sums)
    asm volatile("" : "+v"(sum));  // otherwise the compiler sees that all sums are equal and keeps one
  asm volatile("" : "+v"(factor), "+v"(term));
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kSums; ++j) sums[j] = sums[j] * factor + term;
  }
  for (const Floats& sum : sums) asm volatile("" ::"v"(sum));
  return rounds * kSums * kLanes * 2;
}

// Multiplies pairs of 16-bit numbers and adds the products to sums of 32 bits.
extern "C" int64_t int16_units(int64_t rounds) {
  Ints sums[kSums] = {}, pairs = broadcast(int32_t{0x00010001});
#pragma GCC unroll 12
  for (Ints& sum : sums) asm volatile("" : "+v"(sum));
  asm volatile("" : "+v"(pairs));
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kSums; ++j) add_pair_products(pairs, pairs, sums[j]);
  }
#pragma GCC unroll 12
  for (const Ints& sum : sums) asm volatile("" ::"v"(sum));
  return rounds * kSums * kLanes * 4;
}

#ifdef __AMX_BF16__
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

// Runs 16 x 32 times 32 x 16 products in bfloat16 on four independent tiles of sums. Returns the number of
// operations, or 0 without permission.
extern "C" int64_t bfloat16_units(int64_t rounds) {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData)) return 0;
  alignas(64) uint8_t config[64] = {1};
  for (int tile = 0; tile < 8; ++tile) {
    config[16 + 2 * tile] = 64;  // bytes of a row
    config[48 + tile] = 16;      // rows
  }
  _tile_loadconfig(config);
  alignas(64) uint16_t values[16 * 32];
  for (int i = 0; i < 16 * 32; ++i) values[i] = 0x3a80 + i % 97;  // about 1e-3
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, values, 64);
  _tile_loadd(5, values, 64);
  _tile_loadd(6, values, 64);
  _tile_loadd(7, values, 64);
  for (int64_t i = 0; i < rounds; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  alignas(64) float out[16 * 16];
  _tile_stored(0, out, 64);
  asm volatile("" ::"m"(out));
  _tile_release();
  return rounds * 4 * 16 * 16 * 32 * 2;
}
#else
extern "C" int64_t bfloat16_units(int64_t) { return 0; }
#endif

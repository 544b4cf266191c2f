// The tile registers of AMX in memory, so that its kernels run on any CPU with AVX-512 BF16. The build with
// -DUEFL_EMULATE_AMX=ON includes this file first in csrc/cpu/*.amx.cpp. A use that the hardware rejects ends
// the program.
//
// Products and sums follow the order of Intel's Software Developer's Manual, volume 2, TDPBF16PS. There is
// one float32 sum of the even elements and one of the odd elements. FMAs round to nearest even, and subnormal
// inputs and outputs are zero.
#pragma once

#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC bug 105593
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace emulated_amx {

struct EmulatedConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t column_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(EmulatedConfig) == 64);

struct Registers {
  EmulatedConfig config = {};
  alignas(64) unsigned char tile[8][16][64] = {};

  // Returns a tile. The hardware raises an exception if no tile is configured, or if the tile has no size.
  auto& operator[](int t) {
    if (config.palette != 1 || !config.rows[t] || !config.column_bytes[t]) {
      std::fprintf(stderr, "tile %d is used and not configured\n", t);
      std::abort();
    }
    return tile[t];
  }
};
inline thread_local Registers registers;

inline void loadconfig(const void* config) {
  registers = {};
  std::memcpy(&registers.config, config, sizeof(EmulatedConfig));
  bool valid = registers.config.palette == 1 && registers.config.start_row == 0;
  for (const unsigned char byte : registers.config.reserved) valid = valid && !byte;
  for (int t = 0; t < 16; ++t) {
    const int rows = registers.config.rows[t], bytes = registers.config.column_bytes[t];
    valid = valid && (t < 8 ? rows <= 16 && bytes <= 64 && !rows == !bytes : !rows && !bytes);
  }
  if (!valid) {
    std::fprintf(stderr, "a configuration of tiles that raises an exception\n");
    std::abort();
  }
}
inline void release() { registers = {}; }
inline void zero(int t) { std::memset(registers[t], 0, sizeof registers.tile[t]); }

inline void loadd(int t, const void* base, int64_t stride) {
  zero(t);  // zero beyond the configured size
  const EmulatedConfig& config = registers.config;
  for (int i = 0; i < config.rows[t]; ++i) {
    std::memcpy(registers[t][i], static_cast<const char*>(base) + i * stride, config.column_bytes[t]);
  }
}

inline void stored(int t, void* base, int64_t stride) {
  const EmulatedConfig& config = registers.config;
  for (int i = 0; i < config.rows[t]; ++i) {
    std::memcpy(static_cast<char*>(base) + i * stride, registers[t][i], config.column_bytes[t]);
  }
}

// The sizes of a product: the rows of the sum, the 32-bit columns of the sum, and the 32-bit columns of the
// rows.
struct ProductShape {
  int rows, columns, depth;
};
inline ProductShape shape_of(int sum, int a, int b) {
  const EmulatedConfig& config = registers.config;
  const ProductShape shape = {config.rows[sum], config.column_bytes[sum] / 4, config.column_bytes[a] / 4};
  if (config.rows[a] != shape.rows || config.rows[b] != shape.depth ||
      config.column_bytes[b] / 4 != shape.columns || sum == a || sum == b || a == b) {
    std::fprintf(stderr, "tiles %d, %d and %d do not fit each other\n", sum, a, b);
    std::abort();
  }
  return shape;
}

// Returns a bfloat16 of a pair as float32.
inline float half_of(uint32_t pair, int odd) {
  const uint32_t bits = odd ? pair & 0xffff0000u : pair << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Multiplies. It is not inlined, because it must stay between the two settings of MXCSR.
[[gnu::noinline]] inline void multiply_bf16(ProductShape shape, float (*sum)[16], const uint32_t (*a)[16],
                                            const uint32_t (*b)[16]) {
  for (int i = 0; i < shape.rows; ++i) {
    float even[16] = {}, odd[16] = {};
    for (int k = 0; k < shape.depth; ++k) {
      const float first = half_of(a[i][k], 0), second = half_of(a[i][k], 1);
      for (int j = 0; j < shape.columns; ++j) {
        even[j] = __builtin_fmaf(first, half_of(b[k][j], 0), even[j]);
        odd[j] = __builtin_fmaf(second, half_of(b[k][j], 1), odd[j]);
      }
    }
    for (int j = 0; j < shape.columns; ++j) sum[i][j] += even[j] + odd[j];
  }
}

template <class T>
auto cells(int t) {
  return reinterpret_cast<T(*)[16]>(registers[t]);
}

inline void dpbf16ps(int sum, int a, int b) {
  const ProductShape shape = shape_of(sum, a, b);
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0x1f80 | 0x8040);  // no exceptions, to nearest even, subnormal results and operands are zero
  multiply_bf16(shape, cells<float>(sum), cells<const uint32_t>(a), cells<const uint32_t>(b));
  _mm_setcsr(before);
}

inline void dpbssd(int sum, int a, int b) {
  const ProductShape shape = shape_of(sum, a, b);
  const auto total = cells<uint32_t>(sum);  // wraps around
  for (int i = 0; i < shape.rows; ++i) {
    for (int k = 0; k < shape.depth; ++k) {
      const auto* const left = reinterpret_cast<const int8_t*>(registers[a][i]) + 4 * k;
      const auto* const right = reinterpret_cast<const int8_t*>(registers[b][k]);
      for (int j = 0; j < shape.columns; ++j) {
        for (int part = 0; part < 4; ++part)
          total[i][j] += static_cast<uint32_t>(left[part] * right[4 * j + part]);
      }
    }
  }
}

}  // namespace emulated_amx

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadconfig(config) ::emulated_amx::loadconfig(config)
#define _tile_release() ::emulated_amx::release()
#define _tile_zero(tile) ::emulated_amx::zero(tile)
#define _tile_loadd(tile, base, stride) ::emulated_amx::loadd(tile, base, stride)
#define _tile_stored(tile, base, stride) ::emulated_amx::stored(tile, base, stride)
#define _tile_dpbf16ps(sum, a, b) ::emulated_amx::dpbf16ps(sum, a, b)
#define _tile_dpbssd(sum, a, b) ::emulated_amx::dpbssd(sum, a, b)

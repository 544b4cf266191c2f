// The configuration of the AMX tile registers: eight tiles of 16 rows of 64 bytes.
#pragma once

// GCC 12 warns about the undefined operands in its own AVX-512 headers (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <cstdint>

namespace uefl::cpu {
namespace {

struct alignas(64) AmxConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t column_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
const AmxConfig kConfig;  // static memory: the compiler does not know that the instruction reads all of it

struct ConfiguredTiles {
  ConfiguredTiles() { _tile_loadconfig(&kConfig); }
  ~ConfiguredTiles() { _tile_release(); }  // otherwise every later thread switch saves 8 KiB
};

}  // namespace
}  // namespace uefl::cpu

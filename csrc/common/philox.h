// Philox4x32-10 computes random bits from a counter and a key. CPU and GPU compute the same bits, in any
// order and on any thread.
//
// Source: Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3" (Random123), section
// 4.3 and table 2. The key is the seed. Different uses of one seed must have different counters. Each use
// documents how it fills the four words.
#pragma once

#include <cstdint>

#if !defined(UEFL_HOST_DEVICE)
#if defined(__CUDACC__)
#define UEFL_HOST_DEVICE __host__ __device__
#else
#define UEFL_HOST_DEVICE
#endif
#endif

namespace uefl {
namespace {  // internal linkage: see the note in cpu/strided_rows.h

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u, kPhiloxMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u, kPhiloxWeyl1 = 0xBB67AE85u;  // added to the key each round

struct PhiloxWords {
  uint32_t word[4];
};

// Returns four words of random bits. The first word of the key is the low word of the seed.
UEFL_HOST_DEVICE constexpr PhiloxWords philox(PhiloxWords counter, uint64_t seed) {
  uint32_t low_key = static_cast<uint32_t>(seed), high_key = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t first = uint64_t{kPhiloxMultiplier0} * counter.word[0],
                   second = uint64_t{kPhiloxMultiplier1} * counter.word[2];
    counter = {
        {static_cast<uint32_t>(second >> 32) ^ counter.word[1] ^ low_key, static_cast<uint32_t>(second),
         static_cast<uint32_t>(first >> 32) ^ counter.word[3] ^ high_key, static_cast<uint32_t>(first)}};
    low_key += kPhiloxWeyl0;
    high_key += kPhiloxWeyl1;
  }
  return counter;
}

}  // namespace
}  // namespace uefl

// Compares Philox4x32-10 with the known answers of Random123 (kat_vectors), at compile time and at run time.
#include "check.h"
#include "common/philox.h"

struct KnownAnswer {
  uefl::PhiloxWords counter;
  uint64_t seed;
  uefl::PhiloxWords expected;
};

constexpr KnownAnswer kAnswers[] = {
    {{{0, 0, 0, 0}}, 0, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
    {{{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}},
     0xffffffffffffffff,
     {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
    {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
     0x299f31d0a4093822,
     {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}},
};

static_assert(uefl::philox(kAnswers[2].counter, kAnswers[2].seed).word[0] == kAnswers[2].expected.word[0]);

void run() {
  for (const KnownAnswer& answer : kAnswers) {
    const uefl::PhiloxWords got = uefl::philox(answer.counter, answer.seed);
    for (int i = 0; i < 4; ++i)
      CHECK(got.word[i] == answer.expected.word[i], "word %d is %08x", i, got.word[i]);
  }
}

// on_threads() runs every task once, and rethrows an exception of any thread after the others have ended.
// StripedAdder adds whole arrays from several threads without losing a value.
#include <atomic>

#include "check.h"
#include "cpu/striped_adder.h"
#include "cpu/threads.h"

using uefl::cpu::on_threads;

static void every_piece_once() {
  std::vector<int> calls(5);
  on_threads(5, [&](int64_t thread) { ++calls[thread]; });
  CHECK(calls == std::vector<int>(5, 1), "a piece was left out or done twice");
}

static void exceptions_reach_the_caller() {
  for (int64_t thrower = 0; thrower < 4; ++thrower) {
    std::atomic<int> ended = 0;
    bool caught = false;
    try {
      on_threads(4, [&](int64_t thread) {
        if (thread == thrower) throw std::runtime_error("thread");
        ++ended;
      });
    } catch (const std::runtime_error&) {
      caught = true;
    }
    CHECK(caught && ended == 3, "thrown by %ld, %d ended", static_cast<long>(thrower), ended.load());
  }
}

static void sums_of_many_threads() {
  constexpr int64_t kThreads = 8, kTimes = 50;
  for (const size_t size : {0, 1, 511, 1023, 1024, 1025, 100003}) {
    uefl::cpu::StripedAdder adder;
    std::vector<int64_t> total(size), expected(size);
    for (size_t i = 0; i < size; ++i) expected[i] = kTimes * kThreads * (static_cast<int64_t>(i) - 7);
    uefl::cpu::on_threads(kThreads, [&](int64_t) {
      std::vector<int64_t> own(size);
      for (size_t i = 0; i < size; ++i) own[i] = static_cast<int64_t>(i) - 7;
      for (int64_t time = 0; time < kTimes; ++time) adder.add(own, total);
    });
    CHECK(total == expected, "%zu elements", size);
  }
}

void run() {
  every_piece_once();
  sums_of_many_threads();
  exceptions_reach_the_caller();
}

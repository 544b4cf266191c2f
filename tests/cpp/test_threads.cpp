// on_threads: every piece once, and an exception of any thread reaches the caller after the others have ended.
#include <atomic>

#include "check.h"
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

void run() {
  every_piece_once();
  exceptions_reach_the_caller();
}

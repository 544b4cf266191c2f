// Division of work among threads.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

namespace uefl::cpu {

// Calls work(lo, hi) for parts of [0, count), in parallel where possible.
using Parallel = std::function<void(int64_t count, const std::function<void(int64_t lo, int64_t hi)>& work)>;

inline void on_this_thread(int64_t count, const std::function<void(int64_t lo, int64_t hi)>& work) {
  work(0, count);
}

// Runs threads for a front end without a thread pool: calls work(0), ..., work(threads - 1), the first on
// this thread. After all have ended, it rethrows the exception of the lowest number. An exception that leaves
// a thread would end the process.
template <class Body>
void on_threads(int64_t threads, const Body& work) {
  std::vector<std::exception_ptr> errors(threads);
  const auto guarded = [&](int64_t thread) {
    try {
      work(thread);
    } catch (...) {
      errors[thread] = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> pool;
    for (int64_t thread = 1; thread < threads; ++thread) pool.emplace_back(guarded, thread);
    guarded(0);
  }  // joins
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace uefl::cpu

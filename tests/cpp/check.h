// The parts that all C++ tests share: a check that reports and counts, and a main that skips (77) if UEFL_CPU
// cannot run.
#pragma once

#include <cstdint>
#include <cstdio>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "cpu/features.h"
#include "cpu/vq_assign.h"

static int failures = 0;

#define CHECK(condition, ...)                                              \
  do {                                                                     \
    if (!(condition)) {                                                    \
      ++failures;                                                          \
      std::printf("%s:%d: %s is false: ", __FILE__, __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                            \
      std::printf("\n");                                                   \
    }                                                                      \
  } while (false)

void run();

int main() {
  try {
    uefl::cpu::isa();
  } catch (const std::runtime_error& error) {
    std::printf("skipped: %s\n", error.what());
    return 77;
  }
  run();
  std::printf("%s: %d failures\n", name(uefl::cpu::isa()), failures);
  return failures ? 1 : 0;
}

template <class T>
std::vector<T> normal(int64_t count, std::mt19937& random, double offset = 0, double scale = 1) {
  std::normal_distribution<double> distribution(offset, scale);
  std::vector<T> values(count);
  for (T& value : values) value = static_cast<T>(distribution(random));
  return values;
}

// Evaluates the definition of vq_assign for one row, without the library: the argmin in float64, in the order
// of the elements, with ties to the lowest index. NaN never wins.
template <class T, class C>
int64_t nearest(const T* row, int64_t stride, const C* codewords, int64_t k, int64_t d) {
  double best = std::numeric_limits<double>::infinity();
  int64_t index = 0;
  for (int64_t i = 0; i < k; ++i) {
    volatile double total = 0;  // volatile, so that every rounding step happens for any compiler flags
    for (int64_t j = 0; j < d; ++j) {
      const volatile double difference =
          static_cast<double>(row[j * stride]) - static_cast<double>(codewords[i * d + j]);
      const volatile double square = difference * difference;
      total = total + square;
    }
    if (total < best) best = total, index = i;
  }
  return index;
}

// Runs the CUDA kernels of ema_update on the CPU, thread by thread. They give the bits of the CPU kernel. The
// emulation comes before the kernels.
#include "cuda/emulation.h"
//
#include "check.h"
#include "cpu/ema_update.h"
#include "cuda/ema_update_kernels.h"

namespace cuda = uefl::cuda;
namespace cpu = uefl::cpu;

template <class T>
static void compare(int64_t h, int64_t k, int64_t d, T step, bool unit, bool weighted) {
  std::mt19937 random(static_cast<unsigned>(k + d));
  auto sizes = normal<T>(h * k, random, 3, 0.5), weights = normal<T>(h * k, random, 1, 0.2);
  const auto averages = normal<T>(h * k * d, random), codewords = normal<T>(h * k * d, random);
  auto sums = normal<double>(h * k * d, random);
  std::vector<int64_t> counts(h * k);
  for (int64_t& count : counts) count = std::uniform_int_distribution<int64_t>(0, 9)(random);
  sums[h * k * d - 1] = NAN;                         // the last codeword takes no part
  if (step == 1 && k < 20) counts.assign(h * k, 0);  // no codeword has a size
  std::vector<T> results[2][3];
  const auto run_with = [&](std::vector<T>(&out)[3]) {
    out[0].resize(h * k), out[1].resize(h * k * d), out[2].resize(h * k * d);
    return uefl::EmaUpdate<T>{h,
                              k,
                              d,
                              sizes.data(),
                              averages.data(),
                              codewords.data(),
                              counts.data(),
                              sums.data(),
                              weighted ? weights.data() : nullptr,
                              step,
                              T(1e-5),
                              static_cast<T>(1e-5 * static_cast<double>(k)),
                              unit,
                              out[0].data(),
                              out[1].data(),
                              out[2].data()};
  };
  const auto expected = run_with(results[0]), found = run_with(results[1]);
  cpu::move_averages(expected, 0, h * k);
  std::vector<T> totals;
  for (int64_t codebook = 0; codebook < h; ++codebook) totals.push_back(cpu::total_size(expected, codebook));
  cpu::set_codewords(expected, totals.data(), 0, h * k);
  emulation::launch(3, cuda::kThreads, cuda::move_averages<T>, found);
  emulation::launch(static_cast<unsigned>(2 * h), cuda::kThreads, cuda::set_codewords<T>, found);
  for (int part = 0; part < 3; ++part) {
    CHECK(results[0][part] == results[1][part], "h %ld, k %ld, d %ld, step %g: result %d differs",
          static_cast<long>(h), static_cast<long>(k), static_cast<long>(d), static_cast<double>(step), part);
  }
}

void run() {
  for (const auto& [h, k, d] : {std::tuple{1, 1, 1}, {1, 70, 33}, {2, 300, 8}, {3, 9, 100}}) {
    for (const double step : {0.2, 0.5, 1.0}) {
      compare<float>(h, k, d, static_cast<float>(step), step == 0.5, false);
      compare<double>(h, k, d, step, step == 0.5, true);
      compare<float>(h, k, d, static_cast<float>(step), false, true);
    }
  }
}

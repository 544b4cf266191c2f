// Registers ema_update for the CPU.
#include "cpu/ema_update.h"

#include <algorithm>
#include <vector>

#include "ops/check_ema_update.h"

namespace uefl {
namespace {

using torch::stable::Tensor;

template <class T>
void update(const EmaUpdate<T>& run) {
  constexpr int64_t kTask = 1 << 15;  // fewer elements do not pay for a thread
  const int64_t codewords = run.codebooks * run.k,
                grain = std::max<int64_t>(1, kTask / std::max<int64_t>(1, run.d));
  torch::stable::parallel_for(0, codewords, grain,
                              [&](int64_t lo, int64_t hi) { cpu::move_averages(run, lo, hi); });
  std::vector<T> totals;
  for (int64_t codebook = 0; codebook < run.codebooks; ++codebook)
    totals.push_back(cpu::total_size(run, codebook));
  torch::stable::parallel_for(
      0, codewords, grain, [&](int64_t lo, int64_t hi) { cpu::set_codewords(run, totals.data(), lo, hi); });
}

EmaUpdateCall::Results ema_update(const Tensor& sizes, const Tensor& averages, const Tensor& codewords,
                                  const Tensor& counts, const Tensor& sums, std::optional<Tensor> weights,
                                  double step, double eps, bool unit) {
  EmaUpdateCall call(sizes, averages, codewords, counts, sums, weights);
  if (counts.numel() == 0) return call.results();
  call.is_double() ? update(call.of<double>(step, eps, unit)) : update(call.of<float>(step, eps, unit));
  return call.results();
}

}  // namespace
}  // namespace uefl

STABLE_TORCH_LIBRARY_IMPL(uefl, CPU, m) { m.impl("ema_update", TORCH_BOX(&uefl::ema_update)); }

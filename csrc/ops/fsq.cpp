// Registers fsq and its gradient for the CPU, with checks of a direct call of torch.ops.
#include "cpu/fsq.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace uefl {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void require(bool condition, const char* expected) {
  if (!condition) throw std::runtime_error(std::string("fsq: ") + expected);
}

void check(const Tensor& z, const std::vector<int64_t>& levels) {
  require(z.scalar_type() == ScalarType::Float || z.scalar_type() == ScalarType::Double,
          "z must be float32 or float64");
  require(!levels.empty() && z.dim() > 0 && z.size(z.dim() - 1) == static_cast<int64_t>(levels.size()),
          "z must have shape [..., d] with d levels");
  require(std::all_of(levels.begin(), levels.end(), [](int64_t count) { return count >= 2; }),
          "levels must be at least 2 each");
}

// Calls body(lo, hi) for parts of the rows.
template <class Body>
void by_rows(const Tensor& z, const Body& body) {
  constexpr int64_t kTask = 1 << 14;  // fewer elements do not pay for a thread
  const int64_t d = z.size(z.dim() - 1);
  torch::stable::parallel_for(0, z.numel() / d, std::max<int64_t>(1, kTask / d), body);
}

// Returns true if int32 holds every index.
bool narrow(const std::vector<int64_t>& levels) {
  double size = 1;
  for (const int64_t count : levels) size *= static_cast<double>(count);
  return size <= 0x1p31;
}

template <class T>
void run_forward(const cpu::Fsq& fsq, const Tensor& z, Tensor& quantized, Tensor& indices) {
  const bool is_narrow = indices.scalar_type() == ScalarType::Int;
  void* const at = indices.numel() ? indices.mutable_data_ptr() : nullptr;
  const cpu::FsqRun<T> run{.z = static_cast<const T*>(z.const_data_ptr()),
                           .quantized = static_cast<T*>(quantized.mutable_data_ptr()),
                           .indices = is_narrow ? nullptr : static_cast<int64_t*>(at),
                           .narrow = is_narrow ? static_cast<int32_t*>(at) : nullptr};
  by_rows(z, [&](int64_t lo, int64_t hi) { fsq.forward(run, lo, hi); });
}

std::tuple<Tensor, Tensor> fsq(const Tensor& given, std::vector<int64_t> levels, bool symmetric, bool clamp,
                               bool indexed) {
  check(given, levels);
  const Tensor z = torch::stable::contiguous(given);
  Tensor quantized = torch::stable::new_empty(z, z.sizes());
  std::vector<int64_t> shape(z.sizes().begin(), z.sizes().end() - 1);
  if (!indexed) shape = {0};
  Tensor indices = torch::stable::new_empty(z, shape, narrow(levels) ? ScalarType::Int : ScalarType::Long);
  const cpu::Fsq form({std::move(levels), symmetric, clamp});
  z.scalar_type() == ScalarType::Double ? run_forward<double>(form, z, quantized, indices)
                                        : run_forward<float>(form, z, quantized, indices);
  return {quantized, indices};
}

template <class T>
void run_backward(const cpu::Fsq& fsq, const Tensor& grad, const Tensor& z, Tensor& grad_z) {
  const cpu::FsqBackwardRun<T> run{.grad = static_cast<const T*>(grad.const_data_ptr()),
                                   .z = static_cast<const T*>(z.const_data_ptr()),
                                   .grad_z = static_cast<T*>(grad_z.mutable_data_ptr())};
  by_rows(z, [&](int64_t lo, int64_t hi) { fsq.backward(run, lo, hi); });
}

Tensor fsq_backward(const Tensor& grad_given, const Tensor& z_given, std::vector<int64_t> levels,
                    bool symmetric, bool clamp) {
  check(z_given, levels);
  require(grad_given.scalar_type() == z_given.scalar_type() &&
              std::equal(grad_given.sizes().begin(), grad_given.sizes().end(), z_given.sizes().begin(),
                         z_given.sizes().end()),
          "grad must have the shape and dtype of z");
  const Tensor grad = torch::stable::contiguous(grad_given), z = torch::stable::contiguous(z_given);
  Tensor grad_z = torch::stable::new_empty(z, z.sizes());
  const cpu::Fsq form({std::move(levels), symmetric, clamp});
  z.scalar_type() == ScalarType::Double ? run_backward<double>(form, grad, z, grad_z)
                                        : run_backward<float>(form, grad, z, grad_z);
  return grad_z;
}

}  // namespace
}  // namespace uefl

STABLE_TORCH_LIBRARY_IMPL(uefl, CPU, m) {
  m.impl("fsq", TORCH_BOX(&uefl::fsq));
  m.impl("fsq_backward", TORCH_BOX(&uefl::fsq_backward));
}

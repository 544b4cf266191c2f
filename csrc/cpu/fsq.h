// Finite scalar quantization on the CPU, forward and backward. uefl_kernels/ops/fsq/__init__.py has the
// formulas: the level of an element is the number of thresholds that it reaches.
#pragma once

#include <cstdint>
#include <vector>

namespace uefl::cpu {

struct FsqForm {
  std::vector<int64_t> levels;  // the number of each element of a row
  bool symmetric, clamp;
};

template <class T>
struct FsqRun {
  const T* z;        // [N, d]
  T* quantized;      // [N, d]
  int64_t* indices;  // [N], or null
  int32_t* narrow;   // the same as int32, or null
};

template <class T>
struct FsqBackwardRun {
  const T *grad, *z;  // [N, d]
  T* grad_z;          // [N, d]
};

// The numbers of a form. All methods are thread-safe.
class Fsq {
 public:
  explicit Fsq(FsqForm form);

  // Quantizes rows [lo, hi).
  void forward(const FsqRun<float>& run, int64_t lo, int64_t hi) const;
  void forward(const FsqRun<double>& run, int64_t lo, int64_t hi) const;

  // Writes the gradient of rows [lo, hi).
  void backward(const FsqBackwardRun<float>& run, int64_t lo, int64_t hi) const;
  void backward(const FsqBackwardRun<double>& run, int64_t lo, int64_t hi) const;

 private:
  // A level k has the value (k scale - center) / divisor.
  struct ElementForm {
    double shift = 0, slope = 1, scale = 1, center = 1, divisor = 1;
    std::vector<double> thresholds;
    // Rounded up, so a float reaches a rounded threshold if and only if it reaches the threshold.
    std::vector<float> rounded;
  };

  // The numbers of ElementForm for each element of kFsqRows rows.
  struct Tile {
    std::vector<float> thresholds;  // [steps, kFsqRows d], NaN where an element has fewer levels
    std::vector<float> shift, slope, scale, center, divisor;  // [kFsqRows d]
  };

  ElementForm element_of(int64_t levels) const;
  int64_t d() const { return static_cast<int64_t>(form_.levels.size()); }
  template <class T>
  void write_indices(const FsqRun<T>& run, const int32_t* levels, int64_t lo, int64_t hi) const;

  FsqForm form_;
  std::vector<ElementForm> elements_;
  std::vector<int64_t> factors_;  // the factor of each level in an index
  int64_t steps_ = 0;             // the largest number of thresholds of an element
  Tile tile_;
};

}  // namespace uefl::cpu

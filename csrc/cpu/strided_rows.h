// The memory layout of the rows of x, and conversions of elements of any dtype. Every kernel and its callers
// share this file. All code here has internal linkage: files for different instruction sets include this
// header, and the linker could otherwise merge a function compiled for AVX-512 into code for a CPU without
// it.
#pragma once

#include <cstdint>
#include <cstring>

namespace uefl::cpu {

enum class Dtype { f32, bf16, f16, f64 };

// x as [outer, inner, dim]. Strides are in elements and may be zero or negative.
struct StridedRows {
  const void* data;
  Dtype dtype;
  int64_t outer, inner, dim;
  int64_t outer_stride, inner_stride, dim_stride;
};

namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

inline int64_t element_size(Dtype dtype) { return dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2; }

inline float float_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline float widen(float value) { return value; }
inline double widen(double value) { return value; }
inline float widen(BFloat16 value) { return float_from_bits(static_cast<uint32_t>(value.bits) << 16); }

// Converts to float32. It has no branches, so that loops over it vectorize. It has no subnormal floats, so
// that flush-to-zero does not affect it.
inline float widen(Half value) {
  const uint32_t exponent = value.bits & 0x7c00u, bits = (value.bits & 0x7fffu) << 13;
  const float normal = float_from_bits(bits + ((exponent == 0x7c00u ? 224u : 112u) << 23));
  const float subnormal = float_from_bits(bits + (113u << 23)) - 0x1p-14f;
  const float magnitude = exponent == 0 ? subnormal : normal;
  return value.bits & 0x8000u ? -magnitude : magnitude;
}

// Returns the nearest value of a type, with ties to even, as PyTorch rounds. It has no branches, as widen().
template <class T>
inline T narrow(double value) {
  return static_cast<T>(value);
}
template <>
inline BFloat16 narrow(double value) {
  const float single = static_cast<float>(value);
  uint32_t bits;
  memcpy(&bits, &single, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  return {static_cast<uint16_t>(single == single ? rounded : 0x7fc0u)};
}
template <>
inline Half narrow(double value) {
  const float single = static_cast<float>(value);
  uint32_t bits, small;
  memcpy(&bits, &single, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  const float shifted = float_from_bits(magnitude) + 0.5f;  // its last bit is the unit of subnormal halves
  memcpy(&small, &shifted, sizeof small);
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1)) >> 13;
  const uint32_t large = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  return {static_cast<uint16_t>(sign | (magnitude < 113u << 23    ? small - (126u << 23)
                                        : magnitude < 0x477ff000u ? normal
                                                                  : large))};
}

// Calls body with a null pointer of the element type.
template <class Body>
inline void with_type(Dtype dtype, const Body& body) {
  switch (dtype) {
    case Dtype::f32:
      return body(static_cast<const float*>(nullptr));
    case Dtype::bf16:
      return body(static_cast<const BFloat16*>(nullptr));
    case Dtype::f16:
      return body(static_cast<const Half*>(nullptr));
    case Dtype::f64:
      return body(static_cast<const double*>(nullptr));
  }
}

// Returns the address of element `column` of row n, for n in [0, outer * inner).
inline const char* element(const StridedRows& x, int64_t n, int64_t column) {
  const int64_t a = x.inner == 1 ? n : n / x.inner, b = x.inner == 1 ? 0 : n % x.inner;
  return static_cast<const char*>(x.data) +
         (a * x.outer_stride + b * x.inner_stride + column * x.dim_stride) * element_size(x.dtype);
}

// Views a strided [..., dim] array as StridedRows. Returns false if its leading dimensions do not collapse
// into two.
inline bool view_rows(const void* data, Dtype dtype, const int64_t* sizes, const int64_t* strides,
                      int64_t ndim, StridedRows& rows) {
  int64_t size[2] = {1, 1}, stride[2] = {0, 0};  // innermost first
  int used = 0;
  for (int64_t i = ndim - 2; i >= 0; --i) {
    if (sizes[i] == 1) continue;
    if (used > 0 && strides[i] == stride[used - 1] * size[used - 1]) {
      size[used - 1] *= sizes[i];
    } else if (used < 2) {
      size[used] = sizes[i];
      stride[used++] = strides[i];
    } else {
      return false;
    }
  }
  if (used < 2) {  // one run of rows is [outer, 1, dim], which needs no division for addresses
    size[1] = size[0], stride[1] = stride[0];
    size[0] = 1, stride[0] = 0;
  }
  rows = StridedRows{data, dtype, size[1], size[0], sizes[ndim - 1], stride[1], stride[0], strides[ndim - 1]};
  return true;
}

}  // namespace
}  // namespace uefl::cpu

// The body of vq_backward, included by each vq.<isa>.cpp behind vq_kernel.h, whose vectors and loads it uses.
#pragma once

#include "common/rotation.h"
#include "cpu/vq_kernel.h"

namespace uefl::cpu {
namespace {

template <class T, class Vector>
UEFL_INLINE void store(const Vector& value, T* out, int64_t n) {
  constexpr int kCount = sizeof value / sizeof value[0];
  if (n < kCount) {
    for (int i = 0; i < n; ++i) out[i] = narrow<T>(value[i]);
  } else if constexpr (sizeof(T) == sizeof value[0]) {
    store(value, out);
  } else if constexpr (sizeof(T) == sizeof(float)) {
    store_narrow(value, out);
  } else {
    for (int i = 0; i < kCount; ++i) out[i] = narrow<T>(value[i]);
  }
}

// One segment of one row.
template <class T, class Code>
struct Segment {
  const T *x, *g;
  const Code* code;
  T* out;
  int64_t d;
};

template <class T, class Code>
inline void backward_rotated(const Segment<T, Code>& segment, double pull) {
  Doubles xx[kParts] = {}, qq[kParts] = {}, xq[kParts] = {}, xg[kParts] = {}, qg[kParts] = {};
  Doubles x = {}, q = {}, g = {};
  const auto load_all = [&](int64_t j) __attribute__((always_inline)) {
    load(segment.x + j, segment.d - j, x);
    load(segment.code + j, segment.d - j, q);
    load(segment.g + j, segment.d - j, g);
  };
  for (int64_t start = 0; start < segment.d; start += kSums) {
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      const int64_t j = start + part * kDoubles;
      if (j >= segment.d) break;
      load_all(j);
      xx[part] += x * x, qq[part] += q * q, xq[part] += x * q, xg[part] += x * g, qg[part] += q * g;
    }
  }
  const Rotation turn = rotation({sum(xx), sum(qq), sum(xq), sum(xg), sum(qg)});
  for (int64_t j = 0; j < segment.d; j += kDoubles) {  // again, now from the first-level cache
    load_all(j);
    const Doubles gradient = g * turn.scale + (x * turn.along + q * turn.towards) + (x - q) * pull;
    store(gradient, segment.out + j, segment.d - j);
  }
}

template <class T, class Code, bool has_g>
inline void backward_straight(const Segment<T, Code>& segment, Code pull) {
  typedef Code Vector __attribute__((vector_size(sizeof(Floats))));
  constexpr int64_t kCount = sizeof(Vector) / sizeof(Code);
  for (int64_t j = 0; j < segment.d; j += kCount) {
    Vector x = {}, q = {}, g = {};
    load(segment.x + j, segment.d - j, x);
    load(segment.code + j, segment.d - j, q);
    if constexpr (has_g) load(segment.g + j, segment.d - j, g);
    const Vector pulled = (x - q) * pull;
    store(has_g ? g + pulled : pulled, segment.out + j, segment.d - j);
  }
}

template <class T>
inline T* row(const Span& span, int64_t n, int64_t column) {
  return reinterpret_cast<T*>(const_cast<char*>(element(span.rows, span.first + n, column)));
}

template <class T, class Code>
void backward_typed(const VqBackwardRun& run) {
  const int64_t segments = run.x.rows.dim / run.d;
  const bool has_g = run.grad_quantized.rows.data != nullptr;
  for (int64_t n = 0; n < run.rows; ++n) {
    for (int64_t s = 0; s < segments; ++s) {
      const int64_t code = run.indices[n * segments + s] + s * run.codebook_step, column = s * run.d;
      const Segment<T, Code> segment{.x = row<T>(run.x, n, column),
                                     .g = has_g ? row<T>(run.grad_quantized, n, column) : nullptr,
                                     .code = static_cast<const Code*>(run.codes) + code * run.d,
                                     .out = row<T>(run.grad_x, n, column),
                                     .d = run.d};
      if (!has_g) {
        backward_straight<T, Code, false>(segment, static_cast<Code>(run.pull));
      } else if (run.rotation) {
        backward_rotated(segment, run.pull);
      } else {
        backward_straight<T, Code, true>(segment, static_cast<Code>(run.pull));
      }
    }
  }
}

void backward(const VqBackwardRun& run) {
  with_type(run.x.rows.dtype, [&]<class T>(const T*) {
    if constexpr (sizeof(T) == sizeof(double)) {
      backward_typed<T, double>(run);
    } else {
      run.wide ? backward_typed<T, double>(run) : backward_typed<T, float>(run);
    }
  });
}

}  // namespace
}  // namespace uefl::cpu

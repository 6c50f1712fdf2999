// The rotation of queries and keys over an int8 cache, and of rows over weights of 8 bits: a Walsh-Hadamard transform (S. Ashkboos et al.,
// "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", 2024). It leaves q . k as it is, and it spreads the few large channels of keys
// over all, so that one scale serves them.
//
// A stage of it adds and subtracts elements h apart, h = 1, 2, 4, ...: no rounding depends on the width of vectors.
#pragma once
#include "simd.h"

namespace headrace {
namespace HEADRACE_ISA {

// Lane i gets lane i ^ h.
template <int h>
HEADRACE_INLINE vf swapped(vf x) {
#if defined(__AVX512F__)
  if constexpr (h <= 2) return _mm512_permute_ps(x, h == 1 ? 0xb1 : 0x4e);
  else return _mm512_shuffle_f32x4(x, x, h == 4 ? 0xb1 : 0x4e);
#elif defined(__AVX2__)
  if constexpr (h <= 2) return _mm256_permute_ps(x, h == 1 ? 0xb1 : 0x4e);
  else return _mm256_permute2f128_ps(x, x, 1);
#elif defined(__aarch64__)
  return h == 1 ? vrev64q_f32(x) : vextq_f32(x, x, 2);
#else
  float from[kLanes], to[kLanes];
  store(from, x);
  for (int i = 0; i < kLanes; ++i) to[i] = from[i ^ h];
  return load(to);
#endif
}

// The stages h, 2 h, ... within a vector.
template <int h>
HEADRACE_INLINE vf rotate_lanes(vf x) {
  if constexpr (h < kLanes) {
    float signs[kLanes];
    HEADRACE_UNROLL for (int i = 0; i < kLanes; ++i) signs[i] = (i & h) != 0 ? -1.0f : 1.0f;
    return rotate_lanes<2 * h>(fma(load(signs), x, swapped<h>(x)));
  } else {
    return x;
  }
}

// The stages h, 2 h, ... between kCount vectors, h of them apart first.
template <int h, int kCount>
HEADRACE_INLINE void rotate_vectors(vf (&x)[kCount]) {
  if constexpr (h < kCount) {
    HEADRACE_UNROLL for (int i = 0; i < kCount; ++i) {
      if ((i & h) != 0) continue;
      const vf a = x[i], b = x[i + h];
      x[i] = add(a, b);
      x[i + h] = sub(a, b);
    }
    rotate_vectors<2 * h>(x);
  }
}

// to = x in blocks of kSize elements, each times a matrix of 1 and -1, in registers; `size` is a multiple of kSize.
template <int kSize>
HEADRACE_INLINE void rotate_blocks(const float* x, int64_t size, float* to) {
  for (int64_t begin = 0; begin < size; begin += kSize) {
    vf block[kSize / kLanes];
    HEADRACE_UNROLL for (int i = 0; i < kSize / kLanes; ++i) block[i] = rotate_lanes<1>(load(x + begin + i * kLanes));
    rotate_vectors<1>(block);
    HEADRACE_UNROLL for (int i = 0; i < kSize / kLanes; ++i) store(to + begin + i * kLanes, block[i]);
  }
}

// Elements that are mixed: the largest power of two that divides head_dim (a multiple of 16).
HEADRACE_INLINE int64_t rotation_size(int64_t head_dim) { return head_dim & -head_dim; }

// to = x times a matrix of 1 and -1, in blocks of rotation_size elements: its square is rotation_size times the identity.
HEADRACE_INLINE void rotate_head(const float* x, int64_t head_dim, float* to) {
  const int64_t size = rotation_size(head_dim);
  for (int64_t d = 0; d < head_dim; d += kLanes) store(to + d, rotate_lanes<1>(load(x + d)));
  for (int64_t h = kLanes; h < size; h *= 2) {
    for (int64_t begin = 0; begin < head_dim; begin += 2 * h) {
      for (int64_t d = begin; d < begin + h; d += kLanes) {
        const vf a = load(to + d), b = load(to + d + h);
        store(to + d, add(a, b));
        store(to + d + h, sub(a, b));
      }
    }
  }
}

}  // namespace HEADRACE_ISA
}  // namespace headrace

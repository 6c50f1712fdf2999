// Root mean square normalisation (Zhang and Sennrich, 2019), with the residual addition before it.
#include <math.h>

#include "kernels.h"
#include "simd.h"
#include "threads.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

// Squares are summed in two chains of 16 lanes, over elements 32 i .. 32 i + 15 and 32 i + 16 .. 32 i + 31.
float sum_of_squares(const float* x, int64_t size) {
  f32x16 even = splat16(0.0f), odd = splat16(0.0f);
  int64_t i = 0;
  for (; i + 32 <= size; i += 32) {
    const f32x16 a = load16(x + i), b = load16(x + i + 16);
    even = fma(a, a, even);
    odd = fma(b, b, odd);
  }
  if (i + 16 <= size) {
    const f32x16 a = load16(x + i);
    even = fma(a, a, even);
    i += 16;
    if (i < size) {
      const f32x16 b = load_first(x + i, size - i);
      odd = fma(b, b, odd);
    }
  } else if (i < size) {
    const f32x16 a = load_first(x + i, size - i);
    even = fma(a, a, even);
  }
  return sum_lanes(add(even, odd));
}

void norm_row(const NormArgs& n, int64_t row) {
  const float* x = n.x + row * n.x_stride;
  if (n.residual != nullptr) {
    float* const residual = n.residual + row * n.size;
    int64_t i = 0;
    for (; i + 16 <= n.size; i += 16) store16(residual + i, add(load16(residual + i), load16(x + i)));
    for (; i < n.size; ++i) residual[i] += x[i];
    x = residual;
  }
  const f32x16 inverse = splat16(1.0f / sqrtf(sum_of_squares(x, n.size) / static_cast<float>(n.size) + n.eps));
  float* const out = n.out + row * n.size;
  int64_t i = 0;
  for (; i + 16 <= n.size; i += 16) store16(out + i, mul(mul(load16(x + i), inverse), load16(n.weight + i)));
  if (i < n.size) {
    const int64_t rest = n.size - i;
    store_first(out + i, mul(mul(load_first(x + i, rest), inverse), load_first(n.weight + i, rest)), rest);
  }
}

}  // namespace

void rms_norm(const NormArgs& n) {
  const int64_t grain = max_of(1, 8192 / max_of(1, n.size));
  parallel_for(n.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) norm_row(n, row);
  });
}

void head_norm(const HeadNormArgs& h) {
  const int64_t grain = max_of(1, 8192 / max_of(1, h.num_heads * h.head_dim));
  parallel_for(h.tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      float* const x = h.x + token * h.x_stride;
      const NormArgs heads = {x, h.head_dim, nullptr, h.weight, x, h.num_heads, h.head_dim, h.eps};
      for (int64_t head = 0; head < h.num_heads; ++head) norm_row(heads, head);
    }
  });
}

}  // namespace HEADRACE_ISA
}  // namespace headrace

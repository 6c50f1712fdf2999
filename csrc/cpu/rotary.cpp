// Rotary position embedding (Su et al., 2021) on halves: (a, b) -> (a cos - b sin, b cos + a sin), in place.
#include "kernels.h"
#include "simd.h"
#include "threads.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

HEADRACE_INLINE void rotate(f32x16& a, f32x16& b, f32x16 cos, f32x16 sin) {
  const f32x16 zero = splat16(0.0f), first = a;
  a = fma(a, cos, sub(zero, mul(b, sin)));
  b = fma(b, cos, mul(first, sin));
}

void rotate_head(float* x, const float* cos, const float* sin, int64_t half) {
  int64_t i = 0;
  for (; i + 16 <= half; i += 16) {
    f32x16 a = load16(x + i), b = load16(x + half + i);
    rotate(a, b, load16(cos + i), load16(sin + i));
    store16(x + i, a);
    store16(x + half + i, b);
  }
  if (i < half) {
    const int64_t rest = half - i;
    f32x16 a = load_first(x + i, rest), b = load_first(x + half + i, rest);
    rotate(a, b, load_first(cos + i, rest), load_first(sin + i, rest));
    store_first(x + i, a, rest);
    store_first(x + half + i, b, rest);
  }
}

}  // namespace

void rotary(const RotaryArgs& r) {
  const int64_t half = r.rotary_dim / 2;
  const int64_t grain = max_of(1, 8192 / max_of(1, r.num_heads * r.rotary_dim));
  parallel_for(r.tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const float* const cos = r.cos + r.positions[token] * half;
      const float* const sin = r.sin + r.positions[token] * half;
      for (int64_t head = 0; head < r.num_heads; ++head) {
        rotate_head(r.x + token * r.x_stride + head * r.head_dim, cos, sin, half);
      }
    }
  });
}

}  // namespace HEADRACE_ISA
}  // namespace headrace

// Layer normalisation (Ba, Kiros and Hinton, 2016), with the residual addition before it.
#include <math.h>

#include "kernels.h"
#include "simd.h"
#include "threads.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

HEADRACE_INLINE f32x16 load_some(const float* x, int64_t count) { return count >= 16 ? load16(x) : load_first(x, count); }
HEADRACE_INLINE void store_some(float* x, f32x16 a, int64_t count) { count >= 16 ? store16(x, a) : store_first(x, a, count); }

// body(element, count) for each 16 elements of a row, the last ones fewer. Returns the sum of all that it returns, in two chains of 16 lanes,
// over elements 32 i .. 32 i + 15 and 32 i + 16 .. 32 i + 31.
template <class Body>
HEADRACE_INLINE float sum_over(int64_t size, Body body) {
  f32x16 chains[2] = {splat16(0.0f), splat16(0.0f)};
  int64_t i = 0;
  for (; i + 32 <= size; i += 32) {
    chains[0] = add(chains[0], body(i, 16));
    chains[1] = add(chains[1], body(i + 16, 16));
  }
  for (int chain = 0; i < size; i += 16, ++chain) chains[chain] = add(chains[chain], body(i, min_of(16, size - i)));
  return sum_lanes(add(chains[0], chains[1]));
}

void norm_row(const LayerNormArgs& n, int64_t row) {
  const float* x = n.x + row * n.x_stride;
  float* const residual = n.residual == nullptr ? nullptr : n.residual + row * n.size;
  float* const out = n.out + row * n.size;
  const float size = static_cast<float>(n.size);
  const f32x16 mean = splat16(sum_over(n.size, [&](int64_t i, int64_t count) {
    f32x16 value = load_some(x + i, count);
    if (residual != nullptr) {
      value = add(load_some(residual + i, count), value);
      store_some(residual + i, value, count);
    }
    return value;
  }) / size);
  if (residual != nullptr) x = residual;
  // Centred first: the variance of what has a large mean would cancel otherwise.
  const float squares = sum_over(n.size, [&](int64_t i, int64_t count) {
    f32x16 centred = sub(load_some(x + i, count), mean);
    store_some(out + i, centred, count);
    if (count < 16) centred = load_first(out + i, count);  // beyond the row there is 0, not 0 - mean
    return mul(centred, centred);
  });
  const f32x16 inverse = splat16(1.0f / sqrtf(squares / size + n.eps));
  for (int64_t i = 0; i < n.size; i += 16) {
    const int64_t count = min_of(16, n.size - i);
    f32x16 value = mul(mul(load_some(out + i, count), inverse), load_some(n.weight + i, count));
    if (n.bias != nullptr) value = add(value, load_some(n.bias + i, count));
    store_some(out + i, value, count);
  }
}

}  // namespace

void layer_norm(const LayerNormArgs& n) {
  const int64_t grain = max_of(1, 8192 / max_of(1, n.size));
  parallel_for(n.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) norm_row(n, row);
  });
}

}  // namespace HEADRACE_ISA
}  // namespace headrace

// Layer normalisation (Ba, Kiros and Hinton, 2016), with the residual addition before it.
#include <math.h>

#include "kernels.h"
#include "simd.h"
#include "threads.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

// Sum of value(x[i]) in two chains of 16 lanes, over elements 32 i .. 32 i + 15 and 32 i + 16 .. 32 i + 31.
template <class Value>
float sum_of(const float* x, int64_t size, Value value) {
  f32x16 chains[2] = {splat16(0.0f), splat16(0.0f)};
  int64_t i = 0;
  for (; i + 32 <= size; i += 32) {
    chains[0] = add(chains[0], value(load16(x + i)));
    chains[1] = add(chains[1], value(load16(x + i + 16)));
  }
  for (int chain = 0; i < size; i += 16, ++chain) {
    chains[chain] = add(chains[chain], value(size - i >= 16 ? load16(x + i) : load_first(x + i, size - i)));
  }
  return sum_lanes(add(chains[0], chains[1]));
}

void norm_row(const LayerNormArgs& n, int64_t row) {
  const float* x = n.x + row * n.x_stride;
  if (n.residual != nullptr) {
    float* const residual = n.residual + row * n.size;
    for (int64_t i = 0; i < n.size; ++i) residual[i] += x[i];
    x = residual;
  }
  const float size = static_cast<float>(n.size);
  const float mean = sum_of(x, n.size, [](f32x16 v) { return v; }) / size;
  float* const out = n.out + row * n.size;
  // Centred first: the variance of what has a large mean would cancel otherwise.
  for (int64_t i = 0; i < n.size; ++i) out[i] = x[i] - mean;
  const float inverse = 1.0f / sqrtf(sum_of(out, n.size, [](f32x16 v) { return mul(v, v); }) / size + n.eps);
  if (n.bias == nullptr) {
    for (int64_t i = 0; i < n.size; ++i) out[i] = out[i] * inverse * n.weight[i];
  } else {
    for (int64_t i = 0; i < n.size; ++i) out[i] = out[i] * inverse * n.weight[i] + n.bias[i];
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

// Activations as signed bytes: one scale for a whole row or for each 32 elements, and the sums that the linear layers need.
//
// scale = largest magnitude / 127, value = x / scale rounded to nearest even, so values are -127 .. 127. The bits of a row depend on
// that row alone. A NaN or infinity makes the scale of its group (or row) non-finite, and with it every output of the row.
#include "kernels.h"
#include "simd_int.h"
#include "threads.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int64_t kGroup = kQuantGroup;
constexpr float kSmallest = 1e-30f;  // below this 127 / magnitude would overflow: the values are 0

// Magnitudes compare as integers, where a NaN is more than anything.
HEADRACE_INLINE vi largest(const float* x) {
  vi most = magnitude_bits(load(x));
  HEADRACE_UNROLL for (int i = kLanes; i < kGroup; i += kLanes) most = max_int(most, magnitude_bits(load(x + i)));
  return most;
}

HEADRACE_INLINE float as_float(int32_t bits) {
  float result;
  memcpy(&result, &bits, 4);
  return result;
}

HEADRACE_INLINE float inverse_of(float magnitude) { return magnitude > kSmallest ? 127.0f / magnitude : 0.0f; }

// 32 elements; returns the lanes of their sum.
HEADRACE_INLINE vi quantize_group(const float* x, float inverse, int8_t* values) {
  const vf factor = splat(inverse);
  vi sum = splat_int(0);
  HEADRACE_UNROLL for (int i = 0; i < kGroup; i += kLanes) {
    const vi value = to_int(mul(load(x + i), factor));
    sum = add_int(sum, value);
    store_as_bytes(values + i, value);
  }
  return sum;
}

// Calls body(first element, pointer to 32 floats): the last group of a row is padded with zeros.
template <class Body>
HEADRACE_INLINE void for_groups(const float* x, int64_t k, Body body) {
  const int64_t whole = k / kGroup * kGroup;
  for (int64_t begin = 0; begin < whole; begin += kGroup) body(begin, x + begin);
  if (whole < k) {
    float padded[kGroup] = {};
    memcpy(padded, x + whole, static_cast<size_t>(k - whole) * 4);
    body(whole, padded);
  }
}

void quantize_by_group(const QuantizeArgs& q, int64_t row) {
  const int64_t groups = ceil_div(q.k, kGroup);
  int8_t* const values = q.values + row * groups * kGroup;
  for_groups(q.x + row * q.x_stride, q.k, [&](int64_t begin, const float* x) {
    const float magnitude = as_float(reduce_max_int(largest(x)));
    const int32_t negative_sum = -reduce_add_int(quantize_group(x, inverse_of(magnitude), values + begin));
    const int64_t place = row * groups + begin / kGroup;
    q.scales[place] = magnitude / 127.0f;
    q.negative_sums[place] = negative_sum;
    q.scaled_sums[place] = q.scales[place] * static_cast<float>(negative_sum);
  });
}

void quantize_whole(const QuantizeArgs& q, int64_t row) {
  const float* const x = q.x + row * q.x_stride;
  int8_t* const values = q.values + row * ceil_div(q.k, kGroup) * kGroup;
  vi most = splat_int(0), sum = splat_int(0);
  for_groups(x, q.k, [&](int64_t, const float* group) { most = max_int(most, largest(group)); });
  const float magnitude = as_float(reduce_max_int(most)), inverse = inverse_of(magnitude);
  for_groups(x, q.k, [&](int64_t begin, const float* group) {
    sum = add_int(sum, quantize_group(group, inverse, values + begin));
  });
  q.scales[row] = magnitude / 127.0f;
  q.negative_sums[row] = -reduce_add_int(sum);
  q.scaled_sums[row] = q.scales[row] * static_cast<float>(q.negative_sums[row]);
}

}  // namespace

void quantize_rows(const QuantizeArgs& q) {
  const int64_t grain = max_of(1, 16384 / max_of(1, q.k));
  parallel_for(q.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) q.by_group ? quantize_by_group(q, row) : quantize_whole(q, row);
  });
}

}  // namespace HEADRACE_ISA
}  // namespace headrace

// Activations as signed bytes or words: a scale for each group of elements, and the sums that the linear layers need. Or as bfloat16.
//
// scale = largest magnitude / limit, value = x / scale rounded to nearest even, so values are -limit .. limit: 127 or kMaxWord. The bits
// of a row depend on that row alone. A NaN or infinity makes the scale of its group non-finite, and with it every output of the row.
#include "kernels.h"
#include "simd_bf16.h"
#include "simd_words.h"
#include "threads.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int64_t kGroup = kQuantGroup;
constexpr float kSmallest = 1e-30f;  // below this limit / magnitude would overflow: the values are 0

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

constexpr float limit_of(int8_t) { return 127.0f; }
constexpr float limit_of(int16_t) { return static_cast<float>(kMaxWord); }

HEADRACE_INLINE void store_values(int8_t* p, vi values) { store_as_bytes(p, values); }
HEADRACE_INLINE void store_values(int16_t* p, vi values) { store_as_words(p, values); }

// 32 elements; returns the lanes of their sum.
template <class T>
HEADRACE_INLINE vi quantize_some(const float* x, float inverse, T* values) {
  const vf factor = splat(inverse);
  vi sum = splat_int(0);
  HEADRACE_UNROLL for (int i = 0; i < kGroup; i += kLanes) {
    const vi value = to_int(mul(load(x + i), factor));
    sum = add_int(sum, value);
    store_values(values + i, value);
  }
  return sum;
}

// Calls body(element, pointer to 32 floats) for elements begin, begin + 32, ... before end: zeros pad the last of a row.
template <class Body>
HEADRACE_INLINE void for_each_32(const float* x, int64_t begin, int64_t end, Body body) {
  const int64_t whole = begin + (end - begin) / kGroup * kGroup;
  for (int64_t i = begin; i < whole; i += kGroup) body(i, x + i);
  if (whole < end) {
    float padded[kGroup] = {};
    memcpy(padded, x + whole, static_cast<size_t>(end - whole) * 4);
    body(whole, padded);
  }
}

template <class T>
void quantize_row(const QuantizeArgs& q, int64_t row) {
  constexpr float kLimit = limit_of(T{});
  const int64_t groups = ceil_div(q.k, q.format.group);
  const float* const x = q.x + row * q.x_stride;
  T* const values = static_cast<T*>(q.values) + row * ceil_div(q.k, kGroup) * kGroup;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t begin = g * q.format.group, end = min_of(begin + q.format.group, q.k), place = row * groups + g;
    vi most = splat_int(0), sum = splat_int(0);
    for_each_32(x, begin, end, [&](int64_t, const float* some) { most = max_int(most, largest(some)); });
    const float magnitude = as_float(reduce_max_int(most)), inverse = magnitude > kSmallest ? kLimit / magnitude : 0.0f;
    for_each_32(x, begin, end, [&](int64_t i, const float* some) { sum = add_int(sum, quantize_some(some, inverse, values + i)); });
    q.scales[place] = magnitude / kLimit;
    if (sizeof(T) == 2) continue;
    const int32_t negative_sum = -reduce_add_int(sum);
    q.starts[place] = negative_sum * static_cast<int32_t>(q.format.zero);
    q.scaled_sums[place] = q.scales[place] * static_cast<float>(negative_sum);
  }
}

void round_row(const QuantizeArgs& q, int64_t row) {
  bf16* const values = static_cast<bf16*>(q.values) + row * ceil_div(q.k, kGroup) * kGroup;
  for_each_32(q.x + row * q.x_stride, 0, q.k, [&](int64_t at, const float* some) {
    HEADRACE_UNROLL for (int i = 0; i < kGroup; i += 2 * kLanes) store_rounded(values + at + i, load(some + i), load(some + i + kLanes));
  });
}

}  // namespace

void quantize_rows(const QuantizeArgs& q) {
  const int64_t grain = max_of(1, 16384 / max_of(1, q.k));
  parallel_for(q.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (q.format.floats) {
        round_row(q, row);
      } else {
        q.format.value_bytes == 1 ? quantize_row<int8_t>(q, row) : quantize_row<int16_t>(q, row);
      }
    }
  });
}

}  // namespace HEADRACE_ISA
}  // namespace headrace

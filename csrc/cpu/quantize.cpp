// Activations as signed bytes or words: a scale for each group of elements, and the sums that the linear layers need. Or as bfloat16.
//
// scale = largest magnitude / limit, value = x / scale rounded to nearest even, so values are -limit .. limit: 127 or kMaxWord. The bits
// of a row depend on that row alone. A row may be rotated first, or a large element would coarsen the steps of its group. A NaN or infinity makes the scale of its group non-finite, and with it every output of the row.
#include "kernels.h"
#include "rotation.h"
#include "simd_bf16.h"
#include "simd_words.h"
#include "threads.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int64_t kGroup = kQuantGroup;
constexpr int64_t kPiece = 1024;  // elements of a row at once; a multiple of kWideGroup
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

// 32 elements; adds to the lanes of the sums of the first and the last 16.
template <class T>
HEADRACE_INLINE void quantize_some(const float* x, float inverse, T* values, vi (&sums)[2]) {
  const vf factor = splat(inverse);
  HEADRACE_UNROLL for (int i = 0; i < kGroup; i += kLanes) {
    const vi value = to_int(mul(load(x + i), factor));
    sums[i / 16] = add_int(sums[i / 16], value);
    store_values(values + i, value);
  }
}

// Calls body(element, pointer to 32 floats) for elements 0, 32, ... of `size`: zeros pad the last.
template <class Body>
HEADRACE_INLINE void for_each_32(const float* x, int64_t size, Body body) {
  const int64_t whole = size / kGroup * kGroup;
  for (int64_t i = 0; i < whole; i += kGroup) body(i, x + i);
  if (whole < size) {
    float padded[kGroup] = {};
    memcpy(padded, x + whole, static_cast<size_t>(size - whole) * 4);
    body(whole, padded);
  }
}

// Part of a row, rotated into `to`; x itself where nothing is mixed. `size` is a multiple of `block`.
HEADRACE_INLINE const float* rotated_part(const float* x, int64_t size, int64_t block, float* to) {
  switch (block) {
    case 32:
      rotate_blocks<32>(x, size, to);
      return to;
    case 64:
      rotate_blocks<64>(x, size, to);
      return to;
    case kWideGroup:
      rotate_blocks<kWideGroup>(x, size, to);
      return to;
    default:
      return x;
  }
}

HEADRACE_INLINE float magnitude_of(const float* x, int64_t size) {
  vi most = splat_int(0);
  for_each_32(x, size, [&](int64_t, const float* some) { most = max_int(most, largest(some)); });
  return as_float(reduce_max_int(most));
}

// One group, whose largest element has this magnitude: `place` is that of its scale.
template <class T>
HEADRACE_INLINE void quantize_group(const QuantizeArgs& q, const float* x, int64_t size, float magnitude, T* values, int64_t place) {
  constexpr float kLimit = limit_of(T{});
  vi sums[2] = {splat_int(0), splat_int(0)};
  const float inverse = magnitude > kSmallest ? kLimit / magnitude : 0.0f;
  for_each_32(x, size, [&](int64_t i, const float* some) { quantize_some(some, inverse, values + i, sums); });
  q.scales[place] = magnitude / kLimit;
  if (sizeof(T) == 2) return;
  if (q.format.halves) {
    q.starts[place] = half_sums(reduce_add_int(sums[0]), reduce_add_int(sums[1]));
    return;
  }
  const int32_t negative_sum = -reduce_add_int(add_int(sums[0], sums[1]));
  q.starts[place] = negative_sum * static_cast<int32_t>(q.format.zero);
  q.scaled_sums[place] = q.scales[place] * static_cast<float>(negative_sum);
}

// A row in pieces: the magnitudes of all groups of a piece first, so that none waits for another's.
template <class T>
void quantize_row(const QuantizeArgs& q, int64_t row) {
  const int64_t group = q.format.group, places = row * ceil_div(q.k, group);
  const float* const x = q.x + row * q.x_stride;
  T* const values = static_cast<T*>(q.values) + row * ceil_div(q.k, kGroup) * kGroup;
  const int64_t block = q.format.rotated ? rotation_block(q.k) : 1;
  float rotated[kPiece], magnitudes[kPiece / kGroup];
  // A group that is a whole row may be longer than a piece; it is not rotated then.
  const int64_t piece = max_of(kPiece / group * group, group);
  for (int64_t first = 0; first < q.k; first += piece) {
    const int64_t end = min_of(first + piece, q.k);
    const float* const from = rotated_part(x + first, end - first, block, rotated);
    for (int64_t begin = first, i = 0; begin < end; begin += group, ++i) magnitudes[i] = magnitude_of(from + begin - first, min_of(group, end - begin));
    for (int64_t begin = first, i = 0; begin < end; begin += group, ++i) {
      quantize_group(q, from + begin - first, min_of(group, end - begin), magnitudes[i], values + begin, places + begin / group);
    }
  }
}

void round_row(const QuantizeArgs& q, int64_t row) {
  bf16* const values = static_cast<bf16*>(q.values) + row * ceil_div(q.k, kGroup) * kGroup;
  for_each_32(q.x + row * q.x_stride, q.k, [&](int64_t at, const float* some) {
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

// Writes keys and values into the pages of the cache and reads them back. See KvType for how they lie there.
//
// An int8 or int16 cache has one scale for each key and each value: largest magnitude / 127 or / kMaxWord; integers are x / scale to the
// nearest even. Keys in bytes are rotated first (rotation.h); scales of values in words are the next power of 2, which attention is quick
// with. A NaN or an infinity makes the scale non-finite, so that it does not get lost.
#include "kernels.h"
#include "rotation.h"
#include "simd_bf16.h"
#include "simd_words.h"
#include "threads.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

HEADRACE_INLINE float widen(bf16 x) { return bf16_to_float(x); }
HEADRACE_INLINE float widen(float x) { return x; }

// Elements that fill 32 bits: of one key, or of one element of several values.
template <class T>
constexpr int64_t kPerLane = 4 / sizeof(T);

// Element d of the key at `offset` of a page.
template <class T>
HEADRACE_INLINE int64_t key_index(const T*, int64_t d, int64_t offset) {
  return (d / kPerLane<T> * kPageSize + offset) * kPerLane<T> + d % kPerLane<T>;
}

// Element d of the value at `offset` of a page.
template <class T>
HEADRACE_INLINE int64_t value_index(const T*, int64_t d, int64_t offset, int64_t head_dim) {
  return (offset / kPerLane<T> * head_dim + d) * kPerLane<T> + offset % kPerLane<T>;
}

// body(k_page, v_page, token, head, offset) for every token with a slot.
template <class T, class Body>
HEADRACE_INLINE void for_slots(const KvCache& cache, const int32_t* slots, int64_t tokens, Body body) {
  const int64_t page_elements = kv_page_elements(cache.type, cache.head_dim);
  const int64_t grain = max_of(1, 4096 / max_of(1, cache.num_kv_heads * cache.head_dim));
  parallel_for(tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = slots[token];
      if (slot < 0) continue;
      for (int64_t head = 0; head < cache.num_kv_heads; ++head) {
        const int64_t start = (slot / kPageSize * cache.num_kv_heads + head) * page_elements;
        body(static_cast<T*>(cache.k) + start, static_cast<T*>(cache.v) + start, token, head, slot % kPageSize);
      }
    }
  });
}

void write_floats(const WriteKvArgs& w) {
  const int64_t head_dim = w.cache.head_dim;
  for_slots<float>(w.cache, w.slots, w.tokens, [&](float* k_page, float* v_page, int64_t token, int64_t head, int64_t offset) {
    const float* const k = w.k + token * w.k_stride + head * head_dim;
    for (int64_t d = 0; d < head_dim; ++d) k_page[key_index(k_page, d, offset)] = k[d];
    memcpy(v_page + offset * head_dim, w.v + token * w.v_stride + head * head_dim, static_cast<size_t>(head_dim) * 4);
  });
}

void write_bf16(const WriteKvArgs& w) {
  const int64_t head_dim = w.cache.head_dim;
  for_slots<bf16>(w.cache, w.slots, w.tokens, [&](bf16* k_page, bf16* v_page, int64_t token, int64_t head, int64_t offset) {
    const float* const k = w.k + token * w.k_stride + head * head_dim;
    const float* const v = w.v + token * w.v_stride + head * head_dim;
    for (int64_t d = 0; d < head_dim; d += 16) {
      bf16 keys[16], values[16];
      round16(load16(k + d), keys);
      round16(load16(v + d), values);
      HEADRACE_UNROLL for (int i = 0; i < 16; i += 2) memcpy(k_page + key_index(k_page, d + i, offset), keys + i, 4);
      HEADRACE_UNROLL for (int i = 0; i < 16; ++i) v_page[value_index(v_page, d + i, offset, head_dim)] = values[i];
    }
  });
}

template <class T>
void gather_as(const GatherKvArgs& g) {
  const int64_t head_dim = g.cache.head_dim;
  for_slots<T>(g.cache, g.slots, g.tokens, [&](const T* k_page, const T* v_page, int64_t token, int64_t head, int64_t offset) {
    const int64_t to = (token * g.cache.num_kv_heads + head) * head_dim;
    for (int64_t d = 0; d < head_dim; ++d) {
      g.k[to + d] = widen(k_page[key_index(k_page, d, offset)]);
      g.v[to + d] = widen(v_page[value_index(v_page, d, offset, head_dim)]);
    }
  });
}

template <class T>
HEADRACE_INLINE float* scales_of(T* page, int64_t head_dim) { return reinterpret_cast<float*>(page + head_dim * kPageSize); }
template <class T>
HEADRACE_INLINE const float* scales_of(const T* page, int64_t head_dim) {
  return reinterpret_cast<const float*>(page + head_dim * kPageSize);
}

template <class T>
constexpr float kLimit = sizeof(T) == 1 ? 127.0f : static_cast<float>(kMaxWord);
template <class T>
constexpr bool kIsRotated = sizeof(T) == 1;

HEADRACE_INLINE void store_integers(int8_t* p, vi a) { store_as_bytes(p, a); }
HEADRACE_INLINE void store_integers(int16_t* p, vi a) { store_as_words(p, a); }

// The largest magnitude of a head; not finite when one is not.
HEADRACE_INLINE float largest(const float* x, int64_t head_dim) {
  vi most = splat_int(0);
  for (int64_t d = 0; d < head_dim; d += kLanes) most = max_int(most, magnitude_bits(load(x + d)));
  const int32_t bits = reduce_max_int(most);
  float magnitude;
  memcpy(&magnitude, &bits, 4);
  return magnitude;
}

// The least power of 2 that is not below x; a NaN when x is not finite.
HEADRACE_INLINE float next_power_of_2(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits = bits < 0x7f800000u ? (bits + 0x7fffffu) & 0xff800000u : 0x7fc00000u;
  memcpy(&x, &bits, 4);
  return x;
}

// Below this kLimit / magnitude may overflow: the integers are 0.
constexpr float kSmallest = 1e-30f;

template <class T>
HEADRACE_INLINE void store_scaled(const float* x, int64_t head_dim, float inverse, T* integers) {
  for (int64_t d = 0; d < head_dim; d += kLanes) store_integers(integers + d, to_int(mul(load(x + d), splat(inverse))));
}

// head_dim integers; returns their scale.
template <class T>
HEADRACE_INLINE float quantize_head(const float* x, int64_t head_dim, T* integers) {
  const float magnitude = largest(x, head_dim);
  store_scaled(x, head_dim, magnitude > kSmallest ? kLimit<T> / magnitude : 0.0f, integers);
  return magnitude / kLimit<T>;
}
HEADRACE_INLINE float quantize_value(const float* x, int64_t head_dim, int8_t* bytes) { return quantize_head(x, head_dim, bytes); }
HEADRACE_INLINE float quantize_value(const float* x, int64_t head_dim, int16_t* words) {
  const float magnitude = largest(x, head_dim), scale = next_power_of_2(magnitude / kLimit<int16_t>);
  store_scaled(x, head_dim, magnitude > kSmallest ? 1.0f / scale : 0.0f, words);
  return scale;
}

// Bytes of keys are codes 0 .. 255 of -128 .. 127.
HEADRACE_INLINE uint32_t code_of(const int8_t*, uint32_t four) { return four ^ 0x80808080u; }
HEADRACE_INLINE uint32_t code_of(const int16_t*, uint32_t two) { return two; }
HEADRACE_INLINE int key_of(int8_t code) { return static_cast<uint8_t>(code) - 128; }
HEADRACE_INLINE int key_of(int16_t word) { return word; }

template <class T>
void write_integers(const WriteKvArgs& w) {
  const int64_t head_dim = w.cache.head_dim;
  const float unrotation = kIsRotated<T> ? 1.0f / static_cast<float>(rotation_size(head_dim)) : 1.0f;
  for_slots<T>(w.cache, w.slots, w.tokens, [&](T* k_page, T* v_page, int64_t token, int64_t head, int64_t offset) {
    float rotated[kMaxIntHeadDim];
    T integers[kMaxIntHeadDim];
    const float* k = w.k + token * w.k_stride + head * head_dim;
    if (kIsRotated<T>) {
      rotate_head(k, head_dim, rotated);
      k = rotated;
    }
    scales_of(k_page, head_dim)[offset] = quantize_head(k, head_dim, integers) * unrotation;
    for (int64_t d = 0; d < head_dim; d += kPerLane<T>) {
      uint32_t some;
      memcpy(&some, integers + d, 4);
      some = code_of(integers, some);
      memcpy(k_page + key_index(k_page, d, offset), &some, 4);
    }
    scales_of(v_page, head_dim)[offset] = quantize_value(w.v + token * w.v_stride + head * head_dim, head_dim, integers);
    for (int64_t d = 0; d < head_dim; ++d) v_page[value_index(v_page, d, offset, head_dim)] = integers[d];
  });
}

template <class T>
void gather_integers(const GatherKvArgs& g) {
  const int64_t head_dim = g.cache.head_dim;
  for_slots<T>(g.cache, g.slots, g.tokens, [&](const T* k_page, const T* v_page, int64_t token, int64_t head, int64_t offset) {
    const float k_scale = scales_of(k_page, head_dim)[offset], v_scale = scales_of(v_page, head_dim)[offset];
    const int64_t to = (token * g.cache.num_kv_heads + head) * head_dim;
    float keys[kMaxIntHeadDim];
    for (int64_t d = 0; d < head_dim; ++d) keys[d] = static_cast<float>(key_of(k_page[key_index(k_page, d, offset)]));
    if (kIsRotated<T>) {
      rotate_head(keys, head_dim, g.k + to);
    } else {
      memcpy(g.k + to, keys, static_cast<size_t>(head_dim) * 4);
    }
    for (int64_t d = 0; d < head_dim; ++d) {
      g.k[to + d] *= k_scale;
      g.v[to + d] = static_cast<float>(v_page[value_index(v_page, d, offset, head_dim)]) * v_scale;
    }
  });
}

}  // namespace

void write_kv(const WriteKvArgs& w) {
  switch (w.cache.type) {
    case KvType::kFloat:
      return write_floats(w);
    case KvType::kBf16:
    case KvType::kBf16Products:
      return write_bf16(w);
    case KvType::kInt8:
      return write_integers<int8_t>(w);
    case KvType::kInt16:
      return write_integers<int16_t>(w);
  }
}

void gather_kv(const GatherKvArgs& g) {
  switch (g.cache.type) {
    case KvType::kFloat:
      return gather_as<float>(g);
    case KvType::kBf16:
    case KvType::kBf16Products:
      return gather_as<bf16>(g);
    case KvType::kInt8:
      return gather_integers<int8_t>(g);
    case KvType::kInt16:
      return gather_integers<int16_t>(g);
  }
}

}  // namespace HEADRACE_ISA
}  // namespace headrace

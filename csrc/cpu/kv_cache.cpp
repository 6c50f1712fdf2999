// Writes keys and values into the pages of the cache and reads them back. See KvType for how they lie there.
//
// An int8 cache has one scale for each key and each value: largest magnitude / 127; bytes are x / scale to the nearest even. Keys are
// rotated first (rotation.h). A NaN or an infinity makes the scale non-finite, so that it does not get lost.
#include "kernels.h"
#include "rotation.h"
#include "simd_int.h"
#include "threads.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

HEADRACE_INLINE void convert(float from, bf16& to) { to = float_to_bf16(from); }
HEADRACE_INLINE void convert(float from, float& to) { to = from; }
HEADRACE_INLINE float widen(bf16 x) { return bf16_to_float(x); }
HEADRACE_INLINE float widen(float x) { return x; }

// Element d of the key at `offset` of a page.
HEADRACE_INLINE int64_t key_index(const bf16*, int64_t d, int64_t offset) { return ((d >> 1) * kPageSize + offset) * 2 + (d & 1); }
HEADRACE_INLINE int64_t key_index(const float*, int64_t d, int64_t offset) { return d * kPageSize + offset; }

// Element d of the value at `offset` of a page.
HEADRACE_INLINE int64_t value_index(const bf16*, int64_t d, int64_t offset, int64_t head_dim) {
  return (offset / 2 * head_dim + d) * 2 + offset % 2;
}
HEADRACE_INLINE int64_t value_index(const float*, int64_t d, int64_t offset, int64_t head_dim) { return offset * head_dim + d; }

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

template <class T>
void write_as(const WriteKvArgs& w) {
  const int64_t head_dim = w.cache.head_dim;
  for_slots<T>(w.cache, w.slots, w.tokens, [&](T* k_page, T* v_page, int64_t token, int64_t head, int64_t offset) {
    const float* const k = w.k + token * w.k_stride + head * head_dim;
    const float* const v = w.v + token * w.v_stride + head * head_dim;
    for (int64_t d = 0; d < head_dim; ++d) convert(k[d], k_page[key_index(k_page, d, offset)]);
    for (int64_t d = 0; d < head_dim; ++d) convert(v[d], v_page[value_index(v_page, d, offset, head_dim)]);
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

HEADRACE_INLINE float* scales_of(int8_t* page, int64_t head_dim) { return reinterpret_cast<float*>(page + head_dim * kPageSize); }
HEADRACE_INLINE const float* scales_of(const int8_t* page, int64_t head_dim) {
  return reinterpret_cast<const float*>(page + head_dim * kPageSize);
}

// Byte d of the key and of the value at `offset` of a page. Those of keys are codes 0 .. 255 of -128 .. 127.
HEADRACE_INLINE int64_t key_byte(int64_t d, int64_t offset) { return ((d >> 2) * kPageSize + offset) * 4 + (d & 3); }
HEADRACE_INLINE int64_t value_byte(int64_t d, int64_t offset, int64_t head_dim) {
  return ((offset >> 2) * head_dim + d) * 4 + (offset & 3);
}

// head_dim bytes; returns their scale.
HEADRACE_INLINE float quantize_head(const float* x, int64_t head_dim, int8_t* bytes) {
  vi most = splat_int(0);
  for (int64_t d = 0; d < head_dim; d += kLanes) most = max_int(most, magnitude_bits(load(x + d)));
  const int32_t bits = reduce_max_int(most);
  float magnitude;
  memcpy(&magnitude, &bits, 4);
  const vf inverse = splat(magnitude > 1e-30f ? 127.0f / magnitude : 0.0f);  // below that 127 / magnitude may overflow
  for (int64_t d = 0; d < head_dim; d += kLanes) store_as_bytes(bytes + d, to_int(mul(load(x + d), inverse)));
  return magnitude / 127.0f;
}

void write_int8(const WriteKvArgs& w) {
  const int64_t head_dim = w.cache.head_dim;
  const float unrotation = 1.0f / static_cast<float>(rotation_size(head_dim));
  for_slots<int8_t>(w.cache, w.slots, w.tokens, [&](int8_t* k_page, int8_t* v_page, int64_t token, int64_t head, int64_t offset) {
    float rotated[kMaxInt8HeadDim];
    int8_t bytes[kMaxInt8HeadDim];
    rotate_head(w.k + token * w.k_stride + head * head_dim, head_dim, rotated);
    scales_of(k_page, head_dim)[offset] = quantize_head(rotated, head_dim, bytes) * unrotation;
    for (int64_t d = 0; d < head_dim; d += 4) {
      uint32_t four;
      memcpy(&four, bytes + d, 4);
      four ^= 0x80808080u;
      memcpy(k_page + key_byte(d, offset), &four, 4);
    }
    scales_of(v_page, head_dim)[offset] = quantize_head(w.v + token * w.v_stride + head * head_dim, head_dim, bytes);
    for (int64_t d = 0; d < head_dim; ++d) v_page[value_byte(d, offset, head_dim)] = bytes[d];
  });
}

void gather_int8(const GatherKvArgs& g) {
  const int64_t head_dim = g.cache.head_dim;
  for_slots<int8_t>(g.cache, g.slots, g.tokens,
                    [&](const int8_t* k_page, const int8_t* v_page, int64_t token, int64_t head, int64_t offset) {
    const float k_scale = scales_of(k_page, head_dim)[offset], v_scale = scales_of(v_page, head_dim)[offset];
    const int64_t to = (token * g.cache.num_kv_heads + head) * head_dim;
    float rotated[kMaxInt8HeadDim];
    for (int64_t d = 0; d < head_dim; ++d) rotated[d] = static_cast<float>(static_cast<uint8_t>(k_page[key_byte(d, offset)]) - 128);
    rotate_head(rotated, head_dim, g.k + to);
    for (int64_t d = 0; d < head_dim; ++d) {
      g.k[to + d] *= k_scale;
      g.v[to + d] = static_cast<float>(v_page[value_byte(d, offset, head_dim)]) * v_scale;
    }
  });
}

}  // namespace

void write_kv(const WriteKvArgs& w) {
  switch (w.cache.type) {
    case KvType::kFloat:
      return write_as<float>(w);
    case KvType::kBf16:
    case KvType::kBf16Products:
      return write_as<bf16>(w);
    case KvType::kInt8:
      return write_int8(w);
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
      return gather_int8(g);
  }
}

}  // namespace HEADRACE_ISA
}  // namespace headrace

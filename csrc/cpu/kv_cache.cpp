// Writes keys and values into the pages of the cache and reads them back. K lies transposed in its page, V naturally.
#include "kernels.h"
#include "simd.h"
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

// body(k_page, v_page, token, head, offset) for every token with a slot.
template <class T, class Body>
HEADRACE_INLINE void for_slots(const KvCache& cache, const int32_t* slots, int64_t tokens, Body body) {
  const int64_t page_elements = cache.head_dim * kPageSize;
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
    T* const value = v_page + offset * head_dim;
    for (int64_t d = 0; d < head_dim; ++d) convert(v[d], value[d]);
  });
}

template <class T>
void gather_as(const GatherKvArgs& g) {
  const int64_t head_dim = g.cache.head_dim;
  for_slots<T>(g.cache, g.slots, g.tokens, [&](const T* k_page, const T* v_page, int64_t token, int64_t head, int64_t offset) {
    const int64_t to = (token * g.cache.num_kv_heads + head) * head_dim;
    for (int64_t d = 0; d < head_dim; ++d) {
      g.k[to + d] = widen(k_page[key_index(k_page, d, offset)]);
      g.v[to + d] = widen(v_page[offset * head_dim + d]);
    }
  });
}

}  // namespace

void write_kv(const WriteKvArgs& w) { w.cache.is_bf16 ? write_as<bf16>(w) : write_as<float>(w); }
void gather_kv(const GatherKvArgs& g) { g.cache.is_bf16 ? gather_as<bf16>(g) : gather_as<float>(g); }

}  // namespace HEADRACE_ISA
}  // namespace headrace

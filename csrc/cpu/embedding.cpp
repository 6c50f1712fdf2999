// Embedding lookup: rows of a table of floats, as float, times a scale. The table may be the packed weight of an output
// projection that is tied to it: blocks of 32 rows, element-major; bf16 as pairs of rows j and j + 16, or as pairs of elements of a row; or
// blocks of a GGUF file.
#include <type_traits>

#include "gguf_blocks.h"
#include "kernels.h"
#include "simd_int.h"
#include "threads.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

HEADRACE_INLINE float widen(bf16 x) { return bf16_to_float(x); }
HEADRACE_INLINE float widen(f16 x) { return half_to_float(x.bits); }
HEADRACE_INLINE float widen(float x) { return x; }
HEADRACE_INLINE int64_t id_of(const EmbeddingArgs& e, int64_t token) {
  return e.ids_are_int64 ? static_cast<const int64_t*>(e.ids)[token] : static_cast<const int32_t*>(e.ids)[token];
}

template <class T>
void lookup(const EmbeddingArgs& e) {
  const f32x16 scale = splat16(e.scale);
  const int64_t grain = max_of(1, 16384 / max_of(1, e.hidden_size));
  parallel_for(e.tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t id = id_of(e, token);
      const T* const row = static_cast<const T*>(e.table) + id * e.hidden_size;
      float* const out = e.out + token * e.hidden_size;
      int64_t i = 0;
      for (; i + 16 <= e.hidden_size; i += 16) store16(out + i, mul(load16(row + i), scale));
      for (; i < e.hidden_size; ++i) out[i] = widen(row[i]) * e.scale;
    }
  });
}

void lookup_pairs(const EmbeddingArgs& e) {
  const int64_t grain = max_of(1, 4096 / max_of(1, e.hidden_size)), padded = ceil_div(e.hidden_size, kQuantGroup) * kQuantGroup;
  parallel_for(e.tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t id = id_of(e, token), block = id / kPackedColumns;
      const bf16* const first = static_cast<const bf16*>(e.table) + block * kPackedColumns * padded + id % kPackedColumns * 2;
      float* const out = e.out + token * e.hidden_size;
      for (int64_t i = 0; i < e.hidden_size; ++i) out[i] = widen(first[i / 2 * kPackedColumns * 2 + i % 2]) * e.scale;
    }
  });
}

void lookup_blocks(const EmbeddingArgs& e) {
  const GgufEntry* const entries = static_cast<const GgufEntry*>(e.table);
  const int64_t grain = max_of(1, 2048 / max_of(1, e.hidden_size));
  parallel_for(e.tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t id = id_of(e, token);
      const GgufEntry& entry = entries[id / kPackedColumns];
      float* const out = e.out + token * e.hidden_size;
      read_gguf_row(entry.type(), entry.block(), id % kPackedColumns, e.hidden_size, out);
      for (int64_t i = 0; i < e.hidden_size; ++i) out[i] *= e.scale;
    }
  });
}

template <class T>
void lookup_packed(const EmbeddingArgs& e) {
  constexpr int64_t columns = 32;
  const int64_t grain = max_of(1, 4096 / max_of(1, e.hidden_size));
  parallel_for(e.tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t id = id_of(e, token);
      const int64_t column = id % columns;
      const int64_t place = std::is_same_v<T, bf16> ? column % 16 * 2 + column / 16 : column;
      const T* const first = static_cast<const T*>(e.table) + id / columns * columns * e.hidden_size + place;
      float* const out = e.out + token * e.hidden_size;
      for (int64_t i = 0; i < e.hidden_size; ++i) out[i] = widen(first[i * columns]) * e.scale;
    }
  });
}

template <class T>
void lookup_floats(const EmbeddingArgs& e) {
  return e.order == TableOrder::kRows ? lookup<T>(e) : lookup_packed<T>(e);
}

}  // namespace

void embedding(const EmbeddingArgs& e) {
  switch (e.order) {
    case TableOrder::kPairs:
      return lookup_pairs(e);
    case TableOrder::kGguf:
      return lookup_blocks(e);
    default:
      return e.type == FloatType::kFloat ? lookup_floats<float>(e) : e.type == FloatType::kBf16 ? lookup_floats<bf16>(e) : lookup_floats<f16>(e);
  }
}

}  // namespace HEADRACE_ISA
}  // namespace headrace

// Attention in both directions within packed sequences, without a cache.
//
// A piece of work is one KV head of a chunk of queries: keys and values of the sequence are brought into the order of the pages of a KV
// cache, in memory of the thread, and then go through the products and the online softmax of paged attention, in blocks of kKeyBlock keys
// aligned at the start of the sequence. So the bits of a row depend on its own sequence and on its place there alone.
#include "attention_bf16.h"
#include "attention_products.h"
#include "attention_softmax.h"
#include "kernels.h"
#include "simd.h"
#include "threads.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

// Pages of one KV head of a sequence. Heads are padded with zeros to a multiple of 16 elements, and the last page with tokens of zeros.
template <class T>
struct Pages {
  T *k, *v;
  int64_t head_dim;  // padded

  int64_t elements() const { return kPageSize * head_dim; }
};

// At most 16 floats, the others 0.
HEADRACE_INLINE f32x16 load_part(const float* x, int64_t size) { return size >= 16 ? load16(x) : load_first(x, size); }

// to[c][r] = from[r][c] for 16 rows of 16 words of 32 bits; strides in words.
HEADRACE_INLINE void transpose16(const uint32_t* from, int64_t from_stride, uint32_t* to, int64_t to_stride) {
#if defined(__AVX512F__)
  __m512i a[16], b[16];
  HEADRACE_UNROLL for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(from + i * from_stride);
  // Pairs of rows, then of pairs: quarter q of b[4 i + j] has column 4 q + j of rows 4 i .. 4 i + 3.
  HEADRACE_UNROLL for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  HEADRACE_UNROLL for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  HEADRACE_UNROLL for (int j = 0; j < 4; ++j) {
    const __m512i even_low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88), odd_low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
    const __m512i even_high = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88), odd_high = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
    _mm512_storeu_si512(to + j * to_stride, _mm512_shuffle_i32x4(even_low, even_high, 0x88));
    _mm512_storeu_si512(to + (4 + j) * to_stride, _mm512_shuffle_i32x4(odd_low, odd_high, 0x88));
    _mm512_storeu_si512(to + (8 + j) * to_stride, _mm512_shuffle_i32x4(even_low, even_high, 0xdd));
    _mm512_storeu_si512(to + (12 + j) * to_stride, _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd));
  }
#else
  for (int r = 0; r < 16; ++r) {
    for (int c = 0; c < 16; ++c) to[c * to_stride + r] = from[r * from_stride + c];
  }
#endif
}

// A page of keys, rows of words one after the other, in the order of KvType: words of 32 bits transposed.
template <class T>
HEADRACE_INLINE void fill_keys(const T* rows, int64_t head_dim, T* page) {
  const int64_t words = head_dim * static_cast<int64_t>(sizeof(T)) / 4;
  const uint32_t* const from = reinterpret_cast<const uint32_t*>(rows);
  uint32_t* const to = reinterpret_cast<uint32_t*>(page);
  for (int64_t w = 0; w + 16 <= words; w += 16) transpose16(from + w, words, to + w * kPageSize, kPageSize);
  // Half as many are left of heads of 16 bfloat16.
  for (int64_t w = words / 16 * 16; w < words; ++w) {
    for (int64_t token = 0; token < kPageSize; ++token) to[w * kPageSize + token] = from[token * words + w];
  }
}

HEADRACE_INLINE void convert16(f32x16 from, float* to) { store16(to, from); }
HEADRACE_INLINE void convert16(f32x16 from, bf16* to) { round16(from, to); }

// Values of a page, one token after the other, or two side by side.
HEADRACE_INLINE void fill_values(const float* rows, int64_t head_dim, float* page) {
  memcpy(page, rows, static_cast<size_t>(kPageSize * head_dim) * 4);
}
HEADRACE_INLINE void fill_values(const bf16* rows, int64_t head_dim, bf16* page) {
  for (int64_t token = 0; token < kPageSize; token += 2) {
    const bf16* const even = rows + token * head_dim;
    const bf16* const odd = even + head_dim;
    bf16* const to = page + token * head_dim;
    for (int64_t d = 0; d < head_dim; d += 16) {
      HEADRACE_UNROLL for (int i = 0; i < 16; ++i) {
        to[2 * (d + i)] = even[d + i];
        to[2 * (d + i) + 1] = odd[d + i];
      }
    }
  }
}

// One row of a head as T, padded.
template <class T>
HEADRACE_INLINE void convert_row(const float* x, int64_t head_dim, int64_t padded, T* to) {
  for (int64_t d = 0; d < padded; d += 16) convert16(load_part(x + d, head_dim - d), to + d);
}

// All pages of a head. `rows`: room for a page.
template <class T>
void fill(const Pages<T>& pages, T* rows, const float* k, int64_t k_stride, const float* v, int64_t v_stride, int64_t length, int64_t head_dim) {
  for (int64_t first = 0; first < length; first += kPageSize) {
    const int64_t count = min_of(kPageSize, length - first), at = first * pages.head_dim;
    if (count < kPageSize) memset(rows + count * pages.head_dim, 0, static_cast<size_t>((kPageSize - count) * pages.head_dim) * sizeof(T));
    for (int64_t i = 0; i < count; ++i) convert_row(k + (first + i) * k_stride, head_dim, pages.head_dim, rows + i * pages.head_dim);
    fill_keys(rows, pages.head_dim, pages.k + at);
    for (int64_t i = 0; i < count; ++i) convert_row(v + (first + i) * v_stride, head_dim, pages.head_dim, rows + i * pages.head_dim);
    fill_values(rows, pages.head_dim, pages.v + at);
  }
}

template <class Products>
void attend_chunk(const PackedAttentionArgs& a, const PackedChunk& chunk, int64_t kv_head) {
  using T = typename Products::Element;
  const int64_t group = a.num_q_heads / a.num_kv_heads, head_dim = ceil_div(a.head_dim, 16) * 16, length = chunk.length;
  const int64_t rows = (chunk.end - chunk.begin) * group, num_pages = ceil_div(length, kPageSize);
  const int64_t page_floats = num_pages * kPageSize * head_dim * static_cast<int64_t>(sizeof(T)) / 4;
  const int64_t state_room = ceil_div(State::floats(rows, head_dim), 16) * 16, page_room = kPageSize * head_dim;
  float* const scores = static_cast<float*>(thread_scratch(
      static_cast<size_t>(kTileRows * kScoreStride + 2 * page_floats + state_room + page_room + Products::memory_floats(rows, head_dim)) * 4));
  T* const pages_memory = reinterpret_cast<T*>(scores + kTileRows * kScoreStride);
  const Pages<T> pages = {pages_memory, pages_memory + num_pages * kPageSize * head_dim, head_dim};
  float* const state_memory = scores + kTileRows * kScoreStride + 2 * page_floats;
  const State state = State::at(state_memory, rows, head_dim);
  float* const side = state_memory + state_room;  // a page, or a padded query
  Products products(side + page_room, rows, head_dim, false);

  const float* const k = a.k + chunk.first * a.k_stride + kv_head * a.head_dim;
  const float* const v = a.v + chunk.first * a.v_stride + kv_head * a.head_dim;
  fill(pages, reinterpret_cast<T*>(side), k, a.k_stride, v, a.v_stride, length, a.head_dim);
  for (int64_t row = 0; row < rows; ++row) {
    const float* q = a.q + (chunk.first + chunk.begin + row / group) * a.q_stride + (kv_head * group + row % group) * a.head_dim;
    if (head_dim != a.head_dim) {
      convert_row(q, a.head_dim, head_dim, side);
      q = side;
    }
    products.set_query(row, q, a.scale * kLog2E);
  }
  clear(state, rows, head_dim);

  // What a row sees, as keys of the sequence.
  const auto first_seen = [&](int64_t row) { return a.window == 0 ? 0 : max_of(0, chunk.begin + row / group - a.window); };
  const auto end_seen = [&](int64_t row) { return a.window == 0 ? length : min_of(length, chunk.begin + row / group + a.window + 1); };
  for_row_tiles(rows, [&](int64_t row, int64_t count) {
    const int64_t tile_first = first_seen(row), tile_end = end_seen(row + count - 1);
    for (int64_t begin = tile_first / kKeyBlock * kKeyBlock; begin < tile_end; begin += kKeyBlock) {
      const int64_t key_begin = max_of(tile_first - begin, 0), key_end = min_of(kKeyBlock, tile_end - begin);
      const int64_t page_begin = key_begin / kPageSize, page_end = ceil_div(key_end, kPageSize);
      const T *k_pages[kPagesOfBlock], *v_pages[kPagesOfBlock];
      for (int64_t p = page_begin; p < page_end; ++p) {
        k_pages[p] = pages.k + (begin / kPageSize + p) * pages.elements();
        v_pages[p] = pages.v + (begin / kPageSize + p) * pages.elements();
      }
#define HEADRACE_CALL(R) products.template score<R>(row, k_pages, v_pages, page_begin, page_end, scores)
      HEADRACE_FOR_ROWS(count, HEADRACE_CALL)
#undef HEADRACE_CALL
      RowScores rows_of_tile[kTileRows];
      float factors[16];
      for (int64_t i = 0; i < count; ++i) {
        rows_of_tile[i] = {scores + i * kScoreStride, max_of(key_begin, first_seen(row + i) - begin), min_of(key_end, end_seen(row + i) - begin),
                           page_begin * kPageSize, page_end * kPageSize};
      }
      softmax_tile(products, rows_of_tile, count, 0.0f, state.max + row, state.sum + row, factors);
#define HEADRACE_CALL(R) \
  products.template weigh<R>(scores, factors, v_pages, v_pages, key_begin, key_end, state.values + row * head_dim)
      HEADRACE_FOR_ROWS(count, HEADRACE_CALL)
#undef HEADRACE_CALL
    }
  });

  for (int64_t row = 0; row < rows; ++row) {
    const float* const values = state.values + row * head_dim;
    float* const to = a.out + ((chunk.first + chunk.begin + row / group) * a.num_q_heads + kv_head * group + row % group) * a.head_dim;
    const f32x16 inverse = splat16(1.0f / state.sum[row]);
    for (int64_t d = 0; d < a.head_dim; d += 16) {
      const f32x16 part = mul(load16(values + d), inverse);
      a.head_dim - d >= 16 ? store16(to + d, part) : store_first(to + d, part, a.head_dim - d);
    }
  }
}

}  // namespace

void packed_attention(const PackedAttentionArgs& a, const PackedChunk* chunks, int64_t num_chunks) {
  if (num_chunks == 0) return;
  // A claim should last some microseconds: short sequences go several at a time.
  const int64_t work = chunks[0].length * (chunks[0].end - chunks[0].begin) * a.head_dim;
  const int64_t grain = max_of(1, 65536 / max_of(1, work));
  parallel_for(num_chunks * a.num_kv_heads, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const PackedChunk& chunk = chunks[i / a.num_kv_heads];
      if (a.rounded) {
        attend_chunk<Bf16Products>(a, chunk, i % a.num_kv_heads);
      } else {
        attend_chunk<FloatProducts<float>>(a, chunk, i % a.num_kv_heads);
      }
    }
  });
}

}  // namespace HEADRACE_ISA
}  // namespace headrace

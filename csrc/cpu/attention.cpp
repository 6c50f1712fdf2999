// Paged attention, one kernel for decode and extend.
//
// A row is one query head at one position. Its keys are walked in blocks of kKeyBlock with an online softmax (Milakov and
// Gimelshein, 2018; tiled as in FlashAttention, Dao et al., 2022), and every kKeySplit keys make a partial result (maximum, sum,
// weighted values); partial results are merged in the order of positions. Blocks and splits are aligned at position 0, so they
// depend on the row's own position only. Tiles put several rows (heads of one KV head, neighbouring positions) on one load of K
// and V; a key that a row does not see gets weight exactly 0. Hence a row's bits do not depend on what shares its tile, on
// chunking, or on which thread took which split: decode equals extend.
#include "kernels.h"
#include "simd.h"
#include "threads.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int64_t kScoreStride = kKeyBlock + 16;  // floats; off a power of two, so that rows spread over cache sets
constexpr float kMinusInfinity = -__builtin_inff();
constexpr int kPagesOfBlock = kKeyBlock / kPageSize;

// Element pair (2 i, 2 i + 1) of kLanes keys; `keys` points at the first of them in its page.
HEADRACE_INLINE void load_key_pair(const bf16* keys, int64_t i, vf& even, vf& odd) {
  load_interleaved(keys + i * 2 * kPageSize, even, odd);
}
HEADRACE_INLINE void load_key_pair(const float* keys, int64_t i, vf& even, vf& odd) {
  even = load(keys + 2 * i * kPageSize);
  odd = load(keys + (2 * i + 1) * kPageSize);
}
template <class T>
constexpr int64_t kKeyElements = sizeof(T) == 2 ? 2 * kLanes : kLanes;  // of kLanes keys in one packed row

// scores[p][r][j] = q[r] . key j of vector p, one chain over the elements per score. Meanwhile the values of the same pages are
// fetched: they are needed next, and a decode step finds them in memory.
template <class T, int R, int P>
HEADRACE_INLINE void score_vectors(const float* q, int64_t head_dim, const T* const (&keys)[P], const T* const (&values)[P],
                                  float* const (&scores)[P]) {
  vf sum[R][P];
  HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
    HEADRACE_UNROLL for (int p = 0; p < P; ++p) sum[r][p] = splat(0.0f);
  }
  for (int64_t i = 0; i < head_dim / 2; ++i) {
    vf even[P], odd[P];
    HEADRACE_UNROLL for (int p = 0; p < P; ++p) {
      prefetch(values[p] + i * 2 * kPageSize);
      load_key_pair(keys[p], i, even[p], odd[p]);
    }
    HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
      const vf a = splat(q[r * head_dim + 2 * i]), b = splat(q[r * head_dim + 2 * i + 1]);
      HEADRACE_UNROLL for (int p = 0; p < P; ++p) sum[r][p] = fma(b, odd[p], fma(a, even[p], sum[r][p]));
    }
  }
  HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
    HEADRACE_UNROLL for (int p = 0; p < P; ++p) store(scores[p] + r * kScoreStride, sum[r][p]);
  }
}

template <class T, int R>
void score_rows(const float* q, int64_t head_dim, const T* const* k_pages, const T* const* v_pages, int64_t page_begin,
                int64_t page_end, float* scores) {
  const int64_t end = page_end * kParts;
  int64_t u = page_begin * kParts;
  auto keys_of = [&](int64_t unit) { return k_pages[unit / kParts] + unit % kParts * kKeyElements<T>; };
  auto values_of = [&](int64_t unit) { return v_pages[unit / kParts]; };
  auto scores_of = [&](int64_t unit) { return scores + unit * kLanes; };
  if constexpr (R <= kTileRows / 2) {
    for (; u + 4 <= end; u += 4) {
      const T* const keys[4] = {keys_of(u), keys_of(u + 1), keys_of(u + 2), keys_of(u + 3)};
      const T* const values[4] = {values_of(u), values_of(u + 1), values_of(u + 2), values_of(u + 3)};
      float* const to[4] = {scores_of(u), scores_of(u + 1), scores_of(u + 2), scores_of(u + 3)};
      score_vectors<T, R, 4>(q, head_dim, keys, values, to);
    }
  }
  for (; u + 2 <= end; u += 2) {
    const T* const keys[2] = {keys_of(u), keys_of(u + 1)};
    const T* const values[2] = {values_of(u), values_of(u + 1)};
    float* const to[2] = {scores_of(u), scores_of(u + 1)};
    score_vectors<T, R, 2>(q, head_dim, keys, values, to);
  }
  for (; u < end; ++u) {
    const T* const keys[1] = {keys_of(u)};
    const T* const values[1] = {values_of(u)};
    float* const to[1] = {scores_of(u)};
    score_vectors<T, R, 1>(q, head_dim, keys, values, to);
  }
}

// values[r][d] += sum over keys of weights[r][key] * V[key][d], one chain over the keys, for C vectors from element d.
template <class T, int R, int C>
HEADRACE_INLINE void weigh_vectors(const float* weights, int64_t head_dim, const T* const* pages, int64_t key_begin,
                                   int64_t key_end, float* values) {
  vf sum[R][C];
  HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
    HEADRACE_UNROLL for (int c = 0; c < C; ++c) sum[r][c] = load(values + r * head_dim + c * kLanes);
  }
  for (int64_t key = key_begin; key < key_end;) {
    const T* v = pages[key / kPageSize] + key % kPageSize * head_dim;
    const int64_t stop = min_of(key_end, (key / kPageSize + 1) * kPageSize);
    for (; key < stop; ++key, v += head_dim) {
      vf value[C];
      HEADRACE_UNROLL for (int c = 0; c < C; ++c) value[c] = load(v + c * kLanes);
      HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
        const vf w = splat(weights[r * kScoreStride + key]);
        HEADRACE_UNROLL for (int c = 0; c < C; ++c) sum[r][c] = fma(w, value[c], sum[r][c]);
      }
    }
  }
  HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
    HEADRACE_UNROLL for (int c = 0; c < C; ++c) store(values + r * head_dim + c * kLanes, sum[r][c]);
  }
}

template <class T, int R>
void weigh_rows(const float* weights, int64_t head_dim, const T* const* pages, int64_t key_begin, int64_t key_end,
                float* values) {
  const int64_t vectors = head_dim / kLanes;
  int64_t c = 0;
  const T* shifted[kPagesOfBlock];
  auto shift = [&](int64_t d) {
    for (int64_t p = key_begin / kPageSize; p < ceil_div(key_end, kPageSize); ++p) shifted[p] = pages[p] + d;
    return shifted;
  };
  if constexpr (R <= kTileRows / 2) {
    for (; c + 4 <= vectors; c += 4) {
      weigh_vectors<T, R, 4>(weights, head_dim, shift(c * kLanes), key_begin, key_end, values + c * kLanes);
    }
  }
  for (; c + 2 <= vectors; c += 2) {
    weigh_vectors<T, R, 2>(weights, head_dim, shift(c * kLanes), key_begin, key_end, values + c * kLanes);
  }
  for (; c < vectors; ++c) {
    weigh_vectors<T, R, 1>(weights, head_dim, shift(c * kLanes), key_begin, key_end, values + c * kLanes);
  }
}

// Rows cut into even register tiles: body(first, count).
template <class Body>
HEADRACE_INLINE void for_row_tiles(int64_t rows, Body body) {
  const int64_t num_tiles = ceil_div(rows, kTileRows), base = rows / num_tiles, longer = rows % num_tiles;
  for (int64_t t = 0, row = 0; t < num_tiles; ++t) {
    const int64_t count = base + (t < longer ? 1 : 0);
    body(row, count);
    row += count;
  }
}

// Running softmax of some rows: maximum, sum of weights, weighted sum of values.
struct State {
  float* max;
  float* sum;
  float* values;  // [rows][head_dim]

  static int64_t floats(int64_t rows, int64_t head_dim) { return rows * (head_dim + 2); }
  static State at(float* memory, int64_t rows, int64_t head_dim) {
    return {memory + rows * head_dim, memory + rows * (head_dim + 1), memory};
  }
};

void clear(const State& s, int64_t rows, int64_t head_dim) {
  for (int64_t r = 0; r < rows; ++r) {
    s.max[r] = kMinusInfinity;
    s.sum[r] = 0.0f;
  }
  memset(s.values, 0, static_cast<size_t>(rows * head_dim) * 4);
}

// total = total then part, in the order of positions. A part in which a row saw no key (sum 0) changes nothing.
void merge(const State& total, const State& part, int64_t rows, int64_t head_dim) {
  for (int64_t r = 0; r < rows; ++r) {
    if (part.sum[r] == 0.0f) continue;
    float* const to = total.values + r * head_dim;
    const float* const from = part.values + r * head_dim;
    if (total.sum[r] == 0.0f) {
      total.max[r] = part.max[r];
      total.sum[r] = part.sum[r];
      memcpy(to, from, static_cast<size_t>(head_dim) * 4);
      continue;
    }
    const float top = total.max[r] > part.max[r] ? total.max[r] : part.max[r];
    const float scale_total = scalar_exp(total.max[r] - top), scale_part = scalar_exp(part.max[r] - top);
    total.max[r] = top;
    total.sum[r] = total.sum[r] * scale_total + part.sum[r] * scale_part;
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      store(to + d, fma(splat(scale_part), load(from + d), mul(splat(scale_total), load(to + d))));
    }
  }
}

// One block of scores of one row -> weights, in place; the row sees keys [begin, end) of the block. Weights outside are 0 in
// [first, last), both multiples of 16.
void softmax_block(float* s, int64_t begin, int64_t end, int64_t first, int64_t last, float softcap, float& row_max,
                   float& row_sum, float* values, int64_t head_dim) {
  if (begin >= end) {
    for (int64_t j = first; j < last; j += 16) store16(s + j, splat16(0.0f));
    return;
  }
  const int64_t seen_first = begin / 16 * 16, seen_last = ceil_div(end, 16) * 16;
  if (softcap != 0.0f) {
    const f32x16 cap = splat16(softcap), inverse = splat16(1.0f / softcap);
    for (int64_t j = seen_first; j < seen_last; j += 16) store16(s + j, mul(cap, vtanh(mul(load16(s + j), inverse))));
  }
  for (int64_t j = seen_first; j < begin; ++j) s[j] = kMinusInfinity;
  for (int64_t j = end; j < seen_last; ++j) s[j] = kMinusInfinity;
  f32x16 top = splat16(row_max);
  for (int64_t j = seen_first; j < seen_last; j += 16) top = vmax(top, load16(s + j));
  const float new_max = max_lanes(top);
  if (row_max != new_max && row_max != kMinusInfinity) {
    const float factor = scalar_exp(row_max - new_max);
    row_sum *= factor;
    for (int64_t d = 0; d < head_dim; d += kLanes) store(values + d, mul(load(values + d), splat(factor)));
  }
  row_max = new_max;
  const f32x16 shift = splat16(new_max);
  f32x16 sum = splat16(0.0f);
  for (int64_t j = seen_first; j < seen_last; j += 16) {
    const f32x16 weight = vexp(sub(load16(s + j), shift));
    store16(s + j, weight);
    sum = add(sum, weight);
  }
  row_sum += sum_lanes(sum);
  for (int64_t j = first; j < seen_first; j += 16) store16(s + j, splat16(0.0f));
  for (int64_t j = seen_last; j < last; j += 16) store16(s + j, splat16(0.0f));
}

HEADRACE_INLINE int64_t first_key(int64_t position, int64_t window) {
  return window > 0 ? max_of(0, position - window + 1) : 0;
}

// Keys [split * kKeySplit, ...) of a tile into `state`.
template <class T>
void attend_split(const AttentionArgs& a, const AttentionTile& t, int64_t split, const float* q, float* scores,
                  const State& state) {
  const int64_t head_dim = a.cache.head_dim, group = a.num_q_heads / a.cache.num_kv_heads, rows = t.num_positions * group;
  const int64_t page_elements = head_dim * kPageSize, page_stride = page_elements * a.cache.num_kv_heads;
  const T* const k_cache = static_cast<const T*>(a.cache.k) + t.kv_head * page_elements;
  const T* const v_cache = static_cast<const T*>(a.cache.v) + t.kv_head * page_elements;
  const int32_t* const table = a.page_table + t.sequence * a.page_table_stride;
  const int64_t tile_end = t.first_position + t.num_positions, tile_begin = first_key(t.first_position, a.window);
  clear(state, rows, head_dim);
  const int64_t split_end = min_of((split + 1) * kKeySplit, tile_end);
  for (int64_t k0 = split * kKeySplit; k0 < split_end; k0 += kKeyBlock) {
    const int64_t keys = min_of(kKeyBlock, tile_end - k0), skipped = max_of(0, tile_begin - k0);
    if (skipped >= keys) continue;
    const int64_t page_begin = skipped / kPageSize, page_end = ceil_div(keys, kPageSize);
    const T* k_pages[kPagesOfBlock];
    const T* v_pages[kPagesOfBlock];
    for (int64_t p = page_begin; p < page_end; ++p) {
      const int64_t page = table[k0 / kPageSize + p];
      k_pages[p] = k_cache + page * page_stride;
      v_pages[p] = v_cache + page * page_stride;
    }
    for_row_tiles(rows, [&](int64_t row, int64_t count) {
#define HEADRACE_CALL(R) \
  score_rows<T, R>(q + row * head_dim, head_dim, k_pages, v_pages, page_begin, page_end, scores + row * kScoreStride)
      HEADRACE_FOR_ROWS(count, HEADRACE_CALL)
#undef HEADRACE_CALL
    });
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t position = t.first_position + r / group;
      softmax_block(scores + r * kScoreStride, max_of(0, first_key(position, a.window) - k0), min_of(keys, position + 1 - k0),
                    page_begin * kPageSize, page_end * kPageSize, a.softcap, state.max[r], state.sum[r],
                    state.values + r * head_dim, head_dim);
    }
    for_row_tiles(rows, [&](int64_t row, int64_t count) {
#define HEADRACE_CALL(R) \
  weigh_rows<T, R>(scores + row * kScoreStride, head_dim, v_pages, skipped, keys, state.values + row * head_dim)
      HEADRACE_FOR_ROWS(count, HEADRACE_CALL)
#undef HEADRACE_CALL
    });
  }
}

template <class T>
void attend_tile(const AttentionArgs& a, const AttentionTile& t) {
  const int64_t head_dim = a.cache.head_dim, group = a.num_q_heads / a.cache.num_kv_heads, rows = t.num_positions * group;
  const int64_t state_floats = State::floats(rows, head_dim);
  float* memory = static_cast<float*>(
      thread_scratch(static_cast<size_t>(rows * (head_dim + kScoreStride) + 2 * ceil_div(state_floats, 16) * 16) * 4));
  float* const q = memory;
  float* const scores = q + rows * head_dim;
  float* const part_memory = scores + rows * kScoreStride;
  const State part = State::at(part_memory, rows, head_dim);
  const State total = State::at(part_memory + ceil_div(state_floats, 16) * 16, rows, head_dim);
  for (int64_t r = 0; r < rows; ++r) {
    const float* const from = a.q + (t.q_row + r / group) * a.q_stride + (t.kv_head * group + r % group) * head_dim;
    for (int64_t d = 0; d < head_dim; d += kLanes) store(q + r * head_dim + d, mul(load(from + d), splat(a.scale)));
  }
  if (t.partial != nullptr) {
    for (int64_t split = t.split_begin; split < t.split_end; ++split) {
      attend_split<T>(a, t, split, q, scores, State::at(t.partial + (split - t.first_split) * state_floats, rows, head_dim));
    }
    if (__atomic_sub_fetch(t.pending, 1, __ATOMIC_ACQ_REL) != 0) return;
    clear(total, rows, head_dim);
    for (int64_t i = 0; i < t.num_splits; ++i) {
      merge(total, State::at(t.partial + i * state_floats, rows, head_dim), rows, head_dim);
    }
  } else {
    clear(total, rows, head_dim);
    for (int64_t split = t.split_begin; split < t.split_end; ++split) {
      attend_split<T>(a, t, split, q, scores, part);
      merge(total, part, rows, head_dim);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t head = t.kv_head * group + r % group;
    float* const to = a.out + ((t.q_row + r / group) * a.num_q_heads + head) * head_dim;
    const vf inverse = splat(1.0f / total.sum[r]);
    for (int64_t d = 0; d < head_dim; d += kLanes) store(to + d, mul(load(total.values + r * head_dim + d), inverse));
  }
}

}  // namespace

void attention(const AttentionArgs& a, const AttentionTile* tiles, int64_t num_tiles) {
  parallel_for(num_tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (a.cache.is_bf16) {
        attend_tile<bf16>(a, tiles[i]);
      } else {
        attend_tile<float>(a, tiles[i]);
      }
    }
  });
}

}  // namespace HEADRACE_ISA
}  // namespace headrace

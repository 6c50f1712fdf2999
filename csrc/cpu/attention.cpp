// Paged attention, one kernel for decode and extend.
//
// A row is one query head at one position. Its keys are walked in blocks of kKeyBlock with an online softmax (Milakov and
// Gimelshein, 2018; tiled as in FlashAttention, Dao et al., 2022), and every kKeySplit keys (kChosenSplit chosen ones) make a partial result (maximum, sum,
// weighted values); partial results are merged in the order of positions. Blocks and splits are aligned at position 0, so they
// depend on the row's own position only. Tiles put several rows (heads of one KV head, neighbouring positions) on one load of K
// and V; a key that a row does not see gets weight exactly 0. Hence a row's bits do not depend on what shares its tile, on
// chunking, or on which thread took which split: decode equals extend.
#include "attention_bf16.h"
#include "attention_int.h"
#include "attention_products.h"
#include "attention_softmax.h"
#include "kernels.h"
#include "simd.h"
#include "threads.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int64_t kFetchingRows = 2 * kTileRows;  // up to so many rows wait for memory rather than compute

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
    const float scale_total = scalar_exp2(total.max[r] - top), scale_part = scalar_exp2(part.max[r] - top);
    total.max[r] = top;
    total.sum[r] = total.sum[r] * scale_total + part.sum[r] * scale_part;
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      store(to + d, fma(splat(scale_part), load(from + d), mul(splat(scale_total), load(to + d))));
    }
  }
}

HEADRACE_INLINE int64_t first_key(int64_t position, int64_t window) {
  return window > 0 ? max_of(0, position - window + 1) : 0;
}

// A block of keys, from `key` on, and the queries of a tile that go through it together: all where the keys are shared, else one.
struct Visit {
  int64_t key, query, num_queries;
};

HEADRACE_INLINE int64_t end_of(const AttentionTile& t, int64_t query) { return t.queries[query].last_key + 1; }

// The first visit of `split` beyond the shared keys, of `query` or a later one. False: there is none.
bool first_alone(const AttentionTile& t, int64_t split, int64_t query, Visit& visit) {
  const int64_t begin = max_of(split * t.key_split, t.shared_keys), split_end = (split + 1) * t.key_split;
  for (; query < t.num_queries; ++query) {
    if (begin >= min_of(split_end, end_of(t, query))) continue;
    visit = {begin, query, 1};
    return true;
  }
  return false;
}

// The first visit of `split` or a later one of the tile, from the first block that its window reaches on. False: there is none.
bool first_visit(const AttentionTile& t, int64_t window, int64_t split, Visit& visit) {
  const int64_t reached = first_key(t.queries[0].position, window) / kKeyBlock * kKeyBlock;
  for (; split < t.split_end; ++split) {
    const int64_t begin = max_of(split * t.key_split, reached);
    if (begin < min_of((split + 1) * t.key_split, t.shared_keys)) {
      visit = {begin, 0, t.num_queries};
      return true;
    }
    if (first_alone(t, split, 0, visit)) return true;
  }
  return false;
}

// The visit after `visit`, split by split. False: it was the last.
bool next_visit(const AttentionTile& t, int64_t window, Visit& visit) {
  const int64_t split = visit.key / t.key_split, next = visit.key + kKeyBlock;
  const bool shared = visit.key < t.shared_keys;
  if (next < min_of((split + 1) * t.key_split, shared ? t.shared_keys : end_of(t, visit.query))) {
    visit.key = next;
    return true;
  }
  return first_alone(t, split, shared ? 0 : visit.query + 1, visit) || first_visit(t, window, split + 1, visit);
}

// Up to kKeyBlock keys: the pages that hold those that any query of a visit sees.
template <class T>
struct KeyBlock {
  int64_t keys = 0, skipped = 0, page_begin = 0, page_end = 0;  // keys [skipped, keys) of the block are seen
  const T *k[kPagesOfBlock], *v[kPagesOfBlock];

  KeyBlock(const AttentionArgs& a, const AttentionTile& t, const Visit& visit) {
    const AttentionQuery& first = t.queries[visit.query];
    keys = min_of(kKeyBlock, end_of(t, visit.query + visit.num_queries - 1) - visit.key);
    skipped = max_of(0, first_key(first.position, a.window) - visit.key);
    page_begin = skipped / kPageSize;
    page_end = ceil_div(keys, kPageSize);
    const int64_t page_elements = kv_page_elements(a.cache.type, a.cache.head_dim);
    const int32_t* const table = a.page_table + first.sequence * a.page_table_stride + visit.key / kPageSize;
    for (int64_t p = page_begin; p < page_end; ++p) {
      const int64_t at = (table[p] * a.cache.num_kv_heads + t.kv_head) * page_elements;
      k[p] = static_cast<const T*>(a.cache.k) + at;
      v[p] = static_cast<const T*>(a.cache.v) + at;
    }
  }

  // Where the keys after this block begin, as pages beside v: `next`'s, and something near where it has none.
  void later_pages(const KeyBlock& next, const T** pages) const {
    for (int64_t p = page_begin; p < page_end; ++p) {
      pages[p] = p >= next.page_begin && p < next.page_end ? next.k[p] : v[p];
    }
  }
};

// The keys that a row sees.
struct SeenKeys {
  int32_t begin, end;
};

// Keys [split * t.key_split, ...) of tile `t` into `state`. seen: of its rows. next: the tile that this thread computes afterwards, or
// null. A decode step finds keys and values in memory: those that come next are fetched while the present ones are computed with.
template <class Products>
void attend_split(const AttentionArgs& a, const AttentionTile& t, const AttentionTile* next, int64_t split,
                  Products& products, const SeenKeys* seen, float* scores, const State& state) {
  using Element = typename Products::Element;
  const int64_t head_dim = a.cache.head_dim, group = a.num_q_heads / a.cache.num_kv_heads;
  clear(state, t.num_queries * group, head_dim);
  Visit visit;
  bool more = first_visit(t, a.window, split, visit);
  while (more && visit.key < (split + 1) * t.key_split) {
    KeyBlock<Element> block(a, t, visit);
    const int64_t first_row = visit.query * group, rows = visit.num_queries * group, k0 = visit.key;
    more = next_visit(t, a.window, visit);
    const Element* later_pages[kPagesOfBlock];
    bool fetches = false;
    if (rows <= kFetchingRows) {
      Visit later = visit;
      fetches = more || (next != nullptr && first_visit(*next, a.window, next->split_begin, later));
      if (fetches) block.later_pages(KeyBlock<Element>(a, more ? t : *next, later), later_pages);
    }
    products.set_block(block.v, block.skipped, block.keys);
    // A register tile of rows goes through both products at once: its scores stay in the first-level cache.
    for_row_tiles(rows, [&](int64_t tile_row, int64_t count) {
      const int64_t row = first_row + tile_row, first_seen = max_of(0, seen[row].begin - k0);
      const int64_t keys = min_of(block.keys, seen[row + count - 1].end - k0);
      const int64_t page_begin = first_seen / kPageSize, page_end = ceil_div(keys, kPageSize);
      if (page_begin >= page_end) return;
      const Element* const* const later = fetches && tile_row == 0 ? later_pages : block.v;
#define HEADRACE_CALL(R) products.template score<R>(row, block.k, block.v, page_begin, page_end, scores)
      HEADRACE_FOR_ROWS(count, HEADRACE_CALL)
#undef HEADRACE_CALL
      RowScores rows_of_tile[kTileRows];
      float factors[16];
      for (int64_t i = 0; i < count; ++i) {
        rows_of_tile[i] = {scores + i * kScoreStride, max_of(0, seen[row + i].begin - k0),
                           max_of(0, min_of(keys, seen[row + i].end - k0)), page_begin * kPageSize, page_end * kPageSize};
      }
      softmax_tile(products, rows_of_tile, count, a.softcap, state.max + row, state.sum + row, factors);
#define HEADRACE_CALL(R) \
  products.template weigh<R>(scores, factors, block.v, later, first_seen, keys, state.values + row * head_dim)
      HEADRACE_FOR_ROWS(count, HEADRACE_CALL)
#undef HEADRACE_CALL
    });
  }
}

// next: as of attend_split.
template <class Products>
void attend_tile(const AttentionArgs& a, const AttentionTile& t, const AttentionTile* next) {
  const int64_t head_dim = a.cache.head_dim, group = a.num_q_heads / a.cache.num_kv_heads, rows = t.num_queries * group;
  const int64_t state_floats = State::floats(rows, head_dim);
  const int64_t state_room = ceil_div(state_floats, 16) * 16, seen_room = ceil_div(2 * rows, 16) * 16;
  float* const scores = static_cast<float*>(thread_scratch(
      static_cast<size_t>(kTileRows * kScoreStride + 2 * state_room + seen_room + Products::memory_floats(rows, head_dim)) * 4));
  float* const part_memory = scores + kTileRows * kScoreStride;
  const State part = State::at(part_memory, rows, head_dim);
  const State total = State::at(part_memory + state_room, rows, head_dim);
  SeenKeys* const seen = reinterpret_cast<SeenKeys*>(part_memory + 2 * state_room);
  Products products(part_memory + 2 * state_room + seen_room, rows, head_dim, a.softcap != 0.0f);
  for (int64_t query = 0, row = 0; query < t.num_queries; ++query) {
    const float* q = a.q + t.queries[query].q_row * a.q_stride + t.kv_head * group * head_dim;
    for (int64_t head = 0; head < group; ++head, ++row, q += head_dim) {
      seen[row] = {static_cast<int32_t>(first_key(t.queries[query].position, a.window)), t.queries[query].last_key + 1};
      products.set_query(row, q, a.scale * kLog2E);
    }
  }
  if (t.partial != nullptr) {
    for (int64_t split = t.split_begin; split < t.split_end; ++split) {
      attend_split<Products>(a, t, next, split, products, seen, scores, State::at(t.partial + (split - t.first_split) * state_floats, rows, head_dim));
    }
    if (__atomic_sub_fetch(t.pending, 1, __ATOMIC_ACQ_REL) != 0) return;
    clear(total, rows, head_dim);
    for (int64_t i = 0; i < t.num_splits; ++i) {
      merge(total, State::at(t.partial + i * state_floats, rows, head_dim), rows, head_dim);
    }
  } else {
    clear(total, rows, head_dim);
    for (int64_t split = t.split_begin; split < t.split_end; ++split) {
      attend_split<Products>(a, t, next, split, products, seen, scores, part);
      merge(total, part, rows, head_dim);
    }
  }
  for (int64_t query = 0, row = 0; query < t.num_queries; ++query) {
    float* to = a.out + (t.queries[query].q_row * a.num_q_heads + t.kv_head * group) * head_dim;
    for (int64_t head = 0; head < group; ++head, ++row, to += head_dim) {
      const vf inverse = splat(1.0f / total.sum[row]);
      for (int64_t d = 0; d < head_dim; d += kLanes) store(to + d, mul(load(total.values + row * head_dim + d), inverse));
    }
  }
}

}  // namespace

void attention(const AttentionArgs& a, const AttentionTile* tiles, int64_t num_tiles) {
  parallel_for(num_tiles, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const AttentionTile* const next = i + 1 < end ? tiles + i + 1 : nullptr;
      switch (a.cache.type) {
        case KvType::kFloat:
          attend_tile<FloatProducts<float>>(a, tiles[i], next);
          break;
        case KvType::kBf16:
          attend_tile<FloatProducts<bf16>>(a, tiles[i], next);
          break;
        case KvType::kBf16Products:
          attend_tile<Bf16Products>(a, tiles[i], next);
          break;
        case KvType::kInt8:
          attend_tile<IntProducts<ByteCache>>(a, tiles[i], next);
          break;
        case KvType::kInt16:
          attend_tile<IntProducts<WordCache>>(a, tiles[i], next);
          break;
      }
    }
  });
}

}  // namespace HEADRACE_ISA
}  // namespace headrace

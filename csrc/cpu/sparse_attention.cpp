// Which pages of a long sequence a decoded position attends to, and the order of the elements of heads that makes it cheap to tell: those that move
// scores most come first, so that a page's approximate scores need the front of its record of K alone. Attention over the chosen pages is the
// kernel of attention.cpp, on a page table of its own for each KV head.
#include "attention_bf16.h"
#include "attention_int.h"
#include "attention_products.h"
#include "attention_softmax.h"
#include "kernels.h"
#include "rotation.h"
#include "simd.h"
#include "threads.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

// One query and one KV head.
struct Choice {
  const AttentionArgs& a;
  const ChosenPages& c;
  const AttentionQuery& query;
  int64_t kv_head, place;

  int64_t group() const { return a.num_q_heads / a.cache.num_kv_heads; }
  int64_t own_page() const { return query.position / kPageSize; }
  int64_t num_scored() const { return own_page() - a.sparse.recent + 1; }  // pages before the recent ones
  float* tops(int64_t row) const { return c.tops + (place * group() + row) * c.top_stride; }
};

// See OrderArgs; its square is num_blocks times the identity.
void mix_blocks(float* x, int64_t head_dim, int64_t num_blocks) {
  for (int64_t h = 16; h < 16 * num_blocks; h *= 2) {
    for (int64_t begin = 0; begin < head_dim; begin += 2 * h) {
      for (int64_t d = begin; d < begin + h; d += kLanes) {
        const vf a = load(x + d), b = load(x + d + h);
        store(x + d, add(a, b));
        store(x + d + h, sub(a, b));
      }
    }
  }
}

// A query of order_heads as it would be if all elements but the first `channels` of its order were 0.
void keep_first(const float* q, int64_t head_dim, int64_t channels, int64_t num_blocks, float* to) {
  memcpy(to, q, static_cast<size_t>(head_dim) * 4);
  mix_blocks(to, head_dim, num_blocks);
  const vf share = splat(1.0f / static_cast<float>(num_blocks));
  for (int64_t d = 0; d < channels; d += kLanes) store(to + d, mul(load(to + d), share));
  memset(to + channels, 0, static_cast<size_t>(head_dim - channels) * 4);
  mix_blocks(to, head_dim, num_blocks);
}

// The largest scores of pages [split * kPageSplit, ...) in all query heads.
template <class Products>
void score_split(const Choice& choice, int64_t split) {
  using Element = typename Products::Element;
  const AttentionArgs& a = choice.a;
  const int64_t head_dim = a.cache.head_dim, group = choice.group(), channels = a.sparse.channels;
  const int64_t begin = split * kPageSplit, end = min_of(begin + kPageSplit, choice.num_scored());
  if (begin >= end) return;
  float* const scores = static_cast<float*>(
      thread_scratch(static_cast<size_t>(kTileRows * kScoreStride + kMaxIntHeadDim + Products::memory_floats(group, head_dim)) * 4));
  float* const first = scores + kTileRows * kScoreStride;
  Products products(first + kMaxIntHeadDim, group, head_dim, true);
  products.score_first(channels);
  const int64_t num_blocks = a.cache.type == KvType::kInt8 ? rotation_size(head_dim) / 16 : 1;
  const float* q = a.q + choice.query.q_row * a.q_stride + choice.kv_head * group * head_dim;
  for (int64_t row = 0; row < group; ++row, q += head_dim) {
    keep_first(q, head_dim, channels, num_blocks, first);
    products.set_query(row, first, a.scale * kLog2E);
  }
  const int64_t page_elements = kv_page_elements(a.cache.type, head_dim);
  const int32_t* const table = a.page_table + choice.query.sequence * a.page_table_stride;
  const auto page_at = [&](int64_t page) HEADRACE_LAMBDA {
    return static_cast<const Element*>(a.cache.k) + (table[min_of(page, choice.num_scored() - 1)] * a.cache.num_kv_heads + choice.kv_head) * page_elements;
  };
  for (int64_t block = begin; block < end; block += kPagesOfBlock) {
    const int64_t pages = min_of(kPagesOfBlock, end - block);
    const Element *k[kPagesOfBlock], *later[kPagesOfBlock];
    for (int64_t p = 0; p < pages; ++p) {
      k[p] = page_at(block + p);
      later[p] = page_at(block + p + kPagesOfBlock);
    }
    for_row_tiles(group, [&](int64_t row, int64_t count) {
#define HEADRACE_CALL(R) products.template score<R>(row, k, row == 0 ? later : k, 0, pages, scores)
      HEADRACE_FOR_ROWS(count, HEADRACE_CALL)
#undef HEADRACE_CALL
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t p = 0; p < pages; ++p) choice.tops(row + i)[block + p] = max_lanes(load16(scores + i * kScoreStride + p * kPageSize));
      }
    });
  }
}

// Integers in the order of the floats that they are made of, all of them at least 0.
HEADRACE_INLINE uint32_t ordered(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

// A page's score is the largest of its heads', each less the largest of its head. Of pages with equal scores the earlier ones are chosen.
void choose(const Choice& choice) {
  const SparseAttention& sparse = choice.a.sparse;
  const int64_t group = choice.group(), num_scored = choice.num_scored(), wanted = sparse.pages - sparse.recent - 1;
  int32_t* const chosen = choice.c.chosen + choice.place * sparse.pages;
  uint32_t* const keys = static_cast<uint32_t*>(thread_scratch(static_cast<size_t>(num_scored) * 4));
  float* const best = choice.tops(0);
  for (int64_t row = 0; row < group; ++row) {
    float* const tops = choice.tops(row);
    float most = tops[0];
    for (int64_t p = 1; p < num_scored; ++p) most = tops[p] > most ? tops[p] : most;
    for (int64_t p = 0; p < num_scored; ++p) {
      const float score = tops[p] - most;
      best[p] = row == 0 || score > best[p] ? score : best[p];
    }
  }
  for (int64_t p = 0; p < num_scored; ++p) keys[p] = ordered(best[p]);
  // The largest key that at least `wanted` pages reach.
  uint32_t least = 0;
  for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
    const uint32_t trial = least | bit;
    int32_t count = 0;
    for (int64_t p = 1; p < num_scored; ++p) count += keys[p] >= trial ? 1 : 0;
    if (count >= wanted) least = trial;
  }
  int64_t above = 0;
  for (int64_t p = 1; p < num_scored; ++p) above += keys[p] > least ? 1 : 0;
  int64_t equal = wanted - above, next = 0;
  chosen[next++] = 0;
  for (int64_t p = 1; p < num_scored; ++p) {
    if (keys[p] > least || (keys[p] == least && equal-- > 0)) chosen[next++] = static_cast<int32_t>(p);
  }
  for (int64_t p = num_scored; p <= choice.own_page(); ++p) chosen[next++] = static_cast<int32_t>(p);
  const int32_t* const table = choice.a.page_table + choice.query.sequence * choice.a.page_table_stride;
  for (int64_t i = 0; i < sparse.pages; ++i) chosen[i] = table[chosen[i]];
}

void order_head(const OrderArgs& o, const int32_t* order, float* x) {
  float from[kMaxIntHeadDim];
  memcpy(from, x, static_cast<size_t>(o.head_dim) * 4);
  for (int64_t i = 0; i < o.head_dim; ++i) x[i] = from[order[i]] * o.scale;
  mix_blocks(x, o.head_dim, o.num_blocks);
}

}  // namespace

void choose_pages(const AttentionArgs& a, const ChosenPages& c) {
  const int64_t heads = a.cache.num_kv_heads;
  parallel_for(c.num_queries * heads * c.num_splits, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t place = i / c.num_splits, split = i % c.num_splits;
      const Choice choice = {a, c, c.queries[place / heads], place % heads, place};
      switch (a.cache.type) {
        case KvType::kFloat:
          score_split<FloatProducts<float>>(choice, split);
          break;
        case KvType::kBf16:
          score_split<FloatProducts<bf16>>(choice, split);
          break;
        case KvType::kBf16Products:
          score_split<Bf16Products>(choice, split);
          break;
        case KvType::kInt8:
          score_split<IntProducts<ByteCache>>(choice, split);
          break;
        case KvType::kInt16:
          score_split<IntProducts<WordCache>>(choice, split);
          break;
      }
      if (__atomic_sub_fetch(c.pending + place, 1, __ATOMIC_ACQ_REL) == 0) choose(choice);
    }
  });
}

void order_heads(const OrderArgs& o) {
  for (int64_t token = 0; token < o.tokens; ++token) {
    for (int64_t head = 0; head < o.num_heads; ++head) {
      order_head(o, o.order + head / o.group * o.head_dim, o.x + token * o.x_stride + head * o.head_dim);
    }
  }
}

}  // namespace HEADRACE_ISA
}  // namespace headrace

// Products of attention over a bf16 cache as products of bfloat16 (simd_bf16.h): queries and weights are rounded to it. A result is one
// chain of pairs of products, and the sum of a row's weights is that of the rounded ones.
#pragma once
#include "attention_products.h"
#include "simd_bf16.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

class Bf16Products {
 public:
  using Element = bf16;
  static constexpr int64_t kUnit = 32;

  static int64_t memory_floats(int64_t rows, int64_t head_dim) {
    return (rows * padded(head_dim) + kTileRows * kStride + 2 * kPageSize * head_dim) / 2;
  }
  Bf16Products(float* memory, int64_t rows, int64_t head_dim, bool)
      : q_(reinterpret_cast<bf16*>(memory)),
        weights_(q_ + rows * padded(head_dim)),
        trimmed_(weights_ + kTileRows * kStride),
        head_dim_(head_dim) {}

  void set_query(int64_t row, const float* q, float scale) {
    float scaled[32];
    for (int64_t d = 0; d < head_dim_; d += 32) {
      for (int64_t i = 0; i < 32; i += kLanes) {
        store(scaled + i, d + i < head_dim_ ? mul(load(q + d + i), splat(scale)) : splat(0.0f));
      }
      for (int64_t i = 0; i < 32; i += 2 * kLanes) {
        store_rounded(q_ + row * padded(head_dim_) + d + i, load(scaled + i), load(scaled + i + kLanes));
      }
    }
  }

  // Values that nobody sees, in the first and the last page of the block, may be NaN. These pages are replaced by copies that hold 0 there.
  void set_block(const bf16** v_pages, int64_t key_begin, int64_t key_end) {
    const int64_t first = key_begin / kPageSize, last = (key_end - 1) / kPageSize;
    if (key_begin % kPageSize != 0) trim(v_pages[first], trimmed_, key_begin % kPageSize, kPageSize);
    if (key_end % kPageSize == 0) return;
    trim(v_pages[last], trimmed_ + kPageSize * head_dim_, last == first ? key_begin % kPageSize : 0, key_end % kPageSize);
  }
  f32x16 shifted(f32x16 scores, int64_t) const { return scores; }
  void set_scales(f32x16, f32x16) {}

  template <int R>
  void score(int64_t row, const bf16* const* k_pages, const bf16* const* v_pages, int64_t page_begin, int64_t page_end,
             float* scores) const {
    for_units<R>(page_begin * kParts, page_end * kParts, [&](auto count, int64_t unit) HEADRACE_LAMBDA {
      score_units<R, decltype(count)::value>(q_ + row * padded(head_dim_), k_pages, v_pages, unit, scores);
    });
  }

  float set_weights(int64_t i, const RowScores& row, float top) const {
    bf16* const to = weights_ + i * kStride;
    memset(to + row.first, 0, static_cast<size_t>(row.last - row.first) * 2);
    if (row.begin >= row.end) return 0.0f;
    const bf16 one[2] = {0x3f80, 0x3f80};
    const Pairs ones = splat_pair(one);
    const vf tops = splat(top);
    f32x16 sum = splat16(0.0f);
    for (int64_t j = row.seen_first<kUnit>(); j < row.seen_last<kUnit>(); j += kUnit) {
      HEADRACE_UNROLL for (int p = 0; p < kParts; ++p) {
        const float* const scores = row.scores + j + p * 2 * kLanes;
        bf16* const rounded = to + j + p * 2 * kLanes;
        store_rounded(rounded, vexp2_to_13_bits(sub(load(scores), tops)), vexp2_to_13_bits(sub(load(scores + kLanes), tops)));
        dot_pairs(sum.part[p], load_pairs(rounded), ones);
      }
    }
    return sum_lanes(sum);
  }

  template <int R>
  void weigh(const float*, const float* factors, const bf16* const* v_pages, const bf16* const* later_pages, int64_t key_begin,
             int64_t key_end, float* values) const {
    const int64_t page_begin = key_begin / kPageSize, page_end = ceil_div(key_end, kPageSize);
    for_units<R>(0, head_dim_ / kLanes, [&](auto count, int64_t vector) HEADRACE_LAMBDA {
      weigh_vectors<R, decltype(count)::value>(factors, v_pages, later_pages, page_begin, page_end, vector * kLanes, values);
    });
  }

 private:
  static constexpr int64_t kStride = kKeyBlock + 32;  // of weights; off a power of two
  static int64_t padded(int64_t head_dim) { return ceil_div(head_dim, 32) * 32; }

  // `page` becomes a copy of itself with values of tokens [begin, end) alone.
  void trim(const bf16*& page, bf16* to, int64_t begin, int64_t end) const {
    memset(to, 0, static_cast<size_t>(kPageSize * head_dim_) * 2);
    for (int64_t token = begin; token < end; ++token) {
      const int64_t start = token / 2 * 2 * head_dim_ + token % 2;
      for (int64_t d = 0; d < head_dim_; ++d) to[start + 2 * d] = page[start + 2 * d];
    }
    page = to;
  }

  template <int R, int P>
  inline __attribute__((always_inline)) void score_units(const bf16* q, const bf16* const* k_pages, const bf16* const* v_pages,
                                                         int64_t unit, float* scores) const {
    const int64_t stride = padded(head_dim_);
    const bf16 *keys[P], *values[P];
    vf sum[R][P];
    unrolled<P>([&](auto p) HEADRACE_LAMBDA {
      keys[p] = k_pages[(unit + p) / kParts] + (unit + p) % kParts * 2 * kLanes;
      values[p] = v_pages[(unit + p) / kParts];
      unrolled<R>([&](auto r) HEADRACE_LAMBDA { sum[r][p] = splat(0.0f); });
    });
    const bf16* thirds[(R + 2) / 3];
    unrolled<(R + 2) / 3>([&](auto j) HEADRACE_LAMBDA { thirds[j] = q + 3 * j * stride; });
    for (int64_t d = 0; d < head_dim_; d += 2) {
      Pairs key[P];
      unrolled<P>([&](auto p) HEADRACE_LAMBDA {
        if (R <= kTileRows / 2) prefetch(values[p] + d * kPageSize);
        key[p] = load_pairs(keys[p] + d * kPageSize);
      });
      unrolled<R>([&](auto r) HEADRACE_LAMBDA {
        const Pairs two = splat_pair(thirds[r / 3] + r % 3 * stride + d);
        unrolled<P>([&](auto p) HEADRACE_LAMBDA { dot_pairs(sum[r][p], key[p], two); });
      });
    }
    unrolled<R>([&](auto r) HEADRACE_LAMBDA {
      unrolled<P>([&](auto p) HEADRACE_LAMBDA { store(scores + r * kScoreStride + (unit + p) * kLanes, sum[r][p]); });
    });
  }

  template <int R, int C>
  inline __attribute__((always_inline)) void weigh_vectors(const float* factors, const bf16* const* pages,
                                                           const bf16* const* later_pages, int64_t page_begin, int64_t page_end,
                                                           int64_t d, float* values) const {
    vf sum[R][C];
    unrolled<R>([&](auto r) HEADRACE_LAMBDA {
      const vf factor = splat(factors[r]);
      unrolled<C>([&](auto c) HEADRACE_LAMBDA { sum[r][c] = mul(load(values + r * head_dim_ + d + c * kLanes), factor); });
    });
    for (int64_t page = page_begin; page < page_end; ++page) {
      const bf16* v = pages[page] + 2 * d;
      const bf16* later = later_pages[page] + 2 * d;
      const bf16* w = weights_ + page * kPageSize;
      for (int64_t i = 0; i < kPageSize / 2; ++i, v += 2 * head_dim_, later += 2 * head_dim_, w += 2) {
        prefetch_elements<2 * C * kLanes>(later);
        Pairs value[C];
        unrolled<C>([&](auto c) HEADRACE_LAMBDA { value[c] = load_pairs(v + c * 2 * kLanes); });
        unrolled<R>([&](auto r) HEADRACE_LAMBDA {
          const Pairs two = splat_pair(w + r * kStride);
          unrolled<C>([&](auto c) HEADRACE_LAMBDA { dot_pairs(sum[r][c], value[c], two); });
        });
      }
    }
    unrolled<R>([&](auto r) HEADRACE_LAMBDA {
      unrolled<C>([&](auto c) HEADRACE_LAMBDA { store(values + r * head_dim_ + d + c * kLanes, sum[r][c]); });
    });
  }

  bf16* q_;        // [rows][padded head_dim], scaled
  bf16* weights_;  // [kTileRows][kStride]
  bf16* trimmed_;  // two pages of V
  int64_t head_dim_;
};

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace

// Products of attention over a bf16 cache as products of bfloat16 (simd_bf16.h): queries and weights are rounded to it. A result is one
// chain of pairs of products, and the sum of a row's weights is that of the rounded ones.
#pragma once
#include "attention_products.h"
#include "simd_bf16.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

// split_floor: fraction = x - floor(x), in [0, 1]; returns what times_pow2_floor takes for x. times_pow2_floor: a 2^floor(x), rounded once
// where that is a denormal, for a in [0.5, 4]; 0 for minus infinity, NaN for NaN.
#if defined(__AVX512F__)
HEADRACE_INLINE vf split_floor(vf x, vf& fraction) {
  fraction = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  return x;
}
HEADRACE_INLINE vf times_pow2_floor(vf a, vf x) { return _mm512_scalef_ps(a, x); }
#else
HEADRACE_INLINE vf split_floor(vf x, vf& fraction) {
  const vf bounded = vmax(splat(-186.0f), x), n = round_nearest(bounded), floor = if_less(bounded, n, sub(n, splat(1.0f)), n);
  fraction = sub(bounded, floor);
  return floor;
}
// In two steps: 2^n alone may be below the least normal.
HEADRACE_INLINE vf times_pow2_floor(vf a, vf n) { return mul(mul(a, pow2(add(n, splat(64.0f)))), splat(0x1p-64f)); }
#endif

// 2^x with a relative error of up to 7.5e-5, for what is rounded to bfloat16; x is below 64. Of the polynomials of degree 3 this one has
// the least relative error on [0, 1].
HEADRACE_INLINE vf vexp2_for_bf16(vf x) {
  vf fraction;
  const vf n = split_floor(x, fraction);
  vf p = splat(7.8024521e-2f);
  p = fma(p, fraction, splat(2.2606716e-1f));
  p = fma(p, fraction, splat(6.9583356e-1f));
  return times_pow2_floor(fma(p, fraction, splat(0.9999252f)), n);
}

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
        head_dim_(head_dim),
        scored_(head_dim) {}
  void score_first(int64_t elements) { scored_ = elements; }

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
    const int64_t first = row.seen_first<kUnit>(), last = row.seen_last<kUnit>();
    if (row.begin >= row.end) {
      memset(to + row.first, 0, static_cast<size_t>(row.last - row.first) * 2);
      return 0.0f;
    }
    for (int64_t j = row.first; j < first; j += kPageSize) memset(to + j, 0, kPageSize * 2);
    for (int64_t j = last; j < row.last; j += kPageSize) memset(to + j, 0, kPageSize * 2);
    const bf16 one[2] = {0x3f80, 0x3f80};
    const Pairs ones = splat_pair(one);
    // A subtraction as a multiply-add: exponentials keep the units that only add busier than those that multiply.
    const vf one_each = splat(1.0f), minus_top = splat(-top);
    const auto weight_of = [&](const float* scores) HEADRACE_LAMBDA { return vexp2_for_bf16(fma(load(scores), one_each, minus_top)); };
    const auto weigh_unit = [&](int64_t j, f32x16& sum) HEADRACE_LAMBDA {
      HEADRACE_UNROLL for (int p = 0; p < kParts; ++p) {
        const float* const scores = row.scores + j + p * 2 * kLanes;
        bf16* const rounded = to + j + p * 2 * kLanes;
        store_rounded(rounded, weight_of(scores), weight_of(scores + kLanes));
        dot_pairs(sum.part[p], load_pairs(rounded), ones);
      }
    };
    f32x16 even = splat16(0.0f), odd = even;  // one chain would be as long as the exponentials take
    int64_t j = first;
    for (; j + 2 * kUnit <= last; j += 2 * kUnit) {
      weigh_unit(j, even);
      weigh_unit(j + kUnit, odd);
    }
    if (j < last) weigh_unit(j, even);
    return sum_lanes(add(even, odd));
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
    for (int64_t d = 0; d < scored_; d += 2) {
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
  int64_t head_dim_, scored_;
};

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace

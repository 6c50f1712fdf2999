// The two products of attention over one block of keys: scores = q . K and values += weights . V, for the query rows of a tile, and
// between them the weights 2^score in the form that the second takes. A class for each way to multiply; this one multiplies floats, one
// chain of fused multiply-adds per result. attention_bf16.h and attention_int.h have the others.
#pragma once
#include <type_traits>
#include <utility>

#include "ops.h"
#include "simd.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int64_t kScoreStride = kKeyBlock + 16;  // floats; off a power of two, so that rows spread over cache sets
constexpr int kPagesOfBlock = kKeyBlock / kPageSize;

#define HEADRACE_LAMBDA __attribute__((always_inline))

// body(0) .. body(N - 1), each index a constant from the start: GCC 12 keeps arrays of accumulators in memory when it unrolls the
// loop over them late.
template <class Body, int... I>
HEADRACE_INLINE void unrolled_over(std::integer_sequence<int, I...>, Body body) {
  (body(std::integral_constant<int, I>()), ...);
}
template <int N, class Body>
HEADRACE_INLINE void unrolled(Body body) {
  unrolled_over(std::make_integer_sequence<int, N>(), body);
}

// Calls body<P>(unit) for units [begin, end) of kLanes keys, P units at a time: as many as fit the registers beside R rows.
template <int R, class Body>
HEADRACE_INLINE void for_units(int64_t begin, int64_t end, Body body) {
  int64_t u = begin;
  if constexpr (R <= kTileRows / 2) {
    for (; u + 4 <= end; u += 4) body(std::integral_constant<int, 4>(), u);
  }
  for (; u + 2 <= end; u += 2) body(std::integral_constant<int, 2>(), u);
  for (; u < end; ++u) body(std::integral_constant<int, 1>(), u);
}

// Element 2 i + kOdd of kLanes keys; `keys` points at the first of them in its page.
template <int kOdd>
HEADRACE_INLINE vf load_key(const bf16* keys, int64_t i) {
  vf even, odd;
  load_interleaved(keys + i * 2 * kPageSize, even, odd);
  return kOdd ? odd : even;
}
template <int kOdd>
HEADRACE_INLINE vf load_key(const float* keys, int64_t i) {
  return load(keys + (2 * i + kOdd) * kPageSize);
}

// How far elements of one token are apart in V: those of two lie side by side in bf16.
template <class T>
constexpr int64_t kPairWidth = sizeof(T) == 2 ? 2 : 1;

// kLanes elements of the first or of the second of two tokens; `values` points at those of the first.
template <int kOdd>
HEADRACE_INLINE vf load_value(const bf16* values, int64_t) {
  vf even, odd;
  load_interleaved(values, even, odd);
  return kOdd ? odd : even;
}
template <int kOdd>
HEADRACE_INLINE vf load_value(const float* values, int64_t head_dim) {
  return load(values + kOdd * head_dim);
}

template <int64_t kCount, class T>
HEADRACE_INLINE void prefetch_elements(const T* elements) {
  const char* const bytes = reinterpret_cast<const char*>(elements);
  HEADRACE_UNROLL for (int64_t i = 0; i < kCount * static_cast<int64_t>(sizeof(T)); i += 64) prefetch(bytes + i);
}

// Scores of one row in a block: it sees keys [begin, end). [first, last) are the keys of all pages that are computed with.
struct RowScores {
  float* scores;
  int64_t begin, end, first, last;

  // Whole units of some keys around what is seen.
  template <int64_t kUnit>
  int64_t seen_first() const {
    return begin / kUnit * kUnit;
  }
  template <int64_t kUnit>
  int64_t seen_last() const {
    return ceil_div(end, kUnit) * kUnit;
  }
};

// 2^x with a relative error of up to 7.5e-5, for weights that are rounded to 8 or 12 bits afterwards; exactly 0 below -126, NaN for NaN.
HEADRACE_INLINE vf vexp2_to_13_bits(vf x) {
  const vf n = round_nearest(x);
  const vf r = sub(x, n);
  vf p = splat(5.517167e-2f);
  p = fma(p, r, splat(2.4261113e-1f));
  p = fma(p, r, splat(6.9326097e-1f));
  return times_pow2(fma(p, r, splat(0.99992806f)), n, x, splat(-126.0f));
}

template <class T>
class FloatProducts {
 public:
  using Element = T;
  static constexpr int64_t kUnit = 16;

  static int64_t memory_floats(int64_t rows, int64_t head_dim) { return rows * head_dim; }
  FloatProducts(float* memory, int64_t, int64_t head_dim, bool) : q_(memory), head_dim_(head_dim), scored_(head_dim) {}
  void score_first(int64_t elements) { scored_ = elements; }

  void set_block(const T**, int64_t, int64_t) {}
  f32x16 shifted(f32x16 scores, int64_t) const { return scores; }
  void set_scales(f32x16, f32x16) {}

  void set_query(int64_t row, const float* q, float scale) {
    for (int64_t d = 0; d < head_dim_; d += kLanes) store(q_ + row * head_dim_ + d, mul(load(q + d), splat(scale)));
  }

  // scores[r][key] for rows [row, row + R) and the keys of pages [page_begin, page_end): of all elements, or of those of score_first.
  template <int R>
  void score(int64_t row, const T* const* k_pages, const T* const* v_pages, int64_t page_begin, int64_t page_end,
             float* scores) const {
    for_units<R>(page_begin * kParts, page_end * kParts, [&](auto count, int64_t unit) HEADRACE_LAMBDA {
      score_units<R, decltype(count)::value>(q_ + row * head_dim_, k_pages, v_pages, unit, scores);
    });
  }

  // The scores of row i of a register tile become weights 2^(score - top), 0 where nothing is seen; returns their sum. Scores of
  // what is not seen within a vector of 16 are minus infinity.
  float set_weights(int64_t, const RowScores& row, float top) const {
    float* const scores = row.scores;
    const int64_t first = row.seen_first<kUnit>(), last = row.seen_last<kUnit>();
    const f32x16 tops = splat16(top);
    f32x16 sum = splat16(0.0f);
    for (int64_t j = row.first; j < first; j += 16) store16(scores + j, splat16(0.0f));
    for (int64_t j = first; j < last; j += 16) {
      const f32x16 weight = vexp2(sub(load16(scores + j), tops));
      store16(scores + j, weight);
      sum = add(sum, weight);
    }
    for (int64_t j = last; j < row.last; j += 16) store16(scores + j, splat16(0.0f));
    return sum_lanes(sum);
  }

  // values[r][d] = values[r][d] * factors[r] + weights[r][key] V[key][d] over keys [key_begin, key_end), for R rows; weights as
  // set_weights left them in the scores. later_pages: pages to fetch meanwhile, as many as v_pages; v_pages itself when there are none.
  template <int R>
  void weigh(const float* weights, const float* factors, const T* const* v_pages, const T* const* later_pages, int64_t key_begin,
             int64_t key_end, float* values) const {
    for_units<R>(0, head_dim_ / kLanes, [&](auto count, int64_t vector) HEADRACE_LAMBDA {
      weigh_vectors<R, decltype(count)::value>(weights, factors, v_pages, later_pages, key_begin, key_end, vector * kLanes, values);
    });
  }

 private:
  // With few rows the values of the same pages are fetched meanwhile: they are needed next, and a decode step finds them in memory.
  template <int R, int P>
  inline __attribute__((always_inline)) void score_units(const float* q, const T* const* k_pages, const T* const* v_pages, int64_t unit,
                                          float* scores) const {
    constexpr int64_t kKeyElements = sizeof(T) == 2 ? 2 * kLanes : kLanes;  // of kLanes keys in one packed row
    const T *keys[P], *values[P];
    vf sum[R][P];
    unrolled<P>([&](auto p) HEADRACE_LAMBDA {
      keys[p] = k_pages[(unit + p) / kParts] + (unit + p) % kParts * kKeyElements;
      values[p] = v_pages[(unit + p) / kParts];
      unrolled<R>([&](auto r) HEADRACE_LAMBDA { sum[r][p] = splat(0.0f); });
    });
    // Every third row and three distances reach all rows: a pointer for each would not fit the registers.
    const float* thirds[(R + 2) / 3];
    unrolled<(R + 2) / 3>([&](auto j) HEADRACE_LAMBDA { thirds[j] = q + 3 * j * head_dim_; });
    for (int64_t i = 0; i < scored_ / 2; ++i) {
      if (R <= kTileRows / 2) unrolled<P>([&](auto p) HEADRACE_LAMBDA { prefetch(values[p] + i * 2 * kPageSize); });
      // One element of the pair after the other: with both at hand the accumulators do not fit the registers.
      unrolled<2>([&](auto odd) HEADRACE_LAMBDA {
        vf key[P];
        unrolled<P>([&](auto p) HEADRACE_LAMBDA { key[p] = load_key<decltype(odd)::value>(keys[p], i); });
        unrolled<R>([&](auto r) HEADRACE_LAMBDA {
          const vf element = splat(thirds[r / 3][r % 3 * head_dim_ + 2 * i + odd]);
          unrolled<P>([&](auto p) HEADRACE_LAMBDA { sum[r][p] = fma(element, key[p], sum[r][p]); });
        });
      });
    }
    unrolled<R>([&](auto r) HEADRACE_LAMBDA {
      unrolled<P>([&](auto p) HEADRACE_LAMBDA { store(scores + r * kScoreStride + (unit + p) * kLanes, sum[r][p]); });
    });
  }

  // C vectors from element d.
  template <int R, int C>
  inline __attribute__((always_inline)) void weigh_vectors(const float* weights, const float* factors, const T* const* pages,
                                            const T* const* later_pages, int64_t key_begin, int64_t key_end, int64_t d, float* values) const {
    vf sum[R][C];
    unrolled<R>([&](auto r) HEADRACE_LAMBDA {
      const vf factor = splat(factors[r]);
      unrolled<C>([&](auto c) HEADRACE_LAMBDA { sum[r][c] = mul(load(values + r * head_dim_ + d + c * kLanes), factor); });
    });
    const auto add_key = [&](const T* v, int64_t key, auto odd) HEADRACE_LAMBDA {
      vf value[C];
      unrolled<C>([&](auto c) HEADRACE_LAMBDA { value[c] = load_value<decltype(odd)::value>(v + c * kPairWidth<T> * kLanes, head_dim_); });
      unrolled<R>([&](auto r) HEADRACE_LAMBDA {
        const vf w = splat(weights[r * kScoreStride + key]);
        unrolled<C>([&](auto c) HEADRACE_LAMBDA { sum[r][c] = fma(w, value[c], sum[r][c]); });
      });
    };
    for (int64_t key = key_begin; key < key_end;) {
      const int64_t offset = key % kPageSize / 2 * 2 * head_dim_ + kPairWidth<T> * d;
      const T* v = pages[key / kPageSize] + offset;
      const T* later = later_pages[key / kPageSize] + offset;
      const int64_t stop = min_of(key_end, (key / kPageSize + 1) * kPageSize);
      if (key % 2 != 0) {
        add_key(v, key, std::integral_constant<int, 1>());
        ++key;
        v += 2 * head_dim_;
        later += 2 * head_dim_;
      }
      for (; key + 2 <= stop; key += 2, v += 2 * head_dim_, later += 2 * head_dim_) {
        prefetch_elements<2 * C * kLanes>(later);
        add_key(v, key, std::integral_constant<int, 0>());
        add_key(v, key + 1, std::integral_constant<int, 1>());
      }
      if (key < stop) {
        add_key(v, key, std::integral_constant<int, 0>());
        ++key;
      }
    }
    unrolled<R>([&](auto r) HEADRACE_LAMBDA {
      unrolled<C>([&](auto c) HEADRACE_LAMBDA { store(values + r * head_dim_ + d + c * kLanes, sum[r][c]); });
    });
  }

  float* q_;  // [rows][head_dim], scaled
  int64_t head_dim_, scored_;
};

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace

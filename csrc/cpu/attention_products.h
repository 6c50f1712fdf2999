// The two products of attention over one block of keys, by the element of the cache: scores = q . K and values += weights . V, for
// the query rows of a tile, and between them the weights 2^score in the form that the second takes.
//
// bf16 and float caches are multiplied as floats, one chain of fused multiply-adds per result. An int8 cache is multiplied as
// integers: a query row becomes bytes with a scale for each kQueryGroup elements, and a row's weights of a block, times the scales of V,
// become unsigned bytes with one scale. These sums are exact, so the bits of a row do not depend on the rows and keys beside it here either.
#pragma once
#include <type_traits>
#include <utility>

#include "ops.h"
#include "rotation.h"
#include "simd.h"
#include "simd_int.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int64_t kScoreStride = kKeyBlock + 16;  // floats; off a power of two, so that rows spread over cache sets
constexpr int64_t kQueryGroup = 64;
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

template <int64_t kCount, class T>
HEADRACE_INLINE void prefetch_elements(const T* elements) {
  const char* const bytes = reinterpret_cast<const char*>(elements);
  HEADRACE_UNROLL for (int64_t i = 0; i < kCount * static_cast<int64_t>(sizeof(T)); i += 64) prefetch(bytes + i);
}

// Scores of one row in a block: it sees keys [begin, end). [first, last) are the keys of all pages that are computed with.
struct RowScores {
  float* scores;
  int64_t begin, end, first, last;

  // Whole vectors of 16 around what is seen.
  int64_t seen_first() const { return begin / 16 * 16; }
  int64_t seen_last() const { return ceil_div(end, 16) * 16; }
};

// 2^(score - shift) of 16 scores.
HEADRACE_INLINE f32x16 powers(const float* scores, f32x16 shift) { return vexp2(sub(load16(scores), shift)); }

template <class T>
class Products {
 public:
  static int64_t memory_floats(int64_t rows, int64_t head_dim) { return rows * head_dim; }
  Products(float* memory, int64_t, int64_t head_dim) : q_(memory), head_dim_(head_dim) {}

  void set_query(int64_t row, const float* q, float scale) {
    for (int64_t d = 0; d < head_dim_; d += kLanes) store(q_ + row * head_dim_ + d, mul(load(q + d), splat(scale)));
  }

  // scores[r][key] for rows [row, row + R) and the keys of pages [page_begin, page_end).
  template <int R>
  void score(int64_t row, const T* const* k_pages, const T* const* v_pages, int64_t page_begin, int64_t page_end,
             float* scores) const {
    for_units<R>(page_begin * kParts, page_end * kParts, [&](auto count, int64_t unit) HEADRACE_LAMBDA {
      score_units<R, decltype(count)::value>(q_ + row * head_dim_, k_pages, v_pages, unit, scores);
    });
  }

  // The scores of row i of a register tile become weights 2^(score - shift), 0 where nothing is seen; returns their sum. Scores of
  // what is not seen within a vector of 16 are minus infinity.
  float set_weights(int64_t, const RowScores& row, const T* const*, float shift) const {
    float* const scores = row.scores;
    const int64_t first = row.seen_first(), last = row.seen_last();
    const f32x16 shifts = splat16(shift);
    f32x16 sum = splat16(0.0f);
    for (int64_t j = row.first; j < first; j += 16) store16(scores + j, splat16(0.0f));
    for (int64_t j = first; j < last; j += 16) {
      const f32x16 weight = powers(scores + j, shifts);
      store16(scores + j, weight);
      sum = add(sum, weight);
    }
    for (int64_t j = last; j < row.last; j += 16) store16(scores + j, splat16(0.0f));
    return sum_lanes(sum);
  }

  // The same for a row that sees no key of the block.
  void set_no_weights(int64_t, const RowScores& row) const {
    for (int64_t j = row.first; j < row.last; j += 16) store16(row.scores + j, splat16(0.0f));
  }

  // values[r][d] += weights[r][key] V[key][d] over keys [key_begin, key_end), for rows [row, row + R); weights as set_weights left
  // them in the scores. later_pages: pages to fetch meanwhile, as many as v_pages; v_pages itself when there are none.
  template <int R>
  void weigh(const float* weights, const T* const* v_pages, const T* const* later_pages, int64_t key_begin, int64_t key_end,
             float* values) const {
    for_units<R>(0, head_dim_ / kLanes, [&](auto count, int64_t vector) HEADRACE_LAMBDA {
      weigh_vectors<R, decltype(count)::value>(weights, v_pages, later_pages, key_begin, key_end, vector * kLanes, values);
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
    for (int64_t i = 0; i < head_dim_ / 2; ++i) {
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
  inline __attribute__((always_inline)) void weigh_vectors(const float* weights, const T* const* pages, const T* const* later_pages,
                                            int64_t key_begin, int64_t key_end, int64_t d, float* values) const {
    vf sum[R][C];
    unrolled<R>([&](auto r) HEADRACE_LAMBDA {
      unrolled<C>([&](auto c) HEADRACE_LAMBDA { sum[r][c] = load(values + r * head_dim_ + d + c * kLanes); });
    });
    for (int64_t key = key_begin; key < key_end;) {
      const int64_t offset = key % kPageSize * head_dim_ + d;
      const T* v = pages[key / kPageSize] + offset;
      const T* later = later_pages[key / kPageSize] + offset;
      const int64_t stop = min_of(key_end, (key / kPageSize + 1) * kPageSize);
      for (; key < stop; ++key, v += head_dim_, later += head_dim_) {
        prefetch_elements<C * kLanes>(later);
        vf value[C];
        unrolled<C>([&](auto c) HEADRACE_LAMBDA { value[c] = load(v + c * kLanes); });
        unrolled<R>([&](auto r) HEADRACE_LAMBDA {
          const vf w = splat(weights[r * kScoreStride + key]);
          unrolled<C>([&](auto c) HEADRACE_LAMBDA { sum[r][c] = fma(w, value[c], sum[r][c]); });
        });
      }
    }
    unrolled<R>([&](auto r) HEADRACE_LAMBDA {
      unrolled<C>([&](auto c) HEADRACE_LAMBDA { store(values + r * head_dim_ + d + c * kLanes, sum[r][c]); });
    });
  }

  float* q_;  // [rows][head_dim], scaled
  int64_t head_dim_;
};

// Integer sums stay below 2^31: 255 * 127 times 64 elements, or times 256 keys of a block.
template <>
class Products<int8_t> {
 public:
  static int64_t memory_floats(int64_t rows, int64_t head_dim) {
    return rows * (head_dim / 4 + 2 * ceil_div(head_dim, kQueryGroup)) + kTileRows * (kKeyBlock / 4 + 1);
  }
  Products(float* memory, int64_t rows, int64_t head_dim)
      : num_groups_(ceil_div(head_dim, kQueryGroup)),
        q_scales_(memory),
        q_starts_(reinterpret_cast<int32_t*>(q_scales_ + rows * num_groups_)),
        weight_scales_(q_scales_ + 2 * rows * num_groups_),
        q_(reinterpret_cast<int8_t*>(weight_scales_ + kTileRows)),
        weights_(reinterpret_cast<uint8_t*>(q_ + rows * head_dim)),
        head_dim_(head_dim) {}

  // The query is rotated as the keys are: their scales undo the factor that this brings.
  void set_query(int64_t row, const float* query, float scale) {
    float q[kMaxInt8HeadDim];
    rotate_head(query, head_dim_, q);
    for (int64_t g = 0; g < num_groups_; ++g) {
      const int64_t begin = g * kQueryGroup, end = min_of(begin + kQueryGroup, head_dim_);
      vi most = splat_int(0), sum = splat_int(0);
      for (int64_t d = begin; d < end; d += kLanes) most = max_int(most, magnitude_bits(load(q + d)));
      const Range range(most, 127.0f);
      for (int64_t d = begin; d < end; d += kLanes) {
        const vi value = to_int(mul(load(q + d), splat(range.inverse)));
        sum = add_int(sum, value);
        store_as_bytes(q_ + row * head_dim_ + d, value);
      }
      q_scales_[row * num_groups_ + g] = range.scale * scale;
      q_starts_[row * num_groups_ + g] = -128 * reduce_add_int(sum);
    }
  }

  template <int R>
  void score(int64_t row, const int8_t* const* k_pages, const int8_t* const* v_pages, int64_t page_begin, int64_t page_end,
             float* scores) const {
    for_units<R>(page_begin * kParts, page_end * kParts, [&](auto count, int64_t unit) HEADRACE_LAMBDA {
      score_units<R, decltype(count)::value>(row, k_pages, v_pages, unit, scores);
    });
  }

  // Bytes are weights times scales of V, in 254ths of the largest. What rounding takes from a key it gives to the key 16 after it, as
  // in error diffusion (Floyd and Steinberg, 1976): a byte is the step of a running total that is rounded. Many keys of little weight
  // beside one of much do not vanish.
  float set_weights(int64_t i, const RowScores& row, const int8_t* const* v_pages, float shift) const {
    float* const scores = row.scores;
    const int64_t first = row.seen_first(), last = row.seen_last(), last_full = row.end / 16 * 16;
    const f32x16 shifts = splat16(shift);
    f32x16 sum = splat16(0.0f);
    vi most = splat_int(0);
    const auto weigh16 = [&](int64_t j, bool is_full) HEADRACE_LAMBDA {
      const f32x16 weight = powers(scores + j, shifts);
      sum = add(sum, weight);
      f32x16 product = mul(weight, load16(scales_of(v_pages[j / kPageSize])));
      HEADRACE_UNROLL for (int p = 0; p < kParts; ++p) {
        // Nothing is known of the scale of a key that is not seen: it may be a NaN.
        if (!is_full) product.part[p] = if_less(splat(0.0f), weight.part[p], product.part[p], splat(0.0f));
        most = max_int(most, magnitude_bits(product.part[p]));
      }
      store16(scores + j, product);
    };
    int64_t j = first;
    if (row.begin > first) {
      weigh16(j, false);
      j += 16;
    }
    for (; j < last_full; j += 16) weigh16(j, true);
    if (j < last) weigh16(j, false);
    const Range range(most, 254.0f);  // two roundings may make it 255
    weight_scales_[i] = range.scale;
    uint8_t* const to = weights_ + i * kKeyBlock;
    memset(to + row.first, 0, static_cast<size_t>(first - row.first));
    const vf inverse = splat(range.inverse);
    vf total[kParts];
    vi given[kParts];
    HEADRACE_UNROLL for (int p = 0; p < kParts; ++p) {
      total[p] = splat(0.0f);
      given[p] = splat_int(0);
    }
    for (j = first; j < last; j += 16) {
      HEADRACE_UNROLL for (int p = 0; p < kParts; ++p) {
        total[p] = fma(load(scores + j + p * kLanes), inverse, total[p]);
        const vi rounded = to_int(total[p]);
        store_as_bytes(to + j + p * kLanes, sub_int(rounded, given[p]));
        given[p] = rounded;
      }
    }
    memset(to + last, 0, static_cast<size_t>(row.last - last));
    return sum_lanes(sum);
  }

  void set_no_weights(int64_t i, const RowScores& row) const {
    weight_scales_[i] = 0.0f;
    memset(weights_ + i * kKeyBlock + row.first, 0, static_cast<size_t>(row.last - row.first));
  }

  template <int R>
  void weigh(const float*, const int8_t* const* v_pages, const int8_t* const* later_pages, int64_t key_begin, int64_t key_end,
             float* values) const {
    const int64_t page_begin = key_begin / kPageSize, page_end = ceil_div(key_end, kPageSize);
    for_units<R>(0, head_dim_ / kLanes, [&](auto count, int64_t vector) HEADRACE_LAMBDA {
      weigh_vectors<R, decltype(count)::value>(v_pages, later_pages, page_begin, page_end, vector * kLanes, values);
    });
  }

 private:
  // The factors between floats and integers up to `top`, for the largest magnitude (as bits). It is compared as an integer, where a NaN
  // is more than anything: a NaN or an infinity makes the scale non-finite, and with it the result.
  struct Range {
    float scale, inverse;
    Range(vi magnitudes, float top) {
      const int32_t bits = reduce_max_int(magnitudes);
      float magnitude;
      memcpy(&magnitude, &bits, 4);
      scale = magnitude / top;
      inverse = magnitude > 1e-30f ? top / magnitude : 0.0f;  // below that the integers are 0: top / magnitude may overflow
    }
  };

  const float* scales_of(const int8_t* page) const { return reinterpret_cast<const float*>(page + head_dim_ * kPageSize); }

  template <int R, int P>
  inline __attribute__((always_inline)) void score_units(int64_t row, const int8_t* const* k_pages, const int8_t* const* v_pages, int64_t unit,
                                          float* scores) const {
    const uint8_t* keys[P];
    const int8_t* values[P];
    unrolled<P>([&](auto p) HEADRACE_LAMBDA {
      keys[p] = reinterpret_cast<const uint8_t*>(k_pages[(unit + p) / kParts]) + (unit + p) % kParts * 4 * kLanes;
      values[p] = v_pages[(unit + p) / kParts];
    });
    for (int64_t g = 0; g < num_groups_; ++g) {
      const float* const q_scales = q_scales_ + row * num_groups_ + g;
      const int32_t* const q_starts = q_starts_ + row * num_groups_ + g;
      vi sum[R][P];
      unrolled<R>([&](auto r) HEADRACE_LAMBDA {
        const vi start = start_of_bytes(q_starts[r * num_groups_]);
        unrolled<P>([&](auto p) HEADRACE_LAMBDA { sum[r][p] = start; });
      });
      const int8_t* thirds[(R + 2) / 3];
      unrolled<(R + 2) / 3>([&](auto j) HEADRACE_LAMBDA { thirds[j] = q_ + (row + 3 * j) * head_dim_; });
      const int64_t end = min_of((g + 1) * kQueryGroup, head_dim_);
      for (int64_t d = g * kQueryGroup; d < end; d += 4) {
        Bytes key[P];
        unrolled<P>([&](auto p) HEADRACE_LAMBDA {
          prefetch(values[p] + d * kPageSize);
          key[p] = load_weights(keys[p] + d * kPageSize);
        });
        unrolled<R>([&](auto r) HEADRACE_LAMBDA {
          const vi four = splat_bytes(thirds[r / 3] + r % 3 * head_dim_ + d);
          unrolled<P>([&](auto p) HEADRACE_LAMBDA { dot(sum[r][p], key[p], four); });
        });
      }
      unrolled<P>([&](auto p) HEADRACE_LAMBDA {
        const vf k_scale = load(scales_of(k_pages[(unit + p) / kParts]) + (unit + p) % kParts * kLanes);
        unrolled<R>([&](auto r) HEADRACE_LAMBDA {
          float* const to = scores + r * kScoreStride + (unit + p) * kLanes;
          const vf scale = mul(splat(q_scales[r * num_groups_]), k_scale), part = to_float(sum[r][p]);
          store(to, g == 0 ? mul(part, scale) : fma(part, scale, load(to)));
        });
      });
    }
  }

  template <int R, int C>
  inline __attribute__((always_inline)) void weigh_vectors(const int8_t* const* pages, const int8_t* const* later_pages,
                                            int64_t page_begin, int64_t page_end, int64_t d, float* values) const {
    vi sum[R][C];
    unrolled<R>([&](auto r) HEADRACE_LAMBDA {
      unrolled<C>([&](auto c) HEADRACE_LAMBDA { sum[r][c] = splat_int(0); });
    });
    for (int64_t page = page_begin; page < page_end; ++page) {
      const int8_t* v = pages[page] + 4 * d;
      const int8_t* later = later_pages[page] + 4 * d;
      const uint8_t* w = weights_ + page * kPageSize;
      for (int64_t i = 0; i < kPageSize / 4; ++i, v += 4 * head_dim_, later += 4 * head_dim_, w += 4) {
        prefetch_elements<4 * C * kLanes>(later);
        vi value[C];
        unrolled<C>([&](auto c) HEADRACE_LAMBDA { value[c] = load_bytes(v + c * 4 * kLanes); });
        unrolled<R>([&](auto r) HEADRACE_LAMBDA {
          const vi four = splat_bytes(w + r * kKeyBlock);
          unrolled<C>([&](auto c) HEADRACE_LAMBDA { dot_unsigned(sum[r][c], four, value[c]); });
        });
      }
    }
    unrolled<R>([&](auto r) HEADRACE_LAMBDA {
      const vf scale = splat(weight_scales_[r]);
      unrolled<C>([&](auto c) HEADRACE_LAMBDA {
        float* const to = values + r * head_dim_ + d + c * kLanes;
        store(to, fma(to_float(sum[r][c]), scale, load(to)));
      });
    });
  }

  int64_t num_groups_;    // of a query
  float* q_scales_;       // [rows][num_groups]
  int32_t* q_starts_;     // as q_scales: -128 times the sums of their bytes
  float* weight_scales_;  // [kTileRows], of the rows being weighed
  int8_t* q_;             // [rows][head_dim]
  uint8_t* weights_;      // [kTileRows][kKeyBlock]
  int64_t head_dim_;
};

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace

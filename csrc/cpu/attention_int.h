// Products of attention over an int8 or int16 cache, as integers: a query row becomes bytes or words with a scale for each kQueryGroup
// elements, and a row's weights of a block, times the scales of V, become bytes or words with one scale. These sums are exact, so the bits
// of a row do not depend on the rows and keys beside it here either.
#pragma once
#include "attention_products.h"
#include "rotation.h"
#include "simd_words.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int64_t kQueryGroup = 64;

// How the integers of a cache are multiplied. kPerLane of them lie side by side in 32 bits. Queries are at most kQueryLimit, the largest
// weight of a block is kLevels.

// A scale of V is 2^log * correction, and 2^-log is inverse.
struct ScaleParts {
  vf log, correction, inverse;
};

// Keys are codes 0 .. 255, of rotated elements. Sums stay below 2^31: 255 * 127 times 64 elements, or times 256 keys. Two roundings may
// make a weight 255.
struct ByteCache {
  using Element = int8_t;
  using Weight = uint8_t;
  using Keys = Bytes;
  using Values = SignedBytes;
  static constexpr int64_t kPerLane = 4;
  static constexpr int32_t kKeyZero = 128;
  static constexpr bool kIsRotated = true, kIsCorrected = true;
  static constexpr float kQueryLimit = 127.0f, kLevels = 254.0f, kLogLevels = 7.98868469f;

  HEADRACE_INLINE void store_query(int8_t* p, vi a) { store_as_bytes(p, a); }
  HEADRACE_INLINE void store_weights(uint8_t* p, vi a) { store_as_bytes(p, a); }
  HEADRACE_INLINE vi start_of(int32_t start) { return start_of_bytes(start); }
  HEADRACE_INLINE Bytes load_keys(const int8_t* p) { return load_weights(reinterpret_cast<const uint8_t*>(p)); }
  HEADRACE_INLINE void dot_keys(vi& sum, const Bytes& keys, vi query) { dot(sum, keys, query); }
  HEADRACE_INLINE UnsignedBytes splat_weights(const uint8_t* p) { return splat_unsigned(p); }
  HEADRACE_INLINE SignedBytes load_values(const int8_t* p) { return load_signed(p); }
  HEADRACE_INLINE void dot_values(vi& sum, const UnsignedBytes& weights, const SignedBytes& values) { dot_unsigned(sum, weights, values); }
  // The bits of a float, as an integer, are Mitchell's logarithm (Computer Multiplication and Division Using Binary Logarithms, 1962). It is
  // too low by up to 0.0861: with that no correction is above 1.
  HEADRACE_INLINE ScaleParts parts_of(vf scale) {
    const vf log = fma(to_float(magnitude_bits(scale)), splat(0x1p-23f), splat(-127.0f + 0.0861f));
    const vf inverse = vexp2(sub(splat(0.0f), log));
    return {log, mul(scale, inverse), inverse};
  }
};

struct WordCache {
  using Element = int16_t;
  using Weight = int16_t;
  using Keys = vi;
  using Values = vi;
  static constexpr int64_t kPerLane = 2;
  static constexpr int32_t kKeyZero = 0;
  static constexpr bool kIsRotated = false, kIsCorrected = false;
  static constexpr float kQueryLimit = 4095.0f, kLevels = 32760.0f, kLogLevels = 14.9996477f;

  HEADRACE_INLINE void store_query(int16_t* p, vi a) { store_as_words(p, a); }
  HEADRACE_INLINE void store_weights(int16_t* p, vi a) { store_as_words(p, a); }
  HEADRACE_INLINE vi start_of(int32_t) { return splat_int(0); }
  HEADRACE_INLINE vi load_keys(const int16_t* p) { return load_words(p); }
  HEADRACE_INLINE void dot_keys(vi& sum, vi keys, vi query) { dot_words(sum, keys, query); }
  HEADRACE_INLINE vi splat_weights(const int16_t* p) { return splat_words(p); }
  HEADRACE_INLINE vi load_values(const int16_t* p) { return load_words(p); }
  HEADRACE_INLINE void dot_values(vi& sum, vi weights, vi values) { dot_words(sum, weights, values); }
  // The scales of values are powers of 2.
  HEADRACE_INLINE ScaleParts parts_of(vf scale) {
    const vf log = fma(to_float(magnitude_bits(scale)), splat(0x1p-23f), splat(-127.0f));
    return {log, splat(1.0f), pow2(sub(splat(0.0f), log))};
  }
};
static_assert(int64_t{kMaxWord} * 4095 * kQueryGroup < int64_t{1} << 31);
// Of a row's weights in a block. Rounding them twice adds at most 1 for each key, and floats lose a little.
constexpr float kMaxWeightsSum = 261900.0f;
static_assert((261910 + kKeyBlock) * int64_t{kMaxWord} < int64_t{1} << 31);

// Cache: ByteCache or WordCache.
template <class Cache>
class IntProducts {
 public:
  using Element = typename Cache::Element;
  using Weight = typename Cache::Weight;
  static constexpr int64_t kUnit = 16;

  static int64_t memory_floats(int64_t rows, int64_t head_dim) {
    return 3 * kKeyBlock + 2 * 16 + rows * (head_dim / kPerLane + 2 * ceil_div(head_dim, kQueryGroup)) + kTileRows * kKeyBlock / kPerLane;
  }
  IntProducts(float* memory, int64_t rows, int64_t head_dim, bool is_capped)
      : num_groups_(ceil_div(head_dim, kQueryGroup)),
        logs_(memory),
        corrections_(logs_ + kKeyBlock),
        inverses_(corrections_ + kKeyBlock),
        block_tops_(inverses_ + kKeyBlock),
        weight_scales_(block_tops_ + 16),
        q_scales_(weight_scales_ + 16),
        q_starts_(reinterpret_cast<int32_t*>(q_scales_ + rows * num_groups_)),
        q_(reinterpret_cast<Element*>(q_scales_ + 2 * rows * num_groups_)),
        weights_(reinterpret_cast<Weight*>(q_ + rows * head_dim)),
        head_dim_(head_dim),
        scored_(head_dim),
        is_capped_(is_capped) {}
  // The integers of a query beyond them must be 0.
  void score_first(int64_t elements) { scored_ = elements; }

  // The query is rotated if the keys are: their scales undo the factor that this brings.
  void set_query(int64_t row, const float* query, float scale) {
    float rotated[kMaxIntHeadDim];
    if (Cache::kIsRotated) rotate_head(query, head_dim_, rotated);
    const float* const q = Cache::kIsRotated ? rotated : query;
    for (int64_t g = 0; g < num_groups_; ++g) {
      const int64_t begin = g * kQueryGroup, end = min_of(begin + kQueryGroup, head_dim_);
      vi most = splat_int(0), sum = splat_int(0);
      for (int64_t d = begin; d < end; d += kLanes) most = max_int(most, magnitude_bits(load(q + d)));
      const Range range(most, Cache::kQueryLimit);
      for (int64_t d = begin; d < end; d += kLanes) {
        const vi value = to_int(mul(load(q + d), splat(range.inverse)));
        sum = add_int(sum, value);
        Cache::store_query(q_ + row * head_dim_ + d, value);
      }
      q_scales_[row * num_groups_ + g] = range.scale * scale;
      q_starts_[row * num_groups_ + g] = -Cache::kKeyZero * reduce_add_int(sum);
    }
  }

  template <int R>
  void score(int64_t row, const Element* const* k_pages, const Element* const* v_pages, int64_t page_begin, int64_t page_end,
             float* scores) const {
    for_units<R>(page_begin * kParts, page_end * kParts, [&](auto count, int64_t unit) HEADRACE_LAMBDA {
      score_units<R, decltype(count)::value>(row, k_pages, v_pages, unit, scores);
    });
  }

  // What the scales of V contribute to the scores of a block's keys, [key_begin, key_end) of it. A weight that is multiplied by the scale
  // of its key is 2^(score - top) 2^log * correction: log, near the logarithm of the scale, is added to the score, so that the largest
  // score of a row belongs to its largest product.
  void set_block(const Element** v_pages, int64_t key_begin, int64_t key_end) {
    for (int64_t j = key_begin / 16 * 16; j < key_end; j += kLanes) {
      // A scale below 2^-64 counts as 0 beside any other, but its logarithm must be finite.
      const vf scale = vmax(splat(0x1p-64f), load(scales_of(v_pages[j / kPageSize]) + j % kPageSize));
      const ScaleParts parts = Cache::parts_of(scale);
      store(logs_ + j, parts.log);
      if (Cache::kIsCorrected) store(corrections_ + j, parts.correction);
      store(inverses_ + j, fma(scale, splat(0.0f), parts.inverse));  // not finite where the scale is not
    }
  }
  f32x16 shifted(f32x16 scores, int64_t j) const { return add(scores, load16(logs_ + j)); }

  // block: the largest scores of a block in the rows of a register tile. fractions: 2^(block - running maximum).
  void set_scales(f32x16 block, f32x16 fractions) {
    store16(block_tops_, sub(block, splat16(Cache::kLogLevels)));
    store16(weight_scales_, mul(fractions, splat16(1.0f / Cache::kLevels)));
  }

  float set_weights(int64_t i, const RowScores& row, float) const {
    Weight* const to = weights_ + i * kKeyBlock;
    if (row.begin >= row.end) {
      clear(to, row.first, row.last);
      return 0.0f;
    }
    clear(to, row.first, row.seen_first<kUnit>());
    clear(to, row.seen_last<kUnit>(), row.last);
    if constexpr (kPerLane == 4) return diffuse_weights(i, row, to);
    else return limit_weights(i, row, to);
  }

  template <int R>
  void weigh(const float*, const float* factors, const Element* const* v_pages, const Element* const* later_pages, int64_t key_begin,
             int64_t key_end, float* values) const {
    const int64_t page_begin = key_begin / kPageSize, page_end = ceil_div(key_end, kPageSize);
    for_units<R>(0, head_dim_ / kLanes, [&](auto count, int64_t vector) HEADRACE_LAMBDA {
      weigh_vectors<R, decltype(count)::value>(factors, v_pages, later_pages, page_begin, page_end, vector * kLanes, values);
    });
  }

 private:
  static constexpr int64_t kPerLane = Cache::kPerLane;

  // body(part, key, weight, scale_part) for all kLanes keys that the row sees. scale_part(values): those of set_block for these keys.
  template <class Body>
  inline __attribute__((always_inline)) void for_weights(int64_t i, const RowScores& row, Body body) const {
    const int64_t first = row.seen_first<kUnit>(), last = row.seen_last<kUnit>(), last_full = row.end / 16 * 16;
    const vf top = splat(block_tops_[i]);
    const auto weigh16 = [&](int64_t j, bool is_full) HEADRACE_LAMBDA {
      unrolled<kParts>([&](auto p) HEADRACE_LAMBDA {
        const int64_t at = j + p * kLanes;
        const vf weight = vexp2_to_13_bits(sub(load(row.scores + at), top));
        body(p, at, weight, [&](const float* values) HEADRACE_LAMBDA {
          // Nothing is known of the scale of a key that is not seen: it may be a NaN.
          return is_full ? load(values + at) : if_less(splat(0.0f), weight, load(values + at), splat(0.0f));
        });
      });
    };
    int64_t j = first;
    if (row.begin > first) {
      weigh16(j, false);
      j += 16;
    }
    for (; j < last_full; j += 16) weigh16(j, true);
    if (j < last) weigh16(j, false);
  }

  // Integers are weights times scales of V, kLevels for the largest. What rounding takes from a key it gives to the key 16 after it, as
  // in error diffusion (Floyd and Steinberg, 1976): an integer is the step of a running total that is rounded. Many keys of little weight
  // beside one of much do not vanish.
  float diffuse_weights(int64_t i, const RowScores& row, Weight* to) const {
    f32x16 sum = splat16(0.0f), total = sum;
    vi given[kParts];
    HEADRACE_UNROLL for (int p = 0; p < kParts; ++p) given[p] = splat_int(0);
    for_weights(i, row, [&](auto p, int64_t at, vf weight, auto scale_part) HEADRACE_LAMBDA {
      sum.part[p] = fma(weight, scale_part(inverses_), sum.part[p]);
      total.part[p] = fma(weight, scale_part(corrections_), total.part[p]);
      const vi rounded = to_int(total.part[p]);
      Cache::store_weights(to + at, sub_int(rounded, given[p]));
      given[p] = rounded;
    });
    return sum_lanes(sum) * weight_scales_[i];
  }

  // Integers are weights times scales of V, kLevels for the largest, or less when their sum would be above kMaxWeightsSum: a row that looks
  // at few keys has finer weights than one that looks at all.
  float limit_weights(int64_t i, const RowScores& row, Weight* to) const {
    f32x16 sum = splat16(0.0f), total = sum;
    for_weights(i, row, [&](auto p, int64_t at, vf weight, auto scale_part) HEADRACE_LAMBDA {
      sum.part[p] = fma(weight, scale_part(inverses_), sum.part[p]);
      total.part[p] = add(total.part[p], weight);
      Cache::store_weights(to + at, to_int(weight));
    });
    const float scale = weight_scales_[i], share = kMaxWeightsSum / sum_lanes(total);
    if (share < 1.0f) {
      const int32_t factor = static_cast<int32_t>(share * 0x1p15f);
      for (int64_t j = row.begin / (2 * kLanes) * (2 * kLanes); j < row.end; j += 2 * kLanes) scale_words(to + j, factor);
      weight_scales_[i] = scale * (0x1p15f / static_cast<float>(factor));
    }
    return sum_lanes(sum) * scale;
  }

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

  const float* scales_of(const Element* page) const { return reinterpret_cast<const float*>(page + head_dim_ * kPageSize); }
  static void clear(Weight* weights, int64_t begin, int64_t end) {
    memset(weights + begin, 0, static_cast<size_t>(end - begin) * sizeof(Weight));
  }

  template <int R, int P>
  inline __attribute__((always_inline)) void score_units(int64_t row, const Element* const* k_pages, const Element* const* v_pages, int64_t unit,
                                          float* scores) const {
    const Element *keys[P], *values[P];
    unrolled<P>([&](auto p) HEADRACE_LAMBDA {
      keys[p] = k_pages[(unit + p) / kParts] + (unit + p) % kParts * kPerLane * kLanes;
      values[p] = v_pages[(unit + p) / kParts];
    });
    for (int64_t g = 0; g * kQueryGroup < scored_; ++g) {
      const float* const q_scales = q_scales_ + row * num_groups_ + g;
      const int32_t* const q_starts = q_starts_ + row * num_groups_ + g;
      vi sum[R][P];
      unrolled<R>([&](auto r) HEADRACE_LAMBDA {
        const vi start = Cache::start_of(q_starts[r * num_groups_]);
        unrolled<P>([&](auto p) HEADRACE_LAMBDA { sum[r][p] = start; });
      });
      const Element* thirds[(R + 2) / 3];
      unrolled<(R + 2) / 3>([&](auto j) HEADRACE_LAMBDA { thirds[j] = q_ + (row + 3 * j) * head_dim_; });
      const int64_t end = min_of((g + 1) * kQueryGroup, scored_);
      for (int64_t d = g * kQueryGroup; d < end; d += kPerLane) {
        typename Cache::Keys key[P];
        unrolled<P>([&](auto p) HEADRACE_LAMBDA {
          prefetch(values[p] + d * kPageSize);
          key[p] = Cache::load_keys(keys[p] + d * kPageSize);
        });
        unrolled<R>([&](auto r) HEADRACE_LAMBDA {
          const vi query = splat_bytes(thirds[r / 3] + r % 3 * head_dim_ + d);
          unrolled<P>([&](auto p) HEADRACE_LAMBDA { Cache::dot_keys(sum[r][p], key[p], query); });
        });
      }
      vf start[P];
      unrolled<P>([&](auto p) HEADRACE_LAMBDA { start[p] = is_capped_ ? splat(0.0f) : load(logs_ + (unit + p) * kLanes); });
      unrolled<P>([&](auto p) HEADRACE_LAMBDA {
        const vf k_scale = load(scales_of(k_pages[(unit + p) / kParts]) + (unit + p) % kParts * kLanes);
        unrolled<R>([&](auto r) HEADRACE_LAMBDA {
          float* const to = scores + r * kScoreStride + (unit + p) * kLanes;
          const vf scale = mul(splat(q_scales[r * num_groups_]), k_scale), part = to_float(sum[r][p]);
          store(to, fma(part, scale, g == 0 ? start[p] : load(to)));
        });
      });
    }
  }

  template <int R, int C>
  inline __attribute__((always_inline)) void weigh_vectors(const float* factors, const Element* const* pages,
                                            const Element* const* later_pages, int64_t page_begin, int64_t page_end, int64_t d, float* values) const {
    vi sum[R][C];
    unrolled<R>([&](auto r) HEADRACE_LAMBDA {
      unrolled<C>([&](auto c) HEADRACE_LAMBDA { sum[r][c] = splat_int(0); });
    });
    for (int64_t page = page_begin; page < page_end; ++page) {
      const Element* v = pages[page] + kPerLane * d;
      const Element* later = later_pages[page] + kPerLane * d;
      const Weight* w = weights_ + page * kPageSize;
      for (int64_t i = 0; i < kPageSize / kPerLane; ++i, v += kPerLane * head_dim_, later += kPerLane * head_dim_, w += kPerLane) {
        prefetch_elements<kPerLane * C * kLanes>(later);
        typename Cache::Values value[C];
        unrolled<C>([&](auto c) HEADRACE_LAMBDA { value[c] = Cache::load_values(v + c * kPerLane * kLanes); });
        unrolled<R>([&](auto r) HEADRACE_LAMBDA {
          const auto weight = Cache::splat_weights(w + r * kKeyBlock);
          unrolled<C>([&](auto c) HEADRACE_LAMBDA { Cache::dot_values(sum[r][c], weight, value[c]); });
        });
      }
    }
    unrolled<R>([&](auto r) HEADRACE_LAMBDA {
      const vf scale = splat(weight_scales_[r]), factor = splat(factors[r]);
      unrolled<C>([&](auto c) HEADRACE_LAMBDA {
        float* const to = values + r * head_dim_ + d + c * kLanes;
        store(to, fma(to_float(sum[r][c]), scale, mul(load(to), factor)));
      });
    });
  }

  int64_t num_groups_;    // of a query
  float* logs_;           // [kKeyBlock], as are the next two: see set_block
  float* corrections_;
  float* inverses_;
  float* block_tops_;     // [16], of the rows being weighed
  float* weight_scales_;  // [16]
  float* q_scales_;       // [rows][num_groups]
  int32_t* q_starts_;     // as q_scales: -kKeyZero times the sums of their integers
  Element* q_;            // [rows][head_dim]
  Weight* weights_;       // [kTileRows][kKeyBlock]
  int64_t head_dim_, scored_;
  bool is_capped_;        // scores are capped before the logarithms are added
};

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace

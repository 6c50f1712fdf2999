// Products of attention over an int8 cache, as integers: a query row becomes bytes with a scale for each kQueryGroup elements, and a
// row's weights of a block, times the scales of V, become unsigned bytes with one scale. These sums are exact, so the bits of a row do
// not depend on the rows and keys beside it here either.
#pragma once
#include "attention_products.h"
#include "rotation.h"
#include "simd_int.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int64_t kQueryGroup = 64;

// Integer sums stay below 2^31: 255 * 127 times 64 elements, or times 256 keys of a block.
class Int8Products {
 public:
  using Element = int8_t;
  static constexpr int64_t kUnit = 16;

  static int64_t memory_floats(int64_t rows, int64_t head_dim) {
    return 3 * kKeyBlock + 2 * 16 + rows * (head_dim / 4 + 2 * ceil_div(head_dim, kQueryGroup)) + kTileRows * kKeyBlock / 4;
  }
  Int8Products(float* memory, int64_t rows, int64_t head_dim, bool is_capped)
      : num_groups_(ceil_div(head_dim, kQueryGroup)),
        logs_(memory),
        corrections_(logs_ + kKeyBlock),
        inverses_(corrections_ + kKeyBlock),
        block_tops_(inverses_ + kKeyBlock),
        weight_scales_(block_tops_ + 16),
        q_scales_(weight_scales_ + 16),
        q_starts_(reinterpret_cast<int32_t*>(q_scales_ + rows * num_groups_)),
        q_(reinterpret_cast<int8_t*>(q_scales_ + 2 * rows * num_groups_)),
        weights_(reinterpret_cast<uint8_t*>(q_ + rows * head_dim)),
        head_dim_(head_dim),
        is_capped_(is_capped) {}

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

  // What the scales of V contribute to the scores of a block's keys, [key_begin, key_end) of it. A weight that is multiplied by the scale
  // of its key is 2^(score - top) 2^log * correction: log, near the logarithm of the scale, is added to the score, so that the largest
  // score of a row belongs to its largest product.
  void set_block(const int8_t** v_pages, int64_t key_begin, int64_t key_end) {
    for (int64_t j = key_begin / 16 * 16; j < key_end; j += 16) {
      // A scale below 2^-64 counts as 0 beside any other, but its logarithm must be finite.
      const f32x16 scale = vmax(splat16(0x1p-64f), load16(scales_of(v_pages[j / kPageSize])));
      f32x16 log;
      HEADRACE_UNROLL for (int p = 0; p < kParts; ++p) {
        // The bits of a float, as an integer: Mitchell's logarithm (Computer Multiplication and Division Using Binary Logarithms, 1962),
        // and the most by which it is too low, so that no correction is above 1.
        log.part[p] = fma(to_float(magnitude_bits(scale.part[p])), splat(0x1p-23f), splat(-127.0f + 0.0861f));
      }
      const f32x16 inverse = vexp2(sub(splat16(0.0f), log)), correction = mul(scale, inverse);
      store16(logs_ + j, log);
      store16(corrections_ + j, correction);
      store16(inverses_ + j, fma(correction, splat16(0.0f), inverse));  // not finite where the scale is not
    }
  }
  f32x16 shifted(f32x16 scores, int64_t j) const { return add(scores, load16(logs_ + j)); }

  // block: the largest scores of a block in the rows of a register tile. fractions: 2^(block - running maximum).
  void set_scales(f32x16 block, f32x16 fractions) {
    store16(block_tops_, sub(block, splat16(kLogLevels)));
    store16(weight_scales_, mul(fractions, splat16(1.0f / kLevels)));
  }

  // Bytes are weights times scales of V, in 254ths of the largest. What rounding takes from a key it gives to the key 16 after it, as
  // in error diffusion (Floyd and Steinberg, 1976): a byte is the step of a running total that is rounded. Many keys of little weight
  // beside one of much do not vanish.
  float set_weights(int64_t i, const RowScores& row, float) const {
    uint8_t* const to = weights_ + i * kKeyBlock;
    const int64_t first = row.seen_first<kUnit>(), last = row.seen_last<kUnit>(), last_full = row.end / 16 * 16;
    if (row.begin >= row.end) {
      memset(to + row.first, 0, static_cast<size_t>(row.last - row.first));
      return 0.0f;
    }
    memset(to + row.first, 0, static_cast<size_t>(first - row.first));
    const vf top = splat(block_tops_[i]);
    f32x16 sum = splat16(0.0f), total = sum;
    vi given[kParts];
    HEADRACE_UNROLL for (int p = 0; p < kParts; ++p) given[p] = splat_int(0);
    const auto weigh16 = [&](int64_t j, bool is_full) HEADRACE_LAMBDA {
      HEADRACE_UNROLL for (int p = 0; p < kParts; ++p) {
        const int64_t at = j + p * kLanes;
        const vf weight = vexp2_to_8_bits(sub(load(row.scores + at), top));
        vf inverse = load(inverses_ + at), correction = load(corrections_ + at);
        if (!is_full) {
          // Nothing is known of the scale of a key that is not seen: it may be a NaN.
          inverse = if_less(splat(0.0f), weight, inverse, splat(0.0f));
          correction = if_less(splat(0.0f), weight, correction, splat(0.0f));
        }
        sum.part[p] = fma(weight, inverse, sum.part[p]);
        total.part[p] = fma(weight, correction, total.part[p]);
        const vi rounded = to_int(total.part[p]);
        store_as_bytes(to + at, sub_int(rounded, given[p]));
        given[p] = rounded;
      }
    };
    int64_t j = first;
    if (row.begin > first) {
      weigh16(j, false);
      j += 16;
    }
    for (; j < last_full; j += 16) weigh16(j, true);
    if (j < last) weigh16(j, false);
    memset(to + last, 0, static_cast<size_t>(row.last - last));
    return sum_lanes(sum) * weight_scales_[i];
  }

  template <int R>
  void weigh(const float*, const float* factors, const int8_t* const* v_pages, const int8_t* const* later_pages, int64_t key_begin,
             int64_t key_end, float* values) const {
    const int64_t page_begin = key_begin / kPageSize, page_end = ceil_div(key_end, kPageSize);
    for_units<R>(0, head_dim_ / kLanes, [&](auto count, int64_t vector) HEADRACE_LAMBDA {
      weigh_vectors<R, decltype(count)::value>(factors, v_pages, later_pages, page_begin, page_end, vector * kLanes, values);
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
  inline __attribute__((always_inline)) void weigh_vectors(const float* factors, const int8_t* const* pages,
                                            const int8_t* const* later_pages, int64_t page_begin, int64_t page_end, int64_t d, float* values) const {
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
      const vf scale = splat(weight_scales_[r]), factor = splat(factors[r]);
      unrolled<C>([&](auto c) HEADRACE_LAMBDA {
        float* const to = values + r * head_dim_ + d + c * kLanes;
        store(to, fma(to_float(sum[r][c]), scale, mul(load(to), factor)));
      });
    });
  }

  static constexpr float kLevels = 254.0f, kLogLevels = 7.98868469f;  // two roundings may make a byte 255

  int64_t num_groups_;    // of a query
  float* logs_;           // [kKeyBlock], as are the next two: see set_block
  float* corrections_;
  float* inverses_;       // of the scales, divided by the corrections
  float* block_tops_;     // [16], of the rows being weighed
  float* weight_scales_;  // [16]
  float* q_scales_;       // [rows][num_groups]
  int32_t* q_starts_;     // as q_scales: -128 times the sums of their bytes
  int8_t* q_;             // [rows][head_dim]
  uint8_t* weights_;      // [kTileRows][kKeyBlock]
  int64_t head_dim_;
  bool is_capped_;        // scores are capped before the logarithms are added
};

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace

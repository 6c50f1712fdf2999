// The online softmax between the two products of attention (Milakov and Gimelshein, 2018), over the register tiles of rows that products take.
#pragma once
#include "attention_products.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();
constexpr float kLog2E = 1.44269504088896341f;  // scores are powers of 2 rather than of e: one multiplication less for each

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

inline void clear(const State& s, int64_t rows, int64_t head_dim) {
  for (int64_t r = 0; r < rows; ++r) {
    s.max[r] = kMinusInfinity;
    s.sum[r] = 0.0f;
  }
  memset(s.values, 0, static_cast<size_t>(rows * head_dim) * 4);
}

// 2^(x - top), 0 where x is minus infinity.
HEADRACE_INLINE f32x16 fraction_of(f32x16 x, f32x16 top) {
  f32x16 result = vexp2(sub(x, top));
  HEADRACE_UNROLL for (int p = 0; p < kParts; ++p) {
    result.part[p] = if_less(splat(kMinusInfinity), x.part[p], result.part[p], splat(0.0f));
  }
  return result;
}

// The largest of the scores that a row sees, after the cap; those around it within vectors of 16 become minus infinity.
template <class Products>
float finish_scores(const Products& products, const RowScores& row, float softcap) {
  if (row.begin >= row.end) return kMinusInfinity;
  float* const s = row.scores;
  const int64_t seen_first = row.template seen_first<Products::kUnit>(), seen_last = row.template seen_last<Products::kUnit>();
  if (softcap != 0.0f) {
    const f32x16 cap = splat16(softcap * kLog2E), inverse = splat16(1.0f / (softcap * kLog2E));
    for (int64_t j = seen_first; j < seen_last; j += 16) {
      store16(s + j, products.shifted(mul(cap, vtanh(mul(load16(s + j), inverse))), j));
    }
  }
  for (int64_t j = seen_first; j < row.begin; ++j) s[j] = kMinusInfinity;
  for (int64_t j = row.end; j < seen_last; ++j) s[j] = kMinusInfinity;
  f32x16 top = splat16(kMinusInfinity), other = top;  // two chains: one would be as long as the exponentials take
  int64_t j = seen_first;
  for (; j + 32 <= seen_last; j += 32) {
    top = vmax(top, load16(s + j));
    other = vmax(other, load16(s + j + 16));
  }
  if (j < seen_last) top = vmax(top, load16(s + j));
  return max_lanes(vmax(top, other));
}

// The scores of a register tile's rows become weights, and their running maxima and sums take note of them. factors[i]: what the
// values of row i so far must be multiplied by.
template <class Products>
void softmax_tile(Products& products, const RowScores* rows, int64_t count, float softcap, float* row_max, float* row_sum,
                  float* factors) {
  float block_max[16], tops[16];
  for (int64_t i = 0; i < count; ++i) block_max[i] = finish_scores(products, rows[i], softcap);
  const f32x16 before = load_first(row_max, count), block = load_first(block_max, count), top = vmax(before, block);
  store16(tops, top);
  store16(factors, fraction_of(before, top));
  products.set_scales(block, fraction_of(block, top));
  for (int64_t i = 0; i < count; ++i) {
    row_max[i] = tops[i];
    row_sum[i] = row_sum[i] * factors[i] + products.set_weights(i, rows[i], tops[i]);
  }
}

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace

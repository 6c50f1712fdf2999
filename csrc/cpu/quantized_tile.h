// What the tiles of quantised linear layers share: their sizes, how rows are cut into them, and how results reach y.
#pragma once
#include "kernels.h"
#include "simd_int.h"

namespace headrace {
namespace HEADRACE_ISA {

constexpr int kUnitsOfBlock = static_cast<int>(kPackedColumns) / kLanes;  // a unit is kLanes columns
constexpr int64_t kRowBlock = 192;  // rows that go through a block of weights while these are in cache
constexpr int64_t kAheadBytes = 8192;  // weights are asked for this far ahead of their use, when they come from memory
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTile = 6;  // rows: x 2 units x 2 accumulators, or x 4 units, fit 32 registers
#elif defined(__AVX2__)
constexpr int kTile = 4;  // rows x 2 units fit 16 registers beside the operands
#else
constexpr int kTile = 2;
#endif

// The rows as the products of whole bytes read them, [rows][k_padded].
HEADRACE_INLINE const WideElement* wide_rows(const QuantizedRows& x) {
  return static_cast<const WideElement*>(sizeof(WideElement) == 1 ? x.values : x.words);
}

// R rows x C units of results, whose first column is `column`.
template <int R, int C>
HEADRACE_INLINE void finish(const QuantizedLinearArgs& a, int64_t row, int64_t column, const vf (&result)[R][C]) {
  HEADRACE_UNROLL for (int c = 0; c < C; ++c) {
    const int64_t first = column + c * kLanes;
    const int64_t valid = min_of(kLanes, a.n - first);
    if (valid <= 0) continue;
    const vf scale = a.column_scales == nullptr ? splat(1.0f) : load(a.column_scales + first);
    HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
      float* const y = a.y + (row + r) * a.y_stride + first;
      vf value = mul(result[r][c], scale);
      if (a.bias != nullptr) value = add(value, load(a.bias + first));
      if (valid == kLanes) {
        store(y, a.accumulate ? add(value, load(y)) : value);
      } else {
        float side[kLanes] = {};
        if (a.accumulate) memcpy(side, y, static_cast<size_t>(valid) * 4);
        store(side, a.accumulate ? add(value, load(side)) : value);
        memcpy(y, side, static_cast<size_t>(valid) * 4);
      }
    }
  }
}

// Rows cut into even tiles of at most `most`: body(first row, rows, tile, number of tiles).
template <class Body>
HEADRACE_INLINE void for_row_tiles(int64_t row, int64_t rows, Body body, int64_t most = kTile) {
  const int64_t num_tiles = ceil_div(rows, most), base = rows / num_tiles, longer = rows % num_tiles;
  for (int64_t t = 0; t < num_tiles; ++t) {
    const int64_t count = base + (t < longer ? 1 : 0);
    body(row, count, t, num_tiles);
    row += count;
  }
}

// Weights with one scale a column or none (kInt8Fast, kInt16, kBf16): rows [row, row + rows) by blocks [begin, end) of columns; rows <= kRowBlock.
void linear_by_column(const QuantizedLinearArgs&, int64_t row, int64_t rows, int64_t begin, int64_t end);
// The same of kGguf.
void linear_gguf(const QuantizedLinearArgs&, int64_t row, int64_t rows, int64_t begin, int64_t end);

}  // namespace HEADRACE_ISA
}  // namespace headrace

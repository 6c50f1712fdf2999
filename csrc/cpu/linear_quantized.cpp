// Linear layers whose weights and activations are both quantised: dot products of bytes in 32-bit integers, scales in float.
//
// Integer sums are exact. With group scales an output is one chain of fused multiply-adds over the groups 0, 1, ..., whatever the
// number of rows and the tile they fall in, so a row's bits do not depend on its batch, on chunking or on threads.
#include "kernels.h"
#include "simd_int.h"
#include "threads.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int64_t kColumns = kPackedColumns;
constexpr int64_t kGroup = kQuantGroup;
constexpr int64_t kRowBlock = 192;  // rows that go through a block of weights while these are in cache
constexpr int64_t kAheadBytes = 4096;
constexpr int kUnitsOfBlock = static_cast<int>(kColumns) / kLanes;  // a unit is kLanes columns
#if defined(__AVX512F__)
constexpr int kTile = 6;       // rows: x 2 units x 2 accumulators fit 32 registers
constexpr int kWholeUnits = 4;  // units of a tile without group scales
#else
constexpr int kTile = 2;
constexpr int kWholeUnits = 2;
#endif

// R rows x C units of results, whose first column is `column`.
template <int R, int C>
HEADRACE_INLINE void finish(const QuantizedLinearArgs& a, int64_t row, int64_t column, const vf (&result)[R][C]) {
  HEADRACE_UNROLL for (int c = 0; c < C; ++c) {
    const int64_t first = column + c * kLanes;
    const int64_t valid = min_of(kLanes, a.n - first);
    if (valid <= 0) continue;
    const vf scale = load(a.column_scales + first);
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

// One group of a block of weights: the codes, then 32 half scales, then (kInt4Min) 32 half minimums.
template <QuantScheme kScheme>
constexpr int64_t kCodeBytes = kScheme == QuantScheme::kInt8 ? kGroup * kColumns : kGroup * kColumns / 2;
template <QuantScheme kScheme>
constexpr int64_t kRecordBytes = kCodeBytes<kScheme> + kColumns * (kScheme == QuantScheme::kInt4Min ? 4 : 2);

// Integer sums of one group: R rows x C units, codes of the first unit at `codes`; prefetches `ahead` of them.
template <QuantScheme kScheme, int R, int C>
HEADRACE_INLINE void group_sums(const uint8_t* codes, int64_t ahead, const int8_t* x, int64_t x_stride, vi (&sum)[R][C]) {
  if constexpr (kScheme == QuantScheme::kInt8) {
    HEADRACE_UNROLL for (int step = 0; step < kGroup / 4; ++step) {
      prefetch(codes + step * kColumns * 4 + ahead);
      if (C * kLanes * 4 > 64) prefetch(codes + step * kColumns * 4 + 64 + ahead);
      Bytes weights[C];
      HEADRACE_UNROLL for (int c = 0; c < C; ++c) weights[c] = load_weights(codes + step * kColumns * 4 + c * kLanes * 4);
      HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
        const vi values = splat_bytes(x + r * x_stride + step * 4);
        HEADRACE_UNROLL for (int c = 0; c < C; ++c) dot(sum[r][c], weights[c], values);
      }
    }
  } else {
    HEADRACE_UNROLL for (int step = 0; step < kGroup / 8; ++step) {
      prefetch(codes + step * kColumns * 4 + ahead);
      if (C * kLanes * 4 > 64) prefetch(codes + step * kColumns * 4 + 64 + ahead);
      vi low[C], high[C];
      HEADRACE_UNROLL for (int c = 0; c < C; ++c) {
        const vi both = load_bytes(codes + step * kColumns * 4 + c * kLanes * 4);
        low[c] = low_nibbles(both);
        high[c] = high_nibbles(both);
      }
      HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
        const vi first = splat_bytes(x + r * x_stride + step * 8), second = splat_bytes(x + r * x_stride + step * 8 + 4);
        HEADRACE_UNROLL for (int c = 0; c < C; ++c) {
          dot_nibbles(sum[r][c], low[c], first);
          dot_nibbles(sum[r][c], high[c], second);
        }
      }
    }
  }
}

template <QuantScheme kScheme, int R, int C>
void group_tile(const QuantizedLinearArgs& a, int64_t row, const uint8_t* weight, int64_t unit, int64_t column, int64_t ahead) {
  const int64_t groups = a.k_padded / kGroup;
  const int8_t* const x = a.x.values + row * a.x.values_stride;
  const float* const x_scales = a.x.scales + row * groups;
  const int32_t* const x_sums = a.x.negative_sums + row * groups;
  vf result[R][C];
  HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
    HEADRACE_UNROLL for (int c = 0; c < C; ++c) result[r][c] = splat(0.0f);
  }
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t* const record = weight + g * kRecordBytes<kScheme>;
    vi sum[R][C];
    HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
      const int32_t negative_sum = x_sums[r * groups + g];
      const vi start = kScheme == QuantScheme::kInt8   ? start_of_bytes(negative_sum)
                       : kScheme == QuantScheme::kInt4 ? shift_left<3>(splat_int(negative_sum))
                                                       : splat_int(0);
      HEADRACE_UNROLL for (int c = 0; c < C; ++c) sum[r][c] = start;
    }
    group_sums<kScheme, R, C>(record + unit * kLanes * 4, ahead, x + g * kGroup, a.x.values_stride, sum);
    const uint16_t* const halves = reinterpret_cast<const uint16_t*>(record + kCodeBytes<kScheme>) + unit * kLanes;
    prefetch(record + kCodeBytes<kScheme> + ahead);
    if (kScheme == QuantScheme::kInt4Min) prefetch(record + kCodeBytes<kScheme> + 64 + ahead);
    vf scale[C], minimum[C];
    HEADRACE_UNROLL for (int c = 0; c < C; ++c) {
      scale[c] = load_half(halves + c * kLanes);
      if constexpr (kScheme == QuantScheme::kInt4Min) minimum[c] = load_half(halves + kColumns + c * kLanes);
    }
    HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
      const vf x_scale = splat(x_scales[r * groups + g]);
      HEADRACE_UNROLL for (int c = 0; c < C; ++c) {
        result[r][c] = fma(to_float(sum[r][c]), mul(scale[c], x_scale), result[r][c]);
        if constexpr (kScheme == QuantScheme::kInt4Min) {
          const vf scaled_sum = mul(x_scale, to_float(splat_int(x_sums[r * groups + g])));
          result[r][c] = fma(minimum[c], scaled_sum, result[r][c]);
        }
      }
    }
  }
  finish<R, C>(a, row, column, result);
}

template <QuantScheme kScheme>
void group_rows(const QuantizedLinearArgs& a, int64_t row, int64_t rows, const uint8_t* weight, int64_t column,
                int64_t ahead) {
  for (int unit = 0; unit < kUnitsOfBlock; unit += 2) {
#define HEADRACE_TILE(R)                                                                             \
  case R:                                                                                            \
    if constexpr (R <= kTile) group_tile<kScheme, R, 2>(a, row, weight, unit, column + unit * kLanes, ahead); \
    break;
    switch (rows) { HEADRACE_TILE(1) HEADRACE_TILE(2) HEADRACE_TILE(3) HEADRACE_TILE(4) HEADRACE_TILE(5) HEADRACE_TILE(6) }
#undef HEADRACE_TILE
  }
}

// One scale a row and a column: R rows x C units, which may reach into the next block.
template <int R, int C>
void whole_tile(const QuantizedLinearArgs& a, int64_t row, const uint8_t* weight, int64_t unit, int64_t column, int64_t ahead) {
  const int8_t* const x = a.x.values + row * a.x.values_stride;
  const uint8_t* codes[C];
  HEADRACE_UNROLL for (int c = 0; c < C; ++c) {
    codes[c] = weight + (unit + c) / kUnitsOfBlock * kColumns * a.k_padded + (unit + c) % kUnitsOfBlock * kLanes * 4;
  }
  vi sum[R][C];
  HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
    const vi start = start_of_bytes(a.x.negative_sums[row + r]);
    HEADRACE_UNROLL for (int c = 0; c < C; ++c) sum[r][c] = start;
  }
  for (int64_t k = 0; k < a.k_padded; k += 8) {
    HEADRACE_UNROLL for (int step = 0; step < 2; ++step) {
      Bytes weights[C];
      HEADRACE_UNROLL for (int c = 0; c < C; ++c) {
        const uint8_t* const place = codes[c] + (k + step * 4) * kColumns;
        prefetch(place + ahead);
        weights[c] = load_weights(place);
      }
      HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
        const vi values = splat_bytes(x + r * a.x.values_stride + k + step * 4);
        HEADRACE_UNROLL for (int c = 0; c < C; ++c) dot(sum[r][c], weights[c], values);
      }
    }
  }
  vf result[R][C];
  HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
    const vf x_scale = splat(a.x.scales[row + r]);
    HEADRACE_UNROLL for (int c = 0; c < C; ++c) result[r][c] = mul(to_float(sum[r][c]), x_scale);
  }
  finish<R, C>(a, row, column, result);
}

template <int C>
HEADRACE_INLINE void whole_rows(const QuantizedLinearArgs& a, int64_t row, int64_t rows, const uint8_t* weight, int64_t unit,
                                int64_t column, int64_t ahead) {
#define HEADRACE_TILE(R)                                                                 \
  case R:                                                                                \
    if constexpr (R <= kTile) whole_tile<R, C>(a, row, weight, unit, column + unit * kLanes, ahead); \
    break;
  switch (rows) { HEADRACE_TILE(1) HEADRACE_TILE(2) HEADRACE_TILE(3) HEADRACE_TILE(4) HEADRACE_TILE(5) HEADRACE_TILE(6) }
#undef HEADRACE_TILE
}

// Rows cut into even tiles: body(first row, rows, ahead). The first tile asks memory for the weights that come next; the others find
// theirs in cache.
template <class Body>
HEADRACE_INLINE void for_row_tiles(int64_t row, int64_t rows, Body body) {
  const int64_t num_tiles = ceil_div(rows, kTile), base = rows / num_tiles, longer = rows % num_tiles;
  for (int64_t t = 0; t < num_tiles; ++t) {
    const int64_t count = base + (t < longer ? 1 : 0);
    body(row, count, t == 0 ? kAheadBytes : 0);
    row += count;
  }
}

template <QuantScheme kScheme>
void group_blocks(const QuantizedLinearArgs& a, int64_t row, int64_t rows, int64_t begin, int64_t end) {
  const int64_t block_bytes = a.k_padded / kGroup * kRecordBytes<kScheme>;
  for (int64_t block = begin; block < end; ++block) {
    for_row_tiles(row, rows, [&](int64_t first, int64_t count, int64_t ahead) {
      group_rows<kScheme>(a, first, count, a.weight + block * block_bytes, block * kColumns, ahead);
    });
  }
}

void whole_blocks(const QuantizedLinearArgs& a, int64_t row, int64_t rows, int64_t begin, int64_t end) {
  const uint8_t* const weight = a.weight + begin * kColumns * a.k_padded;
  const int64_t units = (end - begin) * kUnitsOfBlock, column = begin * kColumns;
  for (int64_t unit = 0; unit < units;) {
    const bool wide = unit + kWholeUnits <= units;
    for_row_tiles(row, rows, [&](int64_t first, int64_t count, int64_t ahead) {
      wide ? whole_rows<kWholeUnits>(a, first, count, weight, unit, column, ahead)
           : whole_rows<2>(a, first, count, weight, unit, column, ahead);
    });
    unit += wide ? kWholeUnits : 2;
  }
}

}  // namespace

void linear_quantized(const QuantizedLinearArgs& a) {
  const int64_t num_blocks = ceil_div(a.n, kColumns), row_blocks = ceil_div(a.rows, kRowBlock);
  const int64_t rows_each = row_blocks == 0 ? 0 : ceil_div(a.rows, row_blocks);
  // A claim should last some microseconds.
  const int64_t grain = max_of(1, 131072 / max_of(1, a.k_padded * kColumns * min_of(a.rows, kRowBlock)));
  parallel_for(num_blocks * row_blocks, grain, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t row = begin / num_blocks * rows_each, block = begin % num_blocks;
      const int64_t count = min_of(end - begin, num_blocks - block);
      const int64_t rows = min_of(rows_each, a.rows - row);
      if (rows > 0) {
        switch (a.scheme) {
          case QuantScheme::kInt8:
            group_blocks<QuantScheme::kInt8>(a, row, rows, block, block + count);
            break;
          case QuantScheme::kInt4:
            group_blocks<QuantScheme::kInt4>(a, row, rows, block, block + count);
            break;
          case QuantScheme::kInt4Min:
            group_blocks<QuantScheme::kInt4Min>(a, row, rows, block, block + count);
            break;
          case QuantScheme::kInt8Fast:
            whole_blocks(a, row, rows, block, block + count);
            break;
        }
      }
      begin += count;
    }
  });
}

}  // namespace HEADRACE_ISA
}  // namespace headrace

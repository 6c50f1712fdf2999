// Linear layers whose weights are codes of 8 or 16 bits with one scale a column, with activations that have a scale for each kWideGroup
// elements; and those whose weights and activations are bfloat16, without scales.
//
// An output is one chain of fused multiply-adds over the groups 0, 1, ... of exact integer sums, whatever the number of rows and the
// tile they fall in, so a row's bits do not depend on its batch, on chunking or on threads. Between two groups it waits in memory: a
// group's weights stay in the first-level cache for all rows, and the registers hold integers alone. Of bfloat16 it is one chain of
// products of pairs (simd_bf16.h), which waits there between two groups, too.
#include "quantized_tile.h"
#include "simd_bf16.h"
#include "simd_words.h"
#if defined(HEADRACE_AMX)
#include "linear_amx.h"
#endif

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int kUnits = kTile == 6 ? 4 : 2;  // of a wide tile
constexpr int64_t kLongRows = 13, kLongBytes = 1024;  // from so many rows on, of at most so many bytes, a tile goes through all of K
constexpr int64_t kFloatDepth = 2048;  // elements of K whose weights stay in the second-level cache while all rows use them
constexpr int64_t kStepBytes = kPackedColumns * 4;  // a step: four bytes of a row, and of each column of a block

template <QuantScheme kScheme>
HEADRACE_INLINE const char* rows_of(const QuantizedLinearArgs& a) {
  return static_cast<const char*>(kScheme == QuantScheme::kInt8Fast ? static_cast<const void*>(wide_rows(a.x)) : a.x.values);
}

// Where unit c of a tile prefetches while it computes: its own codes + offset + step for each step of the loop.
struct Ahead {
  int64_t offset, step;
};

// What one step multiplies: four bytes in a lane, or two words.
template <QuantScheme kScheme>
struct Codes;
template <>
struct Codes<QuantScheme::kInt8Fast> {
  using Sum = vi;
  static constexpr int64_t kElementBytes = sizeof(WideElement);
  Wide weights;
  HEADRACE_INLINE Codes load(const uint8_t* p) { return {load_wide(p)}; }
  HEADRACE_INLINE vi start(int32_t start) { return start_of_wide(start); }
  HEADRACE_INLINE auto splat(const char* x) { return splat_wide(reinterpret_cast<const WideElement*>(x)); }
  template <class Values>
  HEADRACE_INLINE void multiply(vi& sum, const Codes& w, const Values& x) { dot_wide(sum, w.weights, x); }
};
template <>
struct Codes<QuantScheme::kInt16> {
  using Sum = vi;
  static constexpr int64_t kElementBytes = 2;
  vi weights;
  HEADRACE_INLINE Codes load(const uint8_t* p) { return {load_words(reinterpret_cast<const int16_t*>(p))}; }
  HEADRACE_INLINE vi start(int32_t) { return splat_int(0); }
  HEADRACE_INLINE vi splat(const char* x) { return splat_words(reinterpret_cast<const int16_t*>(x)); }
  HEADRACE_INLINE void multiply(vi& sum, const Codes& w, vi x) { dot_words(sum, w.weights, x); }
};
template <>
struct Codes<QuantScheme::kBf16> {
  using Sum = vf;
  static constexpr int64_t kElementBytes = 2;
  Pairs weights;
  HEADRACE_INLINE Codes load(const uint8_t* p) { return {load_pairs(reinterpret_cast<const bf16*>(p))}; }
  HEADRACE_INLINE Pairs splat(const char* x) { return splat_pair(reinterpret_cast<const bf16*>(x)); }
  HEADRACE_INLINE void multiply(vf& sum, const Codes& w, const Pairs& x) { dot_pairs(sum, w.weights, x); }
};

// Rows from `row`, columns from `column`; part `group` of K, of `num_groups` of `depth` elements.
struct Place {
  int64_t row, column, group, num_groups, depth;
};

// The chain of a tile before a group: what the groups before left in `partial`, [R][C][kLanes].
HEADRACE_INLINE vf chain(const Place& place, const float* partial) { return place.group == 0 ? splat(0.0f) : load(partial); }

// R rows x C units. `partial` holds the chains of the groups before, [R][C][kLanes].
template <QuantScheme kScheme, int R, int C>
__attribute__((noinline)) void tile(const QuantizedLinearArgs& a, const Place& place, const uint8_t* const (&codes)[C], const Ahead& ahead, float* partial) {
  using Step = Codes<kScheme>;
  constexpr bool kFloats = row_format(kScheme).floats;
  constexpr int64_t kValueBytes = row_format(kScheme).value_bytes;
  constexpr int64_t kElementBytes = Step::kElementBytes, kStepOfRow = 4 / kValueBytes * kElementBytes;
  const int64_t first = place.group * place.depth, row_bytes = a.k_padded * kElementBytes;
  const int64_t num_steps = min_of(place.depth, a.k_padded - first) * kValueBytes / 4;
  const char* const x = rows_of<kScheme>(a) + place.row * row_bytes + first * kElementBytes;
  const int64_t scales = place.row * place.num_groups + place.group;
  typename Step::Sum sum[R][C];
  HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
    HEADRACE_UNROLL for (int c = 0; c < C; ++c) {
      if constexpr (kFloats) {
        sum[r][c] = chain(place, partial + (r * C + c) * kLanes);
      } else {
        sum[r][c] = Step::start(kScheme == QuantScheme::kInt8Fast ? a.x.starts[scales + r * place.num_groups] : 0);
      }
    }
  }
  for (int64_t step = 0; step < num_steps; ++step) {
    Step weights[C];
    HEADRACE_UNROLL for (int c = 0; c < C; ++c) {
      prefetch_weights<R>(codes[c] + ahead.offset + step * ahead.step);
      weights[c] = Step::load(codes[c] + step * kStepBytes);
    }
    HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
      const auto values = Step::splat(x + r * row_bytes + step * kStepOfRow);
      HEADRACE_UNROLL for (int c = 0; c < C; ++c) Step::multiply(sum[r][c], weights[c], values);
    }
  }
  vf result[R][C];
  HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
    HEADRACE_UNROLL for (int c = 0; c < C; ++c) {
      if constexpr (kFloats) {
        result[r][c] = sum[r][c];
      } else {
        const vf x_scale = splat(a.x.scales[scales + r * place.num_groups]);
        result[r][c] = fma(to_float(sum[r][c]), x_scale, chain(place, partial + (r * C + c) * kLanes));
      }
    }
  }
  if (place.group + 1 == place.num_groups) return finish<R, C>(a, place.row, place.column, result);
  HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
    HEADRACE_UNROLL for (int c = 0; c < C; ++c) store(partial + (r * C + c) * kLanes, result[r][c]);
  }
}

// All groups of R rows x 2 units of integers one after the other, whose chains stay in registers beside the sums. Quicker than the above where a
// block of weights and the rows fit the first-level cache.
template <QuantScheme kScheme, int R>
__attribute__((noinline)) void long_tile(const QuantizedLinearArgs& a, int64_t row, int64_t column, const uint8_t* codes, const uint8_t* ahead,
                                         int64_t ahead_step) {
  using Step = Codes<kScheme>;
  constexpr int64_t kValueBytes = row_format(kScheme).value_bytes, kUnitBytes = kLanes * 4;
  constexpr int64_t kElementBytes = Step::kElementBytes;
  const int64_t row_bytes = a.k_padded * kElementBytes, num_groups = ceil_div(a.k_padded, kWideGroup);
  const char* x = rows_of<kScheme>(a) + row * row_bytes;
  vf result[R][2];
  HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
    HEADRACE_UNROLL for (int c = 0; c < 2; ++c) result[r][c] = splat(0.0f);
  }
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t scales = row * num_groups + g, num_steps = min_of(kWideGroup, a.k_padded - g * kWideGroup) * kValueBytes / 4;
    vi sum[R][2];
    HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
      const vi start = Step::start(kScheme == QuantScheme::kInt8Fast ? a.x.starts[scales + r * num_groups] : 0);
      HEADRACE_UNROLL for (int c = 0; c < 2; ++c) sum[r][c] = start;
    }
    for (int64_t step = 0; step < num_steps; ++step, codes += kStepBytes, ahead += ahead_step, x += 4 / kValueBytes * kElementBytes) {
      Step weights[2];
      HEADRACE_UNROLL for (int c = 0; c < 2; ++c) weights[c] = Step::load(codes + c * kUnitBytes);
      prefetch_weights<R>(ahead);
      HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
        const auto values = Step::splat(x + r * row_bytes);
        HEADRACE_UNROLL for (int c = 0; c < 2; ++c) Step::multiply(sum[r][c], weights[c], values);
      }
    }
    HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
      const vf x_scale = splat(a.x.scales[scales + r * num_groups]);
      HEADRACE_UNROLL for (int c = 0; c < 2; ++c) result[r][c] = fma(to_float(sum[r][c]), x_scale, result[r][c]);
    }
  }
  finish<R, 2>(a, row, column, result);
}

template <QuantScheme kScheme>
void long_tiles(const QuantizedLinearArgs& a, int64_t row, int64_t rows, const uint8_t* weight, int64_t column) {
  const int64_t block_bytes = packed_block_bytes(kScheme, a.k_padded);
  for (int unit = 0; unit < kUnitsOfBlock; unit += 2) {
    for_row_tiles(row, rows, [&](int64_t first, int64_t count, int64_t t, int64_t num_tiles) {
      // Each tile asks for its share of the next block.
      const uint8_t* const codes = weight + unit * kLanes * 4;
      const uint8_t* const ahead = codes + block_bytes + block_bytes * t / num_tiles;
#define HEADRACE_TILE(R)                                                                              \
  case R:                                                                                             \
    if constexpr (R <= kTile) {                                                                      \
      long_tile<kScheme, R>(a, first, column + unit * kLanes, codes, ahead, kStepBytes / num_tiles); \
    }                                                                                                \
    break;
      switch (count) { HEADRACE_TILE(1) HEADRACE_TILE(2) HEADRACE_TILE(3) HEADRACE_TILE(4) HEADRACE_TILE(5) HEADRACE_TILE(6) }
#undef HEADRACE_TILE
    });
  }
}

// C units from unit `unit` of the blocks at `weight`, for all rows, in tiles of at most kRows. Rows of bfloat16 run through much of K at once,
// and all of it if they are one tile: their chains stay in registers.
template <QuantScheme kScheme, int C, int kRows>
void units(const QuantizedLinearArgs& a, int64_t row, int64_t rows, const uint8_t* weight, int64_t unit, int64_t column) {
  alignas(64) float partial[kRowBlock * C * kLanes];
  const int64_t depth = !row_format(kScheme).floats ? kWideGroup : rows <= kRows ? a.k_padded : min_of(a.k_padded, kFloatDepth);
  const int64_t num_groups = ceil_div(a.k_padded, depth), block_bytes = packed_block_bytes(kScheme, a.k_padded);
  const int64_t group_bytes = depth * row_format(kScheme).value_bytes * kPackedColumns;
  for (int64_t g = 0; g < num_groups; ++g) {
    const uint8_t* codes[C];
    HEADRACE_UNROLL for (int c = 0; c < C; ++c) {
      codes[c] = weight + (unit + c) / kUnitsOfBlock * block_bytes + g * group_bytes + (unit + c) % kUnitsOfBlock * kLanes * 4;
    }
    // Several tiles over the same weights ask for the next ones, each for its share, so that memory works all the time.
    const int64_t next = g + 1 < num_groups ? group_bytes : ceil_div(C, kUnitsOfBlock) * block_bytes - g * group_bytes;
    for_row_tiles(row, rows, [&](int64_t first, int64_t count, int64_t t, int64_t num_tiles) {
      const Ahead in_order = {kAskForWeights ? kAheadBytes : 0, kStepBytes};
      const Ahead ahead = num_tiles == 1 ? in_order : Ahead{next + group_bytes * t / num_tiles, kStepBytes / num_tiles};
      const Place place = {first, column, g, num_groups, depth};
      float* const sums = partial + (first - row) * C * kLanes;
#define HEADRACE_TILE(R)                                                                  \
  case R:                                                                                 \
    if constexpr (R <= kRows) tile<kScheme, R, C>(a, place, codes, ahead, sums);           \
    break;
      switch (count) {
        HEADRACE_TILE(1) HEADRACE_TILE(2) HEADRACE_TILE(3) HEADRACE_TILE(4) HEADRACE_TILE(5) HEADRACE_TILE(6)
        HEADRACE_TILE(7) HEADRACE_TILE(8) HEADRACE_TILE(9) HEADRACE_TILE(10) HEADRACE_TILE(11) HEADRACE_TILE(12)
      }
#undef HEADRACE_TILE
    }, kRows);
  }
}

// Up to so many rows, more than a tile, go in tiles of twice the height and two units: these read the weights once, or half as often.
template <QuantScheme kScheme>
constexpr int64_t kHighRows = row_format(kScheme).floats          ? 4 * kTile
                              : kUnits == 2                       ? 0
                              : kScheme == QuantScheme::kInt8Fast ? 2 * kTile
                                                                  : kTile + 2;

template <QuantScheme kScheme>
void blocks(const QuantizedLinearArgs& a, int64_t row, int64_t rows, int64_t begin, int64_t end) {
#if defined(HEADRACE_AMX)
  // All rows of bfloat16, whose bits are those of tiles; of bytes those that are too many for one tile of registers.
  if constexpr (kScheme != QuantScheme::kInt16) {
    if (row_format(kScheme).floats || rows > kTile) return blocks_of_squares<kScheme>(a, row, rows, begin, end);
  }
#endif
  if constexpr (!row_format(kScheme).floats && kTile == 6) {
    if (rows >= kLongRows && a.k_padded * row_format(kScheme).value_bytes <= kLongBytes) {
      for (int64_t block = begin; block < end; ++block) {
        long_tiles<kScheme>(a, row, rows, a.weight + block * packed_block_bytes(kScheme, a.k_padded), block * kPackedColumns);
      }
      return;
    }
  }
  const uint8_t* const weight = a.weight + begin * packed_block_bytes(kScheme, a.k_padded);
  const int64_t num_units = (end - begin) * kUnitsOfBlock, column = begin * kPackedColumns;
  const bool is_high = rows > kTile && rows <= kHighRows<kScheme>;
  int64_t unit = 0;
  // One or two rows are as fast as memory, which is faster in order.
  if constexpr (kUnitsOfBlock == 4) {
    for (; rows <= 2 && unit + 4 <= num_units; unit += 4) units<kScheme, 4, 2>(a, row, rows, weight, unit, column + unit * kLanes);
  }
  for (; !is_high && unit + kUnits <= num_units; unit += kUnits) units<kScheme, kUnits, kTile>(a, row, rows, weight, unit, column + unit * kLanes);
  for (; unit < num_units; unit += 2) {
    if constexpr (kHighRows<kScheme> > 0) {
      // A last block of bfloat16 does so with any number of rows: 6 x 2 chains are too few.
      if (is_high || (row_format(kScheme).floats && rows > kTile)) {
        units<kScheme, 2, 2 * kTile>(a, row, rows, weight, unit, column + unit * kLanes);
        continue;
      }
    }
    units<kScheme, 2, kTile>(a, row, rows, weight, unit, column + unit * kLanes);
  }
}

}  // namespace

void linear_by_column(const QuantizedLinearArgs& a, int64_t row, int64_t rows, int64_t begin, int64_t end) {
  switch (a.scheme) {
    case QuantScheme::kBf16:
      return blocks<QuantScheme::kBf16>(a, row, rows, begin, end);
    case QuantScheme::kInt16:
      return blocks<QuantScheme::kInt16>(a, row, rows, begin, end);
    default:
      return blocks<QuantScheme::kInt8Fast>(a, row, rows, begin, end);
  }
}

}  // namespace HEADRACE_ISA
}  // namespace headrace

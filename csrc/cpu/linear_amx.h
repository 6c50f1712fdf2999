// Linear layers over weights with one scale a column, or of bfloat16, by the tiles of AMX: 32 rows by the 32 columns of a block at once,
// whose packed order is that of tiles already.
//
// Sums of bytes are exact, so their bits are those of every other instruction set. Those of bfloat16 are not: a product of tiles adds
// up 32 elements apart before it adds them to the sum. They do not depend on the rows beside a row or on the cut of K either, since
// every row goes through tiles, and each begins at a multiple of 32 elements.
#pragma once
#include "amx.h"
#include "quantized_tile.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int64_t kSquare = 2 * kTileSide;  // rows and columns of two tiles each way
static_assert(kSquare == kPackedColumns, "a block of weights is two tiles wide");

// Tiles 0 .. 3: sums, of rows 0 .. 15 and then 16 .. 31; 4 and 5: those rows of x; 6 and 7: weights of columns 0 .. 15 and 16 .. 31.
// depth_bytes: of a row, that one product takes.
inline void shape_squares(int64_t rows, int64_t depth_bytes) {
  TileShapes shapes;
  const int64_t upper = min_of(rows, kTileSide), lower = max_of(1, rows - kTileSide);
  for (int tile = 0; tile < 4; ++tile) shapes.set(tile, tile < 2 ? upper : lower, kTileBytes);
  shapes.set(4, upper, depth_bytes);
  shapes.set(5, lower, depth_bytes);
  for (int tile = 6; tile < 8; ++tile) shapes.set(tile, depth_bytes / 4, kTileBytes);
  shape_tiles(shapes);
}

template <bool kFloats, int kC, int kA, int kB>
HEADRACE_INLINE void dot_tiles() {
  kFloats ? dot_tiles_pairs<kC, kA, kB>() : dot_tiles_bytes<kC, kA, kB>();
}

// sums[32][32] += x . weights over num_bytes of each row; starts from 0 where `resume` is false.
template <bool kFloats>
HEADRACE_INLINE void multiply_square(const char* x, int64_t row_bytes, int64_t rows, const uint8_t* weights, int64_t num_bytes,
                                     int64_t depth_bytes, bool resume, void* sums) {
  constexpr int64_t kStride = kSquare * 4, kHalf = kTileSide * kStride;
  char* const to = static_cast<char*>(sums);
  const bool is_high = rows > kTileSide;
  zero_tile<0>();
  zero_tile<1>();
  zero_tile<2>();
  zero_tile<3>();
  if (resume) {
    load_tile<0>(to, kStride);
    load_tile<1>(to + kTileBytes, kStride);
    if (is_high) {
      load_tile<2>(to + kHalf, kStride);
      load_tile<3>(to + kHalf + kTileBytes, kStride);
    }
  }
  for (int64_t at = 0; at < num_bytes; at += depth_bytes) {
    const uint8_t* const w = weights + at * kPackedColumns;
    for (int64_t line = 0; line < depth_bytes * kPackedColumns; line += 64) prefetch(w + kAheadBytes + line);
    load_tile<4>(x + at, row_bytes);
    load_tile<6>(w, kStride);
    load_tile<7>(w + kTileBytes, kStride);
    dot_tiles<kFloats, 0, 4, 6>();
    dot_tiles<kFloats, 1, 4, 7>();
    if (!is_high) continue;
    load_tile<5>(x + kTileSide * row_bytes + at, row_bytes);
    dot_tiles<kFloats, 2, 5, 6>();
    dot_tiles<kFloats, 3, 5, 7>();
  }
  store_tile<0>(to, kStride);
  store_tile<1>(to + kTileBytes, kStride);
  if (!is_high) return;
  store_tile<2>(to + kHalf, kStride);
  store_tile<3>(to + kHalf + kTileBytes, kStride);
}

// What row `row` of x gave in a block: [2][kLanes] results, the groups before in `chain`.
template <QuantScheme kScheme>
HEADRACE_INLINE void row_results(const QuantizedLinearArgs& a, int64_t row, int64_t group, int64_t num_groups, const void* sums,
                                 const float* chain, vf (&result)[1][2]) {
  HEADRACE_UNROLL for (int c = 0; c < 2; ++c) {
    if constexpr (row_format(kScheme).floats) {
      result[0][c] = load(static_cast<const float*>(sums) + c * kLanes);
    } else {
      const int64_t place = row * num_groups + group;
      const vi sum = add_int(load_bytes(static_cast<const int32_t*>(sums) + c * kLanes), splat_int(a.x.starts[place]));
      result[0][c] = fma(to_float(sum), splat(a.x.scales[place]), group == 0 ? splat(0.0f) : load(chain + c * kLanes));
    }
  }
}

// Rows [row, row + rows), rows <= kRowBlock, of one block of weights.
template <QuantScheme kScheme>
void block_of_squares(const QuantizedLinearArgs& a, int64_t row, int64_t rows, const uint8_t* weight, int64_t column) {
  static_assert(kLanes == kTileSide, "a tile is a vector wide");
  constexpr bool kFloats = row_format(kScheme).floats;
  constexpr int64_t kValueBytes = row_format(kScheme).value_bytes;
  alignas(64) float chains[kRowBlock * kSquare];
  alignas(64) int32_t integers[kSquare * kSquare];
  const int64_t row_bytes = a.k_padded * kValueBytes, depth_bytes = row_bytes % kTileBytes == 0 ? kTileBytes : kTileBytes / 2;
  const int64_t depth = kFloats && rows <= kSquare ? a.k_padded : kWideGroup, num_groups = ceil_div(a.k_padded, depth);
  int64_t shaped = 0;
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t first = g * depth * kValueBytes, num_bytes = min_of(depth * kValueBytes, row_bytes - first);
    for (int64_t r = 0; r < rows; r += kSquare) {
      const int64_t count = min_of(kSquare, rows - r);
      if (count != shaped) shape_squares(count, depth_bytes);
      shaped = count;
      const char* const x = static_cast<const char*>(a.x.values) + (row + r) * row_bytes + first;
      float* const chain = chains + r * kSquare;
      void* const sums = kFloats ? static_cast<void*>(chain) : integers;
      multiply_square<kFloats>(x, row_bytes, count, weight + first * kPackedColumns, num_bytes, depth_bytes, kFloats && g > 0, sums);
      if (kFloats && g + 1 < num_groups) continue;
      for (int64_t i = 0; i < count; ++i) {
        vf result[1][2];
        row_results<kScheme>(a, row + r + i, g, num_groups, static_cast<char*>(sums) + i * kSquare * 4, chain + i * kSquare, result);
        if (g + 1 == num_groups) {
          finish<1, 2>(a, row + r + i, column, result);
        } else {
          store(chain + i * kSquare, result[0][0]);
          store(chain + i * kSquare + kLanes, result[0][1]);
        }
      }
    }
  }
}

template <QuantScheme kScheme>
void blocks_of_squares(const QuantizedLinearArgs& a, int64_t row, int64_t rows, int64_t begin, int64_t end) {
  for (int64_t block = begin; block < end; ++block) {
    block_of_squares<kScheme>(a, row, rows, a.weight + block * packed_block_bytes(kScheme, a.k_padded), block * kPackedColumns);
  }
  release_tiles();
}

}  // namespace
}  // namespace HEADRACE_ISA
}  // namespace headrace

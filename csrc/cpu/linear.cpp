// Linear layers with prepacked weights.
//
// Every output element is one chain of fused multiply-adds over k = 0, 1, ..., K - 1, whatever the number of rows: the tile shape
// and the cut of K into blocks (accumulators are stored to y and loaded again, which is exact) change what is in registers, never
// the order. So a row's bits do not depend on its batch, on chunking or on threads.
#include <type_traits>

#include "kernels.h"
#include "simd_int.h"
#include "threads.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int64_t kColumns = kPackedColumns;
constexpr int64_t kDepthBlock = 128;  // an unpacked panel of 128 x 32 floats stays in the first-level cache, with the rows' slices
constexpr int64_t kRowBlock = 192;    // rows that share an unpacked panel
constexpr int64_t kPackedTiles = 5;      // up to so many tiles unpacking once does not pay
constexpr int64_t kAheadBytes = 8192;  // weights are asked for this far ahead of their use, when they come from memory

HEADRACE_INLINE void load_columns(const bf16* w, vf& low, vf& high) { load_interleaved(w, low, high); }
template <class T>
HEADRACE_INLINE void load_columns(const T* w, vf& low, vf& high) {
  low = load(w);
  high = load(w + 16);
}

// A unit is kLanes column pairs (j, j + 16) of a block of 32: elements that one unit takes of a packed row.
template <class T>
constexpr int64_t kUnitElements = std::is_same_v<T, bf16> ? 2 * kLanes : kLanes;

// What a tile needs to know of its place.
struct Target {
  float* y;
  int64_t y_stride;
  const float* bias;  // null until the last block of k
  bool resume;        // start from y
};

// Where to prefetch while a tile computes: address + k * step for each k.
struct Ahead {
  const char* address;
  int64_t step;
};

// R rows x C units: unit c reads its packed rows at weight[c] and writes columns column[c] ... and column[c] + 16 ...
template <class T, int R, int C>
HEADRACE_INLINE void tile(const float* x, int64_t x_stride, const T* const (&weight)[C], const int64_t (&column)[C],
                          int64_t depth, const Target& target, const Ahead (&ahead)[C]) {
  vf sum[R][C][2];
  HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
    HEADRACE_UNROLL for (int c = 0; c < C; ++c) {
      const float* y = target.y + r * target.y_stride + column[c];
      sum[r][c][0] = target.resume ? load(y) : splat(0.0f);
      sum[r][c][1] = target.resume ? load(y + 16) : splat(0.0f);
    }
  }
  // Every third row and three distances reach all rows: a pointer for each would not fit the registers.
  const float* thirds[(R + 2) / 3];
  HEADRACE_UNROLL for (int i = 0; i < (R + 2) / 3; ++i) thirds[i] = x + 3 * i * x_stride;
  for (int64_t k = 0; k < depth; ++k) {
    vf low[C], high[C];
    HEADRACE_UNROLL for (int c = 0; c < C; ++c) {
      prefetch_weights<R>(ahead[c].address + k * ahead[c].step);
      load_columns(weight[c] + k * kColumns, low[c], high[c]);
    }
    HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
      const vf a = splat(thirds[r / 3][r % 3 * x_stride + k]);
      HEADRACE_UNROLL for (int c = 0; c < C; ++c) {
        sum[r][c][0] = fma(a, low[c], sum[r][c][0]);
        sum[r][c][1] = fma(a, high[c], sum[r][c][1]);
      }
    }
  }
  HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
    HEADRACE_UNROLL for (int c = 0; c < C; ++c) {
      float* y = target.y + r * target.y_stride + column[c];
      if (target.bias != nullptr) {
        sum[r][c][0] = add(sum[r][c][0], load(target.bias + column[c]));
        sum[r][c][1] = add(sum[r][c][1], load(target.bias + column[c] + 16));
      }
      store(y, sum[r][c][0]);
      store(y + 16, sum[r][c][1]);
    }
  }
}

// All units of blocks [0, num_blocks) for R rows; block b at weight + b * block_stride, columns from 32 b. The weights are
// prefetched as they are used, unless `ahead` says what to prefetch instead.
template <class T, int R>
void rows_of_blocks(const float* x, int64_t x_stride, const T* weight, int64_t block_stride, int64_t num_blocks, int64_t depth,
                    const Target& target, const Ahead* ahead) {
  const int64_t units = num_blocks * kParts;
  auto at = [&](int64_t unit) { return weight + unit / kParts * block_stride + unit % kParts * kUnitElements<T>; };
  auto column_of = [&](int64_t unit) { return unit / kParts * kColumns + unit % kParts * kLanes; };
  auto ahead_of = [&](int64_t unit) {
    if (ahead != nullptr) return *ahead;
    return Ahead{reinterpret_cast<const char*>(at(unit)) + (kAskForWeights ? kAheadBytes : 0), kColumns * static_cast<int64_t>(sizeof(T))};
  };
  auto one = [&](int64_t unit) {
    const T* const weights[1] = {at(unit)};
    const int64_t columns[1] = {column_of(unit)};
    const Ahead aheads[1] = {ahead_of(unit)};
    tile<T, R, 1>(x, x_stride, weights, columns, depth, target, aheads);
  };
  if constexpr (R <= kTileRows / 2) {
    for (int64_t u = 0; u + 2 <= units; u += 2) {
      const T* const weights[2] = {at(u), at(u + 1)};
      const int64_t columns[2] = {column_of(u), column_of(u + 1)};
      const Ahead aheads[2] = {ahead_of(u), ahead_of(u + 1)};
      tile<T, R, 2>(x, x_stride, weights, columns, depth, target, aheads);
    }
    if (units % 2 == 1) one(units - 1);
  } else {
    for (int64_t u = 0; u < units; ++u) one(u);
  }
}

template <class T>
void few_rows(const float* x, int64_t x_stride, int64_t rows, const T* weight, int64_t block_stride, int64_t num_blocks,
              int64_t depth, const Target& target, const Ahead* ahead) {
#define HEADRACE_CALL(R) rows_of_blocks<T, R>(x, x_stride, weight, block_stride, num_blocks, depth, target, ahead)
  HEADRACE_FOR_ROWS(rows, HEADRACE_CALL)
#undef HEADRACE_CALL
}

template <class T>
HEADRACE_INLINE const float* unpack(const T* weight, int64_t depth, float* panel) {
  for (int64_t k = 0; k < depth; ++k) {
    for (int i = 0; i < kParts; ++i) {
      vf low, high;
      load_columns(weight + k * kColumns + i * kUnitElements<T>, low, high);
      store(panel + k * kColumns + i * kLanes, low);
      store(panel + k * kColumns + 16 + i * kLanes, high);
    }
  }
  return panel;
}
HEADRACE_INLINE const float* unpack(const float* weight, int64_t, float*) { return weight; }

// Rows cut into even register tiles: body(tile, first row, rows).
template <class Body>
HEADRACE_INLINE void for_row_tiles(int64_t rows, Body body) {
  const int64_t num_tiles = ceil_div(rows, kTileRows), base = rows / num_tiles, longer = rows % num_tiles;
  for (int64_t t = 0, row = 0; t < num_tiles; ++t) {
    const int64_t count = base + (t < longer ? 1 : 0);
    body(t, row, count);
    row += count;
  }
}

// A few tiles of rows of one block: the later ones find its weights in cache, still packed. Each asks for its share of the next
// block, so that memory works all the time.
template <class T>
void some_rows(const float* x, int64_t x_stride, int64_t rows, const T* weight, int64_t depth, const Target& whole) {
  const int64_t num_tiles = ceil_div(rows, kTileRows), row_bytes = kColumns * static_cast<int64_t>(sizeof(T));
  const char* const next = reinterpret_cast<const char*>(weight) + depth * row_bytes;
  for_row_tiles(rows, [&](int64_t t, int64_t row, int64_t count) {
    const Ahead ahead = {next + depth * row_bytes * t / num_tiles, row_bytes / num_tiles};
    Target target = whole;
    target.y = whole.y + row * whole.y_stride;
    few_rows<T>(x + row * x_stride, x_stride, count, weight, 0, 1, depth, target, &ahead);
  });
}

// Many rows of one block of 32 columns: K is cut so that the panel and the rows' slices stay in cache.
template <class T>
void many_rows(const float* x, int64_t x_stride, int64_t rows, const T* weight, int64_t depth, const Target& whole) {
  alignas(64) float panel[kDepthBlock * kColumns];
  const int64_t num_tiles = ceil_div(rows, kTileRows), row_bytes = kColumns * static_cast<int64_t>(sizeof(T));
  for (int64_t k0 = 0; k0 < depth; k0 += kDepthBlock) {
    const int64_t part = min_of(kDepthBlock, depth - k0);
    const float* const unpacked = unpack(weight + k0 * kColumns, part, panel);
    const char* const next = reinterpret_cast<const char*>(weight + (k0 + part) * kColumns);
    for_row_tiles(rows, [&](int64_t t, int64_t row, int64_t count) {
      // Each tile asks for its share of the next panel: one alone would wait for memory.
      const Ahead ahead = {next + part * row_bytes * t / num_tiles, ceil_div(row_bytes, num_tiles)};
      const Target target = {whole.y + row * whole.y_stride, whole.y_stride, k0 + part == depth ? whole.bias : nullptr,
                             whole.resume || k0 > 0};
      few_rows<float>(x + row * x_stride + k0, x_stride, count, unpacked, 0, 1, part, target, &ahead);
    });
  }
}

template <class T>
void blocks(const LinearArgs& a, int64_t row, int64_t rows, int64_t block_begin, int64_t block_end) {
  const int64_t block_stride = a.k * kColumns;
  const float* const x = a.x + row * a.x_stride;
  auto run = [&](int64_t block, int64_t num_blocks, const Target& target) {
    const T* const weight = static_cast<const T*>(a.weight) + block * block_stride;
    if (rows <= kTileRows) {
      few_rows<T>(x, a.x_stride, rows, weight, block_stride, num_blocks, a.k, target, nullptr);
      return;
    }
    for (int64_t b = 0; b < num_blocks; ++b) {
      Target one = target;
      one.y += b * kColumns;
      if (one.bias != nullptr) one.bias += b * kColumns;
      if (rows <= kPackedTiles * kTileRows) {
        some_rows<T>(x, a.x_stride, rows, weight + b * block_stride, a.k, one);
      } else {
        many_rows<T>(x, a.x_stride, rows, weight + b * block_stride, a.k, one);
      }
    }
  };
  const int64_t whole_end = min_of(block_end, a.n / kColumns);
  if (block_begin < whole_end) {
    const int64_t column = block_begin * kColumns;
    run(block_begin, whole_end - block_begin,
        {a.y + row * a.y_stride + column, a.y_stride, a.bias == nullptr ? nullptr : a.bias + column, a.accumulate});
  }
  if (block_end <= whole_end) return;
  // The last block has columns that y does not: compute beside it.
  const int64_t block = max_of(block_begin, whole_end), column = block * kColumns, valid = a.n - column;
  alignas(64) float side[kRowBlock * kColumns] = {};
  float* const y = a.y + row * a.y_stride + column;
  if (a.accumulate) {
    for (int64_t r = 0; r < rows; ++r) memcpy(side + r * kColumns, y + r * a.y_stride, static_cast<size_t>(valid) * 4);
  }
  run(block, 1, {side, kColumns, a.bias == nullptr ? nullptr : a.bias + column, a.accumulate});
  for (int64_t r = 0; r < rows; ++r) memcpy(y + r * a.y_stride, side + r * kColumns, static_cast<size_t>(valid) * 4);
}

}  // namespace

void linear(const LinearArgs& a) {
  const int64_t num_blocks = ceil_div(a.n, kColumns), row_blocks = ceil_div(a.rows, kRowBlock);
  const int64_t rows_each = row_blocks == 0 ? 0 : ceil_div(a.rows, row_blocks);
  // A claim of one block should last some microseconds.
  const int64_t grain = max_of(1, 32768 / max_of(1, a.k * kColumns * min_of(a.rows, kRowBlock)));
  parallel_for(num_blocks * row_blocks, grain, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t row = begin / num_blocks * rows_each, block = begin % num_blocks;
      const int64_t count = min_of(end - begin, num_blocks - block);
      const int64_t rows = min_of(rows_each, a.rows - row);
      if (rows > 0) {
        if (a.type == FloatType::kBf16) {
          blocks<bf16>(a, row, rows, block, block + count);
        } else if (a.type == FloatType::kHalf) {
          blocks<f16>(a, row, rows, block, block + count);
        } else {
          blocks<float>(a, row, rows, block, block + count);
        }
      }
      begin += count;
    }
  });
}

}  // namespace HEADRACE_ISA
}  // namespace headrace

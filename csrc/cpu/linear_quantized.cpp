// Linear layers whose weights and activations are both quantised: dot products of bytes in 32-bit integers, scales in float.
//
// Integer sums are exact. With group scales an output is one chain of fused multiply-adds over the groups 0, 1, ..., whatever the
// number of rows and the tile they fall in, so a row's bits do not depend on its batch, on chunking or on threads.
#include <algorithm>
#include <type_traits>

#include "gguf_blocks.h"
#include "quantized_tile.h"
#include "threads.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int64_t kColumns = kPackedColumns;
constexpr int64_t kGroup = kQuantGroup;

// Where to prefetch while a tile computes: record g of the tile goes with address + g * record_step, and so on for the parts of it.
// One tile over the weights asks for what it needs a little later (one row in vectors of 256 bits only where kAskForWeights says so). Several tiles over
// the same weights ask for the next block instead, each for its share, so that memory works all the time.
struct Ahead {
  const uint8_t* address;
  int64_t record_step, line_step;  // bytes for a record, for a cache line of it

  HEADRACE_INLINE Ahead of(const uint8_t* weight, int64_t block_bytes, int64_t record_bytes, int64_t rows, int64_t tile, int64_t num_tiles) {
    if (num_tiles == 1) return {weight + (kAskForWeights || rows > 1 || kLanes == 16 ? kAheadBytes : 0), record_bytes, 64};
    return {weight + block_bytes + block_bytes * tile / num_tiles, record_bytes / num_tiles, 64 / num_tiles};
  }
};

// One group of a block of weights: the codes, then 32 half scales, then (kInt4Min) 32 half minimums.
template <QuantScheme kScheme>
constexpr int64_t kCodeBytes = kScheme == QuantScheme::kInt8 ? kGroup * kColumns : kGroup * kColumns / 2;
template <QuantScheme kScheme>
constexpr int64_t kRecordBytes = kCodeBytes<kScheme> + kColumns * (kScheme == QuantScheme::kInt4Min ? 4 : 2);

constexpr int64_t kUnpackedGroup = kGroup * kColumns;  // bytes of a group of 4-bit codes that were unpacked, one a byte
// From so many tiles of rows on unpacking once pays. Not where there are vector units beside those of the dot products (Zen 4, Zen 5):
// they unpack for each tile anew meanwhile.
#if defined(__AVX512BF16__) && !defined(HEADRACE_AMX)
constexpr int64_t kUnpackTiles = kRowBlock;
#else
constexpr int64_t kUnpackTiles = 3;
#endif

// The weights of a block, and where many rows share them also unpacked: its 4-bit codes in the order of 8-bit ones, and its scales and
// minimums as floats, [groups][2][32].
struct GroupBlock {
  const uint8_t* records;
  const uint8_t* codes;
  const float* scales;
  int64_t column;  // of y
};

static_assert(steps_in_words(15, kGroup / 4) == kGroup / 4);

template <QuantScheme kScheme>
using GroupElement = std::conditional_t<kScheme == QuantScheme::kInt8, WideElement, int8_t>;

// Integer sums of one group: R rows x C units, codes of the first unit at `codes`, unpacked if kUnpacked. Prefetches from `ahead`.
template <QuantScheme kScheme, bool kUnpacked, int R, int C>
HEADRACE_INLINE void group_sums(const uint8_t* codes, const uint8_t* ahead, int64_t line_step, const GroupElement<kScheme>* x, int64_t x_stride,
                                vi (&sum)[R][C]) {
  vi words[R][C];  // of 4-bit codes
  HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
    HEADRACE_UNROLL for (int c = 0; c < C; ++c) words[r][c] = splat_int(0);
  }
  if constexpr (kScheme == QuantScheme::kInt8 || kUnpacked) {
    HEADRACE_UNROLL for (int step = 0; step < kGroup / 4; ++step) {
      if (kScheme == QuantScheme::kInt8 || step % 2 == 0) {  // 4-bit codes are half as many lines
        const int line = kScheme == QuantScheme::kInt8 ? 2 * step : step;
        prefetch_weights<R>(ahead + line * line_step);
        if (C * kLanes * 4 > 64) prefetch_weights<R>(ahead + (line + 1) * line_step);
      }
      const uint8_t* const place = codes + step * kColumns * 4;
      if constexpr (kScheme == QuantScheme::kInt8) {
        Wide weights[C];
        HEADRACE_UNROLL for (int c = 0; c < C; ++c) weights[c] = load_wide(place + c * kLanes * 4);
        HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
          const auto values = splat_wide(x + r * x_stride + step * 4);
          HEADRACE_UNROLL for (int c = 0; c < C; ++c) dot_wide(sum[r][c], weights[c], values);
        }
      } else {
        vi weights[C];
        HEADRACE_UNROLL for (int c = 0; c < C; ++c) weights[c] = load_bytes(place + c * kLanes * 4);
        HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
          const vi values = splat_bytes(x + r * x_stride + step * 4);
          HEADRACE_UNROLL for (int c = 0; c < C; ++c) {
            step == 0 ? first_small(sum[r][c], words[r][c], weights[c], values) : dot_small(sum[r][c], words[r][c], weights[c], values);
          }
        }
      }
    }
  } else {
    HEADRACE_UNROLL for (int step = 0; step < kGroup / 8; ++step) {
      prefetch_weights<R>(ahead + 2 * step * line_step);
      if (C * kLanes * 4 > 64) prefetch_weights<R>(ahead + (2 * step + 1) * line_step);
      vi low[C], high[C];
      HEADRACE_UNROLL for (int c = 0; c < C; ++c) {
        const vi both = load_bytes(codes + step * kColumns * 4 + c * kLanes * 4);
        low[c] = low_nibbles(both);
        high[c] = high_nibbles(both);
      }
      HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
        const vi first = splat_bytes(x + r * x_stride + step * 8), second = splat_bytes(x + r * x_stride + step * 8 + 4);
        HEADRACE_UNROLL for (int c = 0; c < C; ++c) {
          step == 0 ? first_small(sum[r][c], words[r][c], low[c], first) : dot_small(sum[r][c], words[r][c], low[c], first);
          dot_small(sum[r][c], words[r][c], high[c], second);
        }
      }
    }
  }
  if constexpr (kScheme != QuantScheme::kInt8) {
    HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
      HEADRACE_UNROLL for (int c = 0; c < C; ++c) add_small(sum[r][c], words[r][c]);
    }
  }
}

template <QuantScheme kScheme, bool kUnpacked, int R, int C>
void group_tile(const QuantizedLinearArgs& a, int64_t row, const GroupBlock& block, int64_t unit, const Ahead& ahead) {
  const int64_t groups = a.k_padded / kGroup;
  const GroupElement<kScheme>* x;
  if constexpr (kScheme == QuantScheme::kInt8) x = wide_rows(a.x) + row * a.k_padded;
  else x = static_cast<const int8_t*>(a.x.values) + row * a.k_padded;
  const float* const x_scales = a.x.scales + row * groups;
  const int32_t* const x_starts = a.x.starts + row * groups;
  const float* const x_scaled_sums = a.x.scaled_sums + row * groups;
  vf result[R][C];
  HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
    HEADRACE_UNROLL for (int c = 0; c < C; ++c) result[r][c] = splat(0.0f);
  }
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t* const record = block.records + g * kRecordBytes<kScheme>;
    vi sum[R][C];
    HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
      vi start = splat_int(0);
      if constexpr (kScheme == QuantScheme::kInt8) start = start_of_wide(x_starts[r * groups + g]);
      if constexpr (kScheme == QuantScheme::kInt4) start = splat_int(x_starts[r * groups + g]);
      HEADRACE_UNROLL for (int c = 0; c < C; ++c) sum[r][c] = start;
    }
    const uint8_t* const codes =
        (kUnpacked && kScheme != QuantScheme::kInt8 ? block.codes + g * kUnpackedGroup : record) + unit * kLanes * 4;
    const uint8_t* const later = ahead.address + g * ahead.record_step + unit * kLanes * 4;
    group_sums<kScheme, kUnpacked, R, C>(codes, later, ahead.line_step, x + g * kGroup, a.k_padded, sum);
    prefetch_weights<R>(later + kCodeBytes<kScheme> / 64 * ahead.line_step);
    if (kScheme == QuantScheme::kInt4Min) prefetch_weights<R>(later + (kCodeBytes<kScheme> / 64 + 1) * ahead.line_step);
    const uint16_t* const halves = reinterpret_cast<const uint16_t*>(record + kCodeBytes<kScheme>) + unit * kLanes;
    const float* const scales = kUnpacked ? block.scales + g * 2 * kColumns + unit * kLanes : nullptr;
    vf scale[C], minimum[C];
    HEADRACE_UNROLL for (int64_t c = 0; c < C; ++c) {
      if constexpr (kUnpacked) {
        scale[c] = load(scales + c * kLanes);
        if constexpr (kScheme == QuantScheme::kInt4Min) minimum[c] = load(scales + kColumns + c * kLanes);
      } else {
        scale[c] = load_half(halves + c * kLanes);
        if constexpr (kScheme == QuantScheme::kInt4Min) minimum[c] = load_half(halves + kColumns + c * kLanes);
      }
    }
    HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
      const vf x_scale = splat(x_scales[r * groups + g]);
      HEADRACE_UNROLL for (int c = 0; c < C; ++c) {
        result[r][c] = fma(to_float(sum[r][c]), mul(scale[c], x_scale), result[r][c]);
        if constexpr (kScheme == QuantScheme::kInt4Min) {
          result[r][c] = fma(minimum[c], splat(x_scaled_sums[r * groups + g]), result[r][c]);
        }
      }
    }
  }
  finish<R, C>(a, row, block.column + unit * kLanes, result);
}

template <QuantScheme kScheme, bool kUnpacked>
void group_rows(const QuantizedLinearArgs& a, int64_t row, int64_t rows, const GroupBlock& block, const Ahead& ahead) {
  // One or two rows are as fast as memory, which is faster in order.
  if constexpr (kUnitsOfBlock == 4) {
    if (rows == 1) return group_tile<kScheme, kUnpacked, 1, 4>(a, row, block, 0, ahead);
    if (rows == 2) return group_tile<kScheme, kUnpacked, 2, 4>(a, row, block, 0, ahead);
  }
  for (int unit = 0; unit < kUnitsOfBlock; unit += 2) {
#define HEADRACE_TILE(R)                                                                               \
  case R:                                                                                              \
    if constexpr (R <= kTile) group_tile<kScheme, kUnpacked, R, 2>(a, row, block, unit, ahead);          \
    break;
    switch (rows) { HEADRACE_TILE(1) HEADRACE_TILE(2) HEADRACE_TILE(3) HEADRACE_TILE(4) HEADRACE_TILE(5) HEADRACE_TILE(6) }
#undef HEADRACE_TILE
  }
}

template <QuantScheme kScheme>
void unpack_block(const uint8_t* records, int64_t groups, uint8_t* unpacked, float* scales) {
  constexpr int64_t kVector = kLanes * 4;
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t* const codes = records + g * kRecordBytes<kScheme>;
    uint8_t* const to = unpacked + g * kUnpackedGroup;
    if constexpr (kScheme != QuantScheme::kInt8) {
      for (int64_t step = 0; step < kGroup / 8; ++step) {
        HEADRACE_UNROLL for (int64_t i = 0; i < kColumns * 4; i += kVector) {
          const vi both = load_bytes(codes + step * kColumns * 4 + i);
          store_bytes(to + 2 * step * kColumns * 4 + i, low_nibbles(both));
          store_bytes(to + (2 * step + 1) * kColumns * 4 + i, high_nibbles(both));
        }
      }
    }
    const uint16_t* const halves = reinterpret_cast<const uint16_t*>(codes + kCodeBytes<kScheme>);
    constexpr int64_t kHalves = (kRecordBytes<kScheme> - kCodeBytes<kScheme>) / 2;
    HEADRACE_UNROLL for (int64_t i = 0; i < kHalves; i += kLanes) store(scales + g * 2 * kColumns + i, load_half(halves + i));
  }
}

template <QuantScheme kScheme>
void group_blocks(const QuantizedLinearArgs& a, int64_t row, int64_t rows, int64_t begin, int64_t end) {
  const int64_t groups = a.k_padded / kGroup, block_bytes = groups * kRecordBytes<kScheme>;
  constexpr int64_t kCodes = kScheme == QuantScheme::kInt8 ? 0 : kUnpackedGroup;
  uint8_t* codes = nullptr;
  float* scales = nullptr;
  if (rows > (kUnpackTiles - 1) * kTile) {
    codes = static_cast<uint8_t*>(thread_scratch(static_cast<size_t>(groups * (kCodes + 2 * kColumns * 4)), Scratch::kWeights));
    scales = reinterpret_cast<float*>(codes + groups * kCodes);
  }
  for (int64_t index = begin; index < end; ++index) {
    const GroupBlock block = {a.weight + index * block_bytes, codes, scales, index * kColumns};
    if (scales != nullptr) unpack_block<kScheme>(block.records, groups, codes, scales);
    for_row_tiles(row, rows, [&](int64_t first, int64_t count, int64_t tile, int64_t num_tiles) {
      const Ahead ahead = Ahead::of(block.records, block_bytes, kRecordBytes<kScheme>, rows, tile, num_tiles);
      scales != nullptr ? group_rows<kScheme, true>(a, first, count, block, ahead) : group_rows<kScheme, false>(a, first, count, block, ahead);
    });
  }
}

#if defined(HEADRACE_WIDE_IN_WORDS)
bool has_wide(const QuantizedLinearArgs& a) {
  if (a.scheme != QuantScheme::kGguf) return a.scheme == QuantScheme::kInt8 || a.scheme == QuantScheme::kInt8Rotated || a.scheme == QuantScheme::kInt8Fast;
  const GgufEntry* const entries = reinterpret_cast<const GgufEntry*>(a.weight);
  return std::any_of(entries, entries + ceil_div(a.n, kColumns), [](const GgufEntry& entry) { return gguf_format(entry.type()).wide; });
}

// The rows as words, where some of the weights are whole bytes.
const int16_t* words_of(const QuantizedLinearArgs& a) {
  if (!has_wide(a)) return nullptr;
  const int64_t count = a.rows * a.k_padded;
  const int8_t* const values = static_cast<const int8_t*>(a.x.values);
  int16_t* const words = static_cast<int16_t*>(thread_scratch(static_cast<size_t>(count) * 2, Scratch::kWords));
  parallel_for(count / kGroup, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * kGroup; i < end * kGroup; i += kGroup) store_wide(words + i, values + i);
  });
  return words;
}
#else
const int16_t* words_of(const QuantizedLinearArgs&) { return nullptr; }
#endif

}  // namespace

void linear_quantized(const QuantizedLinearArgs& args) {
  QuantizedLinearArgs a = args;
  a.x.words = words_of(args);
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
          case QuantScheme::kInt8Rotated:
            group_blocks<QuantScheme::kInt8>(a, row, rows, block, block + count);
            break;
          case QuantScheme::kInt4:
            group_blocks<QuantScheme::kInt4>(a, row, rows, block, block + count);
            break;
          case QuantScheme::kInt4Min:
            group_blocks<QuantScheme::kInt4Min>(a, row, rows, block, block + count);
            break;
          case QuantScheme::kInt8Fast:
          case QuantScheme::kInt16:
          case QuantScheme::kBf16:
            linear_by_column(a, row, rows, block, block + count);
            break;
          case QuantScheme::kGguf:
            linear_gguf(a, row, rows, block, block + count);
            break;
        }
      }
      begin += count;
    }
  });
}

}  // namespace HEADRACE_ISA
}  // namespace headrace

// Linear layers over blocks of GGUF files: products of bytes in 32-bit integers, scales in float, every bit of the file.
//
// A run of records is unpacked first: codes to bytes, scales and minimums to floats, which is exact. Then all rows are multiplied with it. One
// or few rows take less time than memory, and read records in order (rows_in_order), with the same bits.
// Integer sums are exact, and an output is one chain of fused multiply-adds over the records 0, 1, ... (both halves of a record where they
// have scales of their own, and its minimums), whatever the number of rows and the tile they fall in; between two runs it waits in memory. So
// a row's bits do not depend on its batch, on chunking or on threads.
#include <type_traits>
#include <utility>

#include "gguf_blocks.h"
#include "quantized_tile.h"
#include "threads.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int64_t kColumns = kPackedColumns;
constexpr int64_t kGroup = kQuantGroup;
constexpr int64_t kStepBytes = kColumns * 4;     // four elements of all columns
constexpr int64_t kFactors = 4 * kColumns;       // floats of a record: scales of its halves, minimums of its halves, [4][32]
constexpr int64_t kRun = 8;                      // records in a run: unpacked, they stay in the first-level cache

// body(std::integral_constant<int, i>) for i = 0 .. kCount - 1.
template <class Body, int... i>
HEADRACE_INLINE void for_each_of(std::integer_sequence<int, i...>, Body body) {
  (body(std::integral_constant<int, i>{}), ...);
}
template <int kCount, class Body>
HEADRACE_INLINE void for_constants(Body body) {
  for_each_of(std::make_integer_sequence<int, kCount>{}, body);
}

// Step s of the codes of a record, [32][4] bytes, from byte `at` on.
template <GgufType kType, int s>
HEADRACE_INLINE vi load_codes(const uint8_t* record, int64_t at) {
  constexpr GgufFormat kFormat = gguf_format(kType);
  constexpr int64_t kPairs = kFormat.planes & kNibblePlane ? kColumns * 16 : 0, kBits = kPairs + (kFormat.planes & kPairPlane ? kColumns * 8 : 0);
  constexpr int kPairBit = kFormat.planes & kNibblePlane ? 4 : 0, kBit = kPairBit + (kFormat.planes & kPairPlane ? 2 : 0);
  if constexpr (kFormat.planes == kWholePlane) return load_bytes(record + s * kStepBytes + at);
  vi code = splat_int(0);
  if constexpr ((kFormat.planes & kNibblePlane) != 0) {
    const vi both = load_bytes(record + s / 2 * kStepBytes + at);
    code = s % 2 == 0 ? low_nibbles(both) : high_nibbles(both);
  }
  if constexpr ((kFormat.planes & kPairPlane) != 0) {
    const vi four = load_bytes(record + kPairs + s / 4 * kStepBytes + at);
    code = or_bits(code, moved_bits<(3 << kPairBit), kPairBit - s % 4 * 2>(four));
  }
  if constexpr ((kFormat.planes & kBitPlane) != 0) {
    code = or_bits(code, moved_bits<(1 << kBit), kBit - s>(load_bytes(record + kBits + at)));
  }
  if constexpr (kType == GgufType::kIQ4_NL || kType == GgufType::kIQ4_XS) code = look_up(kIq4Codes, code);
  if constexpr (kType == GgufType::kMXFP4) code = look_up(kMxfp4Codes, code);
  return code;
}

// Of kLanes columns: factors of the two halves of a record, and what is added for their minimums.
struct Scales {
  vf factor[2], minimum[2];
};

HEADRACE_INLINE vf load_halves(const uint8_t* halves, int64_t c) { return load_half(reinterpret_cast<const uint16_t*>(halves) + c); }

// Columns [c, c + kLanes) of a record. d, d_min: those of the head; times numbers of at most 8 bits, which is exact.
template <GgufType kType>
HEADRACE_INLINE Scales load_scales(const uint8_t* scales, int64_t c, vf d, vf d_min) {
  constexpr ScaleKind kScales = gguf_format(kType).scales;
  Scales result;
  // With AVX-512 GCC 12 then reads a record in the order that memory gives it faster; elsewhere it clears by an instruction that is slow.
  if constexpr (kLanes == 16) result = {};
  if constexpr (kScales == ScaleKind::kHalf || kScales == ScaleKind::kHalfMinimum) {
    result.factor[0] = load_halves(scales, c);
    // In the file they are added.
    if constexpr (kScales == ScaleKind::kHalfMinimum) result.minimum[0] = sub(splat(0.0f), load_halves(scales, kColumns + c));
  } else if constexpr (kScales == ScaleKind::kSixBits) {
    const vi low = load_widened(scales + c), both = load_widened(scales + kColumns + c % 16);
    const vi upper = c < 16 ? low_nibbles(both) : high_nibbles(both);
    const vi one = or_bits(low_nibbles(low), moved_bits<0x30, 4>(upper)), other = or_bits(high_nibbles(low), moved_bits<0x30, 2>(upper));
    if constexpr (gguf_format(kType).minimum) {
      result.factor[0] = mul(d, to_float(one));
      result.minimum[0] = mul(d_min, to_float(other));
    } else {
      result.factor[0] = mul(d, to_float(sub_int(one, splat_int(32))));
      result.factor[1] = mul(d, to_float(sub_int(other, splat_int(32))));
    }
  } else if constexpr (kScales == ScaleKind::kSixBitsOne) {
    using Words = uint64_t __attribute__((vector_size(16)));
    constexpr uint64_t kNibbles = 0x0f0f0f0f0f0f0f0fu, kPairs = 0x0303030303030303u;
    Words low;
    uint64_t upper;
    memcpy(&low, scales, 16);
    memcpy(&upper, scales + 16, 8);
    const uint64_t bit = static_cast<uint64_t>(c / 16 * 4);
    const Words numbers = (low >> Words{bit, bit} & kNibbles) | (Words{upper >> bit, upper >> (bit + 2)} & kPairs) << 4;
    uint8_t bytes[16];
    memcpy(bytes, &numbers, 16);
    result.factor[0] = mul(d, to_float(sub_int(load_widened(bytes + c % 16), splat_int(32))));
  } else if constexpr (kScales == ScaleKind::kNibbles) {
    HEADRACE_UNROLL for (int half = 0; half < 2; ++half) {
      const vi both = load_widened(scales + half * kColumns + c);
      result.factor[half] = mul(d, to_float(low_nibbles(both)));
      result.minimum[half] = mul(d_min, to_float(high_nibbles(both)));
    }
  } else if constexpr (kScales == ScaleKind::kBytes) {
    HEADRACE_UNROLL for (int half = 0; half < 2; ++half) {
      result.factor[half] = mul(d, to_float(load_widened(reinterpret_cast<const int8_t*>(scales) + half * kColumns + c)));
    }
  } else {
    using Lanes = uint32_t __attribute__((vector_size(kLanes * 4)));
    const vi exponents = load_widened(scales + c);
    Lanes e;
    memcpy(&e, &exponents, sizeof e);
    e = e < 2 ? 0x00200000u << e : (e - 1) << 23;  // as power_bits
    memcpy(&result.factor[0], &e, sizeof e);
  }
  return result;
}

// Unpacked records [begin, end) of a block, whose first is at `records`.
struct Run {
  uint8_t* codes;   // [][8][32][4]
  float* factors;   // [][4][32]
  const uint8_t* records;
  int64_t bytes, begin, end;  // bytes: of the records
};

// What the products of rows [row, row + rows) begin with: of each group (both halves where they have scales of their own) minus the sum of its
// values times the code of 0, or, where there are minimums, times its scale. [rows][groups][halves].
union Start {
  int32_t sum;
  float scaled;
};

template <GgufType kType>
void prepare(const QuantizedLinearArgs& a, int64_t row, int64_t rows, Start* starts) {
  constexpr GgufFormat kFormat = gguf_format(kType);
  const int64_t groups = a.k_padded / kGroup;
  for (int64_t i = row * groups; i < (row + rows) * groups; ++i) {
    const int32_t first = half_sum(a.x.starts[i], 0), last = half_sum(a.x.starts[i], 1);
    HEADRACE_UNROLL for (int half = 0; half < (kFormat.halves ? 2 : 1); ++half, ++starts) {
      const int32_t sum = -(!kFormat.halves ? first + last : half == 0 ? first : last);
      if constexpr (kFormat.minimum) starts->scaled = a.x.scales[i] * static_cast<float>(sum);
      else starts->sum = kFormat.wide && !kWideUnsigned ? 0 : sum * kFormat.zero;
    }
  }
}

template <bool kWide>
HEADRACE_INLINE auto row_values(const QuantizedLinearArgs& a, int64_t at) {
  if constexpr (kWide) return wide_rows(a.x) + at;
  else return static_cast<const int8_t*>(a.x.values) + at;
}

// What a tile asks memory for while it multiplies: `lines` for each record, from `next` on.
struct Ahead {
  const uint8_t* next;
  int64_t lines;
};

template <int R>
HEADRACE_INLINE void ask(Ahead& ahead) {
  for (int64_t i = 0; i < ahead.lines; ++i, ahead.next += 64) prefetch_weights<R>(ahead.next);
}

template <GgufType kType>
void unpack(const uint8_t* block, const Run& run) {
  constexpr GgufFormat kFormat = gguf_format(kType);
  float d[kColumns] = {}, d_min[kColumns] = {};
  for (int64_t g = run.begin; g < run.end; ++g) {
    const uint8_t* const record = block + kFormat.record_at(g);
    if constexpr (kFormat.head_bytes() != 0) {
      if (g % kGgufHeadGroups == 0) {
        const uint8_t* const head = record - kFormat.head_bytes();
        HEADRACE_UNROLL for (int64_t c = 0; c < kColumns; c += kLanes) {
          store(d + c, load_halves(head, c));
          if constexpr (kFormat.minimum) store(d_min + c, load_halves(head, kColumns + c));
        }
      }
    }
    if constexpr (kFormat.planes != kWholePlane) {
      uint8_t* const codes = run.codes + (g - run.begin) * kGroup * kColumns;
      for (int64_t at = 0; at < kStepBytes; at += kLanes * 4) {
        for_constants<8>([&](auto step) {
          constexpr int s = decltype(step)::value;
          store_bytes(codes + s * kStepBytes + at, load_codes<kType, s>(record, at));
        });
      }
    }
    float* const factors = run.factors + (g - run.begin) * kFactors;
    HEADRACE_UNROLL for (int64_t c = 0; c < kColumns; c += kLanes) {
      const Scales scales = load_scales<kType>(record + kFormat.code_bytes(), c, load(d + c), load(d_min + c));
      HEADRACE_UNROLL for (int half = 0; half < (kFormat.halves ? 2 : 1); ++half) {
        store(factors + half * kColumns + c, scales.factor[half]);
        if constexpr (kFormat.minimum) store(factors + (2 + half) * kColumns + c, scales.minimum[half]);
      }
    }
  }
}

// What a kind of block asks of the products. kStepsInWords: steps_in_words of its codes; 0: not for them.
template <bool kWideCodes, bool kHalvesOfRecord, bool kMinimums, int kStepsInWords>
struct Kind {
  static constexpr int kSmallSteps = kStepsInWords;
  static constexpr bool kWide = kWideCodes, kMinimum = kMinimums;
  static constexpr int kHalves = kHalvesOfRecord ? 2 : 1;
};

// The codes of a run as a tile reads them: unpacked, or those of whole bytes in the records themselves.
struct Codes {
  const uint8_t* first;
  int64_t stride;  // from a record to the next
};

// R rows x C units through a run. `partial`: their chains, [R] rows of kColumns.
template <class K, int R, int C>
void tile(const QuantizedLinearArgs& a, int64_t row, int64_t column, const Codes& codes, const Run& run, const Start* starts, Ahead ahead, int unit,
          float* partial) {
  constexpr int kSteps = 8 / K::kHalves;
  const int64_t groups = a.k_padded / kGroup;
  const auto* x = row_values<K::kWide>(a, row * a.k_padded + run.begin * kGroup);
  const uint8_t* record = codes.first + unit * kLanes * 4;
  const float* factors = run.factors + unit * kLanes;
  vf result[R][C];
  HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
    HEADRACE_UNROLL for (int c = 0; c < C; ++c) {
      result[r][c] = run.begin == 0 ? splat(0.0f) : load(partial + r * kColumns + (unit + c) * kLanes);
    }
  }
  for (int64_t g = run.begin; g < run.end; ++g, x += kGroup, record += codes.stride, factors += kFactors) {
    ask<R>(ahead);
    HEADRACE_UNROLL for (int half = 0; half < K::kHalves; ++half) {
      const Start* const start = starts + g * K::kHalves + half;
      vi sum[R][C];
      HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
        HEADRACE_UNROLL for (int c = 0; c < C; ++c) sum[r][c] = splat_int(K::kMinimum ? 0 : start[r * groups * K::kHalves].sum);
      }
      vi words[R][C];
      HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
        HEADRACE_UNROLL for (int c = 0; c < C; ++c) words[r][c] = splat_int(0);
      }
      HEADRACE_UNROLL for (int i = 0; i < kSteps; ++i) {
        const int step = half * kSteps + i;
        const uint8_t* const place = record + step * kStepBytes;
        if constexpr (K::kWide) {
          Wide weights[C];
          HEADRACE_UNROLL for (int c = 0; c < C; ++c) weights[c] = load_wide(place + c * kLanes * 4);
          HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
            const auto values = splat_wide(x + r * a.k_padded + step * 4);
            HEADRACE_UNROLL for (int c = 0; c < C; ++c) dot_wide(sum[r][c], weights[c], values);
          }
        } else {
          vi weights[C];
          HEADRACE_UNROLL for (int c = 0; c < C; ++c) weights[c] = load_bytes(place + c * kLanes * 4);
          HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
            const vi values = splat_bytes(x + r * a.k_padded + step * 4);
            HEADRACE_UNROLL for (int c = 0; c < C; ++c) {
              if constexpr (K::kSmallSteps == 0) dot_nibbles(sum[r][c], weights[c], values);
              else if (i % K::kSmallSteps == 0) first_small(sum[r][c], words[r][c], weights[c], values);
              else dot_small(sum[r][c], words[r][c], weights[c], values);
            }
          }
          if (K::kSmallSteps != 0 && (i + 1) % K::kSmallSteps == 0) {
            HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
              HEADRACE_UNROLL for (int c = 0; c < C; ++c) add_small(sum[r][c], words[r][c]);
            }
          }
        }
      }
      HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
        const vf x_scale = splat(a.x.scales[(row + r) * groups + g]);
        HEADRACE_UNROLL for (int c = 0; c < C; ++c) {
          const vf scale = load(factors + half * kColumns + c * kLanes);
          result[r][c] = fma(to_float(sum[r][c]), mul(scale, x_scale), result[r][c]);
        }
        if constexpr (K::kMinimum) {
          HEADRACE_UNROLL for (int c = 0; c < C; ++c) {
            const vf minimum = load(factors + (2 + half) * kColumns + c * kLanes);
            result[r][c] = fma(minimum, splat(start[r * groups * K::kHalves].scaled), result[r][c]);
          }
        }
      }
    }
  }
  if (run.end == groups) return finish<R, C>(a, row, column + unit * kLanes, result);
  HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
    HEADRACE_UNROLL for (int c = 0; c < C; ++c) store(partial + r * kColumns + (unit + c) * kLanes, result[r][c]);
  }
}

template <class K>
void tiles(const QuantizedLinearArgs& a, int64_t row, int64_t rows, int64_t column, const Codes& codes, const Run& run, const Start* starts, float* partial) {
  // Each asks for its share of the next run, so that memory works all the time.
  const int64_t num_tiles = ceil_div(rows, kTile) * (kUnitsOfBlock < 2 ? 1 : kUnitsOfBlock / 2);
  const int64_t lines = ceil_div(run.bytes, 64 * num_tiles * (run.end - run.begin));
  Ahead ahead = {run.records + run.bytes, lines};
  for_row_tiles(row, rows, [&](int64_t first, int64_t count, int64_t, int64_t) {
    float* const chains = partial + (first - row) * kColumns;
    const Start* const own = starts + (first - row) * (a.k_padded / kGroup) * K::kHalves;
    for (int unit = 0; unit < kUnitsOfBlock; unit += 2, ahead.next += 64 * lines * (run.end - run.begin)) {
#define HEADRACE_TILE(R)                                                                                      \
  case R:                                                                                                     \
    if constexpr (R <= kTile) tile<K, R, 2>(a, first, column, codes, run, own, ahead, unit, chains);          \
    break;
      switch (count) { HEADRACE_TILE(1) HEADRACE_TILE(2) HEADRACE_TILE(3) HEADRACE_TILE(4) HEADRACE_TILE(5) HEADRACE_TILE(6) }
#undef HEADRACE_TILE
    }
  });
}

// Codes up to 15 (Q4_0, Q4_1, Q4_K), 3 (Q2_K) and 7 (Q3_K) take all steps that have one scale; those up to 31 (Q5_0, Q5_1, Q5_K) and 24 (MXFP4)
// four; those of Q6_K, up to 63, would take two.
template <GgufType kType>
constexpr int small_steps() {
  constexpr GgufFormat kFormat = gguf_format(kType);
  if (kFormat.wide) return 0;
  return steps_in_words(kType == GgufType::kMXFP4 ? kMxfp4Codes[7] : kFormat.largest_code(), kFormat.halves ? 4 : 8);
}

// R rows: each record is read once, in order, and multiplied out of registers.
template <GgufType kType, int R>
void rows_in_order(const QuantizedLinearArgs& a, int64_t row, int64_t column, const uint8_t* block, const Start* starts) {
  constexpr GgufFormat kFormat = gguf_format(kType);
  constexpr int kUnits = kUnitsOfBlock, C = kUnits == 4 ? 4 : kUnits < 2 ? kUnits : 2, kHalves = kFormat.halves ? 2 : 1, kSteps = 8 / kHalves;
  constexpr int kSmallSteps = small_steps<kType>();
  const int64_t groups = a.k_padded / kGroup;
  const auto* x = row_values<kFormat.wide>(a, row * a.k_padded);
  vf result[R][kUnits], d[kUnits] = {}, d_min[kUnits] = {};
  HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
    HEADRACE_UNROLL for (int u = 0; u < kUnits; ++u) result[r][u] = splat(0.0f);
  }
  const uint8_t* record = block;
  for (int64_t g = 0; g < groups; ++g, x += kGroup, record += kFormat.record_bytes()) {
    if constexpr (kFormat.head_bytes() != 0) {
      if (g % kGgufHeadGroups == 0) {
        HEADRACE_UNROLL for (int u = 0; u < kUnits; ++u) {
          d[u] = load_halves(record, u * kLanes);
          if constexpr (kFormat.minimum) d_min[u] = load_halves(record, kColumns + u * kLanes);
        }
        record += kFormat.head_bytes();
      }
    }
    if (kAskForWeights || (kUnits == 4 && kFormat.planes != kWholePlane)) {
      for (int64_t line = 0; line < kFormat.record_bytes(); line += 64) prefetch_weights<R>(record + kAheadBytes + line);
    }
    HEADRACE_UNROLL for (int first = 0; first < kUnits; first += C) {
      Scales scales[C];
      HEADRACE_UNROLL for (int c = 0; c < C; ++c) {
        scales[c] = load_scales<kType>(record + kFormat.code_bytes(), (first + c) * kLanes, d[first + c], d_min[first + c]);
      }
      for_constants<kHalves>([&](auto of_half) {
        constexpr int half = decltype(of_half)::value;
        const Start* const start = starts + g * kHalves + half;
        vi sum[R][C], words[R][C];
        HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
          HEADRACE_UNROLL for (int c = 0; c < C; ++c) {
            sum[r][c] = splat_int(kFormat.minimum ? 0 : start[r * groups * kHalves].sum);
            words[r][c] = splat_int(0);
          }
        }
        for_constants<kSteps>([&](auto of_step) {
          constexpr int i = decltype(of_step)::value, step = half * kSteps + i;
          vi codes[C];
          HEADRACE_UNROLL for (int c = 0; c < C; ++c) codes[c] = load_codes<kType, step>(record, (first + c) * kLanes * 4);
          HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
            if constexpr (kFormat.wide) {
              const auto values = splat_wide(x + r * a.k_padded + step * 4);
              HEADRACE_UNROLL for (int c = 0; c < C; ++c) dot_wide(sum[r][c], wide_of(codes[c]), values);
            } else {
              const vi values = splat_bytes(x + r * a.k_padded + step * 4);
              HEADRACE_UNROLL for (int c = 0; c < C; ++c) {
                if constexpr (kSmallSteps == 0) dot_nibbles(sum[r][c], codes[c], values);
                else if constexpr (i % kSmallSteps == 0) first_small(sum[r][c], words[r][c], codes[c], values);
                else dot_small(sum[r][c], words[r][c], codes[c], values);
                if constexpr (kSmallSteps != 0 && (i + 1) % (kSmallSteps == 0 ? 1 : kSmallSteps) == 0) add_small(sum[r][c], words[r][c]);
              }
            }
          }
        });
        HEADRACE_UNROLL for (int r = 0; r < R; ++r) {
          const vf x_scale = splat(a.x.scales[(row + r) * groups + g]);
          HEADRACE_UNROLL for (int c = 0; c < C; ++c) {
            vf& chain = result[r][first + c];
            chain = fma(to_float(sum[r][c]), mul(scales[c].factor[half], x_scale), chain);
          }
          if constexpr (kFormat.minimum) {
            const vf scaled_sum = splat(start[r * groups * kHalves].scaled);
            HEADRACE_UNROLL for (int c = 0; c < C; ++c) result[r][first + c] = fma(scales[c].minimum[half], scaled_sum, result[r][first + c]);
          }
        }
      });
    }
  }
  finish<R, kUnits>(a, row, column, result);
}

template <GgufType kType>
void multiply(const QuantizedLinearArgs& a, int64_t row, int64_t rows, int64_t column, const uint8_t* block, const Start* starts, Run run, float* partial) {
  constexpr GgufFormat kFormat = gguf_format(kType);
  constexpr bool kInPlace = kFormat.planes == kWholePlane;
  // So many at most: the registers must hold the sums, scales and minimums of a record.
  constexpr int kInOrder = kUnitsOfBlock <= 2 ? 4 : kUnitsOfBlock == 4 || kInPlace;
#define HEADRACE_ROWS(R)                                                                          \
  if constexpr (R <= kInOrder) {                                                                  \
    if (rows == R) return rows_in_order<kType, R>(a, row, column, block, starts);                 \
  }
  HEADRACE_ROWS(1) HEADRACE_ROWS(2) HEADRACE_ROWS(3) HEADRACE_ROWS(4)
#undef HEADRACE_ROWS
  const int64_t groups = a.k_padded / kGroup;
  for (run.begin = 0; run.begin < groups; run.begin = run.end) {
    run.end = min_of(run.begin + kRun, groups);
    run.records = block + kFormat.record_at(run.begin);
    run.bytes = (run.end - run.begin) * kFormat.record_bytes();
    unpack<kType>(block, run);
    const Codes codes = kInPlace ? Codes{run.records, kFormat.record_bytes()} : Codes{run.codes, kGroup * kColumns};
    tiles<Kind<kFormat.wide, kFormat.halves, kFormat.minimum, small_steps<kType>()>>(a, row, rows, column, codes, run, starts, partial);
  }
}

}  // namespace

void linear_gguf(const QuantizedLinearArgs& a, int64_t row, int64_t rows, int64_t begin, int64_t end) {
  constexpr int64_t kCodeBytes = kRun * kGroup * kColumns, kFactorBytes = kRun * kFactors * 4;
  uint8_t* const codes = static_cast<uint8_t*>(
      thread_scratch(static_cast<size_t>(kCodeBytes + kFactorBytes + kRowBlock * kColumns * 4 + rows * a.k_padded / kGroup * 8), Scratch::kWeights));
  float* const factors = reinterpret_cast<float*>(codes + kCodeBytes);
  const Run run = {codes, factors, nullptr, 0, 0, 0};
  float* const partial = factors + kRun * kFactors;
  Start* const starts = reinterpret_cast<Start*>(partial + kRowBlock * kColumns);
  const GgufEntry* const entries = reinterpret_cast<const GgufEntry*>(a.weight);
  for (int64_t index = begin; index < end; ++index) {
    const GgufType type = entries[index].type();
#define HEADRACE_CALL(name)                                                                                             \
  if (index == begin || type != entries[index - 1].type()) prepare<GgufType::name>(a, row, rows, starts);               \
  multiply<GgufType::name>(a, row, rows, index * kColumns, entries[index].block(), starts, run, partial)
    HEADRACE_FOR_GGUF_TYPE(type, HEADRACE_CALL)
#undef HEADRACE_CALL
  }
}

}  // namespace HEADRACE_ISA
}  // namespace headrace

// Matrices in the block types of GGUF files, as the kernels keep them: the bits of the file, in the order in which they are multiplied.
//
// A packed matrix [n, k] is a table of ceil(n / 32) entries, one for each 32 rows of it (columns of the product), and then their blocks, so
// that parts of one matrix may have different types. An entry is relative to its own address: a table can be read from any entry on.
//
// A block is a run of records, one for each 32 elements of k, with a head before each eighth (the first included) where the type has one:
//   head    32 halves d, and 32 halves dmin where there are minimums: factors of the scales (minimums) of 256 elements
//   codes   planes of their bits, each where the type has it, four elements of a column side by side, [..][32][4] bytes:
//           whole    [8]: byte j of step i is element 4 i + j
//           nibbles  [4]: elements 8 i + j and (high nibble) 8 i + 4 + j: bits 0 .. 3
//           pairs    [2]: elements 16 i + 4 s + j in bits 2 s and 2 s + 1, s = 0 .. 3: the two bits above the nibble, or bits 0 and 1
//           bits     [1]: element 4 s + j in bit s, s = 0 .. 7: the bit above the others
//   scales  as ScaleKind says
// weight = scale * (code - zero), or scale * code - minimum; a type with a table looks the code up first.
// Types and their numbers: ggml.h; layouts in the file: the block_* structs of ggml-common.h (https://github.com/ggml-org/ggml).
#pragma once
#include <cstdint>
#include <cstring>

#include "ops.h"

namespace headrace {

enum class GgufType : int {
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kIQ4_NL = 20,
  kIQ4_XS = 23,
  kMXFP4 = 39
};

enum class ScaleKind {
  kHalf,         // 32 halves
  kHalfMinimum,  // 32 halves, 32 halves of minimums
  kSixBits,      // of each column two numbers of 6 bits, a scale and a minimum or the scales of the first and the last 16 elements:
                 // 32 bytes of their low nibbles, 16 bytes of their upper bits, columns c and c + 16 in the low and the high nibble
  kSixBitsOne,   // a scale of 6 bits less 32: 16 bytes of low nibbles, columns c and c + 16; 8 bytes of upper bits, columns c, c + 8, ...
  kNibbles,      // [2][32] bytes, of the first and the last 16 elements: a scale and (high) a minimum of 4 bits
  kBytes,        // [2][32] signed bytes, scales of the first and the last 16 elements
  kExponent      // 32 bytes e: 2^(e - 128)
};

// The bits of the float that a byte of kExponent stands for; below 2 it is subnormal.
constexpr uint32_t power_bits(uint32_t e) { return e < 2 ? 0x00200000u << e : (e - 1) << 23; }

static inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, magnitude = static_cast<uint32_t>(half & 0x7fff) << 13;
  // Exponent and fraction, read as those of a float, are too small by 2^112; infinity and NaN are not in weights that were loaded.
  float value;
  std::memcpy(&value, &magnitude, 4);
  value *= 0x1p112f;
  return sign != 0 ? -value : value;
}

constexpr int kWholePlane = 8, kNibblePlane = 4, kPairPlane = 2, kBitPlane = 1;
constexpr int64_t kGgufHeadGroups = 8;  // records behind a head

// elements, bytes: of a block in the file. planes: of the codes. zero: the code of 0 (kSixBits as scales: of the scale, too, 32).
// minimum: weights have minimums. halves: the first and the last 16 elements of a record have scales (and minimums) of their own.
// wide: codes may be larger than 127; then zero is 128.
struct GgufFormat {
  int64_t elements, bytes;
  int planes, zero;
  ScaleKind scales;
  bool minimum, halves, wide;

  // Of those that are not wide and have no table.
  constexpr int largest_code() const {
    return (planes & kNibblePlane ? 16 : 1) * (planes & kPairPlane ? 4 : 1) * (planes & kBitPlane ? 2 : 1) - 1;
  }
  constexpr int64_t code_bytes() const {
    return kPackedColumns * ((planes & kWholePlane ? 32 : 0) + (planes & kNibblePlane ? 16 : 0) + (planes & kPairPlane ? 8 : 0) +
                             (planes & kBitPlane ? 4 : 0));
  }
  constexpr int64_t scale_bytes() const {
    return scales == ScaleKind::kHalf || scales == ScaleKind::kNibbles || scales == ScaleKind::kBytes ? 2 * kPackedColumns
           : scales == ScaleKind::kHalfMinimum                                                        ? 4 * kPackedColumns
           : scales == ScaleKind::kSixBits                                                            ? 48
           : scales == ScaleKind::kSixBitsOne                                                         ? 24
                                                                                                      : kPackedColumns;
  }
  constexpr int64_t record_bytes() const { return code_bytes() + scale_bytes(); }
  constexpr int64_t head_bytes() const { return elements == 256 ? kPackedColumns * (minimum ? 4 : 2) : 0; }
  // Where record `group` begins; its head, if it has one, ends where record group - group % 8 begins.
  constexpr int64_t record_at(int64_t group) const {
    return group * record_bytes() + (group / kGgufHeadGroups + 1) * head_bytes();
  }
  // Of 32 rows of k elements.
  constexpr int64_t block_bytes(int64_t k) const {
    const int64_t groups = k / kQuantGroup;
    return groups * record_bytes() + (groups + kGgufHeadGroups - 1) / kGgufHeadGroups * head_bytes();
  }
};

constexpr GgufFormat gguf_format(GgufType type) {
  using S = ScaleKind;
  constexpr int n = kNibblePlane, p = kPairPlane, b = kBitPlane;
  switch (type) {
    case GgufType::kQ4_0:
      return {32, 18, n, 8, S::kHalf, false, false, false};
    case GgufType::kQ4_1:
      return {32, 20, n, 0, S::kHalfMinimum, true, false, false};
    case GgufType::kQ5_0:
      return {32, 22, n | b, 16, S::kHalf, false, false, false};
    case GgufType::kQ5_1:
      return {32, 24, n | b, 0, S::kHalfMinimum, true, false, false};
    case GgufType::kQ8_0:
      return {32, 34, kWholePlane, 128, S::kHalf, false, false, true};
    case GgufType::kQ2_K:
      return {256, 84, p, 0, S::kNibbles, true, true, false};
    case GgufType::kQ3_K:
      return {256, 110, p | b, 4, S::kSixBits, false, true, false};
    case GgufType::kQ4_K:
      return {256, 144, n, 0, S::kSixBits, true, false, false};
    case GgufType::kQ5_K:
      return {256, 176, n | b, 0, S::kSixBits, true, false, false};
    case GgufType::kQ6_K:
      return {256, 210, n | p, 32, S::kBytes, false, true, false};
    case GgufType::kIQ4_NL:
      return {32, 18, n, 128, S::kHalf, false, false, true};
    case GgufType::kIQ4_XS:
      return {256, 136, n, 128, S::kSixBitsOne, false, false, true};
    case GgufType::kMXFP4:
      return {32, 17, n, 12, S::kExponent, false, false, false};
  }
  return {0, 0, 0, 0, S::kHalf, false, false, false};
}

// CALL(name) for the type: what follows from it is known to the compiler in each.
#define HEADRACE_FOR_GGUF_TYPE(type, CALL) \
  switch (type) {                          \
    case GgufType::kQ4_0:                  \
      CALL(kQ4_0);                         \
      break;                               \
    case GgufType::kQ4_1:                  \
      CALL(kQ4_1);                         \
      break;                               \
    case GgufType::kQ5_0:                  \
      CALL(kQ5_0);                         \
      break;                               \
    case GgufType::kQ5_1:                  \
      CALL(kQ5_1);                         \
      break;                               \
    case GgufType::kQ8_0:                  \
      CALL(kQ8_0);                         \
      break;                               \
    case GgufType::kQ2_K:                  \
      CALL(kQ2_K);                         \
      break;                               \
    case GgufType::kQ3_K:                  \
      CALL(kQ3_K);                         \
      break;                               \
    case GgufType::kQ4_K:                  \
      CALL(kQ4_K);                         \
      break;                               \
    case GgufType::kQ5_K:                  \
      CALL(kQ5_K);                         \
      break;                               \
    case GgufType::kQ6_K:                  \
      CALL(kQ6_K);                         \
      break;                               \
    case GgufType::kIQ4_NL:                \
      CALL(kIQ4_NL);                       \
      break;                               \
    case GgufType::kIQ4_XS:                \
      CALL(kIQ4_XS);                       \
      break;                               \
    case GgufType::kMXFP4:                 \
      CALL(kMXFP4);                        \
      break;                               \
  }

// What the nibbles of IQ4 and MXFP4 stand for, plus the zero of their format; ggml-common.h: kvalues_iq4nl, kvalues_mxfp4.
alignas(16) constexpr uint8_t kIq4Codes[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
alignas(16) constexpr uint8_t kMxfp4Codes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// An entry of the table.
struct GgufEntry {
  int64_t bits;

  static GgufEntry of(GgufType type, int64_t offset) { return {offset << 8 | static_cast<int64_t>(type)}; }
  GgufType type() const { return static_cast<GgufType>(bits & 255); }
  const uint8_t* block() const { return reinterpret_cast<const uint8_t*>(this) + (bits >> 8); }
};

// 32 rows (num_rows of them, the others are zeros) of `k` elements as they lie in a file, rows `row_bytes` apart, to a block; and back.
void pack_gguf_block(GgufType type, const uint8_t* rows, int64_t row_bytes, int64_t num_rows, int64_t k, uint8_t* block);
void unpack_gguf_block(GgufType type, const uint8_t* block, int64_t num_rows, int64_t k, uint8_t* rows, int64_t row_bytes);


// Row `column` of a block as floats: bit for bit those of ggml.
void read_gguf_row(GgufType type, const uint8_t* block, int64_t column, int64_t k, float* out);

}  // namespace headrace

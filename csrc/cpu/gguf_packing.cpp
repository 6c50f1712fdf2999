// Blocks of GGUF files to the order of the kernels and back, every bit kept; and single rows as floats.
#include "gguf_blocks.h"

#include <cstring>

namespace headrace {
namespace {

constexpr int64_t kColumns = kPackedColumns;

// 32 elements of a row: the codes, and the bits of their scales: one number for all, or one for each half, and the same of minimums.
struct Group {
  uint8_t codes[kQuantGroup];
  uint16_t scales[2], minimums[2];
};

// The sixteen 6-bit numbers of Q4_K and Q5_K in 12 bytes: eight scales and eight minimums. The first four of each whole, the last four
// split in nibble and upper bits.
void read_sixes(const uint8_t* q, int64_t j, uint16_t& scale, uint16_t& minimum) {
  scale = j < 4 ? q[j] & 63 : (q[j + 4] & 15) | (q[j - 4] >> 6) << 4;
  minimum = j < 4 ? q[j + 4] & 63 : q[j + 4] >> 4 | (q[j] >> 6) << 4;
}
void write_sixes(uint8_t* q, int64_t j, int scale, int minimum) {
  if (j < 4) {
    q[j] = static_cast<uint8_t>(q[j] | scale);
    q[j + 4] = static_cast<uint8_t>(q[j + 4] | minimum);
  } else {
    q[j + 4] = static_cast<uint8_t>(q[j + 4] | (scale & 15) | (minimum & 15) << 4);
    q[j - 4] = static_cast<uint8_t>(q[j - 4] | (scale >> 4) << 6);
    q[j] = static_cast<uint8_t>(q[j] | (minimum >> 4) << 6);
  }
}

// Where the pieces of a block lie. nibbles: 32 elements from a byte on, the second 16 in high nibbles, or 32 in one nibble of 32 bytes.
struct FileLayout {
  int d, dmin;      // bytes of the halves; -1: none
  int low, high;    // of the nibbles or whole bytes, of the upper bits
  int scales;       // of K types
};
constexpr FileLayout layout_of(GgufType type) {
  switch (type) {
    case GgufType::kQ4_0:
    case GgufType::kIQ4_NL:
    case GgufType::kQ8_0:
      return {0, -1, 2, -1, -1};
    case GgufType::kQ4_1:
      return {0, 2, 4, -1, -1};
    case GgufType::kQ5_0:
      return {0, -1, 6, 2, -1};
    case GgufType::kQ5_1:
      return {0, 2, 8, 4, -1};
    case GgufType::kMXFP4:
      return {-1, -1, 1, -1, 0};
    case GgufType::kQ2_K:
      return {80, 82, 16, -1, 0};
    case GgufType::kQ3_K:
      return {108, -1, 32, 0, 96};
    case GgufType::kQ4_K:
      return {0, 2, 16, -1, 4};
    case GgufType::kQ5_K:
      return {0, 2, 48, 16, 4};
    case GgufType::kQ6_K:
      return {208, -1, 0, 128, 192};
    case GgufType::kIQ4_XS:
      return {0, -1, 8, -1, 2};
  }
  return {};
}

// The place of bits of element l of group g: a byte of the block, a shift within it, and how many bits.
struct Bits {
  int byte, shift, count;
};

// Low bits (up to 8) and high bits of an element; a count of 0 where there are none.
struct ElementBits {
  Bits low, high;
};
constexpr ElementBits bits_of(GgufType type, const FileLayout& at, int g, int l) {
  switch (type) {
    case GgufType::kQ8_0:
      return {{at.low + l, 0, 8}, {}};
    case GgufType::kQ4_0:
    case GgufType::kQ4_1:
    case GgufType::kIQ4_NL:
    case GgufType::kMXFP4:
      return {{at.low + l % 16, l / 16 * 4, 4}, {}};
    case GgufType::kQ5_0:
    case GgufType::kQ5_1:
      return {{at.low + l % 16, l / 16 * 4, 4}, {at.high + l / 8, l % 8, 1}};
    case GgufType::kIQ4_XS:
      return {{at.low + 16 * g + l % 16, l / 16 * 4, 4}, {}};
    case GgufType::kQ4_K:
      return {{at.low + g / 2 * 32 + l, g % 2 * 4, 4}, {}};
    case GgufType::kQ5_K:
      return {{at.low + g / 2 * 32 + l, g % 2 * 4, 4}, {at.high + l, g, 1}};
    case GgufType::kQ6_K:
      return {{at.low + g / 4 * 64 + g % 2 * 32 + l, g % 4 / 2 * 4, 4}, {at.high + g / 4 * 32 + l, g % 4 * 2, 2}};
    case GgufType::kQ2_K:
      return {{at.low + g / 4 * 32 + l, g % 4 * 2, 2}, {}};
    case GgufType::kQ3_K:
      return {{at.low + g / 4 * 32 + l, g % 4 * 2, 2}, {at.high + l, g, 1}};
  }
  return {};
}

uint16_t half_at(const uint8_t* block, int byte) {
  uint16_t half = 0;
  if (byte >= 0) std::memcpy(&half, block + byte, 2);
  return half;
}

// The scale bits of group g, one or two numbers and their minimums. Of types of 32 elements halves themselves.
void read_scales(GgufType type, const FileLayout& at, const uint8_t* block, int g, Group& group) {
  const uint8_t* const s = block + at.scales;
  switch (type) {
    case GgufType::kMXFP4:
      group.scales[0] = s[0];
      break;
    case GgufType::kQ2_K:
      for (int i = 0; i < 2; ++i) {
        group.scales[i] = s[2 * g + i] & 15;
        group.minimums[i] = s[2 * g + i] >> 4;
      }
      break;
    case GgufType::kQ3_K:
      for (int i = 0; i < 2; ++i) {
        const int j = 2 * g + i;
        group.scales[i] = static_cast<uint16_t>((j < 8 ? s[j] & 15 : s[j - 8] >> 4) | (s[8 + j % 4] >> j / 4 * 2 & 3) << 4);
      }
      break;
    case GgufType::kQ4_K:
    case GgufType::kQ5_K:
      read_sixes(s, g, group.scales[0], group.minimums[0]);
      break;
    case GgufType::kQ6_K:
      for (int i = 0; i < 2; ++i) group.scales[i] = s[2 * g + i];
      break;
    case GgufType::kIQ4_XS:
      group.scales[0] = static_cast<uint16_t>((s[2 + g / 2] >> g % 2 * 4 & 15) | (half_at(s, 0) >> 2 * g & 3) << 4);
      break;
    default:
      group.scales[0] = half_at(block, at.d);
      group.minimums[0] = half_at(block, at.dmin);
  }
}

void write_scales(GgufType type, const FileLayout& at, const Group& group, int g, uint8_t* block) {
  uint8_t* const s = block + at.scales;
  const auto add = [](uint8_t& byte, int bits) { byte = static_cast<uint8_t>(byte | bits); };
  switch (type) {
    case GgufType::kMXFP4:
      s[0] = static_cast<uint8_t>(group.scales[0]);
      break;
    case GgufType::kQ2_K:
      for (int i = 0; i < 2; ++i) s[2 * g + i] = static_cast<uint8_t>(group.scales[i] | group.minimums[i] << 4);
      break;
    case GgufType::kQ3_K:
      for (int i = 0; i < 2; ++i) {
        const int j = 2 * g + i;
        add(s[j % 8], (group.scales[i] & 15) << j / 8 * 4);
        add(s[8 + j % 4], group.scales[i] >> 4 << j / 4 * 2);
      }
      break;
    case GgufType::kQ4_K:
    case GgufType::kQ5_K:
      write_sixes(s, g, group.scales[0], group.minimums[0]);
      break;
    case GgufType::kQ6_K:
      for (int i = 0; i < 2; ++i) s[2 * g + i] = static_cast<uint8_t>(group.scales[i]);
      break;
    case GgufType::kIQ4_XS: {
      add(s[2 + g / 2], (group.scales[0] & 15) << g % 2 * 4);
      const uint16_t upper = static_cast<uint16_t>(half_at(s, 0) | group.scales[0] >> 4 << 2 * g);
      std::memcpy(s, &upper, 2);
      break;
    }
    default:
      std::memcpy(block + at.d, &group.scales[0], 2);
      if (at.dmin >= 0) std::memcpy(block + at.dmin, &group.minimums[0], 2);
  }
}

// What is added to a stored code: Q8_0 has signed bytes.
constexpr uint8_t offset_of(GgufType type) { return type == GgufType::kQ8_0 ? 128 : 0; }

// The planes of a record that column `c` has in them.
template <class Visit>
inline void for_each_plane(const GgufFormat& format, int64_t c, Visit visit) {
  int64_t plane = 0;
  int first_bit = 0;
  const auto in = [&](int bits, int64_t bytes, int steps) {  // `steps` elements of `bits` bits share a byte
    for (int e = 0; e < kQuantGroup; ++e) {
      const int64_t vector = e / (4 * steps), byte = plane + (vector * kColumns + c) * 4 + e % 4;
      visit(e, byte, e / 4 % steps * bits, bits, first_bit);
    }
    plane += kColumns * bytes;
    first_bit += bits;
  };
  if (format.planes & kWholePlane) in(8, 32, 1);
  if (format.planes & kNibblePlane) in(4, 16, 2);
  if (format.planes & kPairPlane) in(2, 8, 4);
  if (format.planes & kBitPlane) in(1, 4, 8);
}

// The codes of column c into the planes of a record: as `for_each_plane` has them, four elements at a time.
inline void put_codes(const GgufFormat& format, const Group& group, int64_t c, uint8_t* plane) {
  uint32_t words[kQuantGroup / 4];
  std::memcpy(words, group.codes, sizeof words);
  int first_bit = 0;
  const auto put = [&](int bits, int steps) {
    const uint32_t mask = 0x01010101u * ((1u << bits) - 1);
    for (int vector = 0; vector < kQuantGroup / 4 / steps; ++vector) {
      uint32_t word = 0;
      for (int step = 0; step < steps; ++step) word |= (words[vector * steps + step] >> first_bit & mask) << step * bits;
      std::memcpy(plane + (vector * kColumns + c) * 4, &word, 4);
    }
    plane += kColumns * kQuantGroup / steps;
    first_bit += bits;
  };
  if (format.planes & kWholePlane) put(8, 1);
  if (format.planes & kNibblePlane) put(4, 2);
  if (format.planes & kPairPlane) put(2, 4);
  if (format.planes & kBitPlane) put(1, 8);
}

// The scale bits of column c in a record.
void put_scales(const GgufFormat& format, const Group& group, int64_t c, uint8_t* scales) {
  const auto add = [&](int64_t byte, int bits) { scales[byte] = static_cast<uint8_t>(scales[byte] | bits); };
  switch (format.scales) {
    case ScaleKind::kHalf:
    case ScaleKind::kHalfMinimum:
      std::memcpy(scales + 2 * c, &group.scales[0], 2);
      if (format.minimum) std::memcpy(scales + 2 * (kColumns + c), &group.minimums[0], 2);
      break;
    case ScaleKind::kSixBits: {
      const int second = format.minimum ? group.minimums[0] : group.scales[1];
      add(c, (group.scales[0] & 15) | (second & 15) << 4);
      add(kColumns + c % 16, (group.scales[0] >> 4 | second >> 4 << 2) << c / 16 * 4);
      break;
    }
    case ScaleKind::kSixBitsOne:
      add(c % 16, (group.scales[0] & 15) << c / 16 * 4);
      add(16 + c % 8, group.scales[0] >> 4 << c / 8 * 2);
      break;
    case ScaleKind::kNibbles:
      for (int i = 0; i < 2; ++i) add(i * kColumns + c, group.scales[i] | group.minimums[i] << 4);
      break;
    case ScaleKind::kBytes:
      for (int i = 0; i < 2; ++i) add(i * kColumns + c, group.scales[i]);
      break;
    case ScaleKind::kExponent:
      add(c, group.scales[0]);
  }
}

void take_scales(const GgufFormat& format, const uint8_t* scales, int64_t c, Group& group) {
  switch (format.scales) {
    case ScaleKind::kHalf:
    case ScaleKind::kHalfMinimum:
      std::memcpy(&group.scales[0], scales + 2 * c, 2);
      if (format.minimum) std::memcpy(&group.minimums[0], scales + 2 * (kColumns + c), 2);
      break;
    case ScaleKind::kSixBits: {
      const int upper = scales[kColumns + c % 16] >> c / 16 * 4 & 15;
      group.scales[0] = static_cast<uint16_t>((scales[c] & 15) | (upper & 3) << 4);
      (format.minimum ? group.minimums[0] : group.scales[1]) = static_cast<uint16_t>(scales[c] >> 4 | (upper >> 2) << 4);
      break;
    }
    case ScaleKind::kSixBitsOne:
      group.scales[0] = static_cast<uint16_t>((scales[c % 16] >> c / 16 * 4 & 15) | (scales[16 + c % 8] >> c / 8 * 2 & 3) << 4);
      break;
    case ScaleKind::kNibbles:
      for (int i = 0; i < 2; ++i) {
        group.scales[i] = scales[i * kColumns + c] & 15;
        group.minimums[i] = scales[i * kColumns + c] >> 4;
      }
      break;
    case ScaleKind::kBytes:
      for (int i = 0; i < 2; ++i) group.scales[i] = scales[i * kColumns + c];
      break;
    case ScaleKind::kExponent:
      group.scales[0] = scales[c];
  }
}

template <GgufType type>
void pack(const uint8_t* rows, int64_t row_bytes, int64_t num_rows, int64_t k, uint8_t* block) {
  constexpr GgufFormat format = gguf_format(type);
  constexpr FileLayout at = layout_of(type);
  std::memset(block, 0, static_cast<size_t>(format.block_bytes(k)));
  const int64_t groups = format.elements / kQuantGroup;  // of a block in the file
  for (int64_t c = 0; c < num_rows; ++c) {
    for (int64_t g = 0; g < k / kQuantGroup; ++g) {
      const uint8_t* const from = rows + c * row_bytes + g / groups * format.bytes;
      const int in_block = static_cast<int>(g % groups);
      uint8_t* const record = block + format.record_at(g);
      Group group = {};
#pragma GCC unroll 32
      for (int l = 0; l < kQuantGroup; ++l) {  // unrolled, most of `bits_of` is known
        const ElementBits bits = bits_of(type, at, in_block, l);
        int code = from[bits.low.byte] >> bits.low.shift & ((1 << bits.low.count) - 1);
        if (bits.high.count != 0) code |= (from[bits.high.byte] >> bits.high.shift & ((1 << bits.high.count) - 1)) << bits.low.count;
        group.codes[l] = static_cast<uint8_t>(code + offset_of(type));
      }
      put_codes(format, group, c, record);
      read_scales(type, at, from, in_block, group);
      put_scales(format, group, c, record + format.code_bytes());
      if (format.head_bytes() != 0 && g % kGgufHeadGroups == 0) {
        uint8_t* const head = record - format.head_bytes();
        std::memcpy(head + 2 * c, from + at.d, 2);
        if (format.minimum) std::memcpy(head + 2 * (kColumns + c), from + at.dmin, 2);
      }
    }
  }
}

template <GgufType type>
void unpack(const uint8_t* block, int64_t num_rows, int64_t k, uint8_t* rows, int64_t row_bytes) {
  constexpr GgufFormat format = gguf_format(type);
  constexpr FileLayout at = layout_of(type);
  const int64_t groups = format.elements / kQuantGroup;
  for (int64_t c = 0; c < num_rows; ++c) {
    std::memset(rows + c * row_bytes, 0, static_cast<size_t>(k / format.elements * format.bytes));
    for (int64_t g = 0; g < k / kQuantGroup; ++g) {
      uint8_t* const to = rows + c * row_bytes + g / groups * format.bytes;
      const int in_block = static_cast<int>(g % groups);
      const uint8_t* const record = block + format.record_at(g);
      Group group = {};
      for_each_plane(format, c, [&](int e, int64_t byte, int shift, int bits, int first_bit) {
        group.codes[e] = static_cast<uint8_t>(group.codes[e] | (record[byte] >> shift & ((1 << bits) - 1)) << first_bit);
      });
      for (int l = 0; l < kQuantGroup; ++l) {
        const ElementBits bits = bits_of(type, at, in_block, l);
        const int code = static_cast<uint8_t>(group.codes[l] - offset_of(type));
        to[bits.low.byte] = static_cast<uint8_t>(to[bits.low.byte] | (code & ((1 << bits.low.count) - 1)) << bits.low.shift);
        if (bits.high.count != 0) to[bits.high.byte] = static_cast<uint8_t>(to[bits.high.byte] | code >> bits.low.count << bits.high.shift);
      }
      take_scales(format, record + format.code_bytes(), c, group);
      write_scales(type, at, group, in_block, to);
      if (format.head_bytes() != 0 && in_block == 0) {
        const uint8_t* const head = record - format.head_bytes();
        std::memcpy(to + at.d, head + 2 * c, 2);
        if (format.minimum) std::memcpy(to + at.dmin, head + 2 * (kColumns + c), 2);
      }
    }
  }
}

float power_of(uint16_t exponent) {
  const uint32_t bits = power_bits(exponent);
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

template <GgufType type>
void read_row(const uint8_t* block, int64_t c, int64_t k, float* out) {
  constexpr GgufFormat format = gguf_format(type);
  constexpr bool is_iq4 = type == GgufType::kIQ4_NL || type == GgufType::kIQ4_XS;
  // What is taken off the bits of a scale before d multiplies it; of bytes that have a sign nothing.
  constexpr int scale_zero = format.scales == ScaleKind::kSixBitsOne || (format.scales == ScaleKind::kSixBits && !format.minimum) ? 32 : 0;
  float d = 1.0f, d_min = 1.0f;
  for (int64_t g = 0; g < k / kQuantGroup; ++g) {
    const uint8_t* const record = block + format.record_at(g);
    if (format.head_bytes() != 0 && g % kGgufHeadGroups == 0) {
      d = half_to_float(half_at(record - format.head_bytes(), static_cast<int>(2 * c)));
      if (format.minimum) d_min = half_to_float(half_at(record - format.head_bytes(), static_cast<int>(2 * (kColumns + c))));
    }
    Group group = {};
    for_each_plane(format, c, [&](int e, int64_t byte, int shift, int bits, int first_bit) {
      group.codes[e] = static_cast<uint8_t>(group.codes[e] | (record[byte] >> shift & ((1 << bits) - 1)) << first_bit);
    });
    take_scales(format, record + format.code_bytes(), c, group);
    for (int e = 0; e < kQuantGroup; ++e) {
      const int half = format.halves ? e / 16 : 0, bits = group.scales[half];
      const int code = is_iq4 ? kIq4Codes[group.codes[e]] : type == GgufType::kMXFP4 ? kMxfp4Codes[group.codes[e]] : group.codes[e];
      float scale, minimum = 0.0f;
      if constexpr (format.scales == ScaleKind::kHalf || format.scales == ScaleKind::kHalfMinimum) {
        scale = half_to_float(static_cast<uint16_t>(bits));
        minimum = -half_to_float(group.minimums[0]);
      } else if constexpr (format.scales == ScaleKind::kExponent) {
        scale = power_of(static_cast<uint16_t>(bits));
      } else {
        scale = d * static_cast<float>(format.scales == ScaleKind::kBytes ? static_cast<int8_t>(bits) : bits - scale_zero);
        minimum = d_min * static_cast<float>(group.minimums[half]);
      }
      const float value = scale * static_cast<float>(code - format.zero);
      out[g * kQuantGroup + e] = format.minimum ? value - minimum : value;
    }
  }
}

}  // namespace

void read_gguf_row(GgufType type, const uint8_t* block, int64_t column, int64_t k, float* out) {
#define HEADRACE_CALL(name) read_row<GgufType::name>(block, column, k, out)
  HEADRACE_FOR_GGUF_TYPE(type, HEADRACE_CALL)
#undef HEADRACE_CALL
}

void pack_gguf_block(GgufType type, const uint8_t* rows, int64_t row_bytes, int64_t num_rows, int64_t k, uint8_t* block) {
#define HEADRACE_CALL(name) pack<GgufType::name>(rows, row_bytes, num_rows, k, block)
  HEADRACE_FOR_GGUF_TYPE(type, HEADRACE_CALL)
#undef HEADRACE_CALL
}

void unpack_gguf_block(GgufType type, const uint8_t* block, int64_t num_rows, int64_t k, uint8_t* rows, int64_t row_bytes) {
#define HEADRACE_CALL(name) unpack<GgufType::name>(block, num_rows, k, rows, row_bytes)
  HEADRACE_FOR_GGUF_TYPE(type, HEADRACE_CALL)
#undef HEADRACE_CALL
}

}  // namespace headrace

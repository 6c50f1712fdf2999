// Integer vectors of the quantised kernels: `vi`, kLanes 32-bit lanes, and the dot products of bytes into them.
//
// A lane takes four unsigned codes and four signed bytes: 0 .. 15 (dot_nibbles), 0 .. 255 that stand for -128 .. 127 (dot), or that
// stand for themselves (dot_unsigned, of splat_unsigned and load_signed). dot_nibbles is exact up to codes of 127. Every way to compute that
// sum here is exact (no step saturates), so all instruction sets give the same integers.
//
// dot_small is a dot_nibbles of which several follow each other, the first of them as first_small, and add_small follows the last of at most
// steps_in_words(largest code, steps). Without an instruction for four products, pairs of products are added up in 16 bits first, in `words`:
// a step adds at most 2 * 15 * 127 to that of a nibble, so 8 steps at most 30,480.
//
// moved_bits takes the bits of kMask of each byte after a shift to the left (negative: right); look_up the byte of a table of 16 for each byte
// of 0 .. 15; load_widened takes kLanes bytes into lanes.
#pragma once
#include "simd.h"

namespace headrace {
namespace HEADRACE_ISA {

#if defined(__AVX512F__)

using vi = __m512i;

HEADRACE_INLINE vi splat_int(int32_t x) { return _mm512_set1_epi32(x); }
HEADRACE_INLINE vi load_bytes(const void* p) { return _mm512_loadu_si512(p); }
HEADRACE_INLINE void store_bytes(void* p, vi a) { _mm512_storeu_si512(p, a); }
HEADRACE_INLINE vi splat_bytes(const void* p) {
  int32_t four;
  memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}
HEADRACE_INLINE vi add_int(vi a, vi b) { return _mm512_add_epi32(a, b); }
HEADRACE_INLINE vi sub_int(vi a, vi b) { return _mm512_sub_epi32(a, b); }
HEADRACE_INLINE vi low_nibbles(vi a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
HEADRACE_INLINE vi high_nibbles(vi a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15)); }
template <int kMask, int kShift>
HEADRACE_INLINE vi moved_bits(vi a) {
  if constexpr (kShift > 0) a = _mm512_slli_epi16(a, kShift);
  if constexpr (kShift < 0) a = _mm512_srli_epi16(a, -kShift);
  return _mm512_and_si512(a, _mm512_set1_epi8(static_cast<char>(kMask)));
}
HEADRACE_INLINE vi or_bits(vi a, vi b) { return _mm512_or_si512(a, b); }
HEADRACE_INLINE vi load_widened(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
HEADRACE_INLINE vi load_widened(const int8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
HEADRACE_INLINE vi look_up(const uint8_t* table, vi nibbles) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table))), nibbles);
}
HEADRACE_INLINE vf to_float(vi a) { return _mm512_cvtepi32_ps(a); }
HEADRACE_INLINE vi to_int(vf a) { return _mm512_cvtps_epi32(a); }
HEADRACE_INLINE vi magnitude_bits(vf a) { return _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff)); }
HEADRACE_INLINE vi max_int(vi a, vi b) { return _mm512_max_epi32(a, b); }
HEADRACE_INLINE int32_t reduce_max_int(vi a) { return _mm512_reduce_max_epi32(a); }
HEADRACE_INLINE int32_t reduce_add_int(vi a) { return _mm512_reduce_add_epi32(a); }
HEADRACE_INLINE void store_as_bytes(int8_t* p, vi a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(a));
}
HEADRACE_INLINE void store_as_bytes(uint8_t* p, vi a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtusepi32_epi8(a));
}
HEADRACE_INLINE vf load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

#if defined(__AVX512VNNI__)

// Inline assembly: GCC 12 spills the accumulators around the intrinsic.
HEADRACE_INLINE void dot_bytes(vi& sum, vi weights, vi x) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(x)); }

struct Bytes {  // codes 0 .. 255 of weights -128 .. 127
  vi codes;
};
HEADRACE_INLINE Bytes weights_of(vi codes) { return {codes}; }
constexpr bool kUnsignedCodes = true;
HEADRACE_INLINE void dot(vi& sum, const Bytes& w, vi x) { dot_bytes(sum, w.codes, x); }
HEADRACE_INLINE void dot_nibbles(vi& sum, vi weights, vi x) { dot_bytes(sum, weights, x); }
HEADRACE_INLINE void dot_unsigned(vi& sum, vi codes, vi x) { dot_bytes(sum, codes, x); }

#else

// |w| <= 128 and |x| <= 127, so a pair is at most 32,512: it does not saturate 16 bits.
struct Bytes {
  vi magnitude;
  __mmask64 negative;
};
HEADRACE_INLINE Bytes weights_of(vi codes) {
  const vi weights = _mm512_xor_si512(codes, _mm512_set1_epi8(static_cast<char>(0x80)));
  return {_mm512_abs_epi8(weights), _mm512_movepi8_mask(weights)};
}
constexpr bool kUnsignedCodes = false;
// Inline assembly: GCC 12 computes all products of a tile before it adds them up, and spills them or the accumulators.
HEADRACE_INLINE void add_to(vi& sum, vi a) { asm("vpaddd %1, %0, %0" : "+v"(sum) : "v"(a)); }
HEADRACE_INLINE void dot_nibbles(vi& sum, vi weights, vi x) {
  add_to(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(weights, x), _mm512_set1_epi16(1)));
}
HEADRACE_INLINE void dot(vi& sum, const Bytes& w, vi x) {
  dot_nibbles(sum, w.magnitude, _mm512_mask_sub_epi8(x, w.negative, _mm512_setzero_si512(), x));
}
#define HEADRACE_PAIRS_IN_WORDS
HEADRACE_INLINE void dot_small(vi&, vi& words, vi codes, vi x) {
  asm("vpaddw %1, %0, %0" : "+v"(words) : "v"(_mm512_maddubs_epi16(codes, x)));
}
HEADRACE_INLINE void first_small(vi&, vi& words, vi codes, vi x) {
  asm("vpmaddubsw %2, %1, %0" : "=v"(words) : "v"(codes), "v"(x));
}
HEADRACE_INLINE void add_small(vi& sum, vi words) { add_to(sum, _mm512_madd_epi16(words, _mm512_set1_epi16(1))); }
// A pair of these does not fit: as words, of which a product takes two.
struct UnsignedBytes {
  vi even, odd;
};
using SignedBytes = UnsignedBytes;
HEADRACE_INLINE UnsignedBytes splat_unsigned(const void* p) {
  const vi all = splat_bytes(p);
  return {_mm512_and_si512(all, _mm512_set1_epi16(0xff)), _mm512_srli_epi16(all, 8)};
}
HEADRACE_INLINE SignedBytes load_signed(const void* p) {
  const vi all = load_bytes(p);
  return {_mm512_srai_epi16(_mm512_slli_epi16(all, 8), 8), _mm512_srai_epi16(all, 8)};
}
HEADRACE_INLINE void dot_unsigned(vi& sum, const UnsignedBytes& codes, const SignedBytes& x) {
  add_to(sum, _mm512_madd_epi16(codes.even, x.even));
  add_to(sum, _mm512_madd_epi16(codes.odd, x.odd));
}

#endif

#elif defined(__AVX2__) && defined(__FMA__)

using vi = __m256i;

HEADRACE_INLINE vi splat_int(int32_t x) { return _mm256_set1_epi32(x); }
HEADRACE_INLINE vi load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
HEADRACE_INLINE void store_bytes(void* p, vi a) { _mm256_storeu_si256(static_cast<__m256i*>(p), a); }
HEADRACE_INLINE vi splat_bytes(const void* p) {
  int32_t four;
  memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}
HEADRACE_INLINE vi add_int(vi a, vi b) { return _mm256_add_epi32(a, b); }
HEADRACE_INLINE vi sub_int(vi a, vi b) { return _mm256_sub_epi32(a, b); }
HEADRACE_INLINE vi low_nibbles(vi a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
HEADRACE_INLINE vi high_nibbles(vi a) { return _mm256_and_si256(_mm256_srli_epi16(a, 4), _mm256_set1_epi8(15)); }
template <int kMask, int kShift>
HEADRACE_INLINE vi moved_bits(vi a) {
  if constexpr (kShift > 0) a = _mm256_slli_epi16(a, kShift);
  if constexpr (kShift < 0) a = _mm256_srli_epi16(a, -kShift);
  return _mm256_and_si256(a, _mm256_set1_epi8(static_cast<char>(kMask)));
}
HEADRACE_INLINE vi or_bits(vi a, vi b) { return _mm256_or_si256(a, b); }
HEADRACE_INLINE vi load_widened(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
HEADRACE_INLINE vi load_widened(const int8_t* p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
HEADRACE_INLINE vi look_up(const uint8_t* table, vi nibbles) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table))), nibbles);
}
HEADRACE_INLINE vf to_float(vi a) { return _mm256_cvtepi32_ps(a); }
HEADRACE_INLINE vi to_int(vf a) { return _mm256_cvtps_epi32(a); }
HEADRACE_INLINE vi magnitude_bits(vf a) { return _mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0x7fffffff)); }
HEADRACE_INLINE vi max_int(vi a, vi b) { return _mm256_max_epi32(a, b); }
HEADRACE_INLINE int32_t reduce_max_int(vi a) {
  __m128i b = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  b = _mm_max_epi32(b, _mm_shuffle_epi32(b, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(b, _mm_shuffle_epi32(b, 0xb1)));
}
HEADRACE_INLINE int32_t reduce_add_int(vi a) {
  __m128i b = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  b = _mm_add_epi32(b, _mm_shuffle_epi32(b, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(b, _mm_shuffle_epi32(b, 0xb1)));
}
HEADRACE_INLINE void store_as_bytes(int8_t* p, vi a) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
HEADRACE_INLINE void store_as_bytes(uint8_t* p, vi a) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
}
HEADRACE_INLINE vf load_half(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

#if defined(__AVXVNNI__)

// Inline assembly, as for AVX-512. {vex}: or the assembler takes the encoding of AVX-512.
HEADRACE_INLINE void dot_bytes(vi& sum, vi weights, vi x) { asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(weights), "x"(x)); }

struct Bytes {  // codes 0 .. 255 of weights -128 .. 127
  vi codes;
};
HEADRACE_INLINE Bytes weights_of(vi codes) { return {codes}; }
constexpr bool kUnsignedCodes = true;
HEADRACE_INLINE void dot(vi& sum, const Bytes& w, vi x) { dot_bytes(sum, w.codes, x); }
HEADRACE_INLINE void dot_nibbles(vi& sum, vi weights, vi x) { dot_bytes(sum, weights, x); }
HEADRACE_INLINE void dot_unsigned(vi& sum, vi codes, vi x) { dot_bytes(sum, codes, x); }

#else

struct Bytes {
  vi weights, magnitude;
};
HEADRACE_INLINE Bytes weights_of(vi codes) {
  const vi weights = _mm256_xor_si256(codes, _mm256_set1_epi8(static_cast<char>(0x80)));
  return {weights, _mm256_abs_epi8(weights)};
}
constexpr bool kUnsignedCodes = false;
// Inline assembly: GCC 12 computes all products of a tile before it adds them up, and spills them or the accumulators.
HEADRACE_INLINE void add_to(vi& sum, vi a) { asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(a)); }
HEADRACE_INLINE void dot_nibbles(vi& sum, vi weights, vi x) {
  add_to(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(weights, x), _mm256_set1_epi16(1)));
}
// |w| <= 128 and |x| <= 127, so a pair is at most 32,512: it does not saturate 16 bits.
HEADRACE_INLINE void dot(vi& sum, const Bytes& w, vi x) { dot_nibbles(sum, w.magnitude, _mm256_sign_epi8(x, w.weights)); }
#define HEADRACE_WIDE_IN_WORDS
#define HEADRACE_PAIRS_IN_WORDS
HEADRACE_INLINE void dot_small(vi&, vi& words, vi codes, vi x) {
  asm("vpaddw %1, %0, %0" : "+x"(words) : "x"(_mm256_maddubs_epi16(codes, x)));
}
HEADRACE_INLINE void first_small(vi&, vi& words, vi codes, vi x) {
  asm("vpmaddubsw %2, %1, %0" : "=x"(words) : "x"(codes), "x"(x));
}
HEADRACE_INLINE void add_small(vi& sum, vi words) { add_to(sum, _mm256_madd_epi16(words, _mm256_set1_epi16(1))); }
// A pair of these does not fit: as words, of which a product takes two.
struct UnsignedBytes {
  vi even, odd;
};
using SignedBytes = UnsignedBytes;
HEADRACE_INLINE UnsignedBytes splat_unsigned(const void* p) {
  const vi all = splat_bytes(p);
  return {_mm256_and_si256(all, _mm256_set1_epi16(0xff)), _mm256_srli_epi16(all, 8)};
}
HEADRACE_INLINE SignedBytes load_signed(const void* p) {
  const vi all = load_bytes(p);
  return {_mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8), _mm256_srai_epi16(all, 8)};
}
HEADRACE_INLINE void dot_unsigned(vi& sum, const UnsignedBytes& codes, const SignedBytes& x) {
  add_to(sum, _mm256_madd_epi16(codes.even, x.even));
  add_to(sum, _mm256_madd_epi16(codes.odd, x.odd));
}

#endif

#elif defined(__SSE4_2__)

using vi = __m128i;

HEADRACE_INLINE vi splat_int(int32_t x) { return _mm_set1_epi32(x); }
HEADRACE_INLINE vi load_bytes(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
HEADRACE_INLINE void store_bytes(void* p, vi a) { _mm_storeu_si128(static_cast<__m128i*>(p), a); }
HEADRACE_INLINE vi splat_bytes(const void* p) {
  int32_t four;
  memcpy(&four, p, 4);
  return _mm_set1_epi32(four);
}
HEADRACE_INLINE vi add_int(vi a, vi b) { return _mm_add_epi32(a, b); }
HEADRACE_INLINE vi sub_int(vi a, vi b) { return _mm_sub_epi32(a, b); }
HEADRACE_INLINE vi low_nibbles(vi a) { return _mm_and_si128(a, _mm_set1_epi8(15)); }
HEADRACE_INLINE vi high_nibbles(vi a) { return _mm_and_si128(_mm_srli_epi16(a, 4), _mm_set1_epi8(15)); }
template <int kMask, int kShift>
HEADRACE_INLINE vi moved_bits(vi a) {
  if constexpr (kShift > 0) a = _mm_slli_epi16(a, kShift);
  if constexpr (kShift < 0) a = _mm_srli_epi16(a, -kShift);
  return _mm_and_si128(a, _mm_set1_epi8(static_cast<char>(kMask)));
}
HEADRACE_INLINE vi or_bits(vi a, vi b) { return _mm_or_si128(a, b); }
HEADRACE_INLINE vi load_widened(const uint8_t* p) {
  int32_t four;
  memcpy(&four, p, 4);
  return _mm_cvtepu8_epi32(_mm_cvtsi32_si128(four));
}
HEADRACE_INLINE vi load_widened(const int8_t* p) {
  int32_t four;
  memcpy(&four, p, 4);
  return _mm_cvtepi8_epi32(_mm_cvtsi32_si128(four));
}
HEADRACE_INLINE vi look_up(const uint8_t* table, vi nibbles) {
  return _mm_shuffle_epi8(_mm_load_si128(reinterpret_cast<const __m128i*>(table)), nibbles);
}
HEADRACE_INLINE vf to_float(vi a) { return _mm_cvtepi32_ps(a); }
HEADRACE_INLINE vi to_int(vf a) { return _mm_cvtps_epi32(a); }
HEADRACE_INLINE vi magnitude_bits(vf a) { return _mm_and_si128(_mm_castps_si128(a), _mm_set1_epi32(0x7fffffff)); }
HEADRACE_INLINE vi max_int(vi a, vi b) { return _mm_max_epi32(a, b); }
HEADRACE_INLINE int32_t reduce_max_int(vi a) {
  a = _mm_max_epi32(a, _mm_shuffle_epi32(a, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(a, _mm_shuffle_epi32(a, 0xb1)));
}
HEADRACE_INLINE int32_t reduce_add_int(vi a) {
  a = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(a, _mm_shuffle_epi32(a, 0xb1)));
}
HEADRACE_INLINE void store_as_bytes(int8_t* p, vi a) {
  const __m128i words = _mm_packs_epi32(a, a);
  const int32_t four = _mm_cvtsi128_si32(_mm_packs_epi16(words, words));
  memcpy(p, &four, 4);
}
HEADRACE_INLINE void store_as_bytes(uint8_t* p, vi a) {
  const __m128i words = _mm_packs_epi32(a, a);
  const int32_t four = _mm_cvtsi128_si32(_mm_packus_epi16(words, words));
  memcpy(p, &four, 4);
}
// A finite half: its exponent and fraction, read as those of a float, are too small by 2^112. The product is exact.
HEADRACE_INLINE vf load_half(const uint16_t* p) {
  const __m128i bits = _mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i small = _mm_slli_epi32(_mm_and_si128(bits, _mm_set1_epi32(0x7fff)), 13);
  const __m128i sign = _mm_slli_epi32(_mm_and_si128(bits, _mm_set1_epi32(0x8000)), 16);
  const vf value = _mm_mul_ps(_mm_castsi128_ps(small), _mm_castsi128_ps(_mm_set1_epi32((127 + 112) << 23)));
  return _mm_or_ps(value, _mm_castsi128_ps(sign));
}

struct Bytes {
  vi weights, magnitude;
};
HEADRACE_INLINE Bytes weights_of(vi codes) {
  const vi weights = _mm_xor_si128(codes, _mm_set1_epi8(static_cast<char>(0x80)));
  return {weights, _mm_abs_epi8(weights)};
}
constexpr bool kUnsignedCodes = false;
HEADRACE_INLINE void dot_nibbles(vi& sum, vi weights, vi x) {
  sum = _mm_add_epi32(sum, _mm_madd_epi16(_mm_maddubs_epi16(weights, x), _mm_set1_epi16(1)));
}
// |w| <= 128 and |x| <= 127, so a pair is at most 32,512: it does not saturate 16 bits.
HEADRACE_INLINE void dot(vi& sum, const Bytes& w, vi x) { dot_nibbles(sum, w.magnitude, _mm_sign_epi8(x, w.weights)); }
// Seven bits and the eighth apart, for the same reason.
HEADRACE_INLINE void dot_unsigned(vi& sum, vi codes, vi x) {
  dot_nibbles(sum, _mm_and_si128(codes, _mm_set1_epi8(0x7f)), x);
  dot_nibbles(sum, _mm_and_si128(codes, _mm_set1_epi8(static_cast<char>(0x80))), x);
}

#elif defined(__aarch64__)

using vi = int32x4_t;

HEADRACE_INLINE vi splat_int(int32_t x) { return vdupq_n_s32(x); }
HEADRACE_INLINE vi load_bytes(const void* p) { return vreinterpretq_s32_u8(vld1q_u8(static_cast<const uint8_t*>(p))); }
HEADRACE_INLINE void store_bytes(void* p, vi a) { vst1q_u8(static_cast<uint8_t*>(p), vreinterpretq_u8_s32(a)); }
HEADRACE_INLINE vi splat_bytes(const void* p) {
  int32_t four;
  memcpy(&four, p, 4);
  return vdupq_n_s32(four);
}
HEADRACE_INLINE vi add_int(vi a, vi b) { return vaddq_s32(a, b); }
HEADRACE_INLINE vi sub_int(vi a, vi b) { return vsubq_s32(a, b); }
HEADRACE_INLINE vi and_bytes(vi a, uint8_t b) { return vreinterpretq_s32_u8(vandq_u8(vreinterpretq_u8_s32(a), vdupq_n_u8(b))); }
HEADRACE_INLINE vi low_nibbles(vi a) { return and_bytes(a, 15); }
HEADRACE_INLINE vi high_nibbles(vi a) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(a), 4)); }
template <int kMask, int kShift>
HEADRACE_INLINE vi moved_bits(vi a) {
  uint8x16_t bytes = vreinterpretq_u8_s32(a);
  if constexpr (kShift > 0) bytes = vshlq_n_u8(bytes, kShift);
  if constexpr (kShift < 0) bytes = vshrq_n_u8(bytes, -kShift);
  return and_bytes(vreinterpretq_s32_u8(bytes), kMask);
}
HEADRACE_INLINE vi or_bits(vi a, vi b) { return vorrq_s32(a, b); }
HEADRACE_INLINE vi load_widened(const uint8_t* p) { return int32x4_t{p[0], p[1], p[2], p[3]}; }
HEADRACE_INLINE vi load_widened(const int8_t* p) { return int32x4_t{p[0], p[1], p[2], p[3]}; }
HEADRACE_INLINE vi look_up(const uint8_t* table, vi nibbles) {
  return vreinterpretq_s32_u8(vqtbl1q_u8(vld1q_u8(table), vreinterpretq_u8_s32(nibbles)));
}
HEADRACE_INLINE vf to_float(vi a) { return vcvtq_f32_s32(a); }
HEADRACE_INLINE vi to_int(vf a) { return vcvtnq_s32_f32(a); }
HEADRACE_INLINE vi magnitude_bits(vf a) { return vandq_s32(vreinterpretq_s32_f32(a), vdupq_n_s32(0x7fffffff)); }
HEADRACE_INLINE vi max_int(vi a, vi b) { return vmaxq_s32(a, b); }
HEADRACE_INLINE int32_t reduce_max_int(vi a) { return vmaxvq_s32(a); }
HEADRACE_INLINE int32_t reduce_add_int(vi a) { return vaddvq_s32(a); }
HEADRACE_INLINE void store_as_bytes(int8_t* p, vi a) {
  const int16x4_t words = vqmovn_s32(a);
  const int32_t four = vget_lane_s32(vreinterpret_s32_s8(vqmovn_s16(vcombine_s16(words, words))), 0);
  memcpy(p, &four, 4);
}
HEADRACE_INLINE void store_as_bytes(uint8_t* p, vi a) {
  const int16x4_t words = vqmovn_s32(a);
  const int32_t four = vget_lane_s32(vreinterpret_s32_u8(vqmovun_s16(vcombine_s16(words, words))), 0);
  memcpy(p, &four, 4);
}
HEADRACE_INLINE vf load_half(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }

// Signed by signed bytes.
HEADRACE_INLINE void dot_signed(vi& sum, vi a, vi b) {
  const int8x16_t x = vreinterpretq_s8_s32(a), y = vreinterpretq_s8_s32(b);
#if defined(__ARM_FEATURE_DOTPROD)
  sum = vdotq_s32(sum, x, y);
#else
  // |a| <= 128 and |b| <= 127, so a pair is at most 32,512: it does not overflow 16 bits.
  const int16x8_t low = vmull_s8(vget_low_s8(x), vget_low_s8(y)), high = vmull_high_s8(x, y);
  sum = vpadalq_s16(sum, vpaddq_s16(low, high));
#endif
}
HEADRACE_INLINE void dot_nibbles(vi& sum, vi weights, vi x) { dot_signed(sum, weights, x); }

#if defined(__ARM_FEATURE_MATMUL_INT8)

struct Bytes {  // codes 0 .. 255 of weights -128 .. 127
  vi codes;
};
HEADRACE_INLINE void dot_unsigned(vi& sum, vi codes, vi x) {
  sum = vusdotq_s32(sum, vreinterpretq_u8_s32(codes), vreinterpretq_s8_s32(x));
}
HEADRACE_INLINE Bytes weights_of(vi codes) { return {codes}; }
constexpr bool kUnsignedCodes = true;
HEADRACE_INLINE void dot(vi& sum, const Bytes& w, vi x) { dot_unsigned(sum, w.codes, x); }

#else

struct Bytes {
  vi weights;
};
HEADRACE_INLINE Bytes weights_of(vi codes) { return {vreinterpretq_s32_u8(veorq_u8(vreinterpretq_u8_s32(codes), vdupq_n_u8(0x80)))}; }
constexpr bool kUnsignedCodes = false;
HEADRACE_INLINE void dot(vi& sum, const Bytes& w, vi x) { dot_signed(sum, w.weights, x); }
// Seven bits and the eighth apart: as a signed byte that is -128.
HEADRACE_INLINE void dot_unsigned(vi& sum, vi codes, vi x) {
  dot_signed(sum, and_bytes(codes, 0x7f), x);
  dot_signed(sum, and_bytes(codes, 0x80), vreinterpretq_s32_s8(vnegq_s8(vreinterpretq_s8_s32(x))));
}

#endif

#else  // any other CPU: four lanes of plain C++

struct vi {
  int32_t lane[4];
};

#define HEADRACE_INT_LANES(expression)                       \
  vi result;                                                 \
  for (int i = 0; i < 4; ++i) result.lane[i] = expression;   \
  return result

HEADRACE_INLINE uint8_t byte_of(vi a, int i) { return static_cast<uint8_t>(static_cast<uint32_t>(a.lane[i / 4]) >> i % 4 * 8); }

HEADRACE_INLINE vi splat_int(int32_t x) { HEADRACE_INT_LANES(x); }
HEADRACE_INLINE vi load_bytes(const void* p) {
  const uint8_t* const bytes = static_cast<const uint8_t*>(p);
  HEADRACE_INT_LANES(static_cast<int32_t>(bytes[4 * i] | bytes[4 * i + 1] << 8 | bytes[4 * i + 2] << 16 |
                                          static_cast<uint32_t>(bytes[4 * i + 3]) << 24));
}
HEADRACE_INLINE void store_bytes(void* p, vi a) {
  uint8_t* const bytes = static_cast<uint8_t*>(p);
  for (int i = 0; i < 16; ++i) bytes[i] = byte_of(a, i);
}
HEADRACE_INLINE vi splat_bytes(const void* p) {
  const uint8_t* const bytes = static_cast<const uint8_t*>(p);
  return splat_int(static_cast<int32_t>(bytes[0] | bytes[1] << 8 | bytes[2] << 16 | static_cast<uint32_t>(bytes[3]) << 24));
}
HEADRACE_INLINE vi add_int(vi a, vi b) { HEADRACE_INT_LANES(a.lane[i] + b.lane[i]); }
HEADRACE_INLINE vi sub_int(vi a, vi b) { HEADRACE_INT_LANES(a.lane[i] - b.lane[i]); }
HEADRACE_INLINE vi low_nibbles(vi a) { HEADRACE_INT_LANES(a.lane[i] & 0x0f0f0f0f); }
HEADRACE_INLINE vi high_nibbles(vi a) { HEADRACE_INT_LANES(a.lane[i] >> 4 & 0x0f0f0f0f); }
template <int kMask, int kShift>
HEADRACE_INLINE vi moved_bits(vi a) {
  constexpr uint32_t kFour = kMask * 0x01010101u;
  HEADRACE_INT_LANES(static_cast<int32_t>((kShift > 0 ? static_cast<uint32_t>(a.lane[i]) << (kShift > 0 ? kShift : 0)
                                                      : static_cast<uint32_t>(a.lane[i]) >> (kShift < 0 ? -kShift : 0)) &
                                          kFour));
}
HEADRACE_INLINE vi or_bits(vi a, vi b) { HEADRACE_INT_LANES(a.lane[i] | b.lane[i]); }
HEADRACE_INLINE vi load_widened(const uint8_t* p) { HEADRACE_INT_LANES(p[i]); }
HEADRACE_INLINE vi load_widened(const int8_t* p) { HEADRACE_INT_LANES(p[i]); }
HEADRACE_INLINE vi look_up(const uint8_t* table, vi nibbles) {
  uint8_t codes[16];
  for (int i = 0; i < 16; ++i) codes[i] = table[byte_of(nibbles, i)];
  return load_bytes(codes);
}
HEADRACE_INLINE vf to_float(vi a) {
  vf result;
  for (int i = 0; i < 4; ++i) result.lane[i] = static_cast<float>(a.lane[i]);
  return result;
}
// A NaN has no integer; its group's scale is a NaN.
HEADRACE_INLINE vi to_int(vf a) { HEADRACE_INT_LANES(a.lane[i] == a.lane[i] ? static_cast<int32_t>(__builtin_rintf(a.lane[i])) : 0); }
HEADRACE_INLINE vi magnitude_bits(vf a) {
  vi result;
  memcpy(result.lane, a.lane, sizeof result.lane);
  for (int i = 0; i < 4; ++i) result.lane[i] &= 0x7fffffff;
  return result;
}
HEADRACE_INLINE vi max_int(vi a, vi b) { HEADRACE_INT_LANES(a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]); }
HEADRACE_INLINE int32_t reduce_max_int(vi a) {
  int32_t most = a.lane[0];
  for (int i = 1; i < 4; ++i) most = a.lane[i] > most ? a.lane[i] : most;
  return most;
}
HEADRACE_INLINE int32_t reduce_add_int(vi a) { return a.lane[0] + a.lane[1] + a.lane[2] + a.lane[3]; }
HEADRACE_INLINE void store_as_bytes(int8_t* p, vi a) {
  for (int i = 0; i < 4; ++i) p[i] = static_cast<int8_t>(a.lane[i]);
}
HEADRACE_INLINE void store_as_bytes(uint8_t* p, vi a) {
  for (int i = 0; i < 4; ++i) p[i] = static_cast<uint8_t>(a.lane[i]);
}
HEADRACE_INLINE vf load_half(const uint16_t* p) {
  vf result;
  for (int i = 0; i < 4; ++i) {
    const uint32_t bits = static_cast<uint32_t>(p[i] & 0x7fff) << 13;
    memcpy(&result.lane[i], &bits, 4);
    result.lane[i] *= p[i] & 0x8000 ? -0x1p112f : 0x1p112f;
  }
  return result;
}

struct Bytes {
  vi codes;
};
HEADRACE_INLINE Bytes weights_of(vi codes) { return {codes}; }
constexpr bool kUnsignedCodes = true;
HEADRACE_INLINE void dot_nibbles(vi& sum, vi weights, vi x) {
  for (int i = 0; i < 16; ++i) sum.lane[i / 4] += byte_of(weights, i) * static_cast<int8_t>(byte_of(x, i));
}
HEADRACE_INLINE void dot(vi& sum, const Bytes& w, vi x) { dot_nibbles(sum, w.codes, x); }
HEADRACE_INLINE void dot_unsigned(vi& sum, vi codes, vi x) { dot_nibbles(sum, codes, x); }

#undef HEADRACE_INT_LANES

#endif

#if defined(HEADRACE_PAIRS_IN_WORDS)
constexpr int steps_in_words(int largest, int steps) {
  while (steps * 2 * largest * 127 > 32767) steps /= 2;
  return steps >= 4 ? steps : 0;  // 0: too few to gain by it
}
#else
constexpr int steps_in_words(int, int steps) { return steps; }
HEADRACE_INLINE void dot_small(vi& sum, vi&, vi codes, vi x) { dot_nibbles(sum, codes, x); }
HEADRACE_INLINE void first_small(vi& sum, vi&, vi codes, vi x) { dot_nibbles(sum, codes, x); }
HEADRACE_INLINE void add_small(vi&, vi) {}
using UnsignedBytes = vi;
using SignedBytes = vi;
HEADRACE_INLINE UnsignedBytes splat_unsigned(const void* p) { return splat_bytes(p); }
HEADRACE_INLINE SignedBytes load_signed(const void* p) { return load_bytes(p); }
#endif

HEADRACE_INLINE Bytes load_weights(const uint8_t* p) { return weights_of(load_bytes(p)); }
// start: what makes a sum of codes the sum of weights, -128 times the sum of the activations.
HEADRACE_INLINE vi start_of_bytes(int32_t start) { return splat_int(kUnsignedCodes ? start : 0); }

// dot, where many bytes of weights are multiplied with bytes of a row that was prepared (store_wide, kQuantGroup elements). Without an instruction
// for four products, both as words: two multiplications and two additions, where bytes take three and one, and a change of signs is no quicker
// than a multiplication (Zen 4).
#if defined(HEADRACE_WIDE_IN_WORDS)
using WideElement = int16_t;
struct Wide {
  vi even, odd;
};
HEADRACE_INLINE Wide wide_of(vi codes) { return {_mm256_and_si256(codes, _mm256_set1_epi16(0xff)), _mm256_srli_epi16(codes, 8)}; }
HEADRACE_INLINE Wide splat_wide(const WideElement* p) { return {splat_bytes(p), splat_bytes(p + 2)}; }
constexpr bool kWideUnsigned = true;
HEADRACE_INLINE void dot_wide(vi& sum, const Wide& codes, const Wide& x) {
  add_to(sum, _mm256_madd_epi16(codes.even, x.even));
  add_to(sum, _mm256_madd_epi16(codes.odd, x.odd));
}
// Of four elements the first and the third, then the others.
HEADRACE_INLINE void store_wide(WideElement* p, const int8_t* x) {
  const vi all = load_bytes(x), odd = _mm256_srai_epi16(all, 8), even = _mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8);
  const vi low = _mm256_unpacklo_epi32(even, odd), high = _mm256_unpackhi_epi32(even, odd);
  store_bytes(p, _mm256_permute2x128_si256(low, high, 0x20));
  store_bytes(p + 16, _mm256_permute2x128_si256(low, high, 0x31));
}
#else
using WideElement = int8_t;
using Wide = Bytes;
HEADRACE_INLINE Wide wide_of(vi codes) { return weights_of(codes); }
HEADRACE_INLINE vi splat_wide(const WideElement* p) { return splat_bytes(p); }
constexpr bool kWideUnsigned = kUnsignedCodes;
HEADRACE_INLINE void dot_wide(vi& sum, const Wide& codes, vi x) { dot(sum, codes, x); }
#endif
HEADRACE_INLINE vi start_of_wide(int32_t start) { return splat_int(kWideUnsigned ? start : 0); }
HEADRACE_INLINE Wide load_wide(const uint8_t* p) { return wide_of(load_bytes(p)); }

HEADRACE_INLINE vf load(const f16* p) { return load_half(&p->bits); }

}  // namespace HEADRACE_ISA
}  // namespace headrace

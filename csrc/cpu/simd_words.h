// Dot products of 16-bit integers: a 32-bit lane of a `vi` holds the words 2 i and 2 i + 1.
//
// Every way to compute them here is exact, so all instruction sets give the same integers. The caller keeps sums below 2^31.
#pragma once
#include "simd_int.h"

namespace headrace {
namespace HEADRACE_ISA {

// load_words: 2 * kLanes words. splat_words: one pair of words in every lane. store_as_words: the lanes, which must fit, as kLanes words.
// scale_words: 2 * kLanes words times factor / 2^15, rounded half up.

#if defined(__AVX512F__)

HEADRACE_INLINE void store_as_words(int16_t* p, vi a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(a));
}
HEADRACE_INLINE void scale_words(int16_t* p, int32_t factor) {
  _mm512_storeu_si512(p, _mm512_mulhrs_epi16(_mm512_loadu_si512(p), _mm512_set1_epi16(static_cast<int16_t>(factor))));
}
#if defined(__AVX512VNNI__)
// Inline assembly: GCC 12 spills the accumulators around the intrinsic.
HEADRACE_INLINE void dot_words(vi& sum, vi a, vi b) { asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }
#else
HEADRACE_INLINE void dot_words(vi& sum, vi a, vi b) { add_to(sum, _mm512_madd_epi16(a, b)); }
#endif

#elif defined(__AVX2__) && defined(__FMA__)

HEADRACE_INLINE void store_as_words(int16_t* p, vi a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)));
}
#if defined(__AVXVNNI__)
HEADRACE_INLINE void dot_words(vi& sum, vi a, vi b) { asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b)); }
#else
HEADRACE_INLINE void dot_words(vi& sum, vi a, vi b) { add_to(sum, _mm256_madd_epi16(a, b)); }
#endif
HEADRACE_INLINE void scale_words(int16_t* p, int32_t factor) {
  store_bytes(p, _mm256_mulhrs_epi16(load_bytes(p), _mm256_set1_epi16(static_cast<int16_t>(factor))));
}

#elif defined(__SSE4_2__)

HEADRACE_INLINE void store_as_words(int16_t* p, vi a) {
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi32(a, a));
}
HEADRACE_INLINE void dot_words(vi& sum, vi a, vi b) { sum = _mm_add_epi32(sum, _mm_madd_epi16(a, b)); }
HEADRACE_INLINE void scale_words(int16_t* p, int32_t factor) {
  store_bytes(p, _mm_mulhrs_epi16(load_bytes(p), _mm_set1_epi16(static_cast<int16_t>(factor))));
}

#elif defined(__aarch64__)

HEADRACE_INLINE void store_as_words(int16_t* p, vi a) { vst1_s16(p, vqmovn_s32(a)); }
HEADRACE_INLINE void scale_words(int16_t* p, int32_t factor) {
  vst1q_s16(p, vqrdmulhq_n_s16(vld1q_s16(p), static_cast<int16_t>(factor)));
}
HEADRACE_INLINE void dot_words(vi& sum, vi a, vi b) {
  const int16x8_t x = vreinterpretq_s16_s32(a), y = vreinterpretq_s16_s32(b);
  sum = vaddq_s32(sum, vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y)));
}

#else

HEADRACE_INLINE int32_t pair_of_words(int low, int high) {
  return static_cast<int32_t>(static_cast<uint32_t>(low & 0xffff) | static_cast<uint32_t>(high) << 16);
}
HEADRACE_INLINE void store_as_words(int16_t* p, vi a) {
  for (int i = 0; i < 4; ++i) p[i] = static_cast<int16_t>(a.lane[i]);
}
HEADRACE_INLINE void dot_words(vi& sum, vi a, vi b) {
  for (int i = 0; i < 4; ++i) {
    const int32_t low = static_cast<int16_t>(a.lane[i]) * static_cast<int16_t>(b.lane[i]);
    const int32_t high = (a.lane[i] >> 16) * (b.lane[i] >> 16);
    sum.lane[i] = static_cast<int32_t>(static_cast<uint32_t>(sum.lane[i]) + static_cast<uint32_t>(low) + static_cast<uint32_t>(high));
  }
}
HEADRACE_INLINE void scale_words(int16_t* p, int32_t factor) {
  for (int i = 0; i < 8; ++i) p[i] = static_cast<int16_t>((p[i] * factor + (1 << 14)) >> 15);
}

#endif

#if defined(__SSE4_2__) || defined(__aarch64__)
HEADRACE_INLINE vi load_words(const int16_t* p) { return load_bytes(p); }
HEADRACE_INLINE vi splat_words(const int16_t* p) {
  int32_t two;
  memcpy(&two, p, 4);
  return splat_int(two);
}
#else
HEADRACE_INLINE vi load_words(const int16_t* p) {
  vi result;
  for (int i = 0; i < 4; ++i) result.lane[i] = pair_of_words(p[2 * i], p[2 * i + 1]);
  return result;
}
HEADRACE_INLINE vi splat_words(const int16_t* p) { return splat_int(pair_of_words(p[0], p[1])); }
#endif

}  // namespace HEADRACE_ISA
}  // namespace headrace

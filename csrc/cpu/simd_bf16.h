// Products of bfloat16: a 32-bit lane of a `Pairs` holds elements 2 i (the low half) and 2 i + 1.
//
// One rule for all instruction sets, that of vcvtne2ps2bf16 and vdpbf16ps (Intel SDM volume 2; AMD's processors do the same): round
// to nearest even whatever MXCSR says, read a denormal as 0 and write 0 for one, and add the product of the odd elements first, then
// that of the even ones, each with one rounding (a fused multiply-add). So a sum has the same bits wherever it is computed; only the
// payload of a NaN may differ. A 0 is written where the sum, rounded as if exponents had no end, is below the least normal.
#pragma once
#include "simd.h"

namespace headrace {
namespace HEADRACE_ISA {

// load_pairs: 2 * kLanes elements. splat_pair: two elements in every lane. dot_pairs: sum += a . b in every lane.
// store_rounded: 2 * kLanes floats, in order, as bfloat16.

#if defined(__AVX512BF16__)

using Pairs = __m512i;

HEADRACE_INLINE Pairs load_pairs(const bf16* p) { return _mm512_loadu_si512(p); }
HEADRACE_INLINE Pairs splat_pair(const bf16* p) {
  int32_t two;
  memcpy(&two, p, 4);
  return _mm512_set1_epi32(two);
}
// Inline assembly: GCC 12 spills the accumulators around the intrinsic.
HEADRACE_INLINE void dot_pairs(vf& sum, Pairs a, Pairs b) { asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }
HEADRACE_INLINE void store_rounded(bf16* p, vf first, vf second) {
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

#else  // the same bits from floats

struct Pairs {
  vf even, odd;
};

constexpr float kLeastNormal = 0x1p-126f;

// A denormal becomes a 0 of its sign.
HEADRACE_INLINE vf flushed(vf a) { return if_less(vmax(sub(splat(-0.0f), a), a), splat(kLeastNormal), mul(a, splat(0.0f)), a); }

HEADRACE_INLINE Pairs load_pairs(const bf16* p) {
  Pairs pairs;
  load_interleaved(p, pairs.even, pairs.odd);
  return {flushed(pairs.even), flushed(pairs.odd)};
}
HEADRACE_INLINE Pairs splat_pair(const bf16* p) { return {flushed(splat(bf16_to_float(p[0]))), flushed(splat(bf16_to_float(p[1])))}; }

// The product of two bfloat16 is exact in double; so is its sum with `sum` where that is near the least normal.
HEADRACE_INLINE float scalar_fma_flushed(float a, float b, float sum) {
  const float result = __builtin_fmaf(a, b, sum);
  const double exact = static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(sum);
  // What rounds to 24 bits below it.
  return __builtin_fabs(exact) < 0x1p-126 - 0x1p-151 ? __builtin_copysignf(0.0f, result) : result;
}
static __attribute__((noinline)) vf fma_flushed_by_lane(vf a, vf b, vf sum) {
  float lanes[3][kLanes];
  store(lanes[0], a);
  store(lanes[1], b);
  store(lanes[2], sum);
  for (int i = 0; i < kLanes; ++i) lanes[2][i] = scalar_fma_flushed(lanes[0][i], lanes[1][i], lanes[2][i]);
  return load(lanes[2]);
}
// a b + sum of numbers that are not denormal, with one rounding; where that gives a denormal, a 0.
HEADRACE_INLINE vf fma_flushed(vf a, vf b, vf sum) {
#if defined(__AVX512F__) || defined(__FMA__) || defined(__aarch64__)
  const vf result = fma(a, b, sum), magnitude = vmax(sub(splat(-0.0f), result), result);
  const vf is_tiny = if_less(magnitude, splat(0x1.000002p-126f), splat(1.0f), splat(0.0f));
  return any_equal(if_less(splat(0.0f), magnitude, is_tiny, splat(0.0f)), splat(1.0f)) ? fma_flushed_by_lane(a, b, sum) : result;
#else
  return fma_flushed_by_lane(a, b, sum);
#endif
}

HEADRACE_INLINE void dot_pairs(vf& sum, const Pairs& a, const Pairs& b) {
  sum = fma_flushed(a.even, b.even, fma_flushed(a.odd, b.odd, flushed(sum)));
}
HEADRACE_INLINE void store_rounded(bf16* p, vf first, vf second) {
  float lanes[2 * kLanes];
  store(lanes, flushed(first));
  store(lanes + kLanes, flushed(second));
  for (int i = 0; i < 2 * kLanes; ++i) p[i] = float_to_bf16(lanes[i]);
}

#endif

// 16 floats as bfloat16.
HEADRACE_INLINE void round16(f32x16 from, bf16* to) {
  if constexpr (kParts == 1) {
    bf16 both[2 * kLanes];
    store_rounded(both, from.part[0], from.part[0]);
    memcpy(to, both, 32);
  } else {
    HEADRACE_UNROLL for (int p = 0; p + 1 < kParts; p += 2) store_rounded(to + p * kLanes, from.part[p], from.part[p + 1]);
  }
}

}  // namespace HEADRACE_ISA
}  // namespace headrace

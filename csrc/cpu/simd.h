// Vectors of the kernels: `vf`, as wide as the instruction set of this object file (kLanes floats), and f32x16, sixteen lanes
// made of one or more `vf`.
//
// Code whose lanes are independent uses vf. Code that reduces over lanes uses f32x16, so that the order of a sum is the same for
// every instruction set. Those with a fused multiply-add (AVX2, AVX-512, NEON) give equal bits; baseline has none and differs in the
// last place.
// Everything here has internal linkage or lives in the namespace of its instruction set: a function compiled for AVX-512 must
// never be the one that the linker keeps for all.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__SSE4_2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define HEADRACE_INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define HEADRACE_UNROLL _Pragma("unroll")
#else
#define HEADRACE_UNROLL _Pragma("GCC unroll 32")
#endif

namespace headrace {

// Whether weights that one row or few use are asked for ahead of their use, where they are read strictly in order. Not on AMD's Zen to Zen 4 (families
// 17h and 19h): a Zen 4 reads ahead by itself, faster if nothing is asked for beside it. A Zen 5 (0.75 to 0.9 of the time at one row) and a Xeon are
// faster with it.
extern const bool kAskForWeights;

namespace HEADRACE_ISA {

using bf16 = uint16_t;  // the bits of a bfloat16
struct f16 {            // of a float16
  uint16_t bits;
};

HEADRACE_INLINE float bf16_to_float(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}

// Round to nearest even; a NaN stays a NaN.
HEADRACE_INLINE bf16 float_to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, quiet = (bits >> 16) | 0x40u;
  return static_cast<bf16>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

HEADRACE_INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
HEADRACE_INLINE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
HEADRACE_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

HEADRACE_INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }
// Of weights that a tile of R rows will need. One or two rows are as fast as memory: the first-level cache has what they need next. More rows
// compute meanwhile: what comes waits in the second level, and leaves the first to what they read again.
template <int R>
HEADRACE_INLINE void prefetch_weights(const void* address) { __builtin_prefetch(address, 0, R <= 2 ? 3 : 2); }

// Fewer sizes of register tiles, all made from the same templates: the sanitizers' builds take minutes with all of them.
#if defined(HEADRACE_FEW_TILES)
constexpr bool kFewTiles = true;
#else
constexpr bool kFewTiles = false;
#endif

// if_set: lane i of the first vector where bit i is set, of the second elsewhere.
// vmax and vmin return the second operand when either is a NaN, as x86 does: put the data second and a NaN survives.

#if defined(__AVX512F__)

using vf = __m512;
constexpr int kLanes = 16;
constexpr int kTileRows = kFewTiles ? 4 : 12;  // rows x 2 accumulators that fit the registers beside the operands

HEADRACE_INLINE vf splat(float x) { return _mm512_set1_ps(x); }
HEADRACE_INLINE vf load(const float* p) { return _mm512_loadu_ps(p); }
HEADRACE_INLINE void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
HEADRACE_INLINE vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
HEADRACE_INLINE vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
HEADRACE_INLINE vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
HEADRACE_INLINE vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
HEADRACE_INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
HEADRACE_INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
HEADRACE_INLINE vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
HEADRACE_INLINE float reduce_add(vf a) { return _mm512_reduce_add_ps(a); }
HEADRACE_INLINE float reduce_max(vf a) { return _mm512_reduce_max_ps(a); }
HEADRACE_INLINE vf round_nearest(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
HEADRACE_INLINE vf if_less(vf a, vf b, vf yes, vf no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
HEADRACE_INLINE vf if_set(uint32_t bits, vf yes, vf no) {
  return _mm512_mask_blend_ps(static_cast<__mmask16>(bits), no, yes);
}
HEADRACE_INLINE bool any_equal(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ) != 0; }
HEADRACE_INLINE bool any_nan(vf a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q) != 0; }
HEADRACE_INLINE vf pow2(vf n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
// a 2^n, and 0 where x < lowest, whatever a and n are there.
HEADRACE_INLINE vf times_pow2(vf a, vf n, vf x, vf lowest) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, lowest, _CMP_NLT_UQ), a, n);
}
HEADRACE_INLINE vf load(const bf16* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
HEADRACE_INLINE void load_interleaved(const bf16* p, vf& low, vf& high) {
  const __m512i pairs = _mm512_loadu_si512(p);
  low = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  high = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

#elif defined(__AVX2__) && defined(__FMA__)

using vf = __m256;
constexpr int kLanes = 8;
constexpr int kTileRows = kFewTiles ? 4 : 6;

HEADRACE_INLINE vf splat(float x) { return _mm256_set1_ps(x); }
HEADRACE_INLINE vf load(const float* p) { return _mm256_loadu_ps(p); }
HEADRACE_INLINE void store(float* p, vf x) { _mm256_storeu_ps(p, x); }
HEADRACE_INLINE vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
HEADRACE_INLINE vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
HEADRACE_INLINE vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
HEADRACE_INLINE vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
HEADRACE_INLINE vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
HEADRACE_INLINE vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
HEADRACE_INLINE vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
HEADRACE_INLINE float reduce_add_4(__m128 a) {
  const __m128 pair = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}
HEADRACE_INLINE float reduce_max_4(__m128 a) {
  const __m128 pair = _mm_max_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
}
HEADRACE_INLINE float reduce_add(vf a) {
  return reduce_add_4(_mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)));
}
HEADRACE_INLINE float reduce_max(vf a) {
  return reduce_max_4(_mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)));
}
HEADRACE_INLINE vf round_nearest(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
HEADRACE_INLINE vf if_less(vf a, vf b, vf yes, vf no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
HEADRACE_INLINE vf if_set(uint32_t bits, vf yes, vf no) {
  const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lanes);
  return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lanes)));
}
HEADRACE_INLINE bool any_equal(vf a, vf b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)) != 0; }
HEADRACE_INLINE bool any_nan(vf a) { return _mm256_movemask_ps(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)) != 0; }
HEADRACE_INLINE vf pow2(vf n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
HEADRACE_INLINE vf times_pow2(vf a, vf n, vf x, vf lowest) { return if_less(x, lowest, splat(0.0f), mul(a, pow2(n))); }
HEADRACE_INLINE vf load(const bf16* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
HEADRACE_INLINE void load_interleaved(const bf16* p, vf& low, vf& high) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  low = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  high = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

#elif defined(__SSE4_2__)

using vf = __m128;
constexpr int kLanes = 4;
constexpr int kTileRows = 4;

HEADRACE_INLINE vf splat(float x) { return _mm_set1_ps(x); }
HEADRACE_INLINE vf load(const float* p) { return _mm_loadu_ps(p); }
HEADRACE_INLINE void store(float* p, vf x) { _mm_storeu_ps(p, x); }
HEADRACE_INLINE vf add(vf a, vf b) { return _mm_add_ps(a, b); }
HEADRACE_INLINE vf sub(vf a, vf b) { return _mm_sub_ps(a, b); }
HEADRACE_INLINE vf mul(vf a, vf b) { return _mm_mul_ps(a, b); }
HEADRACE_INLINE vf div(vf a, vf b) { return _mm_div_ps(a, b); }
HEADRACE_INLINE vf fma(vf a, vf b, vf c) { return _mm_add_ps(_mm_mul_ps(a, b), c); }
HEADRACE_INLINE vf vmax(vf a, vf b) { return _mm_max_ps(a, b); }
HEADRACE_INLINE vf vmin(vf a, vf b) { return _mm_min_ps(a, b); }
HEADRACE_INLINE float reduce_add(__m128 a) {
  const __m128 pair = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}
HEADRACE_INLINE float reduce_max(__m128 a) {
  const __m128 pair = _mm_max_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
}
HEADRACE_INLINE vf round_nearest(vf a) { return _mm_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
HEADRACE_INLINE vf if_less(vf a, vf b, vf yes, vf no) { return _mm_blendv_ps(no, yes, _mm_cmplt_ps(a, b)); }
HEADRACE_INLINE vf if_set(uint32_t bits, vf yes, vf no) {
  const __m128i lanes = _mm_setr_epi32(1, 2, 4, 8);
  const __m128i set = _mm_and_si128(_mm_set1_epi32(static_cast<int>(bits)), lanes);
  return _mm_blendv_ps(no, yes, _mm_castsi128_ps(_mm_cmpeq_epi32(set, lanes)));
}
HEADRACE_INLINE bool any_equal(vf a, vf b) { return _mm_movemask_ps(_mm_cmpeq_ps(a, b)) != 0; }
HEADRACE_INLINE bool any_nan(vf a) { return _mm_movemask_ps(_mm_cmpunord_ps(a, a)) != 0; }
HEADRACE_INLINE vf pow2(vf n) {
  return _mm_castsi128_ps(_mm_slli_epi32(_mm_add_epi32(_mm_cvtps_epi32(n), _mm_set1_epi32(127)), 23));
}
HEADRACE_INLINE vf times_pow2(vf a, vf n, vf x, vf lowest) { return if_less(x, lowest, splat(0.0f), mul(a, pow2(n))); }
HEADRACE_INLINE vf load(const bf16* p) {
  return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))), 16));
}
HEADRACE_INLINE void load_interleaved(const bf16* p, vf& low, vf& high) {
  const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  low = _mm_castsi128_ps(_mm_slli_epi32(pairs, 16));
  high = _mm_castsi128_ps(_mm_and_si128(pairs, _mm_set1_epi32(static_cast<int>(0xffff0000u))));
}

#elif defined(__aarch64__)

using vf = float32x4_t;
constexpr int kLanes = 4;
constexpr int kTileRows = kFewTiles ? 4 : 12;

HEADRACE_INLINE vf splat(float x) { return vdupq_n_f32(x); }
HEADRACE_INLINE vf load(const float* p) { return vld1q_f32(p); }
HEADRACE_INLINE void store(float* p, vf x) { vst1q_f32(p, x); }
HEADRACE_INLINE vf add(vf a, vf b) { return vaddq_f32(a, b); }
HEADRACE_INLINE vf sub(vf a, vf b) { return vsubq_f32(a, b); }
HEADRACE_INLINE vf mul(vf a, vf b) { return vmulq_f32(a, b); }
HEADRACE_INLINE vf div(vf a, vf b) { return vdivq_f32(a, b); }
HEADRACE_INLINE vf fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
HEADRACE_INLINE vf if_less(vf a, vf b, vf yes, vf no) { return vbslq_f32(vcltq_f32(a, b), yes, no); }
HEADRACE_INLINE vf if_set(uint32_t bits, vf yes, vf no) {
  const uint32_t lanes[4] = {1, 2, 4, 8};
  return vbslq_f32(vtstq_u32(vdupq_n_u32(bits), vld1q_u32(lanes)), yes, no);
}
// fmax and fmin of this processor give a NaN when either operand is one.
HEADRACE_INLINE vf vmax(vf a, vf b) { return if_less(b, a, a, b); }
HEADRACE_INLINE vf vmin(vf a, vf b) { return if_less(a, b, a, b); }
HEADRACE_INLINE float reduce_add(vf a) { return vpadds_f32(vadd_f32(vget_low_f32(a), vget_high_f32(a))); }
HEADRACE_INLINE float reduce_max(vf a) {
  a = vmax(a, vextq_f32(a, a, 2));
  return vgetq_lane_f32(vmax(a, vdupq_laneq_f32(a, 1)), 0);
}
HEADRACE_INLINE vf round_nearest(vf a) { return vrndnq_f32(a); }
HEADRACE_INLINE bool any_equal(vf a, vf b) { return vmaxvq_u32(vceqq_f32(a, b)) != 0; }
HEADRACE_INLINE bool any_nan(vf a) { return vminvq_u32(vceqq_f32(a, a)) == 0; }
HEADRACE_INLINE vf pow2(vf n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
}
HEADRACE_INLINE vf times_pow2(vf a, vf n, vf x, vf lowest) { return if_less(x, lowest, splat(0.0f), mul(a, pow2(n))); }
HEADRACE_INLINE vf load(const bf16* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
HEADRACE_INLINE void load_interleaved(const bf16* p, vf& low, vf& high) {
  const uint32x4_t pairs = vreinterpretq_u32_u16(vld1q_u16(p));
  low = vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16));
  high = vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000u)));
}

#else  // any other CPU: four lanes of plain C++

struct vf {
  float lane[4];
};
constexpr int kLanes = 4;
constexpr int kTileRows = 4;

#define HEADRACE_LANES(expression)                       \
  vf result;                                             \
  for (int i = 0; i < 4; ++i) result.lane[i] = expression; \
  return result

HEADRACE_INLINE vf splat(float x) { HEADRACE_LANES(x); }
HEADRACE_INLINE vf load(const float* p) { HEADRACE_LANES(p[i]); }
HEADRACE_INLINE void store(float* p, vf x) { memcpy(p, x.lane, sizeof x.lane); }
HEADRACE_INLINE vf add(vf a, vf b) { HEADRACE_LANES(a.lane[i] + b.lane[i]); }
HEADRACE_INLINE vf sub(vf a, vf b) { HEADRACE_LANES(a.lane[i] - b.lane[i]); }
HEADRACE_INLINE vf mul(vf a, vf b) { HEADRACE_LANES(a.lane[i] * b.lane[i]); }
HEADRACE_INLINE vf div(vf a, vf b) { HEADRACE_LANES(a.lane[i] / b.lane[i]); }
HEADRACE_INLINE vf fma(vf a, vf b, vf c) { HEADRACE_LANES(a.lane[i] * b.lane[i] + c.lane[i]); }
HEADRACE_INLINE vf vmax(vf a, vf b) { HEADRACE_LANES(a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]); }
HEADRACE_INLINE vf vmin(vf a, vf b) { HEADRACE_LANES(a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]); }
HEADRACE_INLINE float reduce_add(vf a) { return a.lane[0] + a.lane[2] + (a.lane[1] + a.lane[3]); }
HEADRACE_INLINE float max_of_two(float a, float b) { return a > b ? a : b; }
HEADRACE_INLINE float reduce_max(vf a) {
  return max_of_two(max_of_two(a.lane[0], a.lane[2]), max_of_two(a.lane[1], a.lane[3]));
}
HEADRACE_INLINE vf round_nearest(vf a) { HEADRACE_LANES(__builtin_rintf(a.lane[i])); }
HEADRACE_INLINE vf if_less(vf a, vf b, vf yes, vf no) {
  HEADRACE_LANES(a.lane[i] < b.lane[i] ? yes.lane[i] : no.lane[i]);
}
HEADRACE_INLINE vf if_set(uint32_t bits, vf yes, vf no) {
  HEADRACE_LANES((bits >> i & 1u) != 0 ? yes.lane[i] : no.lane[i]);
}
HEADRACE_INLINE bool any_equal(vf a, vf b) {
  bool any = false;
  for (int i = 0; i < 4; ++i) any = any || a.lane[i] == b.lane[i];
  return any;
}
HEADRACE_INLINE bool any_nan(vf a) {
  bool any = false;
  for (int i = 0; i < 4; ++i) any = any || a.lane[i] != a.lane[i];
  return any;
}
HEADRACE_INLINE float pow2_of(float n) {
  // A NaN has no integer: its factor is 1, the product is a NaN either way.
  const uint32_t bits = n == n ? static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23 : 0x3f800000u;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}
HEADRACE_INLINE vf pow2(vf n) { HEADRACE_LANES(pow2_of(n.lane[i])); }
HEADRACE_INLINE vf times_pow2(vf a, vf n, vf x, vf lowest) {
  HEADRACE_LANES(x.lane[i] < lowest.lane[i] ? 0.0f : a.lane[i] * pow2_of(n.lane[i]));
}
HEADRACE_INLINE vf load(const bf16* p) { HEADRACE_LANES(bf16_to_float(p[i])); }
HEADRACE_INLINE void load_interleaved(const bf16* p, vf& low, vf& high) {
  for (int i = 0; i < 4; ++i) {
    low.lane[i] = bf16_to_float(p[2 * i]);
    high.lane[i] = bf16_to_float(p[2 * i + 1]);
  }
}
#undef HEADRACE_LANES

#endif

constexpr int kParts = 16 / kLanes;  // vf in a f32x16

// e^x, within 2 units in the last place on [-87.3, 88]; exactly 0 below, e^88 above, NaN for NaN.
// Range reduction and polynomial: Cephes expf (S. Moshier, Methods and Programs for Mathematical Functions, 1989).
HEADRACE_INLINE vf vexp(vf x) {
  const vf lowest = splat(-87.33654f);
  const vf clamped = vmin(splat(88.0f), vmax(lowest, x));
  const vf n = round_nearest(mul(clamped, splat(1.44269504088896341f)));
  vf r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  const vf y = add(fma(mul(r, r), p, r), splat(1.0f));
  return if_less(x, lowest, splat(0.0f), mul(y, pow2(n)));
}

// 2^x, within 2 units in the last place on [-126, 126]; exactly 1 at 0, exactly 0 below -126, NaN for NaN. For weights of a softmax,
// where x is hardly above 0. The polynomial has the least relative error on [-0.5, 0.5] of those that are 1 at 0.
HEADRACE_INLINE vf vexp2(vf x) {
  const vf n = round_nearest(x);
  const vf r = sub(x, n);
  vf p = splat(1.326472731307149e-3f);
  p = fma(p, r, splat(9.671512991189957e-3f));
  p = fma(p, r, splat(5.550733581185341e-2f));
  p = fma(p, r, splat(2.402224242687225e-1f));
  p = fma(p, r, splat(6.931470036506653e-1f));
  return times_pow2(fma(p, r, splat(1.0f)), n, x, splat(-126.0f));
}

HEADRACE_INLINE float scalar_exp2(float x) {
  float lanes[kLanes];
  store(lanes, vexp2(splat(x)));
  return lanes[0];
}

// x / (1 + e^-y)
HEADRACE_INLINE vf times_sigmoid(vf x, vf y) { return div(x, add(splat(1.0f), vexp(sub(splat(0.0f), y)))); }

// tanh x, within a few units in the last place everywhere: an odd polynomial near 0 (Cephes tanhf), 1 - 2 / (e^2x + 1) beyond.
HEADRACE_INLINE vf vtanh(vf x) {
  const vf z = mul(x, x);
  vf p = splat(-5.70498872745e-3f);
  p = fma(p, z, splat(2.06390887954e-2f));
  p = fma(p, z, splat(-5.37397155531e-2f));
  p = fma(p, z, splat(1.33314422036e-1f));
  p = fma(p, z, splat(-3.33332819422e-1f));
  const vf near = fma(mul(p, z), x, x);
  const vf far = sub(splat(1.0f), div(splat(2.0f), add(vexp(add(x, x)), splat(1.0f))));
  return if_less(z, splat(0.625f * 0.625f), near, far);
}

struct f32x16 {
  vf part[kParts];
};

HEADRACE_INLINE f32x16 splat16(float x) {
  f32x16 r;
  HEADRACE_UNROLL for (int i = 0; i < kParts; ++i) r.part[i] = splat(x);
  return r;
}
template <class T>
HEADRACE_INLINE f32x16 load16(const T* p) {
  f32x16 r;
  HEADRACE_UNROLL for (int i = 0; i < kParts; ++i) r.part[i] = load(p + i * kLanes);
  return r;
}
HEADRACE_INLINE void store16(float* p, f32x16 a) {
  HEADRACE_UNROLL for (int i = 0; i < kParts; ++i) store(p + i * kLanes, a.part[i]);
}
// The first n of 16 lanes, the others 0.
HEADRACE_INLINE f32x16 load_first(const float* p, int64_t n) {
  float lanes[16] = {};
  memcpy(lanes, p, static_cast<size_t>(n) * 4);
  return load16(lanes);
}
HEADRACE_INLINE void store_first(float* p, f32x16 a, int64_t n) {
  float lanes[16];
  store16(lanes, a);
  memcpy(p, lanes, static_cast<size_t>(n) * 4);
}

#define HEADRACE_LIFT2(name, op)                                                                  \
  HEADRACE_INLINE f32x16 name(f32x16 a, f32x16 b) {                                               \
    f32x16 r;                                                                                     \
    HEADRACE_UNROLL for (int i = 0; i < kParts; ++i) r.part[i] = op(a.part[i], b.part[i]);        \
    return r;                                                                                     \
  }
HEADRACE_LIFT2(add, add)
HEADRACE_LIFT2(sub, sub)
HEADRACE_LIFT2(mul, mul)
HEADRACE_LIFT2(vmax, vmax)
HEADRACE_LIFT2(times_sigmoid, times_sigmoid)
#undef HEADRACE_LIFT2
HEADRACE_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  f32x16 r;
  HEADRACE_UNROLL for (int i = 0; i < kParts; ++i) r.part[i] = fma(a.part[i], b.part[i], c.part[i]);
  return r;
}
HEADRACE_INLINE f32x16 vexp(f32x16 a) {
  f32x16 r;
  HEADRACE_UNROLL for (int i = 0; i < kParts; ++i) r.part[i] = vexp(a.part[i]);
  return r;
}
HEADRACE_INLINE f32x16 vexp2(f32x16 a) {
  f32x16 r;
  HEADRACE_UNROLL for (int i = 0; i < kParts; ++i) r.part[i] = vexp2(a.part[i]);
  return r;
}
HEADRACE_INLINE f32x16 vtanh(f32x16 a) {
  f32x16 r;
  HEADRACE_UNROLL for (int i = 0; i < kParts; ++i) r.part[i] = vtanh(a.part[i]);
  return r;
}

// Sum of the lanes as a fixed tree: i + (i + 8), then 4, 2, 1.
HEADRACE_INLINE float sum_lanes(f32x16 a) {
  HEADRACE_UNROLL for (int n = kParts / 2; n > 0; n /= 2) {
    HEADRACE_UNROLL for (int i = 0; i < n; ++i) a.part[i] = add(a.part[i], a.part[i + n]);
  }
  return reduce_add(a.part[0]);
}
HEADRACE_INLINE float max_lanes(f32x16 a) {
  HEADRACE_UNROLL for (int n = kParts / 2; n > 0; n /= 2) {
    HEADRACE_UNROLL for (int i = 0; i < n; ++i) a.part[i] = vmax(a.part[i], a.part[i + n]);
  }
  return reduce_max(a.part[0]);
}

}  // namespace HEADRACE_ISA
}  // namespace headrace

// Calls body.template operator()<R>() for the run-time row count 1 <= rows <= kTileRows.
#define HEADRACE_ROW_CASE(R, CALL) \
  case R:                          \
    if constexpr (R <= kTileRows) { \
      CALL(R);                     \
    }                              \
    break;
#define HEADRACE_FOR_ROWS(rows, CALL)                                                                             \
  switch (rows) {                                                                                                 \
    HEADRACE_ROW_CASE(1, CALL) HEADRACE_ROW_CASE(2, CALL) HEADRACE_ROW_CASE(3, CALL) HEADRACE_ROW_CASE(4, CALL)     \
    HEADRACE_ROW_CASE(5, CALL) HEADRACE_ROW_CASE(6, CALL) HEADRACE_ROW_CASE(7, CALL) HEADRACE_ROW_CASE(8, CALL)     \
    HEADRACE_ROW_CASE(9, CALL) HEADRACE_ROW_CASE(10, CALL) HEADRACE_ROW_CASE(11, CALL) HEADRACE_ROW_CASE(12, CALL)  \
  }

// What the machine can do at best: how fast memory is read, how many multiply-adds of floats, bytes, words and bfloat16 a second. For
// benchmarks, not for models.
#include "kernels.h"
#include "simd_bf16.h"
#include "simd_words.h"
#include "threads.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int64_t kBlock = 1 << 16;  // bytes of one claim
constexpr int64_t kRounds = 4096;    // of one claim
constexpr int kChains = 12;          // independent sums: latency times throughput of a multiply-add, and some more
#if defined(__AVX512F__) || defined(__AVXVNNI__) || defined(__aarch64__)
constexpr int kDotChains = kChains;
#else
constexpr int kDotChains = 8;  // these fit 16 registers beside the operands and what a product takes in between
#endif

float read_block(const float* x, int64_t floats) {
  vf sum[8];
  HEADRACE_UNROLL for (int c = 0; c < 8; ++c) sum[c] = splat(0.0f);
  int64_t i = 0;
  for (; i + 8 * kLanes <= floats; i += 8 * kLanes) {
    HEADRACE_UNROLL for (int c = 0; c < 8; ++c) {
      prefetch(x + i + c * kLanes + 1024);
      sum[c] = vmax(sum[c], load(x + i + c * kLanes));
    }
  }
  HEADRACE_UNROLL for (int c = 1; c < 8; ++c) sum[0] = vmax(sum[0], sum[c]);
  float lanes[kLanes];
  store(lanes, sum[0]);
  return lanes[0];
}

// How the linear layers multiply four bytes of a lane, two words or a pair of bfloat16.
struct ByteDot {
  using Operand = vi;
  using Sum = vi;
  HEADRACE_INLINE vi load(const void* p) { return load_bytes(p); }
  HEADRACE_INLINE vi splat(const void* p) { return splat_bytes(p); }
  HEADRACE_INLINE vi start() { return splat_int(0); }
  HEADRACE_INLINE void multiply(vi& sum, vi a, vi b) { dot_nibbles(sum, a, b); }
  HEADRACE_INLINE bool is_negative(vi sum) { return reduce_add_int(sum) < 0; }
};
struct WordDot : ByteDot {
  HEADRACE_INLINE void multiply(vi& sum, vi a, vi b) { dot_words(sum, a, b); }
};
struct Bf16Dot {
  using Operand = Pairs;
  using Sum = vf;
  HEADRACE_INLINE Pairs load(const void* p) { return load_pairs(static_cast<const bf16*>(p)); }
  HEADRACE_INLINE Pairs splat(const void* p) { return splat_pair(static_cast<const bf16*>(p)); }
  HEADRACE_INLINE vf start() { return headrace::HEADRACE_ISA::splat(0.0f); }
  HEADRACE_INLINE void multiply(vf& sum, const Pairs& a, const Pairs& b) { dot_pairs(sum, a, b); }
  HEADRACE_INLINE bool is_negative(vf sum) { return reduce_add(sum) < 0.0f; }
};

// count x kDotChains vectors of dot products of zeros that come from memory and might change, so no product is computed once and added
// often; returns whether a sum is below 0.
template <class Dot>
HEADRACE_INLINE bool dots(int64_t count) {
  constexpr int kWeights = 4, kValues = kDotChains / kWeights;
  alignas(64) uint8_t codes[kWeights * kLanes * 4] = {};
  int8_t values[kValues * 4] = {};
  asm volatile("" : : "r"(codes), "r"(values) : "memory");
  typename Dot::Operand x[kValues];
  typename Dot::Sum sum[kDotChains];
  HEADRACE_UNROLL for (int v = 0; v < kValues; ++v) x[v] = Dot::splat(values + v * 4);
  HEADRACE_UNROLL for (int c = 0; c < kDotChains; ++c) sum[c] = Dot::start();
  for (int64_t i = 0; i < count; ++i) {
    asm volatile("" : : "r"(codes) : "memory");
    HEADRACE_UNROLL for (int w = 0; w < kWeights; ++w) {
      const typename Dot::Operand weights = Dot::load(codes + w * kLanes * 4);
      HEADRACE_UNROLL for (int v = 0; v < kValues; ++v) Dot::multiply(sum[w * kValues + v], weights, x[v]);
    }
  }
  bool any = false;
  HEADRACE_UNROLL for (int c = 0; c < kDotChains; ++c) any = any || Dot::is_negative(sum[c]);
  return any;
}

}  // namespace

// Reads `bytes` (floats) once, by all threads; the result only keeps the reads alive.
float probe_read(const void* memory, int64_t bytes) {
  const float* const x = static_cast<const float*>(memory);
  float seen = 0.0f;
  parallel_for(ceil_div(bytes, kBlock), 1, [&](int64_t begin, int64_t end) {
    const float top = read_block(x + begin * (kBlock / 4), (min_of(end * kBlock, bytes) - begin * kBlock) / 4);
    if (top > 1e30f) __atomic_store(&seen, &top, __ATOMIC_RELAXED);
  });
  return seen;
}

// rounds x kChains x kLanes multiply-adds, by all threads; returns how many floating-point operations that were.
double probe_fma(int64_t rounds) {
  const int64_t blocks = ceil_div(rounds, kRounds);
  float seen = 0.0f;
  parallel_for(blocks, 1, [&](int64_t begin, int64_t end) {
    const vf a = splat(0.999f), b = splat(1e-6f);
    vf sum[kChains];
    HEADRACE_UNROLL for (int c = 0; c < kChains; ++c) sum[c] = splat(static_cast<float>(c));
    for (int64_t i = 0; i < (end - begin) * kRounds; ++i) {
      HEADRACE_UNROLL for (int c = 0; c < kChains; ++c) sum[c] = fma(sum[c], a, b);
    }
    HEADRACE_UNROLL for (int c = 1; c < kChains; ++c) sum[0] = add(sum[0], sum[c]);
    float lanes[kLanes];
    store(lanes, sum[0]);
    if (lanes[0] > 1e30f) __atomic_store(&seen, &lanes[0], __ATOMIC_RELAXED);
  });
  return static_cast<double>(seen) + 2.0 * kChains * kLanes * kRounds * static_cast<double>(blocks);
}

// The same for dot products, as the linear layers that round their input use them: four multiply-adds a lane of bytes, else two.
double probe_dot(int64_t rounds, DotKind kind) {
  const int64_t blocks = ceil_div(rounds, kRounds);
  int32_t seen = 0;
  parallel_for(blocks, 1, [&](int64_t begin, int64_t end) {
    const int64_t count = (end - begin) * kRounds;
    const int32_t is_negative = kind == DotKind::kBytes   ? dots<ByteDot>(count)
                                : kind == DotKind::kWords ? dots<WordDot>(count)
                                                          : dots<Bf16Dot>(count);
    if (is_negative != 0) __atomic_store(&seen, &is_negative, __ATOMIC_RELAXED);
  });
  return static_cast<double>(seen) + 2.0 * (kind == DotKind::kBytes ? 4 : 2) * kDotChains * kLanes * kRounds * static_cast<double>(blocks);
}

}  // namespace HEADRACE_ISA
}  // namespace headrace

// What the machine can do at best: how fast memory is read, how many multiply-adds of floats, bytes and words a second. For benchmarks, not for models.
#include "kernels.h"
#include "simd_words.h"
#include "threads.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int64_t kBlock = 1 << 16;  // bytes of one claim
constexpr int64_t kRounds = 4096;    // of one claim
constexpr int kChains = 12;          // independent sums: latency times throughput of a multiply-add, and some more

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

// count x kChains vectors of dot products; returns the sum of all lanes.
template <class Dot>
HEADRACE_INLINE int32_t dots(int64_t count, Dot dot) {
  constexpr int kWeights = 4, kValues = kChains / kWeights;
  alignas(64) uint8_t codes[kWeights * kLanes * 4] = {};
  int8_t values[kValues * 4] = {};
  asm volatile("" : : "r"(codes), "r"(values) : "memory");
  vi x[kValues], sum[kChains];
  HEADRACE_UNROLL for (int v = 0; v < kValues; ++v) x[v] = splat_bytes(values + v * 4);
  HEADRACE_UNROLL for (int c = 0; c < kChains; ++c) sum[c] = splat_int(c);
  for (int64_t i = 0; i < count; ++i) {
    asm volatile("" : : "r"(codes) : "memory");
    HEADRACE_UNROLL for (int w = 0; w < kWeights; ++w) {
      const vi weights = load_bytes(codes + w * kLanes * 4);
      HEADRACE_UNROLL for (int v = 0; v < kValues; ++v) dot(sum[w * kValues + v], weights, x[v]);
    }
  }
  HEADRACE_UNROLL for (int c = 1; c < kChains; ++c) sum[0] = add_int(sum[0], sum[c]);
  return reduce_add_int(sum[0]);
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

// The same for dot products of bytes or of words, as the quantised linears use them: four or two multiply-adds a lane. The operands come
// from memory that might change, so no product is computed once and added often.
double probe_dot(int64_t rounds, bool words) {
  const int64_t blocks = ceil_div(rounds, kRounds);
  int32_t seen = 0;
  parallel_for(blocks, 1, [&](int64_t begin, int64_t end) {
    const int64_t count = (end - begin) * kRounds;
    const int32_t total = words ? dots(count, [](vi& sum, vi a, vi b) __attribute__((always_inline)) { dot_words(sum, a, b); })
                                : dots(count, [](vi& sum, vi a, vi b) __attribute__((always_inline)) { dot_nibbles(sum, a, b); });
    if (total < 0) __atomic_store(&seen, &total, __ATOMIC_RELAXED);
  });
  return static_cast<double>(seen) + 2.0 * (words ? 2 : 4) * kChains * kLanes * kRounds * static_cast<double>(blocks);
}

}  // namespace HEADRACE_ISA
}  // namespace headrace

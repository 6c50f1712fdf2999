// Gated activations: act(gate) * up, where a row holds gate then up.
#include "kernels.h"
#include "simd.h"
#include "threads.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int64_t kChunk = 1024;  // columns of one unit of work

struct Silu {
  HEADRACE_INLINE f32x16 of(f32x16 x) { return times_sigmoid(x, x); }
};

// The tanh form of Hendrycks and Gimpel (2016): 0.5 x (1 + tanh u) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
struct GeluTanh {
  HEADRACE_INLINE f32x16 of(f32x16 x) {
    const f32x16 inner = fma(mul(mul(x, x), x), splat16(0.044715f), x);
    return times_sigmoid(x, mul(inner, splat16(1.5957691216057308f)));
  }
};

template <class Activation>
void gated(const GatedArgs& g) {
  const int64_t chunks = ceil_div(g.size, kChunk);
  parallel_for(g.rows * chunks, 4, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / chunks, stop = min_of(g.size, (item % chunks + 1) * kChunk);
      const float* const gate = g.x + row * g.x_stride;
      const float* const up = gate + g.size;
      float* const out = g.out + row * g.size;
      int64_t i = item % chunks * kChunk;
      for (; i + 16 <= stop; i += 16) store16(out + i, mul(Activation::of(load16(gate + i)), load16(up + i)));
      if (i < stop) {
        const int64_t rest = stop - i;
        store_first(out + i, mul(Activation::of(load_first(gate + i, rest)), load_first(up + i, rest)), rest);
      }
    }
  });
}

}  // namespace

void silu_mul(const GatedArgs& g) { gated<Silu>(g); }
void gelu_tanh_mul(const GatedArgs& g) { gated<GeluTanh>(g); }

}  // namespace HEADRACE_ISA
}  // namespace headrace

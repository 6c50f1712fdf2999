// Activations, alone and gated: act(gate) * up, where a row holds gate then up.
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

// x Phi(x) = max(x, 0) - t Q(t), t = |x|, Q the upper tail of the normal distribution (Hendrycks and Gimpel, 2016): nothing cancels, as 1 + erf
// does for a negative x. The logarithm of Q to base 2 is almost a parabola: a polynomial on [0, 6] that is least in its largest error relative to
// max(1, |log2 Q|), found by Lawson's iteration (C. L. Lawson, 1961). Within 2 units in the last place where x is positive; within 2^-20 of the
// value down to -3, 2^-18 down to -6. Below, where 6 Q(6) is 6e-9, it is 0.
struct Gelu {
  HEADRACE_INLINE f32x16 of(f32x16 x) {
    f32x16 result;
    HEADRACE_UNROLL for (int i = 0; i < kParts; ++i) result.part[i] = of(x.part[i]);
    return result;
  }
  HEADRACE_INLINE vf of(vf x) {
    const vf zero = splat(0.0f), six = splat(6.0f), magnitude = vmax(sub(zero, x), x), t = vmin(six, magnitude);
    vf p = splat(-1.822487019e-08f);
    p = fma(p, t, splat(5.844079102e-07f));
    p = fma(p, t, splat(-8.000438933e-06f));
    p = fma(p, t, splat(5.905720703e-05f));
    p = fma(p, t, splat(-2.195269834e-04f));
    p = fma(p, t, splat(-1.246828298e-04f));
    p = fma(p, t, splat(7.098303027e-03f));
    p = fma(p, t, splat(-5.254205999e-02f));
    p = fma(p, t, splat(-4.591885940e-01f));
    p = fma(p, t, splat(-1.151107930f));
    p = fma(p, t, splat(-9.999999362e-01f));
    const vf tail = if_less(magnitude, six, vexp2(p), zero);
    return fma(sub(zero, t), tail, vmax(zero, x));
  }
};

struct Relu {
  HEADRACE_INLINE f32x16 of(f32x16 x) { return vmax(splat16(0.0f), x); }
};

// Calls body(row, begin, end) for pieces of rows of `size` columns.
template <class Body>
void for_pieces(int64_t rows, int64_t size, Body body) {
  const int64_t chunks = ceil_div(size, kChunk);
  parallel_for(rows * chunks, 4, [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; ++item) {
      body(item / chunks, item % chunks * kChunk, min_of(size, (item % chunks + 1) * kChunk));
    }
  });
}

template <class Activation>
void plain(const ActivationArgs& a) {
  for_pieces(a.rows, a.size, [&](int64_t row, int64_t begin, int64_t end) {
    const float* const x = a.x + row * a.x_stride;
    float* const out = a.out + row * a.size;
    int64_t i = begin;
    for (; i + 16 <= end; i += 16) store16(out + i, Activation::of(load16(x + i)));
    if (i < end) store_first(out + i, Activation::of(load_first(x + i, end - i)), end - i);
  });
}

template <class Activation>
void gated(const GatedArgs& g) {
  for_pieces(g.rows, g.size, [&](int64_t row, int64_t begin, int64_t end) {
    const float* const gate = g.x + row * g.x_stride;
    const float* const up = gate + g.size;
    float* const out = g.out + row * g.size;
    int64_t i = begin;
    for (; i + 16 <= end; i += 16) store16(out + i, mul(Activation::of(load16(gate + i)), load16(up + i)));
    if (i < end) {
      const int64_t rest = end - i;
      store_first(out + i, mul(Activation::of(load_first(gate + i, rest)), load_first(up + i, rest)), rest);
    }
  });
}

}  // namespace

void silu_mul(const GatedArgs& g) { gated<Silu>(g); }
void gelu_tanh_mul(const GatedArgs& g) { gated<GeluTanh>(g); }
void gelu_mul(const GatedArgs& g) { gated<Gelu>(g); }
void gelu(const ActivationArgs& a) { plain<Gelu>(a); }
void gelu_tanh(const ActivationArgs& a) { plain<GeluTanh>(a); }
void relu(const ActivationArgs& a) { plain<Relu>(a); }

}  // namespace HEADRACE_ISA
}  // namespace headrace

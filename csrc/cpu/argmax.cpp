// Index of the largest element of each row: the lowest on ties, -1 when the row holds a NaN.
#include "kernels.h"
#include "simd.h"
#include "threads.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

int64_t argmax_row(const float* x, int64_t size) {
  const int64_t whole = size / 16 * 16;
  float top = -__builtin_inff();
  bool nan = false;
  if (whole > 0) {
    f32x16 best = splat16(-__builtin_inff());
    for (int64_t i = 0; i < whole; i += 16) {
      const f32x16 value = load16(x + i);
      for (int part = 0; part < kParts; ++part) nan = nan || any_nan(value.part[part]);
      best = vmax(value, best);
    }
    top = max_lanes(best);
  }
  for (int64_t i = whole; i < size; ++i) {
    nan = nan || x[i] != x[i];
    top = x[i] > top ? x[i] : top;
  }
  if (nan) return -1;
  const f32x16 wanted = splat16(top);
  int64_t i = 0;
  for (; i < whole; i += 16) {
    const f32x16 value = load16(x + i);
    bool found = false;
    for (int part = 0; part < kParts; ++part) found = found || any_equal(value.part[part], wanted.part[part]);
    if (found) break;
  }
  while (x[i] != top) ++i;
  return i;
}

}  // namespace

void argmax(const ArgmaxArgs& a) {
  const int64_t grain = max_of(1, 32768 / a.size);
  parallel_for(a.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) a.out[row] = argmax_row(a.x + row * a.x_stride, a.size);
  });
}

}  // namespace HEADRACE_ISA
}  // namespace headrace

// Rows of logits where a mask of packed bits allows a token, -inf elsewhere. Values are copied, so every instruction set gives the same
// bits, a NaN's too.
#include "kernels.h"
#include "simd.h"
#include "threads.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int64_t kWord = 32;  // tokens of a word of the mask

// Most words of a grammar's mask have no bit at all: their logits are not read. A word with every bit is no case of its own: choosing
// lanes takes less time than the memory does.
void mask_row(const float* x, const uint32_t* words, float* out, int64_t size) {
  const vf none = splat(-__builtin_inff());
  const int64_t whole = size / kWord;
  for (int64_t w = 0; w < whole; ++w) {
    const uint32_t bits = words[w];
    const float* const from = x + w * kWord;
    float* const to = out + w * kWord;
    if (bits == 0) {
      HEADRACE_UNROLL for (int i = 0; i < kWord; i += kLanes) store(to + i, none);
    } else {
      HEADRACE_UNROLL for (int i = 0; i < kWord; i += kLanes) store(to + i, if_set(bits >> i, load(from + i), none));
    }
  }
  for (int64_t i = whole * kWord; i < size; ++i) out[i] = (words[whole] >> (i % kWord) & 1u) != 0 ? x[i] : -__builtin_inff();
}

}  // namespace

void mask_logits(const MaskArgs& a) {
  const int64_t words = ceil_div(a.size, kWord), grain = max_of(1, 32768 / max_of(1, a.size));
  parallel_for(a.count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) mask_row(a.x + a.rows[i] * a.x_stride, a.masks + i * words, a.out + i * a.out_stride, a.size);
  });
}

}  // namespace HEADRACE_ISA
}  // namespace headrace

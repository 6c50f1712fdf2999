// From rows of logits to ids: the definition is kernels/drawing.py's, in integers, so that every instruction set, the torch
// implementation and every device give the same token.
//
// Floating-point steps are single IEEE operations (no fused multiply-add); sums are of integers. A row is one thread's work.
#include <algorithm>

#include "kernels.h"
#include "simd_int.h"
#include "threads.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int64_t kBlock = 512;       // logits whose weights are summed together
constexpr int64_t kTops = 16;         // maxima kept of a block, each of every 16th logit
constexpr int64_t kWord = 32;         // tokens of a word of a mask
constexpr int kCuts = 4;              // places where top-p tries its cut at once
constexpr float kFirstCuts[kCuts] = {14.0f, 8.0f, 4.0f, 2.0f};  // the first ones: temperatures below the peak
constexpr int64_t kSortedAtOnce = 256;
constexpr float kWeightless = 28.0f;  // 2^40 e^-28 < 1
constexpr float kInf = __builtin_inff();

// 2^40 exp((x - peak) / temperature), 0 <= result <= 2^40 for x <= peak; its integer part is the weight.
template <bool kDivide>
HEADRACE_INLINE vf weights_of(vf x, vf peak, vf temperature) {
  const vf distance = sub(x, peak), z = vmax(kDivide ? div(distance, temperature) : distance, splat(-30.0f));
  const vf n = round_nearest(mul(z, splat(1.44269504088896341f)));
  const vf r = sub(sub(z, mul(n, splat(0.693359375f))), mul(n, splat(-2.12194440e-4f)));
  vf p = splat(1.9875691500e-4f);
  p = add(mul(p, r), splat(1.3981999507e-3f));
  p = add(mul(p, r), splat(8.3334519073e-3f));
  p = add(mul(p, r), splat(4.1665795894e-2f));
  p = add(mul(p, r), splat(1.6666665459e-1f));
  p = add(mul(p, r), splat(5.0000001201e-1f));
  return mul(add(add(mul(p, mul(r, r)), r), splat(1.0f)), pow2(add(n, splat(40.0f))));
}

template <bool kDivide>
void weigh(const float* x, int64_t count, vf peak, vf temperature, float* weights) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(weights + i, weights_of<kDivide>(load(x + i), peak, temperature));
  if (i < count) {
    float lanes[kLanes] = {};
    memcpy(lanes, x + i, static_cast<size_t>(count - i) * 4);
    store(lanes, weights_of<kDivide>(load(lanes), peak, temperature));
    memcpy(weights + i, lanes, static_cast<size_t>(count - i) * 4);
  }
}

void weigh(const float* x, int64_t count, float peak, float temperature, float* weights) {
  if (temperature == 1.0f) return weigh<false>(x, count, splat(peak), splat(1.0f), weights);
  weigh<true>(x, count, splat(peak), splat(temperature), weights);
}

// The integer part of a weight as two 32-bit integers: high * 2^20 + low, each at most 2^20. A block's sums of them fit 32 bits.
HEADRACE_INLINE int32_t high_of(float weight) { return static_cast<int32_t>(weight * 0x1p-20f); }
HEADRACE_INLINE int32_t low_of(float weight, int32_t high) {
  return static_cast<int32_t>(weight - static_cast<float>(high) * 0x1p20f);
}
HEADRACE_INLINE int64_t joined(int32_t high, int32_t low) { return (static_cast<int64_t>(high) << 20) + low; }

int64_t block_sum(const float* weights, int64_t count) {
  int32_t high = 0, low = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t h = high_of(weights[i]);
    high += h;
    low += low_of(weights[i], h);
  }
  return joined(high, low);
}

// A row and what its first pass found.
struct Row {
  const float* x;  // what no mask forbids; undefined in blocks whose block_top is -inf
  int64_t size, blocks;
  float peak;        // NaN when the row holds a NaN
  float* tops;       // [blocks * kTops]; those that do not exist are -inf
  float* block_top;  // [blocks]
  int64_t block_size(int64_t block) const { return min_of(kBlock, size - block * kBlock); }
  bool is_below(int64_t block, float lowest) const { return block_top[block] < lowest || block_top[block] == -kInf; }
};

// One block of logits where a mask allows them, -inf elsewhere and from `count` on. Returns whether it allows any; if not, out is not
// written. Logits of words without a bit are not read: most words of a grammar's mask are such.
bool mask_block(const float* x, const uint32_t* words, int64_t count, float* out) {
  const int64_t whole = count / kWord, num_words = ceil_div(count, kWord);
  uint32_t any = 0;
  for (int64_t w = 0; w < num_words; ++w) any |= words[w];
  if (any == 0) return false;
  const vf none = splat(-kInf);
  for (int64_t w = 0; w < kBlock / kWord; ++w) {
    const float* const from = x + w * kWord;
    float* const to = out + w * kWord;
    if (w < whole && words[w] != 0) {
      HEADRACE_UNROLL for (int i = 0; i < kWord; i += kLanes) store(to + i, if_set(words[w] >> i, load(from + i), none));
    } else {
      HEADRACE_UNROLL for (int i = 0; i < kWord; i += kLanes) store(to + i, none);
    }
  }
  for (int64_t i = whole * kWord; i < count; ++i) out[i] = (words[whole] >> (i % kWord) & 1u) != 0 ? x[i] : -kInf;
  return true;
}

// words: the row's mask, or null; masked: where its logits are put, then, [blocks * kBlock].
void find_tops(Row& row, const uint32_t* words, float* masked) {
  constexpr int32_t kInfBits = 0x7f800000;  // magnitudes of NaNs are larger
  float peak = -kInf;
  vi most = splat_int(0);
  for (int64_t block = 0; block < row.blocks; ++block) {
    const float* x = row.x + block * kBlock;
    float padded[kBlock];
    if (words != nullptr) {
      if (!mask_block(x, words + block * (kBlock / kWord), row.block_size(block), masked + block * kBlock)) {
        store16(row.tops + block * kTops, splat16(-kInf));
        row.block_top[block] = -kInf;
        continue;
      }
      x = masked + block * kBlock;
    } else if (row.block_size(block) < kBlock) {
      for (int64_t i = 0; i < kBlock; ++i) padded[i] = i < row.block_size(block) ? x[i] : -kInf;
      x = padded;
    }
    f32x16 best[2] = {splat16(-kInf), splat16(-kInf)};
    for (int64_t i = 0; i < kBlock; i += 32) {
      HEADRACE_UNROLL for (int half = 0; half < 2; ++half) {
        const f32x16 value = load16(x + i + 16 * half);
        HEADRACE_UNROLL for (int part = 0; part < kParts; ++part) most = max_int(most, magnitude_bits(value.part[part]));
        best[half] = vmax(value, best[half]);
      }
    }
    const f32x16 tops = vmax(best[0], best[1]);
    store16(row.tops + block * kTops, tops);
    row.block_top[block] = max_lanes(tops);
    peak = row.block_top[block] > peak ? row.block_top[block] : peak;
  }
  row.peak = reduce_max_int(most) > kInfBits ? __builtin_nanf("") : peak;
  if (words != nullptr) row.x = masked;
}

int64_t first_peak(const Row& row) {
  int64_t block = 0;
  while (row.block_top[block] != row.peak) ++block;
  int64_t i = block * kBlock;
  while (row.x[i] != row.peak) ++i;
  return i;
}

struct Candidate {
  float value;
  int32_t id;
};

// The order of top-k and top-p: value descending, id ascending. Candidate has internal linkage, so the standard algorithms over it are
// compiled once for each instruction set.
HEADRACE_INLINE bool before(const Candidate& a, const Candidate& b) {
  return a.value != b.value ? a.value > b.value : a.id < b.id;
}

// Those with lowest <= value < limit, above -inf, by id. Returns how many.
int64_t gather(const Row& row, float lowest, float limit, Candidate* out) {
  int64_t count = 0;
  const f32x16 floor = splat16(lowest);
  for (int64_t block = 0; block < row.blocks; ++block) {
    if (row.is_below(block, lowest)) continue;
    const int64_t end = block * kBlock + row.block_size(block);
    for (int64_t begin = block * kBlock; begin < end; begin += 16) {
      const int64_t stop = min_of(begin + 16, end);
      if (stop == begin + 16) {
        const f32x16 value = load16(row.x + begin), top = vmax(floor, value);
        bool any = false;
        for (int part = 0; part < kParts; ++part) any = any || any_equal(top.part[part], value.part[part]);
        if (!any) continue;
      }
      for (int64_t i = begin; i < stop; ++i) {
        out[count] = {row.x[i], static_cast<int32_t>(i)};
        count += row.x[i] >= lowest && row.x[i] < limit && row.x[i] > -kInf ? 1 : 0;
      }
    }
  }
  return count;
}

int64_t target_of(int64_t total, double u) {
  return min_of(static_cast<int64_t>(u * static_cast<double>(total)), total - 1);
}

// What top-p keeps is a beginning of the order; this is its last: kept are x > value, and x == value with an id up to this one.
struct Cut {
  float value;
  int64_t id;
};

// What lies around the cut: everything x >= inside weighs limit or more, everything x >= outside weighs less.
struct Bracket {
  float inside, outside;
  int64_t outside_sum;

  // Narrows by sums of the weights of x >= cut[j], cut ascending. Returns whether it could.
  bool narrow(const float (&cut)[kCuts], const int64_t (&sums)[kCuts], double limit) {
    const Bracket before = *this;
    for (int j = 0; j < kCuts; ++j) {
      if (static_cast<double>(sums[j]) >= limit) {
        inside = cut[j] > inside ? cut[j] : inside;
      } else if (cut[j] < outside) {
        outside = cut[j];
        outside_sum = sums[j];
      }
    }
    return inside != before.inside || outside != before.outside;
  }
};

// Adds the weights of x >= cut[j] to sums[j].
void add_above(const float* x, const float* weights, int64_t size, const float (&cut)[kCuts], int64_t (&sums)[kCuts]) {
  for (int64_t begin = 0; begin < size; begin += kBlock) {
    const int64_t end = min_of(size, begin + kBlock);
    int32_t high[kCuts] = {}, low[kCuts] = {};
    for (int64_t i = begin; i < end; ++i) {
      const int32_t h = high_of(weights[i]), l = low_of(weights[i], h);
      HEADRACE_UNROLL for (int j = 0; j < kCuts; ++j) {
        const int32_t mask = -static_cast<int32_t>(x[i] >= cut[j]);
        high[j] += h & mask;
        low[j] += l & mask;
      }
    }
    for (int j = 0; j < kCuts; ++j) sums[j] += joined(high[j], low[j]);
  }
}

struct Scratch {
  float *weights, *tops, *block_top, *near, *near_weights, *masked;
  int64_t* sums;
  Candidate* candidates;
};

// Brackets the cut by the weight above a few values, first of all logits, then of those in the bracket, and sorts what is left in it.
Cut top_p_cut(const Row& row, const Scratch& s, int64_t total, double top_p, float temperature) {
  const double limit = top_p * static_cast<double>(total);
  Bracket bracket = {row.peak - kWeightless * temperature, __builtin_nextafterf(row.peak, kInf), 0};
  if (!(bracket.inside > -kInf)) bracket.inside = -__FLT_MAX__;
  float cut[kCuts];
  int64_t sums[kCuts] = {};
  for (int j = 0; j < kCuts; ++j) cut[j] = row.peak - kFirstCuts[j] * temperature;
  for (int64_t block = 0; block < row.blocks; ++block) {
    if (row.is_below(block, cut[0])) continue;
    add_above(row.x + block * kBlock, s.weights + block * kBlock, row.block_size(block), cut, sums);
  }
  bracket.narrow(cut, sums, limit);
  Candidate* const found = s.candidates;
  int64_t count = gather(row, bracket.inside, bracket.outside, found);
  for (bool narrower = true; narrower && count > kSortedAtOnce;) {
    for (int64_t i = 0; i < count; ++i) {
      s.near[i] = found[i].value;
      s.near_weights[i] = s.weights[found[i].id];
    }
    for (int j = 0; j < kCuts; ++j) {
      const float share = static_cast<float>(j + 1) / (kCuts + 1);
      cut[j] = bracket.inside * (1.0f - share) + bracket.outside * share;
      sums[j] = bracket.outside_sum;
    }
    add_above(s.near, s.near_weights, count, cut, sums);
    narrower = bracket.narrow(cut, sums, limit);
    int64_t left = 0;
    for (int64_t i = 0; i < count; ++i) {
      found[left] = found[i];
      left += found[i].value >= bracket.inside && found[i].value < bracket.outside ? 1 : 0;
    }
    count = left;
  }
  std::sort(found, found + count, before);
  Cut last = {bracket.outside, row.size};
  int64_t sum = bracket.outside_sum;
  for (int64_t i = 0; i < count && static_cast<double>(sum) < limit; ++i) {
    last = {found[i].value, found[i].id};
    sum += static_cast<int64_t>(s.weights[found[i].id]);
  }
  return last;
}

// The k largest, then top-p and min-p of those.
int64_t draw_of_top_k(const DrawArgs& a, int64_t r, const Row& row, const Scratch& s) {
  const int64_t k = a.top_k[r], num_tops = row.blocks * kTops;
  float floor = -kInf;
  if (k <= num_tops) {
    // k of the maxima are at least the k-th largest of them, so the k-th largest logit is at least that.
    Candidate* const tops = s.candidates;
    for (int64_t i = 0; i < num_tops; ++i) tops[i] = {row.tops[i], static_cast<int32_t>(i)};
    std::nth_element(tops, tops + (k - 1), tops + num_tops, before);
    floor = tops[k - 1].value;
  }
  Candidate* const top = s.candidates;
  const int64_t found = gather(row, floor, kInf, top), count = min_of(k, found);
  if (found > count) std::nth_element(top, top + count, top + found, before);
  std::sort(top, top + count, before);
  for (int64_t i = 0; i < count; ++i) s.weights[i] = top[i].value;
  weigh(s.weights, count, row.peak, a.temperature[r], s.weights);
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += static_cast<int64_t>(s.weights[i]);
  const double limit = a.top_p[r] < 1.0 ? a.top_p[r] * static_cast<double>(total) : static_cast<double>(INT64_MAX);
  int64_t sum = 0, kept = 0, kept_sum = 0;
  for (int64_t i = 0; i < count && static_cast<double>(sum) < limit; ++i) {
    const int64_t weight = static_cast<int64_t>(s.weights[i]);
    sum += weight;
    if (weight < a.min_weight[r]) continue;
    kept_sum += weight;
    top[kept] = top[i];
    ++kept;
  }
  std::sort(top, top + kept, [](const Candidate& x, const Candidate& y) { return x.id < y.id; });
  for (int64_t i = 0; i < kept; ++i) s.weights[i] = top[i].value;
  weigh(s.weights, kept, row.peak, a.temperature[r], s.weights);
  int64_t left = target_of(kept_sum, a.u[r]);
  for (int64_t i = 0; i < kept; ++i) {
    left -= static_cast<int64_t>(s.weights[i]);
    if (left < 0) return top[i].id;
  }
  return first_peak(row);
}

int64_t draw_row(const DrawArgs& a, int64_t r, const Scratch& s) {
  const float temperature = a.temperature[r];
  if (temperature < 0.0f) return -1;
  Row row = {a.x + r * a.x_stride, a.size, ceil_div(a.size, kBlock), 0.0f, s.tops, s.block_top};
  const bool is_masked = a.masks != nullptr && a.mask_rows[r] >= 0;
  find_tops(row, is_masked ? a.masks + a.mask_rows[r] * ceil_div(a.size, kWord) : nullptr, s.masked);
  if (!(row.peak > -kInf && row.peak < kInf)) return -1;
  if (temperature == 0.0f || a.top_k[r] == 1) return first_peak(row);
  if (a.top_k[r] > 0 && a.top_k[r] < a.size) return draw_of_top_k(a, r, row, s);
  int64_t total = 0;
  for (int64_t block = 0; block < row.blocks; ++block) {
    s.sums[block] = 0;
    if (row.is_below(block, -kInf)) continue;
    float* const weights = s.weights + block * kBlock;
    weigh(row.x + block * kBlock, row.block_size(block), row.peak, temperature, weights);
    s.sums[block] = block_sum(weights, row.block_size(block));
    total += s.sums[block];
  }
  if (a.top_p[r] < 1.0 || a.min_weight[r] > 0) {
    Cut cut = {-kInf, a.size};
    if (a.top_p[r] < 1.0) cut = top_p_cut(row, s, total, a.top_p[r], temperature);
    // The least float that is min_weight or more: weights are floats, too.
    float least = static_cast<float>(a.min_weight[r]);
    if (static_cast<int64_t>(least) < a.min_weight[r]) least = __builtin_nextafterf(least, kInf);
    total = 0;
    for (int64_t block = 0; block < row.blocks; ++block) {
      s.sums[block] = 0;
      if (row.is_below(block, cut.value)) continue;
      const float* const x = row.x + block * kBlock;
      float* const weights = s.weights + block * kBlock;
      const int64_t last = cut.id - block * kBlock, count = row.block_size(block);
      for (int64_t i = 0; i < count; ++i) {
        const bool keep = (x[i] > cut.value || (x[i] == cut.value && i <= last)) && weights[i] >= least;
        weights[i] = keep ? weights[i] : 0.0f;
      }
      s.sums[block] = block_sum(weights, count);
      total += s.sums[block];
    }
  }
  int64_t left = target_of(total, a.u[r]);
  for (int64_t block = 0; block < row.blocks; ++block) {
    if (left >= s.sums[block]) {
      left -= s.sums[block];
      continue;
    }
    for (int64_t i = block * kBlock; i < block * kBlock + row.block_size(block); ++i) {
      left -= static_cast<int64_t>(s.weights[i]);
      if (left < 0) return i;
    }
  }
  return first_peak(row);
}

// Memory of one thread for rows of `size`.
Scratch scratch_of(int64_t size) {
  const int64_t blocks = ceil_div(size, kBlock), padded = blocks * kBlock;
  const int64_t bytes = padded * 8 + blocks * (kTops * 4 + 64 + 64) + padded * static_cast<int64_t>(sizeof(Candidate) + 8) + 64;
  char* at = static_cast<char*>(thread_scratch(static_cast<size_t>(bytes)));
  Scratch s;
  s.sums = reinterpret_cast<int64_t*>(at);
  s.candidates = reinterpret_cast<Candidate*>(at += blocks * 8);
  s.weights = reinterpret_cast<float*>(at += (padded + 1) * static_cast<int64_t>(sizeof(Candidate)));
  s.tops = reinterpret_cast<float*>(at += padded * 4);
  s.block_top = reinterpret_cast<float*>(at += blocks * kTops * 4);
  s.near = reinterpret_cast<float*>(at += blocks * 4);
  s.near_weights = reinterpret_cast<float*>(at += padded * 4);
  s.masked = reinterpret_cast<float*>(at + padded * 4);
  return s;
}

}  // namespace

void draw(const DrawArgs& a) {
  parallel_for(a.rows, 1, [&](int64_t begin, int64_t end) {
    const Scratch s = scratch_of(a.size);
    for (int64_t row = begin; row < end; ++row) a.out[row] = draw_row(a, row, s);
  });
}

void exp_sums(const ExpSumsArgs& a) {
  parallel_for(a.rows, max_of(1, 8192 / a.size), [&](int64_t begin, int64_t end) {
    const Scratch s = scratch_of(a.size);
    for (int64_t r = begin; r < end; ++r) {
      Row row = {a.x + r * a.x_stride, a.size, ceil_div(a.size, kBlock), 0.0f, s.tops, s.block_top};
      find_tops(row, nullptr, nullptr);
      a.peaks[r] = row.peak;
      a.sums[r] = 0;
      if (!(row.peak > -kInf && row.peak < kInf)) continue;
      for (int64_t block = 0; block < row.blocks; ++block) {
        weigh(row.x + block * kBlock, row.block_size(block), row.peak, 1.0f, s.weights);
        a.sums[r] += block_sum(s.weights, row.block_size(block));
      }
    }
  });
}

}  // namespace HEADRACE_ISA
}  // namespace headrace

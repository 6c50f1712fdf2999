// A mixture of experts: rows sorted by expert, one product for all rows of an expert, then each row's sum over its experts.
//
// The products are those of `linear` and `linear_quantized`, whose rows do not depend on each other, and a row adds its experts up in
// the order in which the router named them. So a row's bits do not depend on its batch, on chunking or on threads.
#include "kernels.h"
#include "simd.h"
#include "threads.h"

namespace headrace {
namespace HEADRACE_ISA {
namespace {

constexpr int64_t kColumns = kPackedColumns;
constexpr int64_t kPassBytes = 32 << 20;  // activations between the two products, unless so few rows make the products small
constexpr int64_t kPassPairs = 256;

// Consecutive rows of one expert.
struct Segment {
  int32_t expert, first, rows;
};

bool is_quantized(const ExpertWeight& w) { return w.format >= 0; }
RowFormat format_of(const ExpertWeight& w) { return row_format(static_cast<QuantScheme>(w.format)); }

// Rows [n][k] of a pass, as each expert's weight wants them: floats, or bytes or words with their scales.
struct Inputs {
  float* floats;
  char* values;
  float* scales;
  int32_t* starts;
  float* scaled_sums;
  int64_t k;

  static int64_t padded(int64_t k) { return ceil_div(k, kQuantGroup) * kQuantGroup; }

  // The rows of the segment that begins at row `first`, each with room for words and for a scale for each 32 elements.
  QuantizedRows from(int64_t first) const {
    const int64_t at = first * (padded(k) / kQuantGroup);
    return {values + first * padded(k) * 2, scales + at, starts + at, scaled_sums + at};
  }
  // Row `row` of the segment that begins at row `first`.
  void quantize(const float* x, const ExpertWeight& w, int64_t first, int64_t row) const {
    const RowFormat format = format_of(w);
    const int64_t at = first * (padded(k) / kQuantGroup) + (row - first) * ceil_div(k, format.group);
    char* const to = values + first * padded(k) * 2 + (row - first) * padded(k) * format.value_bytes;
    quantize_rows({x, k, to, scales + at, starts + at, scaled_sums + at, 1, k, format});
  }
};

// Memory cut into arrays, each on a cache line of its own.
struct Cutter {
  char* base;
  size_t used;
  template <class T>
  T* take(int64_t count) {
    T* const result = reinterpret_cast<T*>(base + used);
    used += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return result;
  }
};

struct Memory {
  int32_t *ends, *row_of, *place_of;  // [num_experts], [pairs] by sorted place, [pairs], -1 = nobody's
  Segment* segments;
  Inputs hidden, inner;
  float *gate_up, *results;
};

Memory cut(Cutter memory, const MoeArgs& a, int64_t pass, size_t* bytes) {
  auto inputs = [&](int64_t k) {
    const int64_t groups = ceil_div(k, kQuantGroup);
    return Inputs{memory.take<float>(pass * k), memory.take<char>(pass * groups * kQuantGroup * 2), memory.take<float>(pass * groups),
                  memory.take<int32_t>(pass * groups), memory.take<float>(pass * groups), k};
  };
  const int64_t pairs = a.rows * a.top_k;
  Memory m;
  m.ends = memory.take<int32_t>(a.num_experts);
  m.row_of = memory.take<int32_t>(pairs);
  m.place_of = memory.take<int32_t>(pairs);
  m.segments = memory.take<Segment>(a.num_experts);
  m.hidden = inputs(a.hidden_size);
  m.inner = inputs(a.intermediate_size);
  m.gate_up = memory.take<float>(pass * 2 * a.intermediate_size);
  m.results = memory.take<float>(pairs * a.hidden_size);
  *bytes = memory.used;
  return m;
}

// y[rows, n] = x @ weight^T for every segment, blocks of columns of all of them shared out together. weight_of(expert) -> ExpertWeight.
template <class WeightOf>
void products(const Segment* segments, int64_t num_segments, const Inputs& x, int64_t n, float* y, WeightOf weight_of) {
  const int64_t blocks = ceil_div(n, kColumns);
  const int64_t grain = max_of(1, 32768 / max_of(1, x.k * kColumns));
  parallel_for(num_segments * blocks, grain, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const Segment& s = segments[begin / blocks];
      const int64_t block = begin % blocks, count = min_of(end - begin, blocks - block), column = block * kColumns;
      const int64_t columns = min_of(count * kColumns, n - column);
      const ExpertWeight& w = weight_of(s.expert);
      const char* const weight = reinterpret_cast<const char*>(w.data) + block * w.block_bytes;
      const float* const bias = w.bias == 0 ? nullptr : reinterpret_cast<const float*>(w.bias) + column;
      float* const out = y + s.first * n + column;
      if (is_quantized(w)) {
        linear_quantized({x.from(s.first), static_cast<QuantScheme>(w.format), reinterpret_cast<const uint8_t*>(weight),
                          w.column_scales == 0 ? nullptr : reinterpret_cast<const float*>(w.column_scales) + column, bias, out, n, s.rows, columns, Inputs::padded(x.k), false});
      } else {
        linear({x.floats + s.first * x.k, x.k, weight, float_type(w.format), bias, out, n, s.rows, columns, x.k, false});
      }
      begin += count;
    }
  });
}

// body(segment, row) for rows [begin, end) of the pass.
template <class Body>
HEADRACE_INLINE void for_rows(const Segment* segment, int64_t begin, int64_t end, Body body) {
  for (int64_t row = begin; row < end; ++row) {
    while (row >= segment->first + segment->rows) ++segment;
    body(*segment, row);
  }
}

void add_up(const MoeArgs& a, const Memory& m, int64_t row) {
  const int64_t size = a.hidden_size;
  float* const out = a.out + row * size;
  bool is_first = true;
  for (int64_t rank = 0; rank < a.top_k; ++rank) {
    const int64_t place = m.place_of[row * a.top_k + rank];
    if (place < 0) continue;
    const float* const result = m.results + place * size;
    const float share = a.shares[row * a.top_k + rank];
    int64_t i = 0;
    for (; i + 16 <= size; i += 16) {
      const f32x16 part = mul(splat16(share), load16(result + i));
      store16(out + i, is_first ? part : add(load16(out + i), part));
    }
    for (; i < size; ++i) {
      const float part = share * result[i];
      out[i] = is_first ? part : out[i] + part;
    }
    is_first = false;
  }
  if (is_first) memset(out, 0, static_cast<size_t>(size) * 4);
}

}  // namespace

void moe(const MoeArgs& a) {
  const int64_t pairs = a.rows * a.top_k;
  if (pairs == 0) return;
  const int64_t pair_bytes = 6 * a.hidden_size + 14 * a.intermediate_size;
  const int64_t pass = min_of(pairs, max_of(kPassPairs, kPassBytes / pair_bytes));
  size_t bytes;
  cut({nullptr, 0}, a, pass, &bytes);
  const Memory m = cut({static_cast<char*>(thread_scratch(bytes)), 0}, a, pass, &bytes);

  // Pairs (row, rank) sorted by expert, of one expert by row.
  for (int64_t e = 0; e < a.num_experts; ++e) m.ends[e] = 0;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    if (a.ids[pair] >= 0) ++m.ends[a.ids[pair]];
  }
  for (int64_t e = 1; e < a.num_experts; ++e) m.ends[e] += m.ends[e - 1];
  const int64_t num_placed = m.ends[a.num_experts - 1];
  for (int64_t pair = pairs - 1; pair >= 0; --pair) {
    if (a.ids[pair] < 0) {
      m.place_of[pair] = -1;
      continue;
    }
    m.place_of[pair] = --m.ends[a.ids[pair]];
    m.row_of[m.place_of[pair]] = static_cast<int32_t>(pair / a.top_k);
  }
  // m.ends holds beginnings now.
  const ExpertWeight* const experts = a.experts;
  auto gate_up_of = [=](int64_t expert) -> const ExpertWeight& { return experts[2 * expert]; };
  auto down_of = [=](int64_t expert) -> const ExpertWeight& { return experts[2 * expert + 1]; };
  const PoolSession session;
  for (int64_t begin = 0; begin < num_placed; begin += pass) {
    const int64_t count = min_of(pass, num_placed - begin);
    int64_t num_segments = 0;
    for (int64_t e = 0; e < a.num_experts; ++e) {
      const int64_t first = max_of(m.ends[e], begin);
      const int64_t last = min_of(e + 1 < a.num_experts ? m.ends[e + 1] : num_placed, begin + count);
      if (first >= last) continue;
      m.segments[num_segments++] = {static_cast<int32_t>(e), static_cast<int32_t>(first - begin), static_cast<int32_t>(last - first)};
    }
    parallel_for(count, max_of(1, 8192 / a.hidden_size), [&](int64_t from, int64_t to) {
      for_rows(m.segments, from, to, [&](const Segment& s, int64_t row) {
        const float* const x = a.x + m.row_of[begin + row] * a.x_stride;
        const ExpertWeight& w = gate_up_of(s.expert);
        if (is_quantized(w)) {
          m.hidden.quantize(x, w, s.first, row);
        } else {
          memcpy(m.hidden.floats + row * a.hidden_size, x, static_cast<size_t>(a.hidden_size) * 4);
        }
      });
    });
    products(m.segments, num_segments, m.hidden, 2 * a.intermediate_size, m.gate_up, gate_up_of);
    parallel_for(count, max_of(1, 4096 / a.intermediate_size), [&](int64_t from, int64_t to) {
      for_rows(m.segments, from, to, [&](const Segment& s, int64_t row) {
        float* const activated = m.inner.floats + row * a.intermediate_size;
        const GatedArgs gated = {m.gate_up + row * 2 * a.intermediate_size, 2 * a.intermediate_size, activated, 1,
                                 a.intermediate_size};
        a.gelu ? gelu_tanh_mul(gated) : silu_mul(gated);
        if (is_quantized(down_of(s.expert))) m.inner.quantize(activated, down_of(s.expert), s.first, row);
      });
    });
    products(m.segments, num_segments, m.inner, a.hidden_size, m.results + begin * a.hidden_size, down_of);
  }
  parallel_for(a.rows, max_of(1, 8192 / (a.hidden_size * a.top_k)), [&](int64_t from, int64_t to) {
    for (int64_t row = from; row < to; ++row) add_up(a, m, row);
  });
}

}  // namespace HEADRACE_ISA
}  // namespace headrace

// The Python bindings. Addresses come as integers (tensor.data_ptr()), sizes and strides in elements; the Python wrappers have
// checked them. Indices that lie inside tensors (slots, positions, ids, pages) are checked here, before any kernel follows them.
// The GIL is released while a kernel runs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "attention_plan.h"
#include "decoder.h"
#include "dispatch.h"
#include "encoder.h"
#include "gguf_blocks.h"
#include "ops.h"
#include "layer_calls.h"
#include "packed_plan.h"
#include "rank_group.h"
#include "threads.h"

namespace nb = nanobind;

namespace headrace {
namespace {

using Address = uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

void linear(Address x, int64_t x_stride, Address weight, int type, Address bias, Address y, int64_t y_stride,
            int64_t rows, int64_t n, int64_t k, bool accumulate) {
  kernels().linear({at<float>(x), x_stride, at<void>(weight), static_cast<FloatType>(type), at<float>(bias), at<float>(y), y_stride, rows, n,
                    k, accumulate});
}

void linear_quantized(Address x, int64_t x_stride, int scheme, Address weight, Address column_scales, Address bias, Address y,
                      int64_t y_stride, int64_t rows, int64_t n, int64_t k, bool accumulate) {
  run_linear_quantized(at<float>(x), x_stride, static_cast<QuantScheme>(scheme), at<void>(weight), at<float>(column_scales),
                       at<float>(bias), at<float>(y), y_stride, rows, n, k, accumulate);
}

// Rows [0, n) of k elements, as they lie in a file, to the blocks of a packed matrix that begin at `entries`, and back.
void pack_gguf(int type, Address rows, int64_t row_bytes, int64_t n, int64_t k, Address entries) {
  for (int64_t row = 0; row < n; row += kPackedColumns) {
    const GgufEntry& entry = at<GgufEntry>(entries)[row / kPackedColumns];
    pack_gguf_block(static_cast<GgufType>(type), at<uint8_t>(rows) + row * row_bytes, row_bytes, std::min(kPackedColumns, n - row), k,
                    const_cast<uint8_t*>(entry.block()));
  }
}

void unpack_gguf(Address entries, int64_t n, int64_t k, Address rows, int64_t row_bytes) {
  for (int64_t row = 0; row < n; row += kPackedColumns) {
    const GgufEntry& entry = at<GgufEntry>(entries)[row / kPackedColumns];
    unpack_gguf_block(entry.type(), entry.block(), std::min(kPackedColumns, n - row), k, at<uint8_t>(rows) + row * row_bytes, row_bytes);
  }
}

int64_t gguf_block_bytes(int type, int64_t k) { return gguf_format(static_cast<GgufType>(type)).block_bytes(k); }

void quantize_rows(Address x, int64_t x_stride, Address values, Address scales, int64_t rows, int64_t k, int64_t group, int64_t value_bytes,
                   bool rotated) {
  const size_t num_scales = static_cast<size_t>(rows * ((k + group - 1) / group));
  std::vector<int32_t> starts(num_scales);
  std::vector<float> scaled_sums(num_scales);
  kernels().quantize_rows({at<float>(x), x_stride, at<void>(values), at<float>(scales), starts.data(), scaled_sums.data(), rows, k,
                           {value_bytes, group, 0, false, rotated}});
}

// sparse_first, channels, pages, recent: see SparseAttention.
void sparse_attention(Address q, int64_t q_stride, Address out, Address k_cache, Address v_cache, int kv_type,
                     int64_t num_pages, int64_t num_kv_heads, int64_t head_dim, Address page_table, int64_t max_pages,
                     Address seq_lens, Address q_starts, int64_t num_seqs, int64_t num_tokens, int64_t num_q_heads, float scale,
                     int64_t window, float softcap, Address last_keys, Address sparse_first, int64_t channels, int64_t pages, int64_t recent) {
  const AttentionArgs args = {at<float>(q), q_stride,  at<float>(out),
                              {at<void>(k_cache), at<void>(v_cache), static_cast<KvType>(kv_type), num_kv_heads, head_dim},
                              at<int32_t>(page_table), max_pages, num_q_heads, scale, window, softcap, at<int32_t>(last_keys),
                              {at<int32_t>(sparse_first), channels, pages, recent}};
  const AttentionPlan plan =
      plan_attention(args, at<int32_t>(seq_lens), at<int32_t>(q_starts), num_seqs, num_tokens, max_pages, num_pages);
  run_attention(args, plan);
}

void paged_attention(Address q, int64_t q_stride, Address out, Address k_cache, Address v_cache, int kv_type, int64_t num_pages, int64_t num_kv_heads,
                     int64_t head_dim, Address page_table, int64_t max_pages, Address seq_lens, Address q_starts, int64_t num_seqs,
                     int64_t num_tokens, int64_t num_q_heads, float scale, int64_t window, float softcap, Address last_keys) {
  sparse_attention(q, q_stride, out, k_cache, v_cache, kv_type, num_pages, num_kv_heads, head_dim, page_table, max_pages, seq_lens, q_starts,
                   num_seqs, num_tokens, num_q_heads, scale, window, softcap, last_keys, 0, 0, 0, 0);
}

void packed_attention(Address q, int64_t q_stride, Address k, int64_t k_stride, Address v, int64_t v_stride, Address out, Address row_starts,
                      int64_t num_seqs, int64_t tokens, int64_t num_q_heads, int64_t num_kv_heads, int64_t head_dim, float scale, int64_t window,
                      bool rounded) {
  const std::vector<PackedChunk> chunks = plan_packed(at<int32_t>(row_starts), num_seqs, tokens);
  kernels().packed_attention({at<float>(q), q_stride, at<float>(k), k_stride, at<float>(v), v_stride, at<float>(out), num_q_heads, num_kv_heads,
                              head_dim, scale, window, rounded},
                             chunks.data(), static_cast<int64_t>(chunks.size()));
}

void write_kv(Address k, int64_t k_stride, Address v, int64_t v_stride, Address k_cache, Address v_cache, int kv_type,
              int64_t num_pages, int64_t num_kv_heads, int64_t head_dim, Address slots, int64_t tokens) {
  check_range("write_kv: slot", at<int32_t>(slots), tokens, -1, num_pages * kPageSize);
  kernels().write_kv({at<float>(k), k_stride, at<float>(v), v_stride,
                      {at<void>(k_cache), at<void>(v_cache), static_cast<KvType>(kv_type), num_kv_heads, head_dim}, at<int32_t>(slots), tokens});
}

void gather_kv(Address k, Address v, Address k_cache, Address v_cache, int kv_type, int64_t num_pages,
               int64_t num_kv_heads, int64_t head_dim, Address slots, int64_t tokens) {
  check_range("gather_kv: slot", at<int32_t>(slots), tokens, 0, num_pages * kPageSize);
  kernels().gather_kv({at<float>(k), at<float>(v),
                       {at<void>(k_cache), at<void>(v_cache), static_cast<KvType>(kv_type), num_kv_heads, head_dim}, at<int32_t>(slots), tokens});
}

void rms_norm(Address x, int64_t x_stride, Address residual, Address weight, Address out, int64_t rows, int64_t size, float eps) {
  kernels().rms_norm({at<float>(x), x_stride, at<float>(residual), at<float>(weight), at<float>(out), rows, size, eps});
}

void rotary(Address q, int64_t q_stride, int64_t num_q_heads, Address k, int64_t k_stride, int64_t num_kv_heads,
            Address positions, Address cos, Address sin, int64_t tokens, int64_t head_dim, int64_t rotary_dim,
            int64_t max_positions) {
  check_range("rotary: position", at<int32_t>(positions), tokens, 0, max_positions);
  kernels().rotary({at<float>(q), q_stride, at<int32_t>(positions), at<float>(cos), at<float>(sin), tokens, num_q_heads,
                    head_dim, rotary_dim});
  kernels().rotary({at<float>(k), k_stride, at<int32_t>(positions), at<float>(cos), at<float>(sin), tokens, num_kv_heads,
                    head_dim, rotary_dim});
}

void silu_mul(Address x, int64_t x_stride, Address out, int64_t rows, int64_t size) {
  kernels().silu_mul({at<float>(x), x_stride, at<float>(out), rows, size});
}

void gelu_tanh_mul(Address x, int64_t x_stride, Address out, int64_t rows, int64_t size) {
  kernels().gelu_tanh_mul({at<float>(x), x_stride, at<float>(out), rows, size});
}

void gelu_mul(Address x, int64_t x_stride, Address out, int64_t rows, int64_t size) {
  kernels().gelu_mul({at<float>(x), x_stride, at<float>(out), rows, size});
}

void gelu(Address x, int64_t x_stride, Address out, int64_t rows, int64_t size) {
  kernels().gelu({at<float>(x), x_stride, at<float>(out), rows, size});
}

void gelu_tanh(Address x, int64_t x_stride, Address out, int64_t rows, int64_t size) {
  kernels().gelu_tanh({at<float>(x), x_stride, at<float>(out), rows, size});
}

void embedding(Address table, int type, int order, Address ids, bool ids_are_int64, Address out, int64_t tokens,
               int64_t vocab_size, int64_t hidden_size, float scale) {
  if (ids_are_int64) {
    check_range("embedding: id", at<int64_t>(ids), tokens, 0, vocab_size);
  } else {
    check_range("embedding: id", at<int32_t>(ids), tokens, 0, vocab_size);
  }
  kernels().embedding(
      {at<void>(table), static_cast<FloatType>(type), static_cast<TableOrder>(order), at<void>(ids), ids_are_int64, at<float>(out), tokens, hidden_size, scale});
}

void argmax(Address x, int64_t x_stride, Address out, int64_t rows, int64_t size) {
  kernels().argmax({at<float>(x), x_stride, at<int64_t>(out), rows, size});
}

void layer_norm(Address x, int64_t x_stride, Address residual, Address weight, Address bias, Address out, int64_t rows,
                int64_t size, float eps) {
  kernels().layer_norm(
      {at<float>(x), x_stride, at<float>(residual), at<float>(weight), at<float>(bias), at<float>(out), rows, size, eps});
}

void draw(Address x, int64_t x_stride, Address temperature, Address top_k, Address top_p, Address min_weight, Address u,
          Address masks, Address mask_rows, int64_t num_masks, Address out, int64_t rows, int64_t size) {
  if (masks != 0) check_range("draw: mask", at<int64_t>(mask_rows), rows, -1, num_masks);
  kernels().draw({at<float>(x), x_stride, at<float>(temperature), at<int64_t>(top_k), at<double>(top_p),
                  at<int64_t>(min_weight), at<double>(u), at<uint32_t>(masks), at<int64_t>(mask_rows), at<int64_t>(out), rows, size});
}

void exp_sums(Address x, int64_t x_stride, Address peaks, Address sums, int64_t rows, int64_t size) {
  kernels().exp_sums({at<float>(x), x_stride, at<float>(peaks), at<int64_t>(sums), rows, size});
}

void moe(Address x, int64_t x_stride, Address ids, Address shares, Address experts, Address out, int64_t rows, int64_t top_k,
         int64_t num_experts, int64_t hidden_size, int64_t intermediate_size, bool gelu) {
  check_range("moe: expert", at<int64_t>(ids), rows * top_k, -1, num_experts);
  kernels().moe({at<float>(x), x_stride, at<int64_t>(ids), at<float>(shares), at<ExpertWeight>(experts), at<float>(out), rows,
                 top_k, num_experts, hidden_size, intermediate_size, gelu});
}

// A decoder without layers; they are added in order.
void make_decoder(Decoder* self, int64_t hidden_size, int64_t intermediate_size, int64_t num_q_heads, int64_t num_kv_heads,
                  int64_t head_dim, float eps, bool gelu, int kv_type, int64_t num_pages, Address final_norm) {
  new (self) Decoder({hidden_size, intermediate_size, num_q_heads, num_kv_heads, head_dim, eps, gelu, static_cast<KvType>(kv_type), num_pages, {}},
                     at<float>(final_norm));
}

// (address, format, address of the column scales, address of the bias, n, k), see LinearWeight
using Weight = std::tuple<Address, int, Address, Address, int64_t, int64_t>;

LinearWeight as_linear(const Weight& w) {
  return {at<void>(std::get<0>(w)), std::get<1>(w), at<float>(std::get<2>(w)), at<float>(std::get<3>(w)), std::get<4>(w), std::get<5>(w)};
}

void decoder_add_layer(Decoder& decoder, Address attention_norm, const Weight& qkv, Address q_norm, Address k_norm, Address cos,
                       Address sin, int64_t rotary_dim, int64_t max_positions, float scale, int64_t window, float softcap,
                       Address k_cache, Address v_cache, const Weight& out, Address after_attention, Address mlp_norm,
                       const Weight& gate_up, const Weight& down, Address after_mlp) {
  decoder.add_layer({at<float>(attention_norm), as_linear(qkv), at<float>(q_norm), at<float>(k_norm), at<float>(cos),
                     at<float>(sin), rotary_dim, max_positions, scale, window, softcap, at<void>(k_cache), at<void>(v_cache),
                     as_linear(out), at<float>(after_attention), at<float>(mlp_norm), as_linear(gate_up), as_linear(down),
                     at<float>(after_mlp), nullptr});
}

// orders: of each layer, see OrderArgs.
void decoder_set_sparse(Decoder& decoder, int64_t channels, int64_t pages, int64_t recent, const std::vector<Address>& orders) {
  std::vector<const int32_t*> of_layers;
  for (const Address order : orders) of_layers.push_back(at<int32_t>(order));
  decoder.set_sparse({nullptr, channels, pages, recent}, of_layers);
}

void decoder_forward_sparse(Decoder& decoder, Address hidden, Address out, int64_t tokens, Address positions, Address out_slots,
                     Address page_table, int64_t max_pages, Address seq_lens, Address q_starts, Address read_starts, int64_t num_seqs,
                     Address sparse_first) {
  decoder.forward({at<float>(hidden), at<float>(out), tokens, at<int32_t>(positions), at<int32_t>(out_slots),
                   at<int32_t>(page_table), max_pages, at<int32_t>(seq_lens), at<int32_t>(q_starts), at<int32_t>(read_starts), num_seqs,
                   at<int32_t>(sparse_first)});
}

void decoder_forward(Decoder& decoder, Address hidden, Address out, int64_t tokens, Address positions, Address out_slots, Address page_table,
                     int64_t max_pages, Address seq_lens, Address q_starts, Address read_starts, int64_t num_seqs) {
  decoder_forward_sparse(decoder, hidden, out, tokens, positions, out_slots, page_table, max_pages, seq_lens, q_starts, read_starts, num_seqs, 0);
}

// An encoder without layers; they are added in order.
void make_encoder(Encoder* self, int64_t hidden_size, int64_t num_heads, int64_t head_dim, float scale, float eps, bool pre_norm, int activation,
                  bool gated, bool rounded, Address final_norm, Address final_bias) {
  new (self) Encoder({hidden_size, num_heads, head_dim, scale, eps, pre_norm, static_cast<EncoderActivation>(activation), gated, rounded},
                     {at<float>(final_norm), at<float>(final_bias)});
}

void encoder_add_layer(Encoder& encoder, Address attention_norm, Address attention_bias, const Weight& qkv, const Weight& out, Address mlp_norm,
                       Address mlp_bias, const Weight& up, const Weight& down, int64_t window, Address cos, Address sin, int64_t rotary_dim,
                       int64_t max_positions) {
  encoder.add_layer({{at<float>(attention_norm), at<float>(attention_bias)}, as_linear(qkv), as_linear(out), {at<float>(mlp_norm), at<float>(mlp_bias)},
                     as_linear(up), as_linear(down), window, at<float>(cos), at<float>(sin), rotary_dim, max_positions});
}

void encoder_forward(Encoder& encoder, Address hidden, int64_t tokens, Address positions, Address row_starts, int64_t num_seqs) {
  encoder.forward({at<float>(hidden), tokens, at<int32_t>(positions), at<int32_t>(row_starts), num_seqs});
}

std::vector<double> encoder_phase_seconds(Encoder& encoder) {
  const auto seconds = encoder.phase_seconds();
  return {seconds.begin(), seconds.end()};
}

// In the order of Phase.
std::vector<double> decoder_phase_seconds(Decoder& decoder) {
  const auto seconds = decoder.phase_seconds();
  return {seconds.begin(), seconds.end()};
}

void group_gather(RankGroup& group, Address x, int64_t x_stride, int64_t rows, const std::vector<int64_t>& columns, Address out,
                  int64_t out_stride) {
  if (columns.size() != static_cast<size_t>(group.size())) throw std::invalid_argument("gather: columns of " + std::to_string(columns.size()) + " ranks");
  group.gather(at<float>(x), x_stride, rows, columns.data(), at<float>(out), out_stride);
}

void group_send(RankGroup& group, const nb::bytes& message) {
  const char* const data = message.c_str();
  const auto size = static_cast<int64_t>(message.size());
  const nb::gil_scoped_release unlocked;
  group.send(data, size);
}

nb::bytes group_receive(RankGroup& group) {
  std::string message;
  {
    const nb::gil_scoped_release unlocked;
    group.receive(message);
  }
  return nb::bytes(message.data(), message.size());
}

// next: what is read after this row; it comes into the cache meanwhile, since where it lies is nothing that a processor foresees. past_caches, where that
// can be said: what is written and not read soon displaces nothing there, and what another core reads comes faster from memory than out of this one's
// cache. sums: null, or of each kSummedBytes of all rows; `place`: bytes of the rows before this one.
void copy_row(char* to, const char* from, size_t bytes, const char* next, [[maybe_unused]] bool past_caches, uint64_t* sums, size_t place) {
  constexpr size_t kLine = 64, kSummedBytes = 4096;
  size_t i = 0;
  for (; i + kLine <= bytes; i += kLine) {
    __builtin_prefetch(next + i, 0, 2);
#if defined(__SSE2__)
    const auto* const in = reinterpret_cast<const __m128i*>(from + i);
    auto* const out = reinterpret_cast<__m128i*>(to + i);
    const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1), c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
    if (past_caches && reinterpret_cast<Address>(to) % 16 == 0) {
      _mm_stream_si128(out, a), _mm_stream_si128(out + 1, b), _mm_stream_si128(out + 2, c), _mm_stream_si128(out + 3, d);
    } else {
      _mm_storeu_si128(out, a), _mm_storeu_si128(out + 1, b), _mm_storeu_si128(out + 2, c), _mm_storeu_si128(out + 3, d);
    }
#else
    memcpy(to + i, from + i, kLine);
#endif
    if (sums != nullptr) {
#if defined(__SSE2__)
      const __m128i pair = _mm_add_epi64(_mm_add_epi64(a, b), _mm_add_epi64(c, d));
      const __m128i both = _mm_add_epi64(pair, _mm_unpackhi_epi64(pair, pair));
      uint64_t sum;
      _mm_storel_epi64(reinterpret_cast<__m128i*>(&sum), both);
#else
      uint64_t sum = 0, words[kLine / 8];
      memcpy(words, from + i, kLine);
      for (const uint64_t word : words) sum += word;
#endif
      sums[(place + i) / kSummedBytes] += sum;
    }
  }
  memcpy(to + i, from + i, bytes - i);
}

// Pages of a pool to bytes, or from them: of each page its row in the first layer, then in the next. layers: pages lie one after the other there.
// sums: null, or, where rows have whole lines, to be increased by the 64-bit words of each 4,096 bytes; given, another core reads the bytes.
void copy_kv_pages(const std::vector<Address>& layers, const std::vector<size_t>& row_bytes, int64_t num_pages, const std::vector<int64_t>& pages,
                Address bytes, bool to_pool, Address sums) {
  for (const int64_t page : pages)
    if (page < 0 || page >= num_pages) throw std::out_of_range("a page outside the pool");
  const size_t num_layers = layers.size(), num_rows = pages.size() * num_layers;
  const auto row_at = [&](size_t row) {
    return at<char>(layers[row % num_layers]) + static_cast<size_t>(pages[row / num_layers]) * row_bytes[row % num_layers];
  };
  char* const flat = at<char>(bytes);
  size_t place = 0;
  for (size_t row = 0; row < num_rows; ++row) {
    const size_t size = row_bytes[row % num_layers];
    char *const inside = row_at(row), *const outside = flat + place;
    if (to_pool) {
      copy_row(inside, outside, size, outside + size, true, nullptr, 0);
    } else {
      copy_row(outside, inside, size, row_at(std::min(row + 1, num_rows - 1)), sums != 0, at<uint64_t>(sums), place);
    }
    place += size;
  }
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

float probe_read(Address memory, int64_t bytes) { return kernels().probe_read(at<void>(memory), bytes); }

double probe_fma(int64_t rounds) { return kernels().probe_fma(rounds); }

double probe_dot(int64_t rounds, int kind) { return kernels().probe_dot(rounds, static_cast<DotKind>(kind)); }

}  // namespace

NB_MODULE(_native, m) {
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  m.def("linear", &linear, unlocked);
  m.def("linear_quantized", &linear_quantized, unlocked);
  m.def("quantize_rows", &quantize_rows, unlocked);
  m.def("pack_gguf", &pack_gguf, unlocked);
  m.def("unpack_gguf", &unpack_gguf, unlocked);
  m.def("gguf_block_bytes", &gguf_block_bytes);
  m.def("paged_attention", &paged_attention, unlocked);
  m.def("sparse_attention", &sparse_attention, unlocked);
  m.def("packed_attention", &packed_attention, unlocked);
  m.def("write_kv", &write_kv, unlocked);
  m.def("gather_kv", &gather_kv, unlocked);
  m.def("rms_norm", &rms_norm, unlocked);
  m.def("rotary", &rotary, unlocked);
  m.def("silu_mul", &silu_mul, unlocked);
  m.def("gelu_tanh_mul", &gelu_tanh_mul, unlocked);
  m.def("gelu_mul", &gelu_mul, unlocked);
  m.def("gelu", &gelu, unlocked);
  m.def("gelu_tanh", &gelu_tanh, unlocked);
  m.def("embedding", &embedding, unlocked);
  m.def("argmax", &argmax, unlocked);
  m.def("layer_norm", &layer_norm, unlocked);
  m.def("draw", &draw, unlocked);
  m.def("exp_sums", &exp_sums, unlocked);
  m.def("moe", &moe, unlocked);
  nb::class_<Decoder>(m, "Decoder")
      .def("__init__", &make_decoder)
      .def("add_layer", &decoder_add_layer)
      .def("set_sparse", &decoder_set_sparse)
      .def("set_group", [](Decoder& decoder, Address group, int64_t halves_from) { decoder.set_group(at<RankGroup>(group), halves_from); })
      .def("forward", &decoder_forward, unlocked)
      .def("forward_sparse", &decoder_forward_sparse, unlocked)
      .def("phase_seconds", &decoder_phase_seconds);
  nb::class_<Encoder>(m, "Encoder")
      .def("__init__", &make_encoder)
      .def("add_layer", &encoder_add_layer)
      .def("forward", &encoder_forward, unlocked)
      .def("phase_seconds", &encoder_phase_seconds);
  nb::class_<RankGroup>(m, "RankGroup")
      .def_static("bytes", &RankGroup::bytes)
      .def(nb::init<int, int, int, double>())
      .def("address", [](const RankGroup& group) { return reinterpret_cast<Address>(&group); })
      .def("all_reduce", [](RankGroup& group, Address x, int64_t n) { group.all_reduce(at<float>(x), n); }, unlocked)
      .def("begin_sum", [](RankGroup& group, Address x, int64_t n) { group.begin_sum(at<float>(x), n); }, unlocked)
      .def("finish_sum", [](RankGroup& group, Address x, int64_t n) { group.finish_sum(at<float>(x), n); }, unlocked)
      .def("num_begun", &RankGroup::num_begun)
      .def("gather", &group_gather, unlocked)
      .def("send", &group_send)
      .def("receive", &group_receive)
      .def("break_up", &RankGroup::break_up);
  m.def("copy_kv_pages", &copy_kv_pages, unlocked);
  m.def("probe_read", &probe_read, unlocked);
  m.def("probe_fma", &probe_fma, unlocked);
  m.def("probe_dot", &probe_dot, unlocked);
  m.def("known_isas", &known_isas);
  m.def("why_not_isa", &why_not_isa);
  m.def("select_isa", &select_isa);
  m.def("isa", [] { return std::string(kernels().isa); });
  m.def("set_num_threads", &set_num_threads, unlocked);
  m.def("num_threads", &num_threads);
}

}  // namespace headrace

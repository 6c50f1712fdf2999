// Drives every kernel of every instruction set that this machine runs over odd shapes, and the thread pool, without Python: what
// scripts/sanitize builds with the sanitizers. Each buffer is its own allocation of exactly the size that ops.h asks for, so a
// read or write beyond it is seen. Checked here: the bits of a result do not depend on the number of threads, nor on the instruction
// set where it has a fused multiply-add, and the pool runs every index once. That the values are right is tested in tests/kernels,
// against torch. AMX runs as a model (amx.h). The last line has a digest of all results, to compare with that of another processor.
#include "../gguf_blocks.h"
#include "encoder_cases.h"
#include "harness.h"

namespace headrace {
namespace {

void linears() {
  struct Shape {
    int64_t rows, n, k;
  };
  for (const Shape s : {Shape{1, 1, 1}, {1, 33, 31}, {2, 32, 32}, {3, 31, 65}, {7, 97, 33}, {8, 64, 160}, {13, 130, 95}, {65, 200, 129},
                        {200, 40, 64}, {3, 40, 192}, {4, 33, 256}}) {
    const int64_t columns = round_up(s.n, kPackedColumns), k_padded = round_up(s.k, kQuantGroup), x_stride = s.k + 3, y_stride = s.n + 5;
    // The last row of a strided matrix ends with its last element.
    const Buffer<float> x = floats((s.rows - 1) * x_stride + s.k), bias = floats(columns), scales = floats(columns);
    auto y = [&] { return floats((s.rows - 1) * y_stride + s.n); };
    for (const bool accumulate : {false, true}) {
      for (const bool has_bias : {false, true}) {
        const float* const added = has_bias ? bias.get() : nullptr;
        const Buffer<float> wide = floats(columns * s.k);
        const Buffer<uint16_t> narrow = bf16s(columns * s.k);  // as halves they are numbers, too
        for (const FloatType type : {FloatType::kFloat, FloatType::kBf16, FloatType::kHalf}) {
          const void* const weight = type == FloatType::kFloat ? static_cast<const void*>(wide.get()) : narrow.get();
          same_for_any_threads("linear" + shape({s.rows, s.n, s.k, static_cast<int>(type), accumulate}), [&] {
            g_random = 7;
            const Buffer<float> out = y();
            kernels().linear({x.get(), x_stride, weight, type, added, out.get(), y_stride, s.rows, s.n, s.k, accumulate});
            return out.bytes();
          });
        }
        for (const QuantScheme scheme :
             {QuantScheme::kBf16, QuantScheme::kInt16, QuantScheme::kInt8, QuantScheme::kInt8Fast, QuantScheme::kInt4, QuantScheme::kInt4Min,
              QuantScheme::kInt8Rotated}) {
          const bool is_rounded = scheme == QuantScheme::kBf16;
          const Buffer<uint8_t> codes = packed_bytes(columns / kPackedColumns * packed_block_bytes(scheme, k_padded));
          const Buffer<uint16_t> numbers = bf16s(is_rounded ? columns * k_padded : 0);
          const void* const weight = is_rounded ? static_cast<const void*>(numbers.get()) : codes.get();
          const bool in_order = !is_rounded || std::strcmp(kernels().isa, "amx") != 0;
          same_for_any_threads("quantised linear" + shape({s.rows, s.n, s.k, static_cast<int>(scheme), accumulate}), [&] {
            g_random = 7;
            const Buffer<float> out = y();
            run_linear_quantized(x.get(), x_stride, scheme, weight, scales.get(), added, out.get(), y_stride, s.rows, s.n, s.k, accumulate);
            return out.bytes();
          }, in_order);
        }
      }
    }
    for (const RowFormat format : {RowFormat{1, 32, 128}, RowFormat{1, 128, 8}, RowFormat{1, s.k, 0}, RowFormat{2, 128, 0}, RowFormat{2, 128, 0, true}, RowFormat{1, 128, 128, false, true},
                                   RowFormat{1, 32, 128, false, true}, RowFormat{1, 32, 0, false, false, true}}) {
      same_for_any_threads("quantise rows" + shape({s.rows, s.k, format.value_bytes, format.group}), [&] {
        const int64_t num_scales = s.rows * ((s.k + format.group - 1) / format.group);
        const Buffer<uint8_t> values(s.rows * k_padded * format.value_bytes);
        const Buffer<float> row_scales(num_scales), scaled_sums(num_scales);
        const Buffer<int32_t> sums(num_scales);
        kernels().quantize_rows({x.get(), x_stride, values.get(), row_scales.get(), sums.get(), scaled_sums.get(), s.rows,
                                 s.k, format});
        return values.bytes();
      });
    }
  }
}

// Matrices in blocks of GGUF files: what is packed comes back, and products and single rows.
void ggufs() {
  for (const GgufType type : {GgufType::kQ4_0, GgufType::kQ4_1, GgufType::kQ5_0, GgufType::kQ5_1, GgufType::kQ8_0, GgufType::kQ2_K, GgufType::kQ3_K,
                              GgufType::kQ4_K, GgufType::kQ5_K, GgufType::kQ6_K, GgufType::kIQ4_NL, GgufType::kIQ4_XS, GgufType::kMXFP4}) {
    const GgufFormat format = gguf_format(type);
    const int64_t n = 40, k = 512, row_bytes = k / format.elements * format.bytes, block_bytes = format.block_bytes(k);
    const Buffer<uint8_t> file = packed_bytes(n * row_bytes), back(n * row_bytes), packed(16 + 2 * block_bytes);
    GgufEntry* const entries = reinterpret_cast<GgufEntry*>(packed.get());
    for (int64_t i = 0; i < 2; ++i) {
      entries[i] = GgufEntry::of(type, 16 + i * block_bytes - i * 8);
      const int64_t first = i * kPackedColumns, count = std::min(kPackedColumns, n - first);
      pack_gguf_block(type, file.get() + first * row_bytes, row_bytes, count, k, packed.get() + 16 + i * block_bytes);
      unpack_gguf_block(type, entries[i].block(), count, k, back.get() + first * row_bytes, row_bytes);
    }
    expect(file.bytes() == back.bytes(), std::string(kernels().isa) + " gguf " + std::to_string(static_cast<int>(type)) + " comes back");
    for (const int64_t rows : {1, 2, 7, 14}) {
      const Buffer<float> x = floats(rows * k);
      same_for_any_threads("gguf linear" + shape({rows, static_cast<int>(type)}), [&] {
        const Buffer<float> out(rows * n);
        run_linear_quantized(x.get(), k, QuantScheme::kGguf, packed.get(), nullptr, nullptr, out.get(), n, rows, n, k, false);
        return out.bytes();
      });
    }
    same_for_any_threads("gguf rows" + shape({static_cast<int>(type)}), [&] {
      const Buffer<float> out(2 * k);
      const Buffer<int32_t> ids(2);
      ids[0] = 39;
      kernels().embedding({packed.get(), FloatType::kFloat, TableOrder::kGguf, ids.get(), false, out.get(), 2, k, 0.5f});
      return out.bytes();
    });
  }
}

// Work over rows: norms, gates, lookups, argmax, masks, rotation.
void rows() {
  for (const int64_t count : {1, 2, 5, 33}) {
    for (const int64_t size : {1, 7, 16, 31, 64, 577}) {
      const Buffer<float> x = floats(count * 2 * size), weight = floats(size), residual = floats(count * size);
      for (const bool has_residual : {false, true}) {
        same_for_any_threads("rms norm" + shape({count, size, has_residual}), [&] {
          const Buffer<float> out(count * size), sum(count * size);
          std::memcpy(sum.get(), residual.get(), static_cast<size_t>(sum.size()) * 4);
          kernels().rms_norm({x.get(), size, has_residual ? sum.get() : nullptr, weight.get(), out.get(), count, size, 1e-5f});
          return out.bytes();
        });
      }
      same_for_any_threads("layer norm" + shape({count, size}), [&] {
        const Buffer<float> out(count * size), sum(count * size);
        kernels().layer_norm({x.get(), size, sum.get(), weight.get(), weight.get(), out.get(), count, size, 1e-5f});
        kernels().layer_norm({x.get(), size, nullptr, weight.get(), nullptr, out.get(), count, size, 1e-5f});
        return out.bytes();
      });
      same_for_any_threads("draw and sums" + shape({count, size}), [&] {
        const Buffer<float> temperature(count), peaks(count);
        const Buffer<int64_t> top_k(count), min_weight(count), out(count), sums(count);
        const Buffer<double> top_p(count), u(count);
        for (int64_t i = 0; i < count; ++i) {
          temperature[i] = static_cast<float>(i % 4) - 1.0f;  // not wanted, greedy, 1, 2
          top_k[i] = i % 3;
          top_p[i] = i % 2 == 0 ? 1.0 : 0.5;
          u[i] = static_cast<double>(i) / static_cast<double>(count);
        }
        kernels().draw({x.get(), size, temperature.get(), top_k.get(), top_p.get(), min_weight.get(), u.get(), nullptr, nullptr, out.get(), count, size});
        kernels().exp_sums({x.get(), size, peaks.get(), sums.get(), count, size});
        for (int64_t i = 0; i < count; ++i) {
          expect(out[i] < size && (out[i] >= 0) == (temperature[i] >= 0.0f), "draw gives an id where one is wanted" + shape({count, size}));
        }
        return out.bytes();
      });
      same_for_any_threads("gates" + shape({count, size}), [&] {
        const Buffer<float> silu(count * size), gelu(count * size);
        kernels().silu_mul({x.get(), 2 * size, silu.get(), count, size});
        kernels().gelu_tanh_mul({x.get(), 2 * size, gelu.get(), count, size});
        std::vector<char> both = silu.bytes();
        const std::vector<char> more = gelu.bytes();
        both.insert(both.end(), more.begin(), more.end());
        return both;
      });
      same_for_any_threads("activations" + shape({count, size}), [&] {
        std::vector<char> all;
        const auto keep = [&](const Buffer<float>& out) {
          const std::vector<char> more = out.bytes();
          all.insert(all.end(), more.begin(), more.end());
        };
        const Buffer<float> gated(count * size);
        kernels().gelu_mul({x.get(), 2 * size, gated.get(), count, size});
        keep(gated);
        for (auto* const activate : {kernels().gelu, kernels().gelu_tanh, kernels().relu}) {
          const Buffer<float> out(count * size);
          activate({x.get(), size, out.get(), count, size});
          keep(out);
        }
        return all;
      });
      same_for_any_threads("argmax" + shape({count, size}), [&] {
        const Buffer<int64_t> out(count);
        kernels().argmax({x.get(), size, out.get(), count, size});
        for (int64_t i = 0; i < count; ++i) {
          const float* const row = x.get() + i * size;
          expect(out[i] == std::max_element(row, row + size) - row, "argmax is the first largest" + shape({count, size}));
        }
        return out.bytes();
      });
      const int64_t words = round_up(size, 32) / 32;
      const Buffer<uint32_t> masks(count * words);
      for (int64_t i = 0; i < masks.size(); ++i) masks[i] = i % 3 == 0 ? next_random() : i % 3 == 1 ? 0u : ~0u;
      same_for_any_threads("draw with masks" + shape({count, size}), [&] {
        const Buffer<float> temperature(count);
        const Buffer<int64_t> top_k(count), min_weight(count), mask_rows(count), out(count);
        const Buffer<double> top_p(count), u(count);
        for (int64_t i = 0; i < count; ++i) {
          temperature[i] = static_cast<float>(i % 3);
          top_k[i] = i % 5;
          top_p[i] = i % 2 == 0 ? 1.0 : 0.5;
          mask_rows[i] = count - 2 - i;
        }
        kernels().draw({x.get(), size, temperature.get(), top_k.get(), top_p.get(), min_weight.get(), u.get(), masks.get(),
                        mask_rows.get(), out.get(), count, size});
        for (int64_t i = 0; i < count; ++i) {
          const int64_t mask = mask_rows[i], token = out[i];
          const bool allowed = token >= 0 && (mask < 0 || (masks[mask * words + token / 32] >> (token % 32) & 1u) != 0);
          bool any = mask < 0;
          for (int64_t t = 0; t < size && !any; ++t) any = (masks[mask * words + t / 32] >> (t % 32) & 1u) != 0;
          expect(token < size && allowed == any && (token >= 0) == any, "a mask allows what is drawn" + shape({count, size}));
        }
        return out.bytes();
      });
    }
  }
  constexpr int64_t kTokens = 9, kHeads = 3, kPositions = 21;
  for (const int64_t head_dim : {16, 48, 64}) {
    for (const int64_t rotary_dim : {head_dim, head_dim / 2}) {
      const Buffer<float> cos = floats(kPositions * rotary_dim / 2), sin = floats(kPositions * rotary_dim / 2);
      const Buffer<float> weight = floats(head_dim);
      const Buffer<int32_t> positions(kTokens);
      for (int64_t i = 0; i < kTokens; ++i) positions[i] = static_cast<int32_t>(kPositions - 1 - 2 * i);
      same_for_any_threads("head norm and rotary" + shape({head_dim, rotary_dim}), [&] {
        g_random = 11;
        const Buffer<float> x = floats(kTokens * kHeads * head_dim);
        kernels().head_norm({x.get(), kHeads * head_dim, weight.get(), kTokens, kHeads, head_dim, 1e-6f});
        kernels().rotary(
            {x.get(), kHeads * head_dim, positions.get(), cos.get(), sin.get(), kTokens, kHeads, head_dim, rotary_dim});
        return x.bytes();
      });
    }
  }
}

// Experts of every format, rows that meet some of them and leave others without any; an id of nobody.
void experts() {
  constexpr int64_t kHidden = 70, kInner = 33, kExperts = 5, kTopK = 2;
  for (const int64_t format : {int64_t{-3}, int64_t{-2}, int64_t{-1}, int64_t{0}, int64_t{1}, int64_t{2}, int64_t{3}, int64_t{4}}) {
    auto block_bytes_of = [&](int64_t k) {
      return format < 0 ? k * kPackedColumns * float_bytes(float_type(format))
                        : packed_block_bytes(static_cast<QuantScheme>(format), round_up(k, kQuantGroup));
    };
    std::vector<Buffer<uint8_t>> weights;
    std::vector<Buffer<float>> scales;
    const Buffer<ExpertWeight> table(kExperts * 2);
    for (int64_t i = 0; i < kExperts * 2; ++i) {
      const int64_t n = i % 2 == 0 ? 2 * kInner : kHidden, k = i % 2 == 0 ? kHidden : kInner;
      weights.push_back(packed_bytes(round_up(n, kPackedColumns) / kPackedColumns * block_bytes_of(k)));
      scales.push_back(floats(round_up(n, kPackedColumns)));
      table[i] = {reinterpret_cast<int64_t>(weights.back().get()), block_bytes_of(k), format,
                  format >= 0 ? reinterpret_cast<int64_t>(scales.back().get()) : 0, 0};
    }
    for (const int64_t count : {1, 3, 40}) {
      const Buffer<float> x = floats(count * kHidden), shares = floats(count * kTopK);
      const Buffer<int64_t> ids(count * kTopK);
      for (int64_t i = 0; i < ids.size(); ++i) ids[i] = (i * 3) % kExperts - 1;
      same_for_any_threads("experts" + shape({format, count}), [&] {
        const Buffer<float> out(count * kHidden);
        kernels().moe({x.get(), kHidden, ids.get(), shares.get(), table.get(), out.get(), count, kTopK, kExperts, kHidden, kInner,
                       count == 3});
        return out.bytes();
      });
    }
  }
}

// A cache written by write_kv, read by gather_kv and by attention: prompts, chunks and decode rows of several lengths, of which the
// last three begin with the same pages.
void attention_of(int64_t head_dim, int64_t num_kv_heads, int64_t num_q_heads, KvType type, int64_t window, float softcap) {
  const std::vector<int64_t> lengths = {1, 16, 17, 300, 1025, 2100, 1100, 1030}, rows = {1, 16, 5, 1, 70, 1, 1, 1};
  const int64_t num_seqs = static_cast<int64_t>(lengths.size()), max_pages = round_up(2100, kPageSize) / kPageSize;
  int64_t num_pages = 0, tokens = 0, rows_total = 0;
  const Buffer<int32_t> table(num_seqs * max_pages), seq_lens(num_seqs), q_starts(num_seqs + 1);
  std::vector<int32_t> slots, last_keys;
  for (int64_t i = 0; i < num_seqs; ++i) {
    const int64_t length = lengths[static_cast<size_t>(i)];
    const int64_t shared_pages = i > 5 ? 64 : 0, shared_tokens = shared_pages * kPageSize;
    std::copy_n(table.get() + 5 * max_pages, shared_pages, table.get() + i * max_pages);
    for (int64_t p = shared_pages; p * kPageSize < length; ++p) table[i * max_pages + p] = static_cast<int32_t>(num_pages++);
    for (int64_t t = shared_tokens; t < length; ++t) {
      slots.push_back(static_cast<int32_t>(table[i * max_pages + t / kPageSize] * kPageSize + t % kPageSize));
    }
    seq_lens[i] = static_cast<int32_t>(length);
    for (int64_t position = length - rows[static_cast<size_t>(i)]; position < length; ++position) {  // 40 see each other
      last_keys.push_back(static_cast<int32_t>(std::min(length - 1, position - position % 40 + 39)));
    }
    rows_total += rows[static_cast<size_t>(i)];
    q_starts[i + 1] = static_cast<int32_t>(rows_total);
    tokens += length - shared_tokens;
  }
  const int64_t elements = num_pages * num_kv_heads * kv_page_elements(type, head_dim), width = num_kv_heads * head_dim;
  const int64_t element_bytes = type == KvType::kInt8 ? 1 : type == KvType::kFloat ? 4 : 2;
  const Buffer<uint8_t> k_cache(elements * element_bytes), v_cache(elements * element_bytes);
  const KvCache cache = {k_cache.get(), v_cache.get(), type, num_kv_heads, head_dim};
  const Buffer<float> k = floats(tokens * width), v = floats(tokens * width), q = floats(rows_total * num_q_heads * head_dim);
  const std::string what = shape({head_dim, num_kv_heads, num_q_heads, static_cast<int>(type), window});
  same_for_any_threads("write and gather kv" + what, [&] {
    const Buffer<float> k_back(tokens * width), v_back(tokens * width);
    kernels().write_kv({k.get(), width, v.get(), width, cache, slots.data(), tokens});
    kernels().gather_kv({k_back.get(), v_back.get(), cache, slots.data(), tokens});
    return v_back.bytes();
  });
  for (const int32_t* const ahead : {static_cast<const int32_t*>(nullptr), static_cast<const int32_t*>(last_keys.data())}) {
    same_for_any_threads("attention" + what, [&] {
      const Buffer<float> out(rows_total * num_q_heads * head_dim);
      const AttentionArgs args = {q.get(), num_q_heads * head_dim, out.get(), cache, table.get(), max_pages,
                                  num_q_heads, 0.125f, window, softcap, ahead};
      const AttentionPlan plan = plan_attention(args, seq_lens.get(), q_starts.get(), num_seqs, rows_total, max_pages, num_pages);
      kernels().attention(args, plan.tiles.data(), static_cast<int64_t>(plan.tiles.size()));
      return out.bytes();
    });
  }
}

void attention() {
  attention_of(64, 1, 3, KvType::kBf16, 0, 0.0f);
  attention_of(64, 2, 2, KvType::kFloat, 0, 0.0f);
  attention_of(16, 1, 7, KvType::kBf16, 100, 0.0f);
  attention_of(80, 1, 1, KvType::kBf16, 0, 30.0f);
  attention_of(64, 1, 3, KvType::kBf16Products, 0, 0.0f);
  attention_of(80, 2, 4, KvType::kBf16Products, 100, 30.0f);
  attention_of(64, 1, 3, KvType::kInt8, 0, 0.0f);
  attention_of(80, 2, 4, KvType::kInt8, 100, 30.0f);
  attention_of(64, 1, 3, KvType::kInt16, 0, 0.0f);
  attention_of(80, 2, 4, KvType::kInt16, 100, 30.0f);
}

void lookups() {
  constexpr int64_t kVocabulary = 11, kTokens = 6;
  for (const int64_t size : {1, 17, 64}) {
    const Buffer<float> wide = floats(kVocabulary * size);
    const Buffer<uint16_t> narrow = bf16s(kVocabulary * size);
    const Buffer<int64_t> ids(kTokens);
    for (int64_t i = 0; i < kTokens; ++i) ids[i] = kVocabulary - 1 - i;
    for (const FloatType type : {FloatType::kFloat, FloatType::kBf16, FloatType::kHalf}) {
      same_for_any_threads("embedding" + shape({size, static_cast<int>(type)}), [&] {
        const Buffer<float> out(kTokens * size);
        EmbeddingArgs args{};
        args.table = type == FloatType::kFloat ? static_cast<const void*>(wide.get()) : narrow.get();
        args.type = type;
        args.ids = ids.get();
        args.ids_are_int64 = true;
        args.out = out.get();
        args.tokens = kTokens;
        args.hidden_size = size;
        args.scale = 1.0f;
        kernels().embedding(args);
        return out.bytes();
      });
    }
  }
}

// Several callers at once, jobs within jobs, sessions, and the number of threads changing under them.
void pool() {
  for (const int threads : {1, 2, 4}) {
    set_num_threads(threads);
    for (const int64_t n : {1, 2, 63, 1000}) {
      for (const int64_t grain : {1, 7, 2000}) {
        const Buffer<int32_t> hits(n);
        parallel_for(n, grain, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) ++hits[i];  // a data race if two blocks overlap
        });
        expect(std::count(hits.get(), hits.get() + n, 1) == n, "every index once" + shape({threads, n, grain}));
      }
    }
  }
  std::atomic<int64_t> total{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      for (int job = 0; job < 200; ++job) {
        const PoolSession session;
        parallel_for(50, 1, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) parallel_for(2, 1, [&](int64_t b, int64_t e) { total += e - b; });
        });
      }
    });
  }
  std::thread changer([] {
    for (int i = 0; i < 50; ++i) {
      set_num_threads(1 + i % 4);
      std::this_thread::yield();
    }
  });
  for (std::thread& caller : callers) caller.join();
  changer.join();
  expect(total == 3 * 200 * 50 * 2, "jobs of several callers, with jobs inside");
}

#if defined(__linux__)
// The only core on which the calling thread may run, or -1.
int only_core() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  sched_getaffinity(0, sizeof cores, &cores);
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &cores)) return CPU_COUNT(&cores) == 1 ? core : -1;
  }
  return -1;
}

bool stay_on(int core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(core, &cores);
  return sched_setaffinity(0, sizeof cores, &cores) == 0;
}

// A worker that is off its core in the middle of a block (it sleeps) gets the caller's core, and is back on its own in the next job.
void lent_cores() {
  cpu_set_t all;
  CPU_ZERO(&all);
  sched_getaffinity(0, sizeof all, &all);
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &all)) cores.push_back(core);
  }
  if (cores.size() < 2 || !stay_on(cores[0])) return;
  set_num_threads(2);
  const std::thread::id caller = std::this_thread::get_id();
  // Runs a job of two blocks, one by the caller, in the other of which the worker calls look().
  auto run = [&](const std::function<void()>& look) {
    std::atomic<bool> is_there{false};
    parallel_for(2, 1, [&](int64_t, int64_t) {
      if (std::this_thread::get_id() != caller) is_there = true;
      while (!is_there) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (std::this_thread::get_id() != caller) look();
    });
  };
  run([&] { stay_on(cores[1]); });
  bool is_lent = false, is_back = false;
  for (int job = 0; job < 100 && !is_lent; ++job) {
    run([&] {
      for (int i = 0; i < 50 && !is_lent; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        is_lent = only_core() == cores[0];
      }
    });
  }
  for (int job = 0; job < 100 && !is_back; ++job) run([&] { is_back = only_core() == cores[1]; });  // on a busy machine it may be lent again
  expect(is_lent, "a worker that is off its core gets the caller's");
  expect(is_back, "and goes back to its own");
  set_num_threads(1);  // the worker ends with its core
  sched_setaffinity(0, sizeof all, &all);
}
#else
void lent_cores() {}
#endif

// names: instruction sets, `best` for the first that runs here; none: all.
int run(const std::vector<std::string>& names) {
  auto is_named = [&](const std::string& name) { return std::find(names.begin(), names.end(), name) != names.end(); };
  const std::string best = kernels().isa;
  pool();
  lent_cores();
  for (const std::string& isa : known_isas()) {
    if (!names.empty() && !is_named(isa) && !(isa == best && is_named("best"))) continue;
    const std::string reason = why_not_isa(isa);
    if (!reason.empty()) {
      std::printf("skipped %s: %s\n", isa.c_str(), reason.c_str());
      continue;
    }
    select_isa(isa);
    g_random = kSeed;  // the same inputs for each
    g_repeated = 0;
    linears();
    ggufs();
    rows();
    experts();
    attention();
    encoders();
    lookups();
    g_is_first = g_results.empty();
  }
  set_num_threads(1);  // ends the workers
  uint64_t digest = 0xcbf29ce484222325u;
  for (const std::vector<char>& result : g_results) digest = hash_of(result, digest);
  std::printf("%lld passed, %lld failed, results %016llx\n", static_cast<long long>(g_passed), static_cast<long long>(g_failed),
              static_cast<unsigned long long>(digest));
  return g_failed == 0 && g_passed > 0 ? 0 : 1;
}

}  // namespace
}  // namespace headrace

int main(int argc, char** argv) { return headrace::run({argv + 1, argv + argc}); }

#include "decoder.h"

#include <chrono>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "attention_plan.h"
#include "dispatch.h"
#include "quantized_call.h"
#include "threads.h"

namespace headrace {
namespace {

// Tokens whose feed-forward layer is computed at once: its buffers, the widest, need not hold a whole prefill.
constexpr int64_t kMlpTokens = 384;

void linear(const DecoderLinear& w, const float* x, float* y, int64_t rows) {
  if (w.scheme >= 0) {
    run_linear_quantized(x, w.k, static_cast<QuantScheme>(w.scheme), w.weight, w.column_scales, w.bias, y, w.n, rows, w.n, w.k,
                         false);
    return;
  }
  kernels().linear({x, w.k, w.weight, w.weight_is_bf16, w.bias, y, w.n, rows, w.n, w.k, false});
}

// Tells the pool that `w` is what the linear after the next reads.
void expect(const DecoderLinear& w) {
  int64_t bytes = w.n * w.k * (w.weight_is_bf16 ? 2 : 4);
  if (w.scheme >= 0) {
    const int64_t k_padded = (w.k + kQuantGroup - 1) / kQuantGroup * kQuantGroup;
    bytes = w.n * packed_block_bytes(static_cast<QuantScheme>(w.scheme), k_padded) / kPackedColumns;
  }
  expect_reads(w.weight, bytes);
}

void check_range(const char* what, const int32_t* values, int64_t count, int64_t lowest, int64_t limit) {
  for (int64_t i = 0; i < count; ++i) {
    if (values[i] < lowest || values[i] >= limit) {
      throw std::invalid_argument(std::string("decoder: ") + what + " " + std::to_string(values[i]) + " at index " +
                                  std::to_string(i) + " is not in [" + std::to_string(lowest) + ", " + std::to_string(limit) +
                                  ")");
    }
  }
}

// The tiles of a step by window: layers that attend alike share them.
class Plans {
 public:
  Plans(const DecoderShape& shape, const DecoderStep& step) : shape_(shape), step_(step) {}

  AttentionPlan& of(const AttentionArgs& args) {
    for (auto& [window, plan] : plans_) {
      if (window == args.window) {
        plan.reset();
        return plan;
      }
    }
    plans_.emplace_back(args.window, plan_attention(args, step_.seq_lens, step_.q_starts, step_.num_seqs, step_.tokens,
                                                    step_.max_pages, shape_.num_pages));
    return plans_.back().second;
  }

 private:
  const DecoderShape& shape_;
  const DecoderStep& step_;
  std::vector<std::pair<int64_t, AttentionPlan>> plans_;
};

// Gives the time since the last lap to a phase. Some 25 ns a lap, eight or so laps a layer: too little to switch off.
class LapClock {
 public:
  explicit LapClock(std::array<double, kNumPhases>& seconds) : seconds_(seconds), last_(Clock::now()) {}
  void lap(Phase phase) {
    const Clock::time_point now = Clock::now();
    seconds_[static_cast<size_t>(phase)] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  std::array<double, kNumPhases>& seconds_;
  Clock::time_point last_;
};

}  // namespace

std::array<double, kNumPhases> Decoder::phase_seconds() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(phase_seconds_, {});
}

void Decoder::Free::operator()(float* memory) const { std::free(memory); }

Decoder::Buffers Decoder::buffers(int64_t tokens) {
  const DecoderShape& s = shape_;
  const int64_t q_size = s.num_q_heads * s.head_dim, qkv_size = q_size + 2 * s.num_kv_heads * s.head_dim;
  const int64_t sizes[] = {s.hidden_size, qkv_size, q_size, 2 * s.intermediate_size, s.intermediate_size, s.hidden_size};
  const int64_t mlp_tokens = tokens < kMlpTokens ? tokens : kMlpTokens;
  const int64_t counts[] = {tokens, tokens, tokens, mlp_tokens, mlp_tokens, tokens};
  auto floats = [&](int i) { return (counts[i] * sizes[i] + 15) / 16 * 16; };
  int64_t total = 0;
  for (int i = 0; i < 6; ++i) total += floats(i);
  if (total > memory_floats_) {
    memory_.reset();
    memory_floats_ = 0;
    const size_t bytes = (static_cast<size_t>(total) * 4 + 4095) / 4096 * 4096;
    memory_.reset(static_cast<float*>(std::aligned_alloc(4096, bytes)));
    if (memory_ == nullptr) throw std::bad_alloc();
    memory_floats_ = total;
  }
  float* at[6];
  float* next = memory_.get();
  for (int i = 0; i < 6; ++i) {
    at[i] = next;
    next += floats(i);
  }
  return {at[0], at[1], at[2], at[3], at[4], at[5]};
}

void Decoder::check(const DecoderStep& step) const {
  check_range("slot", step.out_slots, step.tokens, -1, shape_.num_pages * kPageSize);
  const DecoderLayer* shortest = layers_.data();
  for (const DecoderLayer& layer : layers_) {
    if (layer.max_positions < shortest->max_positions) shortest = &layer;
  }
  check_range("position", step.positions, step.tokens, 0, shortest->max_positions);
}

void Decoder::forward(const DecoderStep& step) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (layers_.empty()) throw std::invalid_argument("decoder: it has no layers");
  check(step);
  const KernelTable& k = kernels();
  const DecoderShape& s = shape_;
  const int64_t tokens = step.tokens, q_size = s.num_q_heads * s.head_dim, kv_size = s.num_kv_heads * s.head_dim;
  const int64_t qkv_size = q_size + 2 * kv_size;
  const Buffers b = buffers(tokens);
  Plans plans(s, step);
  auto attention_args = [&](const DecoderLayer& layer) {
    return AttentionArgs{b.qkv,
                         qkv_size,
                         b.attended,
                         {layer.k_cache, layer.v_cache, s.kv_type, s.num_kv_heads, s.head_dim},
                         step.page_table,
                         step.max_pages,
                         s.num_q_heads,
                         layer.scale,
                         layer.window,
                         layer.softcap};
  };
  for (const DecoderLayer& layer : layers_) plans.of(attention_args(layer));  // throws before anything is written
  const PoolSession session;
  auto norm = [&](const float* x, float* residual, const float* weight, float* out) {
    k.rms_norm({x, s.hidden_size, residual, weight, out, tokens, s.hidden_size, s.eps});
  };
  // Head norms, rotation and the KV write of some tokens.
  auto finish_heads = [&](const DecoderLayer& layer, int64_t begin, int64_t end) {
    float* const q = b.qkv + begin * qkv_size;
    float* const key = q + q_size;
    const int64_t count = end - begin;
    if (layer.q_norm != nullptr) {
      k.head_norm({q, qkv_size, layer.q_norm, count, s.num_q_heads, s.head_dim, s.eps});
      k.head_norm({key, qkv_size, layer.k_norm, count, s.num_kv_heads, s.head_dim, s.eps});
    }
    const int32_t* const positions = step.positions + begin;
    k.rotary({q, qkv_size, positions, layer.cos, layer.sin, count, s.num_q_heads, s.head_dim, layer.rotary_dim});
    k.rotary({key, qkv_size, positions, layer.cos, layer.sin, count, s.num_kv_heads, s.head_dim, layer.rotary_dim});
    k.write_kv({key, qkv_size, key + kv_size, qkv_size,
                {layer.k_cache, layer.v_cache, s.kv_type, s.num_kv_heads, s.head_dim}, step.out_slots + begin, count});
  };
  const int64_t heads_grain = 8192 / qkv_size > 1 ? 8192 / qkv_size : 1;
  const float* added = nullptr;
  LapClock clock(phase_seconds_);
  for (const DecoderLayer& layer : layers_) {
    if (added == nullptr) {
      norm(step.hidden, nullptr, layer.attention_norm, b.normed);
    } else {
      norm(added, step.hidden, layer.attention_norm, b.normed);
    }
    clock.lap(Phase::kNorm);
    expect(layer.out);
    linear(layer.qkv, b.normed, b.qkv, tokens);
    clock.lap(Phase::kQkv);
    parallel_for(tokens, heads_grain, [&](int64_t begin, int64_t end) { finish_heads(layer, begin, end); });
    clock.lap(Phase::kHeads);
    const AttentionArgs args = attention_args(layer);
    const AttentionPlan& plan = plans.of(args);
    k.attention(args, plan.tiles.data(), static_cast<int64_t>(plan.tiles.size()));
    clock.lap(Phase::kAttention);
    expect(layer.gate_up);
    linear(layer.out, b.attended, b.added, tokens);
    clock.lap(Phase::kOut);
    if (layer.after_attention != nullptr) norm(b.added, nullptr, layer.after_attention, b.added);
    norm(b.added, step.hidden, layer.mlp_norm, b.normed);
    clock.lap(Phase::kNorm);
    for (int64_t begin = 0; begin < tokens; begin += kMlpTokens) {
      const int64_t count = tokens - begin < kMlpTokens ? tokens - begin : kMlpTokens;
      expect(layer.down);
      linear(layer.gate_up, b.normed + begin * s.hidden_size, b.gate_up, count);
      clock.lap(Phase::kGateUp);
      const GatedArgs gated = {b.gate_up, 2 * s.intermediate_size, b.activated, count, s.intermediate_size};
      s.gelu ? k.gelu_tanh_mul(gated) : k.silu_mul(gated);
      clock.lap(Phase::kActivation);
      begin + count < tokens ? expect(layer.gate_up) : &layer != &layers_.back() ? expect((&layer + 1)->qkv) : expect_reads(nullptr, 0);
      linear(layer.down, b.activated, b.added + begin * s.hidden_size, count);
      clock.lap(Phase::kDown);
    }
    if (layer.after_mlp != nullptr) norm(b.added, nullptr, layer.after_mlp, b.added);
    added = b.added;
  }
  norm(added, step.hidden, final_norm_, step.out);
  clock.lap(Phase::kNorm);
}

}  // namespace headrace

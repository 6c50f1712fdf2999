#include "decoder.h"

#include <cstring>
#include <stdexcept>
#include <utility>

#include "attention_plan.h"
#include "dispatch.h"
#include "layer_calls.h"
#include "rank_group.h"
#include "threads.h"

namespace headrace {
namespace {

// Tokens whose feed-forward layer is computed at once: its buffers, the widest, need not hold a whole prefill.
constexpr int64_t kMlpTokens = 384;

// The tiles of a step by window: layers that attend alike share them. q_starts: of the rows that attend, the last ones of each sequence.
class Plans {
 public:
  Plans(const DecoderShape& shape, const DecoderStep& step, const int32_t* q_starts)
      : shape_(shape), step_(step), q_starts_(q_starts) {}

  AttentionPlan& of(const AttentionArgs& args) {
    for (auto& [window, plan] : plans_) {
      if (window == args.window) {
        plan.reset();
        return plan;
      }
    }
    plans_.emplace_back(args.window, plan_attention(args, step_.seq_lens, q_starts_, step_.num_seqs, q_starts_[step_.num_seqs],
                                                    step_.max_pages, shape_.num_pages));
    return plans_.back().second;
  }

 private:
  const DecoderShape& shape_;
  const DecoderStep& step_;
  const int32_t* q_starts_;
  std::vector<std::pair<int64_t, AttentionPlan>> plans_;
};

// Moves the rows that are read to the front. rows: `width` floats each, `stride` apart.
void keep_read(const DecoderStep& step, float* rows, int64_t stride, int64_t width) {
  for (int64_t i = 0; i < step.num_seqs; ++i) {
    const int64_t begin = step.read_starts[i], end = step.read_starts[i + 1];
    const float* from = rows + (step.q_starts[i + 1] - (end - begin)) * stride;
    float* to = rows + begin * stride;
    if (from == to) continue;
    for (int64_t row = begin; row < end; ++row, from += stride, to += stride) {
      std::memcpy(to, from, static_cast<size_t>(width) * sizeof(float));
    }
  }
}

}  // namespace

std::array<double, kNumPhases> Decoder::phase_seconds() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(phase_seconds_, {});
}

Decoder::Buffers Decoder::buffers(int64_t tokens) {
  const DecoderShape& s = shape_;
  const int64_t q_size = s.num_q_heads * s.head_dim, qkv_size = q_size + 2 * s.num_kv_heads * s.head_dim;
  const int64_t sizes[] = {s.hidden_size, qkv_size, q_size, 2 * s.intermediate_size, s.intermediate_size, s.hidden_size};
  const int64_t mlp_tokens = tokens < kMlpTokens ? tokens : kMlpTokens;
  const int64_t counts[] = {tokens, tokens, tokens, mlp_tokens, mlp_tokens, tokens};
  auto floats = [&](int i) { return (counts[i] * sizes[i] + 15) / 16 * 16; };
  int64_t total = 0;
  for (int i = 0; i < 6; ++i) total += floats(i);
  float* next = memory_.of(total);
  float* at[6];
  for (int i = 0; i < 6; ++i) {
    at[i] = next;
    next += floats(i);
  }
  return {at[0], at[1], at[2], at[3], at[4], at[5]};
}

void Decoder::check(const DecoderStep& step) const {
  check_range("decoder: slot", step.out_slots, step.tokens, -1, shape_.num_pages * kPageSize);
  const DecoderLayer* shortest = layers_.data();
  for (const DecoderLayer& layer : layers_) {
    if (layer.max_positions < shortest->max_positions) shortest = &layer;
  }
  check_range("decoder: position", step.positions, step.tokens, 0, shortest->max_positions);
  if (step.read_starts[0] != 0) throw std::invalid_argument("decoder: read_starts must begin with 0");
  for (int64_t i = 0; i < step.num_seqs; ++i) {
    const int64_t rows = step.q_starts[i + 1] - step.q_starts[i], read = step.read_starts[i + 1] - step.read_starts[i];
    if (read < 0 || read > rows) {
      throw std::invalid_argument("decoder: " + std::to_string(read) + " of the " + std::to_string(rows) + " rows of sequence " +
                                  std::to_string(i) + " are read");
    }
  }
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
  Plans plans(s, step, step.q_starts), read_plans(s, step, step.read_starts);
  const bool narrows = step.num_read() < tokens;
  auto plans_of = [&](const DecoderLayer& layer) -> Plans& {
    return narrows && &layer == &layers_.back() ? read_plans : plans;
  };
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
                         layer.softcap,
                         nullptr,
                         {step.sparse_first, s.sparse.channels, s.sparse.pages, s.sparse.recent}};
  };
  for (const DecoderLayer& layer : layers_) plans_of(layer).of(attention_args(layer));  // throws before anything is written
  const PoolSession session;
  int64_t rows = tokens;
  auto norm = [&](const float* x, float* residual, const float* weight, float* out) {
    k.rms_norm({x, s.hidden_size, residual, weight, out, rows, s.hidden_size, s.eps});
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
    if (layer.channel_order != nullptr) {
      // An int8 cache rotates heads in blocks of the largest power of two that divides head_dim.
      const int64_t num_blocks = s.kv_type == KvType::kInt8 ? (s.head_dim & -s.head_dim) / 16 : 1, group = s.num_q_heads / s.num_kv_heads;
      const auto order = [&](float* heads, int64_t num_heads, int64_t group_heads, float scale) {
        k.order_heads({heads, qkv_size, layer.channel_order, count, num_heads, group_heads, s.head_dim, num_blocks, scale});
      };
      order(q, s.num_q_heads, group, 1.0f / static_cast<float>(num_blocks));
      order(key, s.num_kv_heads, 1, 1.0f);
    }
    k.write_kv({key, qkv_size, key + kv_size, qkv_size,
                {layer.k_cache, layer.v_cache, s.kv_type, s.num_kv_heads, s.head_dim}, step.out_slots + begin, count});
  };
  const int64_t heads_grain = 8192 / qkv_size > 1 ? 8192 / qkv_size : 1;
  const float* added = nullptr;
  LapClock<Phase, kNumPhases> clock(phase_seconds_);
  auto reduce = [&] {
    if (group_ == nullptr) return;
    group_->all_reduce(b.added, rows * s.hidden_size);
    clock.lap(Phase::kReduce);
  };
  for (const DecoderLayer& layer : layers_) {
    if (added == nullptr) {
      norm(step.hidden, nullptr, layer.attention_norm, b.normed);
    } else {
      norm(added, step.hidden, layer.attention_norm, b.normed);
    }
    clock.lap(Phase::kNorm);
    expect(layer.out);
    run_linear(layer.qkv, b.normed, b.qkv, tokens);
    clock.lap(Phase::kQkv);
    parallel_for(tokens, heads_grain, [&](int64_t begin, int64_t end) { finish_heads(layer, begin, end); });
    clock.lap(Phase::kHeads);
    if (narrows && &layer == &layers_.back()) {
      rows = step.num_read();
      if (rows == 0) return;
      keep_read(step, b.qkv, qkv_size, q_size);
      keep_read(step, step.hidden, s.hidden_size, s.hidden_size);
    }
    const AttentionArgs args = attention_args(layer);
    const AttentionPlan& plan = plans_of(layer).of(args);
    run_attention(args, plan);
    clock.lap(Phase::kAttention);
    expect(layer.gate_up);
    run_linear(layer.out, b.attended, b.added, rows);
    clock.lap(Phase::kOut);
    reduce();
    if (layer.after_attention != nullptr) norm(b.added, nullptr, layer.after_attention, b.added);
    norm(b.added, step.hidden, layer.mlp_norm, b.normed);
    clock.lap(Phase::kNorm);
    for (int64_t begin = 0; begin < rows; begin += kMlpTokens) {
      const int64_t count = rows - begin < kMlpTokens ? rows - begin : kMlpTokens;
      expect(layer.down);
      run_linear(layer.gate_up, b.normed + begin * s.hidden_size, b.gate_up, count);
      clock.lap(Phase::kGateUp);
      const GatedArgs gated = {b.gate_up, 2 * s.intermediate_size, b.activated, count, s.intermediate_size};
      s.gelu ? k.gelu_tanh_mul(gated) : k.silu_mul(gated);
      clock.lap(Phase::kActivation);
      begin + count < rows ? expect(layer.gate_up) : &layer != &layers_.back() ? expect((&layer + 1)->qkv) : expect_reads(nullptr, 0);
      run_linear(layer.down, b.activated, b.added + begin * s.hidden_size, count);
      clock.lap(Phase::kDown);
    }
    reduce();
    if (layer.after_mlp != nullptr) norm(b.added, nullptr, layer.after_mlp, b.added);
    added = b.added;
  }
  if (final_norm_ != nullptr) {
    norm(added, step.hidden, final_norm_, step.out);
  } else {
    parallel_for(rows * s.hidden_size, 1 << 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) step.out[i] = step.hidden[i] + added[i];
    });
  }
  clock.lap(Phase::kNorm);
}

}  // namespace headrace

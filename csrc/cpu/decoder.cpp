#include "decoder.h"

#include <algorithm>
#include <cstring>
#include <list>
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

// Rows [begin, end) of a step, as a step; a sequence may begin before them or go on behind them.
struct Rows {
  Rows(const DecoderStep& whole, int64_t hidden_size, int64_t begin, int64_t end) : step(whole) {
    int64_t first = 0, num_before = 0;  // rows before `begin` that are read
    while (whole.q_starts[first + 1] <= begin) ++first;
    for (int64_t i = 0; i < whole.num_seqs && whole.q_starts[i] < end; ++i) {
      const int64_t stop = whole.q_starts[i + 1], first_read = stop - (whole.read_starts[i + 1] - whole.read_starts[i]);
      num_before += std::max<int64_t>(std::min(begin, stop) - first_read, 0);
      if (i < first) continue;
      const int64_t last = std::min(end, stop), num_read = last - std::max(begin, first_read);
      seq_lens.push_back(static_cast<int32_t>(whole.seq_lens[i] - (stop - last)));
      q_starts.push_back(static_cast<int32_t>(last - begin));
      read_starts.push_back(read_starts.back() + static_cast<int32_t>(std::max<int64_t>(num_read, 0)));
    }
    step.hidden += begin * hidden_size;
    step.out += num_before * hidden_size;
    step.tokens = end - begin;
    step.positions += begin;
    step.out_slots += begin;
    step.page_table += first * whole.max_pages;
    step.seq_lens = seq_lens.data();
    step.q_starts = q_starts.data();
    step.read_starts = read_starts.data();
    step.num_seqs = static_cast<int64_t>(seq_lens.size());
    if (step.sparse_first != nullptr) step.sparse_first += first;
  }
  Rows(const Rows&) = delete;

  DecoderStep step;
  std::vector<int32_t> seq_lens, q_starts = {0}, read_starts = {0};
};

}  // namespace

// A step or one half of it on its way through the layers. Between two sums over the ranks it has the buffers to itself, except `added`, whose rows
// are its own.
class Decoder::Part {
 public:
  Part(const Decoder& decoder, const DecoderStep& step, const Buffers& buffers, bool begins_sums, Clock& clock)
      : decoder_(decoder),
        step_(step),
        b_(buffers),
        begins_sums_(begins_sums),
        clock_(clock),
        rows_(step.tokens),
        narrows_(step.num_read() < step.tokens),
        plans_(decoder.shape_, step, step.q_starts),
        read_plans_(decoder.shape_, step, step.read_starts) {
    for (const DecoderLayer& layer : decoder.layers_) plans_of(layer).of(attention_args(layer));  // throws before anything is written
  }
  Part(const Part&) = delete;

  // The layer up to the first sum. then: what the linear after it reads.
  void attend(const DecoderLayer& layer, const LinearWeight& then) {
    if (&layer == &decoder_.layers_.front()) {
      norm(step_.hidden, nullptr, layer.attention_norm, b_.normed);
    } else {
      settle((&layer - 1)->after_mlp);
      norm(b_.added, step_.hidden, layer.attention_norm, b_.normed);
    }
    clock_.lap(Phase::kNorm);
    expect(layer.out);
    run_linear(layer.qkv, b_.normed, b_.qkv, step_.tokens);
    clock_.lap(Phase::kQkv);
    const int64_t grain = 8192 / qkv_size_ > 1 ? 8192 / qkv_size_ : 1;
    parallel_for(step_.tokens, grain, [&](int64_t begin, int64_t end) { finish_heads(layer, begin, end); });
    clock_.lap(Phase::kHeads);
    if (narrows_ && is_last(layer)) {
      rows_ = step_.num_read();
      if (rows_ == 0) return;
      keep_read(step_, b_.qkv, qkv_size_, q_size_);
      keep_read(step_, step_.hidden, shape_.hidden_size, shape_.hidden_size);
    }
    const AttentionArgs args = attention_args(layer);
    const AttentionPlan& plan = plans_of(layer).of(args);
    run_attention(args, plan);
    clock_.lap(Phase::kAttention);
    expect(then);
    run_linear(layer.out, b_.attended, b_.added, rows_);
    clock_.lap(Phase::kOut);
    sum();
  }

  // The rest of the layer. then: as above, null: nothing comes.
  void feed_forward(const DecoderLayer& layer, const LinearWeight* then) {
    if (rows_ == 0) return;
    settle(layer.after_attention);
    norm(b_.added, step_.hidden, layer.mlp_norm, b_.normed);
    clock_.lap(Phase::kNorm);
    for (int64_t begin = 0; begin < rows_; begin += kMlpTokens) {
      const int64_t count = rows_ - begin < kMlpTokens ? rows_ - begin : kMlpTokens;
      expect(layer.down);
      run_linear(layer.gate_up, b_.normed + begin * shape_.hidden_size, b_.gate_up, count);
      clock_.lap(Phase::kGateUp);
      const GatedArgs gated = {b_.gate_up, 2 * shape_.intermediate_size, b_.activated, count, shape_.intermediate_size};
      shape_.gelu ? kernels_.gelu_tanh_mul(gated) : kernels_.silu_mul(gated);
      clock_.lap(Phase::kActivation);
      begin + count < rows_ ? expect(layer.gate_up) : then != nullptr ? expect(*then) : expect_reads(nullptr, 0);
      run_linear(layer.down, b_.activated, b_.added + begin * shape_.hidden_size, count);
      clock_.lap(Phase::kDown);
    }
    sum();
  }

  // What follows the layers.
  void end(const float* final_norm) {
    if (rows_ == 0) return;
    settle(decoder_.layers_.back().after_mlp);
    if (final_norm != nullptr) {
      norm(b_.added, step_.hidden, final_norm, step_.out);
    } else {
      parallel_for(rows_ * shape_.hidden_size, 1 << 16, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) step_.out[i] = step_.hidden[i] + b_.added[i];
      });
    }
    clock_.lap(Phase::kNorm);
  }

 private:
  bool is_last(const DecoderLayer& layer) const { return &layer == &decoder_.layers_.back(); }
  Plans& plans_of(const DecoderLayer& layer) { return narrows_ && is_last(layer) ? read_plans_ : plans_; }

  AttentionArgs attention_args(const DecoderLayer& layer) const {
    return {b_.qkv,
            qkv_size_,
            b_.attended,
            {layer.k_cache, layer.v_cache, shape_.kv_type, shape_.num_kv_heads, shape_.head_dim},
            step_.page_table,
            step_.max_pages,
            shape_.num_q_heads,
            layer.scale,
            layer.window,
            layer.softcap,
            nullptr,
            {step_.sparse_first, shape_.sparse.channels, shape_.sparse.pages, shape_.sparse.recent}};
  }

  void norm(const float* x, float* residual, const float* weight, float* out) const {
    kernels_.rms_norm({x, shape_.hidden_size, residual, weight, out, rows_, shape_.hidden_size, shape_.eps});
  }

  // Head norms, rotation and the KV write of some tokens.
  void finish_heads(const DecoderLayer& layer, int64_t begin, int64_t end) const {
    const DecoderShape& s = shape_;
    const KernelTable& k = kernels_;
    float* const q = b_.qkv + begin * qkv_size_;
    float* const key = q + q_size_;
    const int64_t count = end - begin;
    if (layer.q_norm != nullptr) {
      k.head_norm({q, qkv_size_, layer.q_norm, count, s.num_q_heads, s.head_dim, s.eps});
      k.head_norm({key, qkv_size_, layer.k_norm, count, s.num_kv_heads, s.head_dim, s.eps});
    }
    const int32_t* const positions = step_.positions + begin;
    k.rotary({q, qkv_size_, positions, layer.cos, layer.sin, count, s.num_q_heads, s.head_dim, layer.rotary_dim});
    k.rotary({key, qkv_size_, positions, layer.cos, layer.sin, count, s.num_kv_heads, s.head_dim, layer.rotary_dim});
    if (layer.channel_order != nullptr) {
      // An int8 cache rotates heads in blocks of the largest power of two that divides head_dim.
      const int64_t num_blocks = s.kv_type == KvType::kInt8 ? (s.head_dim & -s.head_dim) / 16 : 1, group = s.num_q_heads / s.num_kv_heads;
      const auto order = [&](float* heads, int64_t num_heads, int64_t group_heads, float scale) {
        k.order_heads({heads, qkv_size_, layer.channel_order, count, num_heads, group_heads, s.head_dim, num_blocks, scale});
      };
      order(q, s.num_q_heads, group, 1.0f / static_cast<float>(num_blocks));
      order(key, s.num_kv_heads, 1, 1.0f);
    }
    k.write_kv({key, qkv_size_, key + kv_size_, qkv_size_,
                {layer.k_cache, layer.v_cache, s.kv_type, s.num_kv_heads, s.head_dim}, step_.out_slots + begin, count});
  }

  // The sum of `added` over the ranks; in halves it has only begun.
  void sum() {
    if (decoder_.group_ == nullptr) return;
    const int64_t n = rows_ * shape_.hidden_size;
    begins_sums_ ? decoder_.group_->begin_sum(b_.added, n) : decoder_.group_->all_reduce(b_.added, n);
    clock_.lap(Phase::kReduce);
  }

  // Now `added` is what is added to the residual stream. after: the norm before that, or null.
  void settle(const float* after) {
    if (begins_sums_) {
      decoder_.group_->finish_sum(b_.added, rows_ * shape_.hidden_size);
      clock_.lap(Phase::kReduce);
    }
    if (after != nullptr) norm(b_.added, nullptr, after, b_.added);
  }

  const Decoder& decoder_;
  const DecoderShape& shape_ = decoder_.shape_;
  const KernelTable& kernels_ = kernels();
  const int64_t q_size_ = shape_.num_q_heads * shape_.head_dim, kv_size_ = shape_.num_kv_heads * shape_.head_dim;
  const int64_t qkv_size_ = q_size_ + 2 * kv_size_;
  const DecoderStep& step_;
  const Buffers b_;
  const bool begins_sums_;
  Clock& clock_;
  int64_t rows_;  // that go on
  const bool narrows_;
  Plans plans_, read_plans_;
};

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
  const Buffers b = buffers(step.tokens);
  Clock clock(phase_seconds_);
  std::list<Rows> halves;
  std::list<Part> parts;
  if (group_ != nullptr && halves_from_ > 1 && step.tokens >= halves_from_) {
    const int64_t middle = step.tokens / 2;
    for (const auto& [begin, end] : {std::pair{int64_t{0}, middle}, {middle, step.tokens}}) {
      halves.emplace_back(step, shape_.hidden_size, begin, end);
      Buffers own = b;
      own.added += begin * shape_.hidden_size;
      parts.emplace_back(*this, halves.back().step, own, true, clock);
    }
  } else {
    parts.emplace_back(*this, step, b, false, clock);
  }
  const PoolSession session;
  // Rows of a sequence that both halves have see each other: in each layer the first half writes its keys before the second one attends.
  for (const DecoderLayer& layer : layers_) {
    for (Part& part : parts) part.attend(layer, &part == &parts.back() ? layer.gate_up : layer.qkv);
    const LinearWeight* const next = &layer == &layers_.back() ? nullptr : &(&layer + 1)->qkv;
    for (Part& part : parts) part.feed_forward(layer, &part == &parts.back() ? next : &layer.gate_up);
  }
  for (Part& part : parts) part.end(final_norm_);
}

}  // namespace headrace

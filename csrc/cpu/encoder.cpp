#include "encoder.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "packed_plan.h"
#include "threads.h"

namespace headrace {
namespace {

constexpr int64_t kThreadRows = 32;  // from so many tokens a thread on, each thread takes rows through all that lies between attention and attention
constexpr int64_t kBlockRows = 64;   // rows that a thread takes at once: what they become stays in the second-level cache
constexpr int64_t kGroupRows = 96;   // of a group of whole sequences, which one thread takes through all layers
constexpr int64_t kGroupsEach = 4;   // so many of the largest group, at the least, are a thread's share
constexpr int64_t kFewRows = 384;    // rows at once where the kernels share out columns

using Clock = LapClock<EncoderPhase, kNumEncoderPhases>;

// One call: what is done with rows [begin, end) between attention and attention. A thread that calls this inside a job computes alone.
class Rows {
 public:
  Rows(const EncoderShape& shape, const EncoderStep& step, float* qkv, float* attended, Clock* clock)
      : s_(shape), step_(step), qkv_(qkv), attended_(attended), clock_(clock), caller_(std::this_thread::get_id()) {}

  // Of the first layer.
  void begin(const EncoderLayer& layer, int64_t begin, int64_t end) {
    const float* x = hidden(begin);
    if (s_.pre_norm && layer.attention_norm.weight != nullptr) {
      float* const normed = memory(s_.hidden_size * (end - begin));
      norm(x, nullptr, layer.attention_norm, normed, end - begin);
      x = normed;
    }
    project(layer, x, begin, end);
  }

  void attend(const EncoderLayer& layer, const std::vector<PackedChunk>& chunks) {
    const int64_t width = layer.qkv.n, size = s_.num_heads * s_.head_dim;
    kernels().packed_attention({qkv_, width, qkv_ + size, width, qkv_ + 2 * size, width, attended_, s_.num_heads, s_.num_heads, s_.head_dim, s_.scale,
                                layer.window, s_.rounded},
                               chunks.data(), static_cast<int64_t>(chunks.size()));
    lap(EncoderPhase::kAttention);
  }

  // From the attention of `layer` to the projections of `next`; null: to the end, with `last` as the norm there.
  void go_on(const EncoderLayer& layer, const EncoderLayer* next, const EncoderNorm& last, int64_t begin, int64_t end) {
    const int64_t rows = end - begin, size = s_.hidden_size, wide = layer.up.n, inner = layer.down.k;
    float* const normed = memory(rows * (2 * size + wide + inner));
    float* const added = normed + rows * size;
    float* const up = added + rows * size;
    float* const activated = s_.gated ? up + rows * wide : up;
    float* const x = hidden(begin);
    linear(layer.out, attended_ + begin * layer.out.k, added, rows, EncoderPhase::kOut);
    if (s_.pre_norm) {
      norm(added, x, layer.mlp_norm, normed, rows);
    } else {
      norm(added, x, layer.attention_norm, x, rows);
    }
    linear(layer.up, s_.pre_norm ? normed : x, up, rows, EncoderPhase::kUp);
    activate(up, wide, activated, rows, inner);
    linear(layer.down, activated, added, rows, EncoderPhase::kDown);
    if (!s_.pre_norm) {
      norm(added, x, layer.mlp_norm, x, rows);
      if (next != nullptr) project(*next, x, begin, end);
      return;
    }
    const EncoderNorm& after = next == nullptr ? last : next->attention_norm;
    float* const to = next == nullptr ? x : normed;
    if (after.weight != nullptr) {
      norm(added, x, after, to, rows);
    } else {
      for (int64_t i = 0; i < rows * size; ++i) x[i] += added[i];
    }
    if (next != nullptr) project(*next, after.weight == nullptr ? x : to, begin, end);
  }

 private:
  float* hidden(int64_t row) const { return step_.hidden + row * s_.hidden_size; }
  static float* memory(int64_t floats) { return static_cast<float*>(thread_scratch(static_cast<size_t>(floats) * 4, Scratch::kLayer)); }
  void lap(EncoderPhase phase) {
    if (clock_ != nullptr && std::this_thread::get_id() == caller_) clock_->lap(phase);
  }
  void norm(const float* x, float* residual, const EncoderNorm& with, float* out, int64_t rows) {
    kernels().layer_norm({x, s_.hidden_size, residual, with.weight, with.bias, out, rows, s_.hidden_size, s_.eps});
    lap(EncoderPhase::kNorm);
  }
  void linear(const LinearWeight& w, const float* x, float* y, int64_t rows, EncoderPhase phase) {
    run_linear(w, x, y, rows);
    lap(phase);
  }
  void project(const EncoderLayer& layer, const float* x, int64_t begin, int64_t end) {
    const int64_t width = layer.qkv.n, size = s_.num_heads * s_.head_dim;
    float* const q = qkv_ + begin * width;
    linear(layer.qkv, x, q, end - begin, EncoderPhase::kQkv);
    if (layer.cos == nullptr) return;
    for (float* const heads : {q, q + size}) {
      kernels().rotary({heads, width, step_.positions + begin, layer.cos, layer.sin, end - begin, s_.num_heads, s_.head_dim, layer.rotary_dim});
    }
    lap(EncoderPhase::kRotary);
  }
  void activate(const float* up, int64_t stride, float* out, int64_t rows, int64_t size) {
    const KernelTable& k = kernels();
    const GatedArgs both = {up, stride, out, rows, size};
    const ActivationArgs one = {up, stride, out, rows, size};
    switch (s_.activation) {
      case EncoderActivation::kGelu:
        s_.gated ? k.gelu_mul(both) : k.gelu(one);
        break;
      case EncoderActivation::kGeluTanh:
        s_.gated ? k.gelu_tanh_mul(both) : k.gelu_tanh(one);
        break;
      case EncoderActivation::kSilu:
        k.silu_mul(both);
        break;
      case EncoderActivation::kRelu:
        k.relu(one);
        break;
    }
    lap(EncoderPhase::kActivation);
  }

  const EncoderShape& s_;
  const EncoderStep& step_;
  float* const qkv_;
  float* const attended_;
  Clock* const clock_;
  const std::thread::id caller_;
};

// Sequences that lie one after the other: rows [begin, end), and their pieces of attention, counted from `begin`.
struct Group {
  int64_t begin, end;
  std::vector<PackedChunk> chunks;
};

// Groups of about kGroupRows rows, a multiple of `threads` of them where sequences are short. Empty where they would not keep all threads busy to
// the end.
std::vector<Group> groups_of(const std::vector<PackedChunk>& chunks, int64_t tokens, int64_t threads) {
  const int64_t num_groups = (tokens + kGroupRows * threads - 1) / (kGroupRows * threads) * threads;
  std::vector<Group> groups;
  int64_t most = 0;
  for (const PackedChunk& chunk : chunks) {
    const bool is_full = !groups.empty() && groups.back().end * num_groups >= tokens * static_cast<int64_t>(groups.size());
    if (chunk.begin == 0 && (groups.empty() || is_full)) groups.push_back({chunk.first, 0, {}});
    Group& group = groups.back();
    group.end = int64_t{chunk.first} + chunk.length;
    group.chunks.push_back({static_cast<int32_t>(chunk.first - group.begin), chunk.length, chunk.begin, chunk.end});
    most = std::max(most, group.end - group.begin);
  }
  if (threads > 1 && most * threads * kGroupsEach > tokens) groups.clear();
  return groups;
}

}  // namespace

std::array<double, kNumEncoderPhases> Encoder::phase_seconds() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(phase_seconds_, {});
}

void Encoder::forward(const EncoderStep& step) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (layers_.empty()) throw std::invalid_argument("encoder: it has no layers");
  for (const EncoderLayer& layer : layers_) {
    if (layer.cos != nullptr) check_range("encoder: position", step.positions, step.tokens, 0, layer.max_positions);
  }
  const std::vector<PackedChunk> chunks = plan_packed(step.row_starts, step.num_seqs, step.tokens);
  if (step.tokens == 0) return;
  const EncoderShape& s = shape_;
  const int64_t tokens = step.tokens, size = s.num_heads * s.head_dim, width = 3 * size, threads = num_threads();
  const PoolSession session;
  Clock clock(phase_seconds_);
  // All layers over the rows of `part`; for_rows(body) calls body(begin, end) for pieces of them.
  const auto run_layers = [&](const EncoderStep& part, const std::vector<PackedChunk>& pieces, float* memory, Clock* laps, auto for_rows) {
    Rows rows(s, part, memory, memory + part.tokens * width, laps);
    for_rows([&](int64_t begin, int64_t end) { rows.begin(layers_.front(), begin, end); });
    for (size_t i = 0; i < layers_.size(); ++i) {
      const EncoderLayer& layer = layers_[i];
      const EncoderLayer* const next = i + 1 < layers_.size() ? &layers_[i + 1] : nullptr;
      rows.attend(layer, pieces);
      for_rows([&](int64_t begin, int64_t end) { rows.go_on(layer, next, final_norm_, begin, end); });
    }
  };
  // body(begin, end) for pieces of rows [0, count), even ones.
  const auto in_pieces = [](int64_t count, int64_t most, auto body) {
    const int64_t num_pieces = (count + most - 1) / most, rows = (count + num_pieces - 1) / num_pieces;
    for (int64_t begin = 0; begin < count; begin += rows) body(begin, std::min(count, begin + rows));
  };

  // Many short sequences: a thread takes some of them through all layers, alone.
  const std::vector<Group> groups = groups_of(chunks, tokens, threads);
  if (!groups.empty()) {
    const std::thread::id caller = std::this_thread::get_id();
    parallel_for(static_cast<int64_t>(groups.size()), 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const Group& group = groups[static_cast<size_t>(i)];
        const int64_t rows = group.end - group.begin;
        const EncoderStep part = {step.hidden + group.begin * s.hidden_size, rows, step.positions + group.begin, nullptr, 0};
        float* const memory = static_cast<float*>(thread_scratch(static_cast<size_t>(rows * (width + size)) * 4, Scratch::kSequences));
        run_layers(part, group.chunks, memory, std::this_thread::get_id() == caller ? &clock : nullptr,
                   [&](auto body) { in_pieces(rows, kBlockRows, body); });
      }
    });
    return clock.lap(EncoderPhase::kWait);
  }
  // Many rows: each thread has its own between attention and attention, with all their columns.
  float* const memory = memory_.of(tokens * (width + size));
  if (tokens >= kThreadRows * threads) {
    const int64_t blocks_each = (tokens + kBlockRows * threads - 1) / (kBlockRows * threads), num_blocks = blocks_each * threads;
    const int64_t block_rows = (tokens + num_blocks - 1) / num_blocks;
    return run_layers(step, chunks, memory, &clock, [&](auto body) {
      parallel_for((tokens + block_rows - 1) / block_rows, 1, [&](int64_t first, int64_t last) {
        for (int64_t block = first; block < last; ++block) body(block * block_rows, std::min(tokens, (block + 1) * block_rows));
      });
      clock.lap(EncoderPhase::kWait);
    });
  }
  // Few: the kernels share out columns.
  run_layers(step, chunks, memory, &clock, [&](auto body) { in_pieces(tokens, kFewRows, body); });
}

}  // namespace headrace

// All layers of an encoder in one call: what it owns is the order of the ops and the buffers between them. Every op is the kernel that a call
// of its own would run, so both ways give the same bits.
#pragma once
#include <array>
#include <cstdint>
#include <mutex>
#include <vector>

#include "layer_calls.h"

namespace headrace {

// Null where there is none.
struct EncoderNorm {
  const float *weight, *bias;
};

// up: of a gated layer [2 * intermediate_size, hidden_size], the half that is activated first. cos, sin: [max_positions, rotary_dim / 2], or null.
// window: see PackedAttentionArgs.
struct EncoderLayer {
  EncoderNorm attention_norm;
  LinearWeight qkv, out;
  EncoderNorm mlp_norm;
  LinearWeight up, down;
  int64_t window;
  const float *cos, *sin;
  int64_t rotary_dim, max_positions;
};

enum class EncoderActivation : int { kGelu, kGeluTanh, kSilu, kRelu };

// pre_norm: x += out(attention(norm(x))), x += down(act(up(norm(x)))). Otherwise x = norm(x + out(attention(x))), x = norm(x + down(act(up(x)))).
// rounded: see PackedAttentionArgs.
struct EncoderShape {
  int64_t hidden_size, num_heads, head_dim;
  float scale, eps;
  bool pre_norm;
  EncoderActivation activation;
  bool gated, rounded;
};

// Parts of a call, for `Encoder::phase_seconds`. kWait: for the other threads, where each has rows of its own.
enum class EncoderPhase : int { kNorm, kQkv, kRotary, kAttention, kOut, kUp, kActivation, kDown, kWait };
constexpr int kNumEncoderPhases = 9;

// hidden [tokens, hidden_size]: what the first layer takes; overwritten with what the last gives. row_starts: see plan_packed.
struct EncoderStep {
  float* hidden;
  int64_t tokens;
  const int32_t* positions;
  const int32_t* row_starts;
  int64_t num_seqs;
};

class Encoder {
 public:
  Encoder(const EncoderShape& shape, const EncoderNorm& final_norm) : shape_(shape), final_norm_(final_norm) {}
  void add_layer(const EncoderLayer& layer) { layers_.push_back(layer); }

  // Throws std::invalid_argument, and then nothing is written, when a position or a start does not fit. One call at a time; a second one waits.
  void forward(const EncoderStep& step);

  // Seconds that the calling threads spent in each EncoderPhase since the last call of this.
  std::array<double, kNumEncoderPhases> phase_seconds();

 private:
  EncoderShape shape_;
  EncoderNorm final_norm_;
  std::vector<EncoderLayer> layers_;
  std::mutex mutex_;
  LayerMemory memory_;
  std::array<double, kNumEncoderPhases> phase_seconds_ = {};
};

}  // namespace headrace

// All layers of a decoder in one call: what it owns is the order of the ops and the buffers between them. Every op is the kernel
// that a call of its own would run, so both ways give the same bits.
#pragma once
#include <array>
#include <cstdint>
#include <mutex>
#include <vector>

#include "layer_calls.h"

namespace headrace {

class RankGroup;

// Null where the layer has no such part. cos, sin: [max_positions, rotary_dim / 2].
struct DecoderLayer {
  const float* attention_norm;
  LinearWeight qkv;
  const float *q_norm, *k_norm;
  const float *cos, *sin;
  int64_t rotary_dim, max_positions;
  float scale;
  int64_t window;
  float softcap;
  void *k_cache, *v_cache;
  LinearWeight out;
  const float* after_attention;
  const float* mlp_norm;
  LinearWeight gate_up, down;
  const float* after_mlp;
  const int32_t* channel_order;  // [num_kv_heads][head_dim], see OrderArgs
};

struct DecoderShape {
  int64_t hidden_size, intermediate_size, num_q_heads, num_kv_heads, head_dim;
  float eps;
  bool gelu;  // gelu_tanh_mul instead of silu_mul
  KvType kv_type;
  int64_t num_pages;
  SparseAttention sparse;  // first: of each step
};

// Parts of a step, for `Decoder::phase_seconds`. kReduce: sums over the ranks of a group.
enum class Phase : int { kNorm, kQkv, kHeads, kAttention, kOut, kGateUp, kActivation, kDown, kReduce };
constexpr int kNumPhases = 9;

// hidden [tokens, hidden_size]: what the first layer takes; overwritten with the residual stream. read_starts[num_seqs + 1]: of
// sequence i the last read_starts[i + 1] - read_starts[i] rows are read, from 0 to all of them; the others end with their keys and
// values in the last layer. out [read_starts[num_seqs], hidden_size]: the rows that are read, after the final norm, or without one the
// residual stream after the last layer. The rest as in paged_attention and write_kv.
struct DecoderStep {
  float* hidden;
  float* out;
  int64_t tokens;
  const int32_t* positions;
  const int32_t* out_slots;
  const int32_t* page_table;
  int64_t max_pages;
  const int32_t* seq_lens;
  const int32_t* q_starts;
  const int32_t* read_starts;
  int64_t num_seqs;
  const int32_t* sparse_first;  // [num_seqs], or null: see SparseAttention

  int64_t num_read() const { return read_starts[num_seqs]; }
};

class Decoder {
 public:
  Decoder(const DecoderShape& shape, const float* final_norm) : shape_(shape), final_norm_(final_norm) {}
  void add_layer(const DecoderLayer& layer) { layers_.push_back(layer); }
  // Positions of a step from its sparse_first on attend to few pages. orders: a channel_order for each layer.
  void set_sparse(const SparseAttention& sparse, const std::vector<const int32_t*>& orders) {
    shape_.sparse = sparse;
    for (size_t i = 0; i < layers_.size(); ++i) layers_[i].channel_order = orders.at(i);
  }
  // The layers are one rank's parts of those of a model: from now on what `out` and `down` give is summed over the ranks of `group`, which
  // must outlive the decoder and run the same steps in each. Null: they are whole. Then forward throws what the group does, too. halves_from:
  // given, a step of so many rows (2 or more) goes through the layers in two halves, and sums of one are on their way while the other is computed.
  void set_group(RankGroup* group, int64_t halves_from = 0) {
    group_ = group;
    halves_from_ = halves_from;
  }

  // Throws std::invalid_argument, and then nothing is written, when a position, a slot, a length, a start or a page does not fit.
  // One call at a time; a second one waits.
  void forward(const DecoderStep& step);

  // Seconds spent in each Phase, a barrier's wait included, since the last call of this.
  std::array<double, kNumPhases> phase_seconds();

 private:
  struct Buffers {
    float *normed, *qkv, *attended, *gate_up, *activated, *added;
  };
  class Part;
  using Clock = LapClock<Phase, kNumPhases>;
  Buffers buffers(int64_t tokens);
  void check(const DecoderStep& step) const;

  DecoderShape shape_;
  const float* final_norm_;
  std::vector<DecoderLayer> layers_;
  RankGroup* group_ = nullptr;
  int64_t halves_from_ = 0;
  std::mutex mutex_;
  LayerMemory memory_;
  std::array<double, kNumPhases> phase_seconds_ = {};
};

}  // namespace headrace

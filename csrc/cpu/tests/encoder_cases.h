// Cases of the kernels of encoders: attention within packed sequences, and all layers in one call.
#pragma once
#include "../encoder.h"
#include "../packed_plan.h"
#include "harness.h"

namespace headrace {
namespace {

// Sequences of several lengths that lie one after the other, heads of q, k and v side by side.
void packed_attention_of(int64_t head_dim, int64_t num_kv_heads, int64_t num_q_heads, int64_t window, bool rounded) {
  const std::vector<int64_t> lengths = {1, 16, 17, 0, 300, 33};
  const int64_t num_seqs = static_cast<int64_t>(lengths.size()), width = (num_q_heads + 2 * num_kv_heads) * head_dim;
  const Buffer<int32_t> row_starts(num_seqs + 1);
  for (int64_t i = 0; i < num_seqs; ++i) row_starts[i + 1] = row_starts[i] + static_cast<int32_t>(lengths[static_cast<size_t>(i)]);
  const int64_t tokens = row_starts[num_seqs];
  const Buffer<float> qkv = floats(tokens * width);
  const float* const k = qkv.get() + num_q_heads * head_dim;
  const auto attend = [&](int64_t first, const Buffer<int32_t>& starts, int64_t count) {
    const int64_t rows = starts[count];
    const Buffer<float> out(rows * num_q_heads * head_dim);
    const std::vector<PackedChunk> chunks = plan_packed(starts.get(), count, rows);
    kernels().packed_attention({qkv.get() + first * width, width, k + first * width, width, k + num_kv_heads * head_dim + first * width, width, out.get(),
                                num_q_heads, num_kv_heads, head_dim, 0.125f, window, rounded},
                               chunks.data(), static_cast<int64_t>(chunks.size()));
    return out.bytes();
  };
  const std::string what = "packed attention" + shape({head_dim, num_kv_heads, num_q_heads, window, rounded});
  same_for_any_threads(what, [&] { return attend(0, row_starts, num_seqs); });
  const std::vector<char> together = attend(0, row_starts, num_seqs);
  for (int64_t i = 0; i < num_seqs; ++i) {
    const Buffer<int32_t> alone(2);
    alone[1] = row_starts[i + 1] - row_starts[i];
    const std::vector<char> bytes = attend(row_starts[i], alone, 1);
    expect(std::equal(bytes.begin(), bytes.end(), together.begin() + row_starts[i] * num_q_heads * head_dim * 4), what + ", a sequence alone");
  }
}

// Layers over texts of several lengths, few rows and many, with rotation, windows and gates.
void encoders_of(bool pre_norm, bool gated, int scheme) {
  constexpr int64_t kHeads = 2, kHeadDim = 24, kSize = kHeads * kHeadDim, kInner = 70, kPositions = 40, kLayers = 2;
  std::vector<Buffer<float>> numbers;
  std::vector<Buffer<uint8_t>> codes;
  const auto number = [&](int64_t count) {
    numbers.push_back(floats(count));
    return static_cast<const float*>(numbers.back().get());
  };
  const auto linear = [&](int64_t n, int64_t k) {
    const int64_t columns = round_up(n, kPackedColumns);
    if (scheme < 0) return LinearWeight{number(columns * k), -1, nullptr, number(columns), n, k};
    codes.push_back(packed_bytes(columns / kPackedColumns * packed_block_bytes(static_cast<QuantScheme>(scheme), round_up(k, kQuantGroup))));
    return LinearWeight{codes.back().get(), scheme, number(columns), number(columns), n, k};
  };
  const EncoderShape shape_of = {kSize, kHeads, kHeadDim, 0.2f, 1e-6f, pre_norm, gated ? EncoderActivation::kSilu : EncoderActivation::kGelu, gated, scheme >= 0};
  Encoder encoder(shape_of, {pre_norm ? number(kSize) : nullptr, nullptr});
  for (int64_t i = 0; i < kLayers; ++i) {
    const EncoderNorm first = {pre_norm && i == 0 ? nullptr : number(kSize), nullptr};
    encoder.add_layer({first, linear(3 * kSize, kSize), linear(kSize, kSize), {number(kSize), number(kSize)}, linear((1 + gated) * kInner, kSize),
                       linear(kSize, kInner), i * 5, number(kPositions * kHeadDim / 2), number(kPositions * kHeadDim / 2), kHeadDim, kPositions});
  }
  for (const auto& [num_texts, length] : {std::pair<int64_t, int64_t>{1, 7}, {2, 40}, {9, 40}, {40, 20}}) {
    const int64_t tokens = num_texts * length;
    const Buffer<int32_t> positions(tokens), row_starts(num_texts + 1);
    for (int64_t i = 0; i < tokens; ++i) positions[i] = static_cast<int32_t>(i % length);
    for (int64_t i = 0; i < num_texts; ++i) row_starts[i + 1] = static_cast<int32_t>((i + 1) * length);
    const Buffer<float> hidden = floats(tokens * kSize);
    same_for_any_threads("encoder" + shape({pre_norm, gated, scheme, num_texts, length}), [&] {
      const Buffer<float> out(tokens * kSize);
      std::memcpy(out.get(), hidden.get(), static_cast<size_t>(out.size()) * 4);
      encoder.forward({out.get(), tokens, positions.get(), row_starts.get(), num_texts});
      return out.bytes();
    });
  }
}

void encoders() {
  for (const bool rounded : {false, true}) {
    packed_attention_of(32, 2, 2, 0, rounded);
    packed_attention_of(24, 1, 2, 20, rounded);
    packed_attention_of(80, 1, 1, 100, rounded);
  }
  encoders_of(false, false, -1);
  encoders_of(true, true, -1);
  encoders_of(false, true, static_cast<int>(QuantScheme::kInt8Fast));
}

}  // namespace
}  // namespace headrace

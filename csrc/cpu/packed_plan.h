// The pieces of a call of packed attention.
#pragma once
#include <stdexcept>
#include <string>
#include <vector>

#include "ops.h"

namespace headrace {

constexpr int64_t kQueryChunk = 256;  // queries of a piece of work, which brings all keys of their sequence into order

// row_starts[num_seqs + 1]: sequence i is tokens row_starts[i] .. row_starts[i + 1] - 1. Throws std::invalid_argument unless they run from 0
// to `tokens` and never down.
static inline std::vector<PackedChunk> plan_packed(const int32_t* row_starts, int64_t num_seqs, int64_t tokens) {
  if (row_starts[0] != 0 || row_starts[num_seqs] != tokens) {
    throw std::invalid_argument("row_starts must run from 0 to " + std::to_string(tokens) + ", got " + std::to_string(row_starts[0]) + " to " +
                                std::to_string(row_starts[num_seqs]));
  }
  std::vector<PackedChunk> chunks;
  chunks.reserve(static_cast<size_t>(num_seqs));
  for (int64_t i = 0; i < num_seqs; ++i) {
    const int64_t length = int64_t{row_starts[i + 1]} - row_starts[i];
    if (length < 0) throw std::invalid_argument("row_starts must not fall, got " + std::to_string(row_starts[i + 1]) + " at index " + std::to_string(i + 1));
    for (int64_t begin = 0; begin < length; begin += kQueryChunk) {
      const int64_t end = begin + kQueryChunk < length ? begin + kQueryChunk : length;
      chunks.push_back({row_starts[i], static_cast<int32_t>(length), static_cast<int32_t>(begin), static_cast<int32_t>(end)});
    }
  }
  return chunks;
}

}  // namespace headrace

#include "attention_plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "threads.h"

namespace headrace {
namespace {

constexpr int64_t kTileRowTarget = 48;  // query rows that share a load of K and V

void check(const AttentionArgs& a, const int32_t* seq_lens, const int32_t* q_starts, int64_t num_seqs, int64_t num_tokens,
           int64_t max_pages, int64_t num_pages) {
  auto fail = [](const std::string& what) { throw std::invalid_argument("paged_attention: " + what); };
  if (q_starts[0] != 0 || q_starts[num_seqs] != num_tokens) {
    fail("q_starts must run from 0 to " + std::to_string(num_tokens) + ", got " + std::to_string(q_starts[0]) + " to " +
         std::to_string(q_starts[num_seqs]));
  }
  for (int64_t i = 0; i < num_seqs; ++i) {
    const int64_t rows = static_cast<int64_t>(q_starts[i + 1]) - q_starts[i], length = seq_lens[i];
    const std::string where = "sequence " + std::to_string(i) + ": ";
    if (rows < 0) fail(where + "q_starts decrease");
    if (rows == 0) continue;
    if (rows > length) fail(where + std::to_string(rows) + " query rows but only " + std::to_string(length) + " keys");
    const int64_t last_page = (length - 1) / kPageSize;
    if (last_page >= max_pages) {
      fail(where + std::to_string(length) + " keys do not fit " + std::to_string(max_pages) + " pages of the table");
    }
    const int64_t first_key = a.window > 0 ? std::max<int64_t>(0, length - rows - a.window + 1) : 0;
    for (int64_t p = first_key / kPageSize; p <= last_page; ++p) {
      const int32_t page = a.page_table[i * a.page_table_stride + p];
      if (page < 0 || page >= num_pages) {
        fail(where + "page " + std::to_string(page) + " at index " + std::to_string(p) + " is not in [0, " +
             std::to_string(num_pages) + ")");
      }
    }
  }
}

}  // namespace

void AttentionPlan::reset() {
  for (const AttentionTile& tile : tiles) {
    if (tile.pending != nullptr) *tile.pending = tile.num_splits;
  }
}

AttentionPlan plan_attention(const AttentionArgs& a, const int32_t* seq_lens, const int32_t* q_starts, int64_t num_seqs,
                             int64_t num_tokens, int64_t max_pages, int64_t num_pages) {
  check(a, seq_lens, q_starts, num_seqs, num_tokens, max_pages, num_pages);
  const int64_t group = a.num_q_heads / a.cache.num_kv_heads;
  const int64_t tile_positions = std::max<int64_t>(1, kTileRowTarget / group);
  AttentionPlan plan;
  for (int64_t i = 0; i < num_seqs; ++i) {
    const int64_t rows = q_starts[i + 1] - q_starts[i], first_position = seq_lens[i] - rows;
    const int64_t num_tiles = (rows + tile_positions - 1) / tile_positions;
    // The last positions see the most keys: they go first, so that short tiles fill the end.
    for (int64_t tile = num_tiles - 1; tile >= 0; --tile) {
      const int64_t begin = tile * tile_positions, end = std::min(rows, begin + tile_positions);
      const int64_t first_key = a.window > 0 ? std::max<int64_t>(0, first_position + begin - a.window + 1) : 0;
      AttentionTile t{};
      t.sequence = static_cast<int32_t>(i);
      t.q_row = static_cast<int32_t>(q_starts[i] + begin);
      t.num_positions = static_cast<int32_t>(end - begin);
      t.first_position = static_cast<int32_t>(first_position + begin);
      t.first_split = t.split_begin = static_cast<int32_t>(first_key / kKeySplit);
      t.split_end = static_cast<int32_t>((first_position + end - 1) / kKeySplit + 1);
      t.num_splits = t.split_end - t.split_begin;
      for (int64_t head = 0; head < a.cache.num_kv_heads; ++head) {
        t.kv_head = static_cast<int32_t>(head);
        plan.tiles.push_back(t);
      }
    }
  }
  // Too few tiles to keep the threads busy: hand out single splits.
  const int64_t num_tiles = static_cast<int64_t>(plan.tiles.size());
  if (num_threads() == 1 || num_tiles >= 4 * num_threads()) return plan;
  int64_t num_floats = 0;
  std::vector<AttentionTile> pieces;
  std::vector<int64_t> offsets;
  plan.pending.reset(new int32_t[static_cast<size_t>(std::max<int64_t>(1, num_tiles))]);
  for (int64_t i = 0; i < num_tiles; ++i) {
    const AttentionTile& tile = plan.tiles[static_cast<size_t>(i)];
    plan.pending[static_cast<size_t>(i)] = tile.num_splits;
    for (int32_t split = tile.split_begin; split < tile.split_end; ++split) {
      AttentionTile piece = tile;
      piece.split_begin = split;
      piece.split_end = split + 1;
      piece.pending = &plan.pending[static_cast<size_t>(i)];
      pieces.push_back(piece);
      offsets.push_back(tile.num_splits > 1 ? num_floats : -1);
    }
    if (tile.num_splits > 1) num_floats += tile.num_splits * tile.num_positions * group * (a.cache.head_dim + 2);
  }
  plan.partials.reset(new float[static_cast<size_t>(std::max<int64_t>(1, num_floats))]);
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (offsets[i] >= 0) pieces[i].partial = plan.partials.get() + offsets[i];
  }
  plan.tiles = std::move(pieces);
  return plan;
}

}  // namespace headrace

#include "attention_plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "dispatch.h"
#include "threads.h"

namespace headrace {
namespace {

// Query rows of one sequence that share a load of K and V: as many as leave each thread kTilesPerThread tiles, within these.
constexpr int64_t kLeastTileRows = 48, kMostTileRows = 192, kTilesPerThread = 16;
constexpr int64_t kSharedRowTarget = 24;  // those of several sequences: fewer, so that the threads have enough tiles

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
    for (int64_t row = 0; row < rows && a.last_keys != nullptr; ++row) {
      const int64_t last = a.last_keys[q_starts[i] + row], before = row > 0 ? a.last_keys[q_starts[i] + row - 1] : 0;
      if (last < length - rows + row || last >= length || last < before) {
        fail(where + "row " + std::to_string(row) + " cannot see keys up to " + std::to_string(last));
      }
    }
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

// Rows of a sequence up to the first that attends to chosen pages.
int64_t num_dense_rows(const AttentionArgs& a, int64_t sequence, int64_t length, int64_t rows) {
  if (a.sparse.first == nullptr || a.window > 0) return rows;
  const int64_t first = std::max<int64_t>(a.sparse.first[sequence], a.sparse.pages * kPageSize);
  return std::clamp<int64_t>(first - (length - rows), 0, rows);
}

// Sequences of one query each whose first pages are the same.
struct Family {
  std::vector<int64_t> sequences;
  int64_t shared_pages;
};

// Who decodes with whom: in the order of their pages, relatives follow each other. A sequence joins the one before it unless that would
// cost the family, or the one after it, more than half of what they have in common.
std::vector<Family> find_families(const AttentionArgs& a, const int32_t* seq_lens, const int32_t* q_starts, int64_t num_seqs,
                                  size_t most_sequences) {
  auto begin_of = [&](int64_t i) { return a.page_table + i * a.page_table_stride; };
  auto full_pages = [&](int64_t i) { return (seq_lens[i] - 1) / kPageSize; };
  auto common_pages = [&](int64_t i, int64_t j) {
    const int64_t most = std::min(full_pages(i), full_pages(j));
    return std::mismatch(begin_of(i), begin_of(i) + most, begin_of(j)).first - begin_of(i);
  };
  std::vector<int64_t> decoding;
  for (int64_t i = 0; i < num_seqs; ++i) {
    if (q_starts[i + 1] - q_starts[i] == 1 && num_dense_rows(a, i, seq_lens[i], 1) == 1) decoding.push_back(i);
  }
  std::stable_sort(decoding.begin(), decoding.end(), [&](int64_t i, int64_t j) {
    return std::lexicographical_compare(begin_of(i), begin_of(i) + full_pages(i), begin_of(j), begin_of(j) + full_pages(j));
  });
  std::vector<Family> families;
  for (size_t n = 0; n < decoding.size(); ++n) {
    const int64_t i = decoding[n], after = n + 1 < decoding.size() ? common_pages(i, decoding[n + 1]) : 0;
    if (n > 0 && families.back().sequences.size() < most_sequences) {
      Family& last = families.back();
      const int64_t shared = std::min(last.shared_pages, common_pages(decoding[n - 1], i));
      if (shared >= kKeyBlock / kPageSize && 2 * shared >= (last.sequences.size() == 1 ? after : last.shared_pages)) {
        last.sequences.push_back(i);
        last.shared_pages = shared;
        continue;
      }
    }
    families.push_back({{i}, full_pages(i)});
  }
  return families;
}

// Too few tiles to keep the threads busy: hand out single splits.
void hand_out_splits(AttentionPlan& plan, int64_t group, int64_t head_dim) {
  const int64_t num_tiles = static_cast<int64_t>(plan.tiles.size());
  if (num_threads() == 1 || num_tiles >= 4 * num_threads()) return;
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
    if (tile.num_splits > 1) num_floats += tile.num_splits * tile.num_queries * group * (head_dim + 2);
  }
  plan.partials.reset(new float[static_cast<size_t>(std::max<int64_t>(1, num_floats))]);
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (offsets[i] >= 0) pieces[i].partial = plan.partials.get() + offsets[i];
  }
  plan.tiles = std::move(pieces);
}

std::shared_ptr<SparsePlan> plan_sparse(const AttentionArgs& a, std::vector<AttentionQuery> queries) {
  auto made = std::make_shared<SparsePlan>();
  const int64_t heads = a.cache.num_kv_heads, group = a.num_q_heads / heads, pages = a.sparse.pages;
  const size_t places = queries.size() * static_cast<size_t>(heads);
  int64_t most_pages = 0;
  AttentionPlan& plan = made->plan;
  plan.queries.reserve(places);
  for (const AttentionQuery& query : queries) {
    most_pages = std::max<int64_t>(most_pages, query.position / kPageSize + 1);
    for (int64_t head = 0; head < heads; ++head) {
      const auto last = static_cast<int32_t>((pages - 1) * kPageSize + query.position % kPageSize);
      plan.queries.push_back({static_cast<int32_t>(plan.queries.size()), query.q_row, last, last});
      AttentionTile t{};
      t.queries = &plan.queries.back();
      t.num_queries = 1;
      t.kv_head = static_cast<int32_t>(head);
      t.shared_keys = last + 1;
      t.key_split = kChosenSplit;
      t.num_splits = t.split_end = static_cast<int32_t>(last / kChosenSplit + 1);
      plan.tiles.push_back(t);
    }
  }
  hand_out_splits(plan, group, a.cache.head_dim);
  made->queries = std::move(queries);
  made->chosen.resize(places * static_cast<size_t>(pages));
  made->pending.resize(places);
  made->tops.resize(places * static_cast<size_t>(group * most_pages));
  made->pages = {made->queries.data(), static_cast<int64_t>(made->queries.size()), (most_pages + kPageSplit - 1) / kPageSplit,
                 most_pages, made->chosen.data(), made->tops.data(), made->pending.data()};
  std::fill(made->pending.begin(), made->pending.end(), static_cast<int32_t>(made->pages.num_splits));
  return made;
}

}  // namespace

void AttentionPlan::reset() {
  for (const AttentionTile& tile : tiles) {
    if (tile.pending != nullptr) *tile.pending = tile.num_splits;
  }
  if (sparse == nullptr) return;
  sparse->plan.reset();
  std::fill(sparse->pending.begin(), sparse->pending.end(), static_cast<int32_t>(sparse->pages.num_splits));
}

void run_attention(const AttentionArgs& a, const AttentionPlan& plan) {
  const auto run = [](const AttentionArgs& args, const AttentionPlan& some) {
    kernels().attention(args, some.tiles.data(), static_cast<int64_t>(some.tiles.size()));
  };
  if (!plan.tiles.empty()) run(a, plan);
  if (plan.sparse == nullptr) return;
  kernels().choose_pages(a, plan.sparse->pages);
  AttentionArgs chosen = a;
  chosen.page_table = plan.sparse->chosen.data();
  chosen.page_table_stride = a.sparse.pages;
  run(chosen, plan.sparse->plan);
}

AttentionPlan plan_attention(const AttentionArgs& a, const int32_t* seq_lens, const int32_t* q_starts, int64_t num_seqs,
                             int64_t num_tokens, int64_t max_pages, int64_t num_pages) {
  check(a, seq_lens, q_starts, num_seqs, num_tokens, max_pages, num_pages);
  const int64_t group = a.num_q_heads / a.cache.num_kv_heads;
  const int64_t tile_rows = std::clamp(num_tokens * a.num_q_heads / (kTilesPerThread * num_threads()), kLeastTileRows, kMostTileRows);
  const int64_t tile_positions = std::max<int64_t>(1, tile_rows / group);
  AttentionPlan plan;
  plan.queries.reserve(static_cast<size_t>(num_tokens));  // tiles point into it
  // A tile of the queries from `first` on, for each KV head.
  auto add_tiles = [&](size_t first, int64_t shared_keys) {
    AttentionTile t{};
    t.queries = plan.queries.data() + first;
    t.num_queries = static_cast<int32_t>(plan.queries.size() - first);
    t.shared_keys = static_cast<int32_t>(shared_keys);
    t.key_split = kKeySplit;
    const int64_t first_key = a.window > 0 ? std::max<int64_t>(0, t.queries[0].position - a.window + 1) : 0;
    t.first_split = t.split_begin = static_cast<int32_t>(first_key / kKeySplit);
    t.split_end = static_cast<int32_t>(plan.queries.back().last_key / kKeySplit + 1);
    t.num_splits = t.split_end - t.split_begin;
    for (int64_t head = 0; head < a.cache.num_kv_heads; ++head) {
      t.kv_head = static_cast<int32_t>(head);
      plan.tiles.push_back(t);
    }
  };
  auto query_of = [&](int64_t sequence, int64_t row) -> AttentionQuery {
    const int64_t position = seq_lens[sequence] - (q_starts[sequence + 1] - q_starts[sequence]) + row;
    const int64_t q_row = q_starts[sequence] + row, last_key = a.last_keys != nullptr ? a.last_keys[q_row] : position;
    return {static_cast<int32_t>(sequence), static_cast<int32_t>(q_row), static_cast<int32_t>(position), static_cast<int32_t>(last_key)};
  };
  auto add_query = [&](int64_t sequence, int64_t row) { plan.queries.push_back(query_of(sequence, row)); };
  std::vector<AttentionQuery> sparse;
  // Keys before a window are not read, so that nothing is gained by sharing them.
  const int64_t most_sequences = a.window > 0 ? 1 : std::max<int64_t>(1, kSharedRowTarget / group);
  std::vector<bool> is_planned(static_cast<size_t>(num_seqs), false);
  if (most_sequences > 1) {
    for (Family& family : find_families(a, seq_lens, q_starts, num_seqs, static_cast<size_t>(most_sequences))) {
      if (family.sequences.size() == 1) continue;
      std::stable_sort(family.sequences.begin(), family.sequences.end(), [&](int64_t i, int64_t j) { return seq_lens[i] < seq_lens[j]; });
      const size_t first = plan.queries.size();
      for (const int64_t sequence : family.sequences) {
        is_planned[static_cast<size_t>(sequence)] = true;
        add_query(sequence, 0);
      }
      add_tiles(first, family.shared_pages * kPageSize / kKeyBlock * kKeyBlock);
    }
  }
  for (int64_t i = 0; i < num_seqs; ++i) {
    if (is_planned[static_cast<size_t>(i)]) continue;
    const int64_t all_rows = q_starts[i + 1] - q_starts[i], rows = num_dense_rows(a, i, seq_lens[i], all_rows);
    const int64_t num_tiles = (rows + tile_positions - 1) / tile_positions;
    for (int64_t row = rows; row < all_rows; ++row) sparse.push_back(query_of(i, row));
    // The last positions see the most keys: they go first, so that short tiles fill the end.
    for (int64_t tile = num_tiles - 1; tile >= 0; --tile) {
      const size_t first = plan.queries.size();
      const int64_t end = std::min(rows, (tile + 1) * tile_positions);
      for (int64_t row = tile * tile_positions; row < end; ++row) add_query(i, row);
      add_tiles(first, plan.queries.back().last_key + 1);
    }
  }
  hand_out_splits(plan, group, a.cache.head_dim);
  if (!sparse.empty()) plan.sparse = plan_sparse(a, std::move(sparse));
  return plan;
}

}  // namespace headrace

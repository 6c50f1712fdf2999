// Cuts one attention call into tiles. Where the cuts fall decides who computes a row, never its bits.
#pragma once
#include <memory>
#include <vector>

#include "ops.h"

namespace headrace {

struct SparsePlan;

// sparse: of the positions that attend to chosen pages; null: there are none.
struct AttentionPlan {
  std::vector<AttentionTile> tiles;
  std::vector<AttentionQuery> queries;
  std::unique_ptr<float[]> partials;
  std::unique_ptr<int32_t[]> pending;
  std::shared_ptr<SparsePlan> sparse;

  // Makes the plan fit for one more call: a call counts `pending` down.
  void reset();
};

// seq_lens int32[num_seqs], q_starts int32[num_seqs + 1]: rows [q_starts[i], q_starts[i + 1]) are the last positions of sequence i.
// Throws std::invalid_argument when a length, a start or a page id does not fit num_tokens, max_pages or num_pages.
AttentionPlan plan_attention(const AttentionArgs& args, const int32_t* seq_lens, const int32_t* q_starts, int64_t num_seqs,
                             int64_t num_tokens, int64_t max_pages, int64_t num_pages);

// A plan over the chosen pages: sequence i * num_kv_heads + h of `plan` is KV head h of queries[i], and its page table is chosen[i][h].
struct SparsePlan {
  AttentionPlan plan;
  std::vector<AttentionQuery> queries;
  std::vector<int32_t> chosen, pending;
  std::vector<float> tops;
  ChosenPages pages;
};

// The kernel calls of a plan.
void run_attention(const AttentionArgs& args, const AttentionPlan& plan);

}  // namespace headrace

// What crosses from the bindings to the kernels: plain pointers, sizes in elements, strides in elements.
// Sizes and indices are checked before they get here.
#pragma once
#include <cstdint>

namespace headrace {

constexpr int64_t kPageSize = 16;    // tokens in a page of the KV cache
constexpr int64_t kKeyBlock = 256;   // keys of one step of the online softmax, aligned at position 0
constexpr int64_t kKeySplit = 1024;  // keys of one partial result, aligned at position 0: the same cut for every row
constexpr int64_t kPackedColumns = 32;

// y[rows, n] = x[rows, k] @ weight^T (+ bias), weight packed as [n / 32][k][32] float or [n / 32][k][16][2] bf16, where pair j of
// a k holds columns j and j + 16. accumulate: the sum starts from y instead of 0. bias has n rounded up to 32 elements.
struct LinearArgs {
  const float* x;
  int64_t x_stride;
  const void* weight;
  bool weight_is_bf16;
  const float* bias;
  float* y;
  int64_t y_stride;
  int64_t rows, n, k;
  bool accumulate;
};

// K cache: [page][kv_head][head_dim / 2][16][2] bf16 or [page][kv_head][head_dim][16] float. V cache: [page][kv_head][16][head_dim].
struct KvCache {
  void* k;
  void* v;
  bool is_bf16;
  int64_t num_kv_heads, head_dim;
};

struct AttentionArgs {
  const float* q;
  int64_t q_stride;
  float* out;  // [tokens, num_q_heads, head_dim], contiguous
  KvCache cache;
  const int32_t* page_table;
  int64_t page_table_stride;
  int64_t num_q_heads;
  float scale;
  int64_t window;  // 0: none
  float softcap;   // 0: none
};

// Some consecutive positions of one sequence and all query heads of one KV head; splits [split_begin, split_end) of its keys.
struct AttentionTile {
  int32_t sequence, kv_head;
  int32_t q_row;           // of the first position
  int32_t num_positions;
  int32_t first_position;  // in the sequence
  int32_t split_begin, split_end;
  int32_t num_splits;      // of the whole tile, from first_split
  int32_t first_split;
  float* partial;          // [num_splits][rows][head_dim + 2] when other tiles take other splits, else null
  int32_t* pending;        // tiles still at work on the same rows; who brings it to 0 merges
};

struct WriteKvArgs {
  const float* k;
  int64_t k_stride;
  const float* v;
  int64_t v_stride;
  KvCache cache;
  const int32_t* slots;  // negative: skip
  int64_t tokens;
};

struct GatherKvArgs {
  float* k;  // [tokens, num_kv_heads, head_dim]
  float* v;
  KvCache cache;
  const int32_t* slots;
  int64_t tokens;
};

// residual == nullptr: out = norm(x). Otherwise residual += x; out = norm(residual).
struct NormArgs {
  const float* x;
  int64_t x_stride;
  float* residual;
  const float* weight;
  float* out;
  int64_t rows, size;
  float eps;
};

// Each head of x normalised alone, in place.
struct HeadNormArgs {
  float* x;
  int64_t x_stride;
  const float* weight;
  int64_t tokens, num_heads, head_dim;
  float eps;
};

struct RotaryArgs {
  float* x;
  int64_t x_stride;
  const int32_t* positions;
  const float* cos;  // [max_position, rotary_dim / 2]
  const float* sin;
  int64_t tokens, num_heads, head_dim, rotary_dim;
};

// x [rows, 2 * size] -> out [rows, size]: activation(x[:, :size]) * x[:, size:]
struct GatedArgs {
  const float* x;
  int64_t x_stride;
  float* out;
  int64_t rows, size;
};

struct EmbeddingArgs {
  const void* table;
  bool table_is_bf16;
  const void* ids;
  bool ids_are_int64;
  float* out;
  int64_t tokens, hidden_size;
  float scale;
};

struct ArgmaxArgs {
  const float* x;
  int64_t x_stride;
  int64_t* out;
  int64_t rows, size;
};

struct KernelTable {
  const char* isa;
  void (*linear)(const LinearArgs&);
  void (*attention)(const AttentionArgs&, const AttentionTile* tiles, int64_t num_tiles);
  void (*write_kv)(const WriteKvArgs&);
  void (*gather_kv)(const GatherKvArgs&);
  void (*rms_norm)(const NormArgs&);
  void (*head_norm)(const HeadNormArgs&);
  void (*rotary)(const RotaryArgs&);
  void (*silu_mul)(const GatedArgs&);
  void (*gelu_tanh_mul)(const GatedArgs&);
  void (*embedding)(const EmbeddingArgs&);
  void (*argmax)(const ArgmaxArgs&);
  float (*probe_read)(const void* memory, int64_t bytes);
  float (*probe_fma)(int64_t rounds);
};

}  // namespace headrace

// What crosses from the bindings to the kernels: plain pointers, sizes in elements, strides in elements.
// Sizes and indices are checked before they get here.
#pragma once
#include <cstdint>

namespace headrace {

constexpr int64_t kPageSize = 16;    // tokens in a page of the KV cache
constexpr int64_t kKeyBlock = 256;   // keys of one step of the online softmax, aligned at position 0
constexpr int64_t kChosenSplit = 256; // as kKeySplit, of keys that were chosen
constexpr int64_t kKeySplit = 1024;  // keys of one partial result, aligned at position 0: the same cut for every row
constexpr int64_t kPackedColumns = 32;
constexpr int64_t kMaxIntHeadDim = 512;  // of an int8 or int16 KV cache
constexpr int64_t kQuantGroup = 32;  // elements that share a scale
constexpr int64_t kWideGroup = 128;  // elements of a row of activations that do, where weights have one scale a column
constexpr int32_t kMaxWord = 8191;   // of an activation or an element of the KV cache as a word
constexpr int32_t kMaxWordsNorm = 23170;  // of kWideGroup weights as words, sqrt(sum of squares)

// Elements of weights that are floats: of 32 bits, bfloat16, or float16.
enum class FloatType : int { kFloat = 0, kBf16 = 1, kHalf = 2 };
constexpr int64_t float_bytes(FloatType type) { return type == FloatType::kFloat ? 4 : 2; }

// Where a weight is of either kind its format is a QuantScheme, or a number below 0 that stands for a FloatType.
constexpr FloatType float_type(int64_t format) { return static_cast<FloatType>(-1 - format); }

// y[rows, n] = x[rows, k] @ weight^T (+ bias), weight packed as [n / 32][k][32] float or half or [n / 32][k][16][2] bf16, where pair j
// of a k holds columns j and j + 16. accumulate: the sum starts from y instead of 0. bias has n rounded up to 32 elements.
struct LinearArgs {
  const float* x;
  int64_t x_stride;
  const void* weight;
  FloatType type;
  const float* bias;
  float* y;
  int64_t y_stride;
  int64_t rows, n, k;
  bool accumulate;
};

// How rows of activations are quantised: signed bytes or words of value_bytes, and a scale for each `group` elements, a multiple of 32.
// zero: the code of the weights that stands for 0. floats: values are bfloat16 instead, and nothing is written beside them.
// rotated: a row is rotated first, as the weights were, in blocks of rotation_block(k) elements (rotation.h).
// halves: of groups of 32 bytes: instead of starts the sums of their first and last 16 elements are written, see half_sums; scaled_sums are not.
struct RowFormat {
  int64_t value_bytes, group, zero;
  bool floats = false, rotated = false, halves = false;
};

// The sums of the first and the last 16 values of a group, at most 2,032 each, in the low and the high half of a number; and back.
constexpr int32_t half_sums(int32_t first, int32_t last) { return static_cast<int32_t>((static_cast<uint32_t>(last) << 16) | (first & 0xffff)); }
constexpr int32_t half_sum(int32_t sums, int half) { return half == 0 ? static_cast<int16_t>(sums & 0xffff) : sums >> 16; }

// Elements of a row that are mixed: the largest power of two up to kWideGroup that divides k; 1, none, below kQuantGroup.
constexpr int64_t rotation_block(int64_t k) {
  const int64_t power = k & -k;
  return power < kQuantGroup ? 1 : power < kWideGroup ? power : kWideGroup;
}

// x[rows, k] as values [rows][k rounded up to 32], and [rows][groups] of scales, starts (minus the sum of a group's values times zero: what
// makes a sum over codes one over weights) and scaled_sums (minus the sum times the scale). For words scales alone are written.
struct QuantizeArgs {
  const float* x;
  int64_t x_stride;
  void* values;
  float* scales;
  int32_t* starts;
  float* scaled_sums;
  int64_t rows, k;
  RowFormat format;
};

// How a quantised weight is packed, in blocks of 32 columns; k is rounded up to 32 and the codes beyond it are those of 0.
// kInt8, kInt4, kInt4Min: [n / 32][k / 32] records of codes, 32 half scales and (kInt4Min) 32 half minimums. kInt8Fast, kInt16: codes alone.
// kInt8Rotated: as kInt8. It and kInt8Fast have weights that were rotated and divided by rotation_block(k), so that their products with
// rotated rows are those of both as they were.
// kGguf: blocks of types of GGUF files behind a table, see gguf_blocks.h; k is a multiple of 32, and there are no column scales.
// kBf16: [k / 2][32][2] bfloat16, the weights themselves, and activations in bfloat16; see simd_bf16.h.
// Codes of 16 bits: [k / 2][32][2] signed words, weight = scale * code. Those of a column have a norm of at most kMaxWordsNorm in each
// kWideGroup of k, and activations one of at most kMaxWord * sqrt(kWideGroup), so that their product is below 2^31 (Cauchy and Schwarz).
// Codes of 8 bits: [k / 4][32][4] bytes, weight = scale * (code - 128). Codes of 4 bits: [k / 8][32][4] bytes, k 8 i + j in the low
// nibble of byte j and 8 i + 4 + j in the high one; weight = scale * (code - 8), or scale * code - minimum.
enum class QuantScheme : int { kInt8 = 0, kInt8Fast = 1, kInt4 = 2, kInt4Min = 3, kInt16 = 4, kBf16 = 5, kInt8Rotated = 6, kGguf = 7 };

// Of the activations of a linear layer.
constexpr RowFormat row_format(QuantScheme scheme) {
  return scheme == QuantScheme::kBf16       ? RowFormat{2, kWideGroup, 0, true}
         : scheme == QuantScheme::kInt16    ? RowFormat{2, kWideGroup, 0}
         : scheme == QuantScheme::kInt8Fast ? RowFormat{1, kWideGroup, 128, false, true}
         : scheme == QuantScheme::kInt8Rotated ? RowFormat{1, kQuantGroup, 128, false, true}
         : scheme == QuantScheme::kInt8     ? RowFormat{1, kQuantGroup, 128}
         : scheme == QuantScheme::kGguf     ? RowFormat{1, kQuantGroup, 0, false, false, true}
         : scheme == QuantScheme::kInt4     ? RowFormat{1, kQuantGroup, 8}
                                            : RowFormat{1, kQuantGroup, 0};
}

// Bytes of a block of 32 columns; of kGguf those of its entry in the table.
constexpr int64_t packed_block_bytes(QuantScheme scheme, int64_t k_padded) {
  const int64_t scales = k_padded / kQuantGroup * 2;  // of a column
  switch (scheme) {
    case QuantScheme::kInt16:
    case QuantScheme::kBf16:
      return kPackedColumns * k_padded * 2;
    case QuantScheme::kInt8Fast:
      return kPackedColumns * k_padded;
    case QuantScheme::kInt8:
    case QuantScheme::kInt8Rotated:
      return kPackedColumns * (k_padded + scales);
    case QuantScheme::kInt4:
      return kPackedColumns * (k_padded / 2 + scales);
    case QuantScheme::kInt4Min:
      return kPackedColumns * (k_padded / 2 + 2 * scales);
    case QuantScheme::kGguf:
      return 8;
  }
  return 0;
}

// What quantize_rows wrote. words: the bytes as words, between kernels that multiply those (store_wide).
struct QuantizedRows {
  const void* values;
  const float* scales;
  const int32_t* starts;
  const float* scaled_sums;
  const int16_t* words = nullptr;
};

// y[rows, n] = x @ weight^T * column_scales (+ bias) (+ y when accumulate). column_scales, null for kBf16, and bias have n rounded up to
// 32 elements.
struct QuantizedLinearArgs {
  QuantizedRows x;
  QuantScheme scheme;
  const uint8_t* weight;
  const float* column_scales;
  const float* bias;
  float* y;
  int64_t y_stride;
  int64_t rows, n, k_padded;
  bool accumulate;
};

// kFloat: K [page][kv_head][head_dim][16], V [page][kv_head][16][head_dim].
// kBf16: K [page][kv_head][head_dim / 2][16][2], two elements side by side, V [page][kv_head][8][head_dim][2], two tokens side by side.
// kBf16Products: as kBf16; attention rounds queries and weights to bfloat16, too, and multiplies that (simd_bf16.h).
// kInt8: [page][kv_head] records of bytes and then 16 float scales, one a token: K [head_dim / 4][16][4], four elements side by side,
// value = (byte - 128) * scale of its token; V [4][head_dim][4], four tokens side by side, signed bytes, value = byte * scale.
// kInt16: the same records of signed words, where kBf16 has its elements; value = word * scale, and scales of V are powers of 2.
enum class KvType : int { kFloat = 0, kBf16 = 1, kInt8 = 2, kBf16Products = 3, kInt16 = 4 };

struct KvCache {
  void* k;
  void* v;
  KvType type;
  int64_t num_kv_heads, head_dim;
};

// Elements of K, or of V, of one head in one page, scales included.
constexpr int64_t kv_page_elements(KvType type, int64_t head_dim) {
  return kPageSize * (head_dim + (type == KvType::kInt8 ? 4 : type == KvType::kInt16 ? 2 : 0));
}

// Double sparsity (S. Yang et al., "Post-Training Sparse Attention with Double Sparsity", 2024), by pages: positions from first[sequence] on attend to
// `pages` pages: the first, the last `recent`, and those between with the largest scores by the first `channels` elements of queries and keys.
// first null: every position attends to all.
struct SparseAttention {
  const int32_t* first = nullptr;
  int64_t channels = 0, pages = 0, recent = 0;
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
  const int32_t* last_keys;  // of each row: the last key that it sees, at or after its position; null: its position
  SparseAttention sparse = {};  // not beside a window or last_keys
};

// Attention in both directions within each of the sequences whose tokens lie one after the other. q [tokens, num_q_heads, head_dim];
// k, v [tokens, num_kv_heads, head_dim]. Token i sees j of its sequence where |i - j| <= window, and all for window 0. rounded: q, k, v and
// weights are rounded to bfloat16, and their products are those of simd_bf16.h.
struct PackedAttentionArgs {
  const float* q;
  int64_t q_stride;
  const float* k;
  int64_t k_stride;
  const float* v;
  int64_t v_stride;
  float* out;  // [tokens, num_q_heads, head_dim], contiguous
  int64_t num_q_heads, num_kv_heads, head_dim;
  float scale;
  int64_t window;
  bool rounded;
};

// Queries [begin, end) of the sequence whose tokens are [first, first + length); both count within it.
struct PackedChunk {
  int32_t first, length, begin, end;
};

// One position that attends.
struct AttentionQuery {
  int32_t sequence;
  int32_t q_row;
  int32_t position;  // in the sequence
  int32_t last_key;  // that it sees
};

// Some queries with all query heads of one KV head, and splits [split_begin, split_end) of their keys. They are positions of one
// sequence or of several that begin with the same pages, in the order of positions. Keys before shared_keys are the same for all.
struct AttentionTile {
  const AttentionQuery* queries;
  int32_t num_queries;
  int32_t kv_head;
  int32_t shared_keys;
  int32_t key_split;       // kKeySplit or kChosenSplit
  int32_t split_begin, split_end;
  int32_t num_splits;      // of the whole tile, from first_split
  int32_t first_split;
  float* partial;          // [num_splits][rows][head_dim + 2] when other tiles take other splits, else null
  int32_t* pending;        // tiles still at work on the same rows; who brings it to 0 merges
};

// Which pages `queries` attend to, into chosen [num_queries][num_kv_heads][sparse.pages], ascending. tops: [num_queries][num_kv_heads][query heads of
// a KV head][top_stride], the largest score of each page. pending: as in AttentionTile, num_splits each, of kPageSplit pages.
struct ChosenPages {
  const AttentionQuery* queries;
  int64_t num_queries, num_splits, top_stride;
  int32_t* chosen;
  float* tops;
  int32_t* pending;
};
constexpr int64_t kPageSplit = 64;

// Heads of x in place: element i becomes element order[kv_head][i] * scale, and then blocks of 16 elements are added and subtracted, a Walsh-Hadamard
// transform over num_blocks of them. The rotation of an int8 cache undoes that, but for a factor: blocks of 16 are rotated each by itself.
struct OrderArgs {
  float* x;
  int64_t x_stride;
  const int32_t* order;  // [num_heads / group][head_dim]
  int64_t tokens, num_heads, group, head_dim, num_blocks;
  float scale;
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

// residual as in NormArgs: out = (x - mean) / sqrt(variance + eps) * weight (+ bias).
struct LayerNormArgs {
  const float* x;
  int64_t x_stride;
  float* residual;
  const float* weight;
  const float* bias;
  float* out;
  int64_t rows, size;
  float eps;
};

// x [rows, 2 * size] -> out [rows, size]: activation(x[:, :size]) * x[:, size:]
struct GatedArgs {
  const float* x;
  int64_t x_stride;
  float* out;
  int64_t rows, size;
};

// What is not gated: x [rows, size] -> out [rows, size], which may be x.
struct ActivationArgs {
  const float* x;
  int64_t x_stride;
  float* out;
  int64_t rows, size;
};

// kRows: the table is [ids][hidden_size]. The others: a packed weight, of LinearArgs, of QuantScheme::kBf16 or of kGguf.
enum class TableOrder : int { kRows = 0, kColumns = 1, kPairs = 2, kGguf = 3 };

struct EmbeddingArgs {
  const void* table;
  FloatType type;
  TableOrder order;
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

// Greedy where temperature is 0, not wanted (out = -1) where it is negative. top_k 0 and top_p 1: off. min_weight: see drawing.py.
// out is -1, too, when a row holds a NaN or no finite largest logit.
// masks: [any][size / 32 rounded up], or null. Of a row with mask_rows >= 0 only logits are seen that this mask allows: token t if bit
// t % 32 of word t / 32 is set; bits beyond size are ignored.
struct DrawArgs {
  const float* x;
  int64_t x_stride;
  const float* temperature;
  const int64_t* top_k;
  const double* top_p;
  const int64_t* min_weight;
  const double* u;
  const uint32_t* masks;
  const int64_t* mask_rows;
  int64_t* out;
  int64_t rows, size;
};

// Largest logit of each row and the sum of all weights at temperature 1; peaks is NaN when the row holds a NaN.
struct ExpSumsArgs {
  const float* x;
  int64_t x_stride;
  float* peaks;
  int64_t* sums;
  int64_t rows, size;
};

// A packed weight of an expert, see float_type. Addresses as integers: Python makes the table.
struct ExpertWeight {
  int64_t data, block_bytes, format, column_scales, bias;  // block_bytes: of 32 columns
};

// out[row] = sum over ranks of shares[row][rank] * down(act(gate) * up) of expert ids[row][rank], gate and up of x[row].
// An id of -1 is nobody's: it adds nothing. experts: [num_experts][2], gate and up stacked [2 * intermediate_size, hidden_size], then down [hidden_size, intermediate_size].
struct MoeArgs {
  const float* x;
  int64_t x_stride;
  const int64_t* ids;
  const float* shares;
  const ExpertWeight* experts;
  float* out;
  int64_t rows, top_k, num_experts, hidden_size, intermediate_size;
  bool gelu;
};

// What probe_dot multiplies: bytes, words, or pairs of bfloat16.
enum class DotKind : int { kBytes = 0, kWords = 1, kBf16 = 2 };

struct KernelTable {
  const char* isa;
  void (*linear)(const LinearArgs&);
  void (*attention)(const AttentionArgs&, const AttentionTile* tiles, int64_t num_tiles);
  void (*choose_pages)(const AttentionArgs&, const ChosenPages&);
  void (*order_heads)(const OrderArgs&);
  void (*packed_attention)(const PackedAttentionArgs&, const PackedChunk* chunks, int64_t num_chunks);
  void (*write_kv)(const WriteKvArgs&);
  void (*gather_kv)(const GatherKvArgs&);
  void (*rms_norm)(const NormArgs&);
  void (*head_norm)(const HeadNormArgs&);
  void (*rotary)(const RotaryArgs&);
  void (*silu_mul)(const GatedArgs&);
  void (*gelu_tanh_mul)(const GatedArgs&);
  void (*gelu_mul)(const GatedArgs&);
  void (*gelu)(const ActivationArgs&);
  void (*gelu_tanh)(const ActivationArgs&);
  void (*relu)(const ActivationArgs&);
  void (*embedding)(const EmbeddingArgs&);
  void (*argmax)(const ArgmaxArgs&);
  void (*layer_norm)(const LayerNormArgs&);
  void (*draw)(const DrawArgs&);
  void (*exp_sums)(const ExpSumsArgs&);
  void (*moe)(const MoeArgs&);
  void (*quantize_rows)(const QuantizeArgs&);
  void (*linear_quantized)(const QuantizedLinearArgs&);
  float (*probe_read)(const void* memory, int64_t bytes);
  double (*probe_fma)(int64_t rounds);
  double (*probe_dot)(int64_t rounds, DotKind kind);
};

}  // namespace headrace

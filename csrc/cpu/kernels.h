// The kernels of one instruction set, HEADRACE_ISA.
#pragma once
#include "ops.h"

namespace headrace {
namespace HEADRACE_ISA {

void linear(const LinearArgs&);
void attention(const AttentionArgs&, const AttentionTile* tiles, int64_t num_tiles);
void choose_pages(const AttentionArgs&, const ChosenPages&);
void order_heads(const OrderArgs&);
void packed_attention(const PackedAttentionArgs&, const PackedChunk* chunks, int64_t num_chunks);
void write_kv(const WriteKvArgs&);
void gather_kv(const GatherKvArgs&);
void rms_norm(const NormArgs&);
void head_norm(const HeadNormArgs&);
void rotary(const RotaryArgs&);
void silu_mul(const GatedArgs&);
void gelu_tanh_mul(const GatedArgs&);
void gelu_mul(const GatedArgs&);
void gelu(const ActivationArgs&);
void gelu_tanh(const ActivationArgs&);
void relu(const ActivationArgs&);
void embedding(const EmbeddingArgs&);
void argmax(const ArgmaxArgs&);
void layer_norm(const LayerNormArgs&);
void draw(const DrawArgs&);
void exp_sums(const ExpSumsArgs&);
void moe(const MoeArgs&);
void quantize_rows(const QuantizeArgs&);
void linear_quantized(const QuantizedLinearArgs&);
float probe_read(const void* memory, int64_t bytes);
double probe_fma(int64_t rounds);
double probe_dot(int64_t rounds, DotKind kind);
const KernelTable& table();

}  // namespace HEADRACE_ISA
}  // namespace headrace

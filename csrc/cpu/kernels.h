// The kernels of one instruction set, HEADRACE_ISA.
#pragma once
#include "ops.h"

namespace headrace {
namespace HEADRACE_ISA {

void linear(const LinearArgs&);
void attention(const AttentionArgs&, const AttentionTile* tiles, int64_t num_tiles);
void write_kv(const WriteKvArgs&);
void gather_kv(const GatherKvArgs&);
void rms_norm(const NormArgs&);
void rotary(const RotaryArgs&);
void silu_mul(const GatedArgs&);
void gelu_tanh_mul(const GatedArgs&);
void embedding(const EmbeddingArgs&);
void argmax(const ArgmaxArgs&);
void quantize_rows(const QuantizeArgs&);
void linear_quantized(const QuantizedLinearArgs&);
const KernelTable& table();

}  // namespace HEADRACE_ISA
}  // namespace headrace

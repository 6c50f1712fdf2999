#include "kernels.h"

#define HEADRACE_NAME_(name) #name
#define HEADRACE_NAME(name) HEADRACE_NAME_(name)

namespace headrace {
#if defined(HEADRACE_AMX)

namespace avx512bf16 {
const KernelTable& table();
}

namespace HEADRACE_ISA {

// Tiles multiply in linear layers alone.
const KernelTable& table() {
  static const KernelTable kTable = [] {
    KernelTable table = avx512bf16::table();
    table.isa = HEADRACE_NAME(HEADRACE_ISA);
    table.linear_quantized = linear_quantized;
    return table;
  }();
  return kTable;
}

}  // namespace HEADRACE_ISA

#else

namespace HEADRACE_ISA {

const KernelTable& table() {
  static constexpr KernelTable kTable = {
      HEADRACE_NAME(HEADRACE_ISA), linear, attention, choose_pages, order_heads, packed_attention, write_kv, gather_kv, rms_norm, head_norm, rotary, silu_mul,
      gelu_tanh_mul, gelu_mul, gelu, gelu_tanh, relu, embedding, argmax, layer_norm, draw, exp_sums, moe, quantize_rows, linear_quantized, probe_read,
      probe_fma, probe_dot};
  return kTable;
}

}  // namespace HEADRACE_ISA

#endif
}  // namespace headrace

#include "kernels.h"

#define HEADRACE_NAME_(name) #name
#define HEADRACE_NAME(name) HEADRACE_NAME_(name)

namespace headrace {
namespace HEADRACE_ISA {

const KernelTable& table() {
  static constexpr KernelTable kTable = {
      HEADRACE_NAME(HEADRACE_ISA), linear, attention, write_kv, gather_kv, rms_norm, head_norm, rotary, silu_mul,
      gelu_tanh_mul, embedding, argmax, layer_norm, draw, exp_sums, moe, quantize_rows, linear_quantized, probe_read, probe_fma,
      probe_dot};
  return kTable;
}

}  // namespace HEADRACE_ISA
}  // namespace headrace

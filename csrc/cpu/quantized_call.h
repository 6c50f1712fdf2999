// A linear layer over quantised weights, whole: quantise the rows into memory of the calling thread, then multiply.
#pragma once
#include "dispatch.h"
#include "threads.h"

namespace headrace {

static inline void run_linear_quantized(const float* x, int64_t x_stride, QuantScheme scheme, const void* weight,
                                        const float* column_scales, const float* bias, float* y, int64_t y_stride, int64_t rows,
                                        int64_t n, int64_t k, bool accumulate) {
  const RowFormat format = row_format(scheme);
  const int64_t k_padded = (k + kQuantGroup - 1) / kQuantGroup * kQuantGroup;
  const int64_t num_scales = rows * ((k + format.group - 1) / format.group);
  // k_padded is a multiple of 32, so the scales behind the values are aligned.
  const int64_t value_bytes = rows * k_padded * format.value_bytes;
  char* const values = static_cast<char*>(thread_scratch(static_cast<size_t>(value_bytes + num_scales * 12)));
  float* const scales = reinterpret_cast<float*>(values + value_bytes);
  int32_t* const starts = reinterpret_cast<int32_t*>(scales + num_scales);
  float* const scaled_sums = reinterpret_cast<float*>(starts + num_scales);
  kernels().quantize_rows({x, x_stride, values, scales, starts, scaled_sums, rows, k, format});
  kernels().linear_quantized({{values, scales, starts, scaled_sums}, scheme, static_cast<const uint8_t*>(weight), column_scales, bias, y,
                              y_stride, rows, n, k_padded, accumulate});
}

}  // namespace headrace

// What the calls over all layers of a model share: packed weights, memory for activations, a clock for the parts of a step.
#pragma once
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "dispatch.h"
#include "gguf_blocks.h"
#include "quantized_call.h"
#include "threads.h"

namespace headrace {

// A packed weight as in LinearArgs or QuantizedLinearArgs.
struct LinearWeight {
  const void* weight;
  int format;                  // see float_type
  const float* column_scales;  // null for float weights
  const float* bias;
  int64_t n, k;
};

// x [rows, k] -> y [rows, n], both contiguous.
static inline void run_linear(const LinearWeight& w, const float* x, float* y, int64_t rows) {
  if (w.format >= 0) {
    run_linear_quantized(x, w.k, static_cast<QuantScheme>(w.format), w.weight, w.column_scales, w.bias, y, w.n, rows, w.n, w.k,
                         false);
    return;
  }
  kernels().linear({x, w.k, w.weight, float_type(w.format), w.bias, y, w.n, rows, w.n, w.k, false});
}

// Tells the pool that `w` is what the linear after the next reads.
static inline void expect(const LinearWeight& w) {
  if (w.format == static_cast<int>(QuantScheme::kGguf)) {
    const GgufEntry* const first = static_cast<const GgufEntry*>(w.weight);
    const GgufEntry* const last = first + (w.n - 1) / kPackedColumns;
    expect_reads(first->block(), last->block() - first->block());
    return;
  }
  if (w.format < 0) return expect_reads(w.weight, w.n * w.k * float_bytes(float_type(w.format)));
  const int64_t k_padded = (w.k + kQuantGroup - 1) / kQuantGroup * kQuantGroup;
  expect_reads(w.weight, w.n * packed_block_bytes(static_cast<QuantScheme>(w.format), k_padded) / kPackedColumns);
}

// Throws std::invalid_argument unless every value is in [lowest, limit).
template <class T>
static inline void check_range(const char* what, const T* values, int64_t count, int64_t lowest, int64_t limit) {
  for (int64_t i = 0; i < count; ++i) {
    if (values[i] < lowest || values[i] >= limit) {
      throw std::invalid_argument(std::string(what) + " " + std::to_string(values[i]) + " at index " +
                                  std::to_string(i) + " is not in [" + std::to_string(lowest) + ", " + std::to_string(limit) +
                                  ")");
    }
  }
}

// Memory that is kept from call to call, page-aligned.
class LayerMemory {
 public:
  // The start of `count` floats; what they held is lost when they are more than ever before. Throws std::bad_alloc.
  float* of(int64_t count) {
    if (count > count_) {
      memory_.reset();
      count_ = 0;
      const size_t bytes = (static_cast<size_t>(count) * 4 + 4095) / 4096 * 4096;
      memory_.reset(static_cast<float*>(std::aligned_alloc(4096, bytes)));
      if (memory_ == nullptr) throw std::bad_alloc();
      count_ = count;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  std::unique_ptr<float[], Free> memory_;
  int64_t count_ = 0;
};

// Gives the time since the last lap to a phase. Some 25 ns a lap, eight or so laps a layer: too little to switch off.
template <class Phase, int kNumPhases>
class LapClock {
 public:
  explicit LapClock(std::array<double, kNumPhases>& seconds) : seconds_(seconds), last_(Clock::now()) {}
  void lap(Phase phase) {
    const Clock::time_point now = Clock::now();
    seconds_[static_cast<size_t>(phase)] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  std::array<double, kNumPhases>& seconds_;
  Clock::time_point last_;
};

}  // namespace headrace

// Waiting for another thread without sleeping: for a short while, since it may come at once.
#pragma once
#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace {

constexpr auto kSpin = std::chrono::microseconds(50);

static inline void cpu_relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until ready() or until kSpin has passed, with idle() between the looks; returns what ready() last said.
template <class Ready, class Idle>
static inline bool spin_until(Ready ready, Idle idle) {
  const auto limit = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return true;
      idle();
      cpu_relax();
    }
  } while (std::chrono::steady_clock::now() < limit);
  return ready();
}

}  // namespace headrace

// The tile registers of AMX (Intel SDM volume 2): eight of up to 16 rows of 64 bytes, and the products of tiles that linear layers use.
// A processor with AMX was never at hand, so the kernel tests run these functions as plain C++ (HEADRACE_AMX_MODEL).
#pragma once
#include "simd.h"

namespace headrace {
namespace HEADRACE_ISA {

constexpr int64_t kTileSide = 16;   // rows of a tile, and 32-bit elements of a row
constexpr int64_t kTileBytes = 64;  // of a row

// What ldtilecfg reads: palette 1, and bytes of a row and rows for each tile register.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t num_rows, int64_t bytes) {
    rows[tile] = static_cast<uint8_t>(num_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};

// shape_tiles also clears the tiles; release_tiles ends their use, so that a switch of threads need not save them. load_tile and
// store_tile: rows `stride` bytes apart. dot_tiles_bytes: 32-bit sums C += A (signed) . B (unsigned); dot_tiles_pairs: float sums of
// products of bfloat16. B has four bytes of each column, or two bfloat16, side by side: [k / 4][16][4] or [k / 2][16][2].

#if defined(HEADRACE_AMX_MODEL)

struct TileFile {
  TileShapes shapes;
  uint8_t tile[8][kTileSide][kTileBytes];
};
static thread_local TileFile t_tiles;

static inline void shape_tiles(const TileShapes& shapes) {
  t_tiles.shapes = shapes;
  memset(t_tiles.tile, 0, sizeof t_tiles.tile);
}
static inline void release_tiles() { shape_tiles({}); }
template <int kIndex>
void zero_tile() {
  memset(t_tiles.tile[kIndex], 0, sizeof t_tiles.tile[kIndex]);
}
template <int kIndex>
void load_tile(const void* from, int64_t stride) {
  zero_tile<kIndex>();
  for (int r = 0; r < t_tiles.shapes.rows[kIndex]; ++r) {
    memcpy(t_tiles.tile[kIndex][r], static_cast<const char*>(from) + r * stride, t_tiles.shapes.row_bytes[kIndex]);
  }
}
template <int kIndex>
void store_tile(void* to, int64_t stride) {
  for (int r = 0; r < t_tiles.shapes.rows[kIndex]; ++r) {
    memcpy(static_cast<char*>(to) + r * stride, t_tiles.tile[kIndex][r], t_tiles.shapes.row_bytes[kIndex]);
  }
}

// body(row of C, column of C, number of steps) for each element of C; steps are 32-bit elements of a row of A.
template <int kC, int kA, class Body>
void for_elements(Body body) {
  for (int m = 0; m < t_tiles.shapes.rows[kC]; ++m) {
    for (int n = 0; n < t_tiles.shapes.row_bytes[kC] / 4; ++n) body(m, n, t_tiles.shapes.row_bytes[kA] / 4);
  }
}

template <int kC, int kA, int kB>
void dot_tiles_bytes() {
  for_elements<kC, kA>([&](int m, int n, int steps) {
    int32_t sum;
    memcpy(&sum, &t_tiles.tile[kC][m][4 * n], 4);
    for (int k = 0; k < steps; ++k) {
      for (int i = 0; i < 4; ++i) sum += static_cast<int8_t>(t_tiles.tile[kA][m][4 * k + i]) * t_tiles.tile[kB][k][4 * n + i];
    }
    memcpy(&t_tiles.tile[kC][m][4 * n], &sum, 4);
  });
}

// A denormal becomes a 0 of its sign.
static inline float without_denormal(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x; }

// The even and the odd elements of a row are a chain of fused multiply-adds each; both together are added to the sum.
template <int kC, int kA, int kB>
void dot_tiles_pairs() {
  const auto element = [](const uint8_t* bytes) {
    bf16 bits;
    memcpy(&bits, bytes, 2);
    return without_denormal(bf16_to_float(bits));
  };
  for_elements<kC, kA>([&](int m, int n, int steps) {
    float chain[2] = {}, sum;
    for (int k = 0; k < steps; ++k) {
      for (int i = 0; i < 2; ++i) {
        const float a = element(&t_tiles.tile[kA][m][4 * k + 2 * i]), b = element(&t_tiles.tile[kB][k][4 * n + 2 * i]);
        chain[i] = without_denormal(__builtin_fmaf(a, b, chain[i]));
      }
    }
    memcpy(&sum, &t_tiles.tile[kC][m][4 * n], 4);
    sum = without_denormal(without_denormal(sum) + without_denormal(chain[0] + chain[1]));
    memcpy(&t_tiles.tile[kC][m][4 * n], &sum, 4);
  });
}

#else

// Inline assembly: the intrinsics of GCC 12 do not tell the compiler that they read memory.
HEADRACE_INLINE void shape_tiles(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
HEADRACE_INLINE void release_tiles() { asm volatile("tilerelease"); }
template <int kIndex>
HEADRACE_INLINE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kIndex));
}
template <int kIndex>
HEADRACE_INLINE void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kIndex) : "memory");
}
template <int kIndex>
HEADRACE_INLINE void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kIndex) : "memory");
}
template <int kC, int kA, int kB>
HEADRACE_INLINE void dot_tiles_bytes() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}
template <int kC, int kA, int kB>
HEADRACE_INLINE void dot_tiles_pairs() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

#endif

}  // namespace HEADRACE_ISA
}  // namespace headrace

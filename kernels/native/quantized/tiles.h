// Products of a block by tiles (AMX): one instruction multiplies up to 16 tokens with 16 outputs and 64 inputs.
//
// The integer sums are those of `multiply_block`, and the same code scales them, so the bits are the same.
#pragma once

#if defined(__AMX_INT8__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "panels.h"

namespace penstock {

constexpr int kTileRows = 16;  // tokens

#if defined(__AMX_INT8__)
// Asks the system to let this process use tiles; returns whether it does.
inline bool may_use_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool may = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return may;
}

struct alignas(64) TileShapes {  // as the processor reads them
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// The shapes of this thread's tiles: 0 and 1 are sums, 2 is inputs, 3 and 4 are weights.
class Tile {
 public:
  ~Tile() {
    if (num_tokens_) _tile_release();
  }

  void configure(int num_tokens, int width) {
    if (num_tokens == num_tokens_ && width == width_) return;
    num_tokens_ = num_tokens, width_ = width;
    TileShapes shapes;
    for (int i = 0; i < 3; i++) shapes.rows[i] = uint8_t(num_tokens);
    for (int i = 0; i < 5; i++) shapes.row_bytes[i] = uint16_t(i == 2 ? width : 64);
    shapes.rows[3] = shapes.rows[4] = uint8_t(width / 4);
    _tile_loadconfig(&shapes);
  }

 private:
  int num_tokens_ = 0, width_ = 0;
};

// As `multiply_block`, for `num_tokens`, at most 16.
template <Steps kSteps>
void multiply_by_tiles(Tile& tile, const Panels& its, const InputBlock* x, int num_tokens, Floats* sums) {
  static_assert(kPanels == 2);
  int width = 64;
  while (its.run % width || its.num_inputs % width) width /= 2;
  tile.configure(num_tokens, width);
  for (int k = 0, j = 0, r = 0; k < its.num_inputs; k += its.group, j++) {
    const int end = std::min(k + its.group, its.num_inputs);
    Floats of_group[kPanels][kTileRows] = {};
    for (int begin = k; begin < end; begin += its.run, r++) {
      alignas(64) Ints of_run[kPanels][kTileRows];
      asm volatile("" : : : "memory");  // compilers do not know that tiles are loaded from memory
      _tile_zero(0);
      _tile_zero(1);
      for (int i = begin; i < std::min(begin + its.run, end); i += width) {
        _tile_loadd(2, x->codes + i, sizeof(InputBlock));
        _tile_loadd(3, its.values + i * kLanes, 64);
        _tile_loadd(4, its.values + its.panel + i * kLanes, 64);
        _tile_dpbsud(0, 2, 3);
        _tile_dpbsud(1, 2, 4);
        for (int ahead = i / 4; ahead < (i + width) / 4; ahead++)
          for (int p = 0; p < kPanels; p++) __builtin_prefetch(its.ahead + p * its.ahead_panel + ahead * its.ahead_step);
      }
      _tile_stored(0, of_run[0], 64);
      _tile_stored(1, of_run[1], 64);
      for (int p = 0; p < kPanels; p++)
        for (int t = 0; t < num_tokens; t++) {
          Ints offset = Ints{} + x[t].offsets[r];
          if (its.has_zeros) offset *= its.scales[p].zeros[j];
          add_run<kSteps>(of_run[p][t] + offset, x[t], begin, of_group[p][t], sums + p * num_tokens + t);
        }
    }
    if constexpr (kSteps == kUnscaled) continue;
    for (int p = 0; p < kPanels; p++)
      for (int t = 0; t < num_tokens; t++) add_group(its, of_group[p][t], x[t], p, j, sums + p * num_tokens + t);
  }
}

#else
struct Tile {};

constexpr bool may_use_tiles() { return false; }

template <Steps kSteps>
void multiply_by_tiles(Tile&, const Panels&, const InputBlock*, int, Floats*) {}
#endif

}  // namespace penstock

// Products of a block by tiles (AMX): one instruction multiplies up to 16 tokens with 16 outputs and 64 inputs.
//
// The integer sums are those of `multiply_block`, and the same code scales them, so the bits are the same.
#pragma once

#include "../machine/tiles.h"
#include "panels.h"

namespace penstock {

#if defined(__AMX_INT8__)
// The shapes for this many tokens and bytes of inputs: 0 and 1 are sums, 2 is inputs, 3 and 4 are weights.
inline TileShapes shapes_of_bytes(int num_tokens, int width) {
  TileShapes shapes;
  for (int tile : {0, 1}) shapes.set(tile, num_tokens, 64);
  shapes.set(2, num_tokens, width);
  for (int tile : {3, 4}) shapes.set(tile, width / 4, 64);
  return shapes;
}

// As `multiply_block`, for `num_tokens`, at most 16.
template <Steps kSteps>
void multiply_by_tiles(const Panels& panels, const InputBlock* x, int num_tokens, Floats* sums) {
  const Panels its = panels;  // no store can change this copy
  static_assert(kPanels == 2);
  int width = 64;
  while (its.run % width || its.num_inputs % width) width /= 2;
  configure_tiles(shapes_of_bytes(num_tokens, width));
  for (int k = 0, j = 0, r = 0; k < its.num_inputs; k += its.group, j++) {
    const int end = std::min(k + its.group, its.num_inputs);
    PartFloats of_group[kPanels][kTileRows][kParts] = {};
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
          const PartInts sum[kParts] = {of_run[p][t] + offset};
          add_run<kSteps>(sum, x[t], begin, of_group[p][t], sums + p * num_tokens + t);
        }
    }
    if constexpr (kSteps == kUnscaled) continue;
    for (int p = 0; p < kPanels; p++)
      for (int t = 0; t < num_tokens; t++) add_group(its, of_group[p][t], x[t], p, j, sums + p * num_tokens + t);
  }
}

#else
template <Steps kSteps>
void multiply_by_tiles(const Panels&, const InputBlock*, int, Floats*) {}
#endif

}  // namespace penstock

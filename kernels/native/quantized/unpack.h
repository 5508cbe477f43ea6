// Unpacks quantized weights: each number as `dequantized` computes it.
#pragma once

#include "../linear/pack.h"
#include "widening.h"

namespace penstock {

// take(k, count, Floats[count]) gets the weights of one panel's inputs [k, k + count), in the order of packing.
template <typename Take>
void widen_panel(const Linear& layer, int panel, Take take) {
  constexpr int kAtOnce = 32;
  const Quantized& its = *layer.quantized;
  const int num_inputs = round_up(layer.num_inputs, kInputsPadding);
  const uint8_t* block_at = static_cast<const uint8_t*>(layer.weight) + panel * panel_bytes(its, layer.num_inputs);
  Scales scales;
  Floats widened[kAtOnce];
  for (int begin = 0; begin < num_inputs; begin += its.block) {
    const int block = std::min(its.block, num_inputs - begin);
    scales_of_block(its, block_at, panel, block, scales);
    for (int k = 0; k < block; k += kAtOnce) {
      widen(its, scales, block_at + header_bytes(its, block), {k, k + kAtOnce, block}, reinterpret_cast<float*>(widened));
      take(begin + k, std::min(kAtOnce, layer.num_inputs - begin - k), widened);
    }
    block_at += block_bytes(its, block);
  }
}

// Row `id`, [K].
inline void unpack_quantized_row(const Linear& layer, int id, float* out) {
  const int32_t* order = layer.quantized->order;
  widen_panel(layer, id / kLanes, [&](int k, int count, const Floats* weights) {
    for (int i = 0; i < count; i++) out[order ? order[k + i] : k + i] = weights[i][id % kLanes];
  });
}

// The whole matrix [N, K]; N and the order of the outputs are those that `pack_quantized` was given.
template <typename T>
void unpack_quantized(const Linear& layer, int num_outputs, bool interleaved, int num_packed, T* out) {
  const int32_t* order = layer.quantized->order;
  const int num_inputs = layer.num_inputs;
  team->run(kLargeWork, [&] {
    team->each(num_packed / kLanes, 1, [&](int panel) {
      widen_panel(layer, panel, [&](int k, int count, Floats* weights) {
        for (int first = 0; first < count; first += kLanes) {
          Floats columns[kLanes];
          std::copy_n(weights + first, kLanes, columns);
          transpose(columns);
          for (int lane = 0; lane < kLanes; lane++) {
            const int row = source_row(panel * kLanes + lane, num_outputs, interleaved);
            if (row < 0) continue;
            T* to = out + size_t(row) * num_inputs;
            for (int i = 0; i < std::min(kLanes, count - first); i++) {
              const int at = k + first + i;
              narrow(columns[lane][i], to + (order ? order[at] : at));
            }
          }
        }
      });
    });
  });
}

}  // namespace penstock

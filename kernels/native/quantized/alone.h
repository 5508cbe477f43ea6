// Products of quantized weights with a single token. Their speed is limited by memory.
//
// The bits are those of `multiply_block`: the same integer sums, scaled and added in the same order. All panels of a
// unit are read side by side, because more streams get more of the memory's bandwidth. Codes are used once, so codes of
// 4 bits are unpacked in registers.
#pragma once

#include "inputs.h"
#include "integers.h"
#include "layout.h"
#include "panels.h"

namespace penstock {

constexpr int kPanelsAlone = kUnitGroups;

enum Source { kBytes, kNibbles };  // how the values of a block are stored; nibbles as in their plane

// The sums of a run.
template <Source kSource>
inline void sum_run_alone(const Panels& its, const InputBlock& x, int j, int r, int k, int end,
                          PartInts (&sums)[kPanelsAlone][kParts]) {
  constexpr int kVector = kSource == kNibbles ? 8 : 4;  // inputs in 64 bytes
#pragma GCC unroll 8
  for (int p = 0; p < kPanelsAlone; p++) {
#pragma GCC unroll 4
    for (int i = 0; i < kParts; i++) {
      sums[p][i] = PartInts{} + x.offsets[r];
      if (its.has_zeros) sums[p][i] *= part_of(its.scales[p].zeros[j], i * kPart);
    }
  }
  const uint8_t *values = its.values + size_t(k) * 64 / kVector, *ahead = its.ahead + k / 4 * its.ahead_step;
  for (; k < end; k += kVector, values += 64, ahead += kVector / 4 * its.ahead_step) {
    const PartWords first = four_at(x.codes + k);
    [[maybe_unused]] const PartWords second = kSource == kNibbles ? four_at(x.codes + k + 4) : first;
#pragma GCC unroll 8
    for (int p = 0; p < kPanelsAlone; p++) {
      __builtin_prefetch(ahead + p * its.ahead_panel);
#pragma GCC unroll 4
      for (int i = 0; i < kParts; i++) {
        const PartWords vector = load<PartWords>(values + p * its.panel + i * sizeof(PartWords));
        if constexpr (kSource == kNibbles) {
          sums[p][i] = plus_dots(sums[p][i], vector & 0x0f0f0f0fu, first);
          sums[p][i] = plus_dots(sums[p][i], vector >> 4 & 0x0f0f0f0fu, second);
        } else {
          sums[p][i] = plus_dots(sums[p][i], vector, first);
        }
      }
    }
  }
}

// sums [kPanelsAlone] += the products of a block.
template <Steps kSteps, Source kSource>
void multiply_block_alone(const Panels& panels, const InputBlock& x, Floats* sums) {
  const Panels its = panels;  // no store can change this copy
  for (int k = 0, j = 0, r = 0; k < its.num_inputs; k += its.group, j++) {
    const int end = std::min(k + its.group, its.num_inputs);
    PartFloats of_group[kPanelsAlone][kParts] = {};
    for (int begin = k; begin < end; begin += its.run, r++) {
      PartInts of_run[kPanelsAlone][kParts];
      sum_run_alone<kSource>(its, x, j, r, begin, std::min(begin + its.run, end), of_run);
#pragma GCC unroll 8
      for (int p = 0; p < kPanelsAlone; p++) add_run<kSteps>(of_run[p], x, begin, of_group[p], sums + p);
    }
    if constexpr (kSteps == kUnscaled) continue;
#pragma GCC unroll 8
    for (int p = 0; p < kPanelsAlone; p++) add_group(its, of_group[p], x, p, j, sums + p);
  }
}

typedef void (*MultiplyBlockAlone)(const Panels&, const InputBlock&, Floats*);

template <Source kSource>
constexpr std::array<MultiplyBlockAlone, 3> kAloneBySteps = {multiply_block_alone<kUnscaled, kSource>,
                                                             multiply_block_alone<kOfTokens, kSource>,
                                                             multiply_block_alone<kOfGroups, kSource>};

// sums [kPanelsAlone] of a unit, whose panels are `size` apart; x is the token's blocks, `stride` apart.
inline void sums_alone(const Linear& layer, const uint8_t* unit, size_t size, const InputBlock* x, size_t stride,
                       Steps steps, Floats* sums) {
  const Quantized& its = *layer.quantized;
  const bool as_nibbles = its.bits == 4 && !its.has_table;
  const MultiplyBlockAlone multiply = as_nibbles ? kAloneBySteps<kNibbles>[steps] : kAloneBySteps<kBytes>[steps];
  const int padded = round_up(layer.num_inputs, kInputsPadding);
  alignas(64) uint8_t unpacked[kPanelsAlone * kMostBlock * kLanes];
  Scales scales[kPanelsAlone];
  // Scaling many runs of whole bytes takes so long that fewer bytes need to be in flight.
  const size_t ahead = steps == kOfGroups && its.bits == 8 ? kAheadAlone / 2 : kAheadAlone;
  const uint8_t* block = unit;
  for (int k = 0; k < padded; k += its.block, x += stride) {
    const int num_inputs = std::min(its.block, padded - k), bytes = block_bytes(its, num_inputs);
    Panels panels = panels_of(layer, num_inputs);
    for (int p = 0; p < kPanelsAlone; p++) unpack_scales(its, block + p * size, num_inputs, scales[p]);
    if (as_nibbles || its.bits == 8 && !its.has_table) {
      panels.values = codes_of(its, block, num_inputs);
      panels.panel = size;
    } else {
      for (int p = 0; p < kPanelsAlone; p++)
        unpacked_codes(its, block + p * size, num_inputs, unpacked + p * kMostBlock * kLanes);
      panels.values = unpacked;
      panels.panel = kMostBlock * kLanes;
    }
    panels.scales = scales;
    panels.set_ahead(unit, size, block - unit + ahead, kPanelsAlone, bytes);
    block += bytes;
    multiply(panels, *x, sums);
  }
}

}  // namespace penstock

// Products of quantized weights with inputs that are rounded to int8.
//
// A run is a range of inputs that share a scale and whose weights share a scale. Its products are summed as integers.
// Sums of runs are scaled and added as floats, in the order of the inputs. If a token and an output have one scale
// each, everything is summed as integers, and scaled once. A block of weights is unpacked to bytes in the L1 cache, and
// all tiles of tokens go through it. The order of a token's sums does not depend on other tokens.
#pragma once

#include "../linear/linear.h"
#include "alone.h"
#include "inputs.h"
#include "integers.h"
#include "layout.h"
#include "panels.h"
#include "tiles.h"

namespace penstock {

// The sums of a run for some tokens and panels. Long runs also prefetch the inputs of as many further tokens.
template <int kTokens, bool kIsLong>
inline void sum_run(const Panels& its, const InputBlock* x, int j, int r, int k, int end,
                    PartInts (&sums)[kPanels][kTokens][kParts]) {
#pragma GCC unroll 8
  for (int p = 0; p < kPanels; p++)
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; t++)
#pragma GCC unroll 4
      for (int i = 0; i < kParts; i++) sums[p][t][i] = PartInts{} + x[t].offsets[r];
  if (its.has_zeros)
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; p++)
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; t++)
#pragma GCC unroll 4
        for (int i = 0; i < kParts; i++) sums[p][t][i] *= part_of(its.scales[p].zeros[j], i * kPart);
  const uint8_t *values = its.values + size_t(k) * kLanes, *ahead = its.ahead + k / 4 * its.ahead_step;
  constexpr size_t kOfTile = kTokens * sizeof(InputBlock) / (kMostBlock / 4);
  const char* coming = reinterpret_cast<const char*>(x + kTokens) + k / 4 * kOfTile;
  for (; k < end; k += 4, values += 4 * kLanes, ahead += its.ahead_step, coming += kOfTile) {
    if constexpr (kIsLong) __builtin_prefetch(coming);
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; p++) __builtin_prefetch(ahead + p * its.ahead_panel);
#pragma GCC unroll 4
    for (int i = 0; i < kParts; i++) {
      PartWords of_panels[kPanels];
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; p++) of_panels[p] = load<PartWords>(values + p * its.panel + i * sizeof(PartWords));
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; t++) {
        const PartWords inputs = four_at(x[t].codes + k);
#pragma GCC unroll 8
        for (int p = 0; p < kPanels; p++) sums[p][t][i] = plus_dots(sums[p][t][i], of_panels[p], inputs);
      }
    }
  }
}

// sums [kPanels][kTokens] += the products of a block; x has each token's inputs to the block.
template <int kTokens, Steps kSteps>
void multiply_block(const Panels& panels, const InputBlock* x, Floats* sums) {
  const Panels its = panels;  // no store can change this copy
  for (int k = 0, j = 0, r = 0; k < its.num_inputs; k += its.group, j++) {
    const int end = std::min(k + its.group, its.num_inputs);
    PartFloats of_group[kPanels][kTokens][kParts] = {};
    for (int begin = k; begin < end; begin += its.run, r++) {
      PartInts of_run[kPanels][kTokens][kParts];
      sum_run<kTokens, kSteps != kOfGroups>(its, x, j, r, begin, std::min(begin + its.run, end), of_run);
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; p++)
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; t++)
          add_run<kSteps>(of_run[p][t], x[t], begin, of_group[p][t], sums + p * kTokens + t);
    }
    if constexpr (kSteps == kUnscaled) continue;
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; p++)
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; t++) add_group(its, of_group[p][t], x[t], p, j, sums + p * kTokens + t);
  }
}

typedef void (*MultiplyBlock)(const Panels&, const InputBlock*, Floats*);

// By the number of tokens in a tile.
template <Steps kSteps, size_t... kIndex>
constexpr std::array<MultiplyBlock, sizeof...(kIndex)> for_quantized_tiles(std::index_sequence<kIndex...>) {
  return {multiply_block<kIndex + 1, kSteps>...};
}

// Tokens [first, end) of a unit; `inputs` are [blocks][tokens].
inline void unit_of_quantized(const Linear& layer, int unit, const InputBlock* inputs, int num_tokens, int first,
                              int end, int share, const Finisher& finisher) {
  static constexpr auto kSizes = std::make_index_sequence<kQuantizedTile>();
  static constexpr std::array kMultiply = {for_quantized_tiles<kUnscaled>(kSizes), for_quantized_tiles<kOfTokens>(kSizes),
                                           for_quantized_tiles<kOfGroups>(kSizes)};
  const Quantized& its = *layer.quantized;
  static constexpr std::array kByTiles = {multiply_by_tiles<kUnscaled>, multiply_by_tiles<kOfTokens>,
                                          multiply_by_tiles<kOfGroups>};
  const bool is_by_tiles = end - first > kQuantizedTile && may_use_tiles();
  const Tiles tiles(end - first, is_by_tiles ? kTileRows : kQuantizedTile);
  const int padded = round_up(layer.num_inputs, kInputsPadding);
  const size_t size = panel_bytes(its, layer.num_inputs);
  const uint8_t* panel = static_cast<const uint8_t*>(layer.weight) + unit * kUnitGroups * size;
  alignas(64) uint8_t unpacked[kPanels * kMostBlock * kLanes];
  Scales scales[kPanels];
  Floats sums[kPanels * kMostTokensAtOnce];  // [tiles][panels][tokens of a tile]
  const bool is_of_token = has_scale_for_token(its, layer.num_inputs);
  const Steps steps = !is_of_token ? kOfGroups : its.scale_type == kNoScales ? kUnscaled : kOfTokens;
  auto finish = [&](int panel, int token, int num, Floats* of_panel) {
    const int output = unit * kUnit + panel * kLanes;
    // No branches, so that multiplication and addition become one instruction wherever this is inlined.
    const Floats scale = its.output_scales ? load16(its.output_scales + output) : splat(1.0f);
    const Floats bias = layer.bias ? load16(layer.bias + output) : Floats{};
    for (int t = 0; t < num; t++) {
      Floats sum = steps == kUnscaled ? __builtin_convertvector(load<Ints>(of_panel + t), Floats) : of_panel[t];
      if (is_of_token) sum *= splat(inputs[token + t].scales[0]);
      of_panel[t] = sum * scale + bias;
    }
    finisher.take(finisher.what, share, token, num, output, of_panel);
  };
  if (end - first == 1) {
    std::fill_n(sums, kPanelsAlone, Floats{});
    sums_alone(layer, panel, size, inputs + first, num_tokens, steps, sums);
    for (int p = 0; p < kPanelsAlone; p++) finish(p, first, 1, sums + p);
    return;
  }
  for (int p = 0; p < kUnitGroups; p += kPanels, panel += kPanels * size) {
    std::fill_n(sums, kPanels * (end - first), Floats{});
    const uint8_t* block = panel;
    const InputBlock* x = inputs + first;
    for (int k = 0; k < padded; k += its.block, x += num_tokens) {
      const int num_inputs = std::min(its.block, padded - k), bytes = block_bytes(its, num_inputs);
      Panels panels = panels_of(layer, num_inputs);
      for (int i = 0; i < kPanels; i++) {
        unpack_scales(its, block + i * size, num_inputs, scales[i]);
        const uint8_t* values = unpacked_codes(its, block + i * size, num_inputs, unpacked + i * kMostBlock * kLanes);
        if (i == 0) panels.values = values;
      }
      panels.panel = panels.values == unpacked ? kMostBlock * kLanes : size;
      panels.scales = scales;
      block += bytes;
      // The prefetching is divided among tiles, so that it goes on while they compute.
      const int sharing = std::min(tiles.count, kSharePrefetch);
      panels.set_ahead(panel, size, block - panel + kBlockAhead, kPanels, bytes / sharing);
      for (int i = 0; i < tiles.count; i++) {
        const int begin = tiles.begin(i), num = tiles.begin(i + 1) - begin;
        if (is_by_tiles)
          kByTiles[steps](panels, x + begin, num, sums + kPanels * begin);
        else
          kMultiply[steps][num - 1](panels, x + begin, sums + kPanels * begin);
        panels.ahead += bytes / sharing;
        if (i + 1 == sharing) panels.ahead_step = 0;
      }
    }
    for (int i = 0; i < tiles.count; i++) {
      const int begin = tiles.begin(i), num = tiles.begin(i + 1) - begin;
      for (int j = 0; j < kPanels; j++) finish(p + j, first + begin, num, sums + kPanels * begin + j * num);
    }
  }
}

// As `linears_of` for other weights.
inline void quantized_linears(Team& team, const Share* shares, int num_shares, const Finder& row, float* packed,
                              const Finisher& finisher) {
  const Linear& like = *shares[0].layer;
  const int blocks = num_blocks(like);
  InputBlock* const inputs = reinterpret_cast<InputBlock*>(packed);
  const Numbering tokens(shares, num_shares, [](const Share& share) { return share.count; });
  team.each(tokens.count(), std::max(1, 4096 / like.num_inputs), [&](int item) {
    const int s = tokens.share_of(item), i = item - tokens.begin(s);
    InputBlock* of_share = inputs + size_t(shares[s].first) * blocks;
    round_token(*shares[s].layer, row(s, i), of_share + i, shares[s].count);
  });
  const int num_units = (like.num_outputs + kUnit - 1) / kUnit;
  // This many tokens stay in the core's own cache while weights stream by.
  const int fitting = int((3 << 18) / (sizeof(InputBlock) * blocks)) / kQuantizedTile * kQuantizedTile;
  const int piece = std::clamp(fitting, 16 * kQuantizedTile, kMostTokensAtOnce);
  auto num_pieces = [&](const Share& share) { return (share.count + piece - 1) / piece; };
  const Numbering units(shares, num_shares, [&](const Share& share) { return num_units * num_pieces(share); });
  // At the end of a unit, the next unit is prefetched.
  const int together = std::clamp(units.count() / (8 * team.size()), 1, 8);
  team.each(units.count(), together, [&](int item) {
    const int s = units.share_of(item), i = item - units.begin(s);
    const Share& share = shares[s];
    const int first = i / num_units * piece, end = std::min(first + piece, share.count);
    const InputBlock* of_share = inputs + size_t(share.first) * blocks;
    unit_of_quantized(*share.layer, i % num_units, of_share, share.count, first, end, s, finisher);
  });
}

}  // namespace penstock

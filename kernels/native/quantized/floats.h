// Products of floats with quantized weights. Stretches of the weights are widened into the L1 cache just before the
// product, which is that of linear.h.
//
// kQuantizedFp32: each weight is widened to the number that it stands for, so a sum has the same bits as with a stored
// float.
//
// kQuantizedBf16, for tables of values: the value of a weight's code and each input are rounded to bf16, and multiplied
// in pairs. A stretch has one scale for each output and one for each token, and its sum is multiplied by them in fp32.
#pragma once

#include <vector>

#include "../linear/linear.h"
#include "widening.h"

namespace penstock {

constexpr int kMostWidened = 64;  // floats or pairs at a time, for 16 outputs; those of four panels fit in the L1 cache

// Inputs of a product as its weights require them: in the weights' order, rounded, padded with zeros.
struct InputsOf {
  const Quantized& its;
  int num_inputs;

  int num_groups() const { return (num_inputs + its.input_group - 1) / its.input_group; }

  // Those from k on, zero at `end` and beyond.
  Floats at(const float* row, int k, int end) const {
    if (!its.order) return load_some(row + k, std::max(0, end - k));
    Floats found = {};
    for (int i = 0; i < std::min(kLanes, end - k); i++) found[i] = row[its.order[k + i]];
    return found;
  }

  // The scale of each group, by which its inputs are divided before they are rounded.
  void find_scales(const float* row, float* scales) const {
    for (int j = 0; j < num_groups(); j++) {
      Floats most = {};
      const int end = std::min(num_inputs, (j + 1) * its.input_group);
      for (int k = j * its.input_group; k < end; k += kLanes)
        most = larger(most, as_floats(Words(at(row, k, end)) & 0x7fffffffu));
      const float scale = its.input_scale ? its.input_scale : max_of(most)[0] / kMostE4m3;
      scales[j] = scale == 0.0f ? 1.0f : scale;
    }
  }

  // Inputs [k, k + count) of a tile, for products with floats or pairs; `scales` are each token's, or null.
  template <bool kPairs>
  void pack(const float* const* rows, const float* scales, int num_tokens, int k, int count, float* to) const {
    alignas(64) float taken[kMostTokens][kMostBlock];
    const float* taken_rows[kMostTokens];
    for (int t = 0; t < num_tokens; t++) {
      taken_rows[t] = taken[t];
      Floats last;
      for (int i = 0; i < count; i += kLanes) {
        Floats x = at(rows[t], k + i, num_inputs);
        if (scales) {
          const int group = std::min((k + i) / its.input_group, num_groups() - 1);
          const float scale = scales[t * num_groups() + group];
          float rounded[kLanes];
          store(rounded, x / scale);
          for (int lane = 0; lane < kLanes; lane += kPart)
            store(rounded + lane, rounded_to_e4m3(load<PartFloats>(rounded + lane)));
          x = kPairs ? load16(rounded) : load16(rounded) * scale;
        }
        if (!kPairs)
          store(taken[t] + i, x);
        else if (i / kLanes % 2)
          store(taken[t] + (i - kLanes) / 2, pairs_of(last, x));
        last = x;
      }
    }
    pack_tile(taken_rows, num_tokens, 0, kPairs ? count / 2 : count, to);
  }
};

template <typename Weight, bool kAlone, size_t... kIndex>
constexpr std::array<Multiply<Weight, Weight>, kMostTokens> for_widened(std::index_sequence<kIndex...>) {
  return {multiply<kIndex + 1, kAlone ? groups_at_a_time(kIndex + 1) : 2, 0, Weight, Weight>...};
}

// Where a stretch from input k of a block ends. It is short; for pairs, its scales are the same throughout.
template <bool kPairs>
int end_of_stretch(const Quantized& its, int block_begin, int k, int block) {
  if (!kPairs) return std::min(block, k + kMostWidened);
  const int of_weights = (k / its.group + 1) * its.group;
  const int of_inputs = ((block_begin + k) / its.input_group + 1) * its.input_group - block_begin;
  return std::min({block, k + 2 * kMostWidened, of_weights, of_inputs});
}

// Sums of a stretch [panels][kTokens] for few tokens: codes become pairs in registers. Panels are `panel` bytes apart.
template <int kBits, int kTokens, int kPanels>
void multiply_codes(const Quantized& its, const uint8_t* codes, size_t panel, Stretch stretch, const float* x,
                    Floats* sums) {
  const PairsOfTable table(its);
  PartFloats kept[kPanels][kTokens][kParts] = {};
  for (int k = stretch.first; k < stretch.end; k += 4, x += 2 * kTokens) {
    Words pairs[kPanels][2];
    for (int p = 0; p < kPanels; p++) {
      __builtin_prefetch(codes + p * panel + k / 4 * 8 * kBits + kBytesAhead);
      table.widen<kBits>(codes_at<kBits>(codes + p * panel, stretch.block / 4, k / 4), pairs[p]);
    }
    for (int j = 0; j < 2; j++)
      for (int t = 0; t < kTokens; t++) {
        const PartWords value = input_at(x + j * kTokens + t, PartWords());
        for (int p = 0; p < kPanels; p++)
          for (int i = 0; i < kParts; i++)
            kept[p][t][i] = add_products(kept[p][t][i], part_of(pairs[p][j], i * kPart), value);
      }
  }
  for (int p = 0; p < kPanels; p++)
    for (int t = 0; t < kTokens; t++) std::memcpy(sums + p * kTokens + t, kept[p][t], sizeof(Floats));
}

constexpr int kFewForPairs = std::min(4, kMostTokens);  // tokens whose sums fit in registers beside a table

typedef void (*MultiplyCodes)(const Quantized&, const uint8_t*, size_t, Stretch, const float*, Floats*);
template <int kBits, size_t... kIndex>
constexpr std::array<MultiplyCodes, kFewForPairs> for_few_tokens(std::index_sequence<kIndex...>) {
  return {multiply_codes<kBits, kIndex + 1, groups_at_a_time(kIndex + 1)>...};
}

// As unit_of_linear. `scales`: of the share's inputs, [tokens][groups], or null.
template <bool kPairs>
void unit_of_floats(const Linear& layer, int unit, const float* packed, const float* scales, const Tiles& tiles,
                    int first, int end, int share, const Finisher& finisher) {
  using Weight = std::conditional_t<kPairs, Pair, float>;
  static constexpr auto kSizes = std::make_index_sequence<kMostTokens>();
  static constexpr auto kMultiplies = for_widened<Weight, false>(kSizes), kAlone = for_widened<Weight, true>(kSizes);
  constexpr int kStep = kPairs ? 2 : 1;  // inputs in a word
  const Quantized& its = *layer.quantized;
  const InputsOf inputs{its, layer.num_inputs};
  const int num_inputs = round_up(layer.num_inputs, kInputsPadding), begin = tiles.begin(first);
  const size_t panel_size = panel_bytes(its, layer.num_inputs);
  const int num_groups = tiles.count == 1 ? groups_at_a_time(tiles.num_tokens) : 2;
  const auto& multiplies = tiles.count == 1 ? kAlone : kMultiplies;
  static constexpr auto kFew = std::make_index_sequence<kFewForPairs>();
  static constexpr auto kOf4Bits = for_few_tokens<4>(kFew), kOf8Bits = for_few_tokens<8>(kFew);
  const bool are_few = kPairs && tiles.num_tokens <= kFewForPairs;
  const int num_sums = num_groups * (tiles.begin(end) - begin);
  Floats sums[2 * kMostTiles * kMostTokens];                 // [tiles][groups][tokens of a tile]
  Floats of_stretch[kPairs ? 2 * kMostTiles * kMostTokens : 1];  // the same, not scaled yet
  Floats widened[kUnitGroups * kMostWidened];
  Scales of_block[kUnitGroups];
  for (int g = 0; g < kUnitGroups; g += num_groups) {
    const int panel = unit * kUnitGroups + g;
    const uint8_t* block_at = static_cast<const uint8_t*>(layer.weight) + panel * panel_size;
    std::fill_n(sums, num_sums, Floats{});
    for (int k = 0; k < num_inputs; k += its.block) {
      const int block = std::min(its.block, num_inputs - k), header = header_bytes(its, block);
      for (int j = 0; j < num_groups; j++)
        scales_of_block(its, block_at + j * panel_size, panel + j, block, of_block[j]);
      for (int at = 0, next; at < block; at = next) {
        next = end_of_stretch<kPairs>(its, k, at, block);
        const int size = (next - at) / kStep, group = its.group ? at / its.group : 0;
        for (int j = 0; !are_few && j < num_groups; j++) {
          const uint8_t* codes = block_at + j * panel_size + header;
          if constexpr (kPairs)
            widen_to_pairs(its, codes, {at, next, block}, reinterpret_cast<Words*>(widened + j * size));
          else
            widen(its, of_block[j], codes, {at, next, block}, reinterpret_cast<float*>(widened + j * size));
        }
        if (kPairs && !are_few) std::fill_n(of_stretch, num_sums, Floats{});
        for (int i = first; i < end; i++) {
          const int from = tiles.begin(i), count = tiles.begin(i + 1) - from, done = num_groups * (from - begin);
          const float* x = packed + tile_at(tiles, i, k / kStep, block / kStep) + size_t(at) / kStep * count;
          const Weight* weights = reinterpret_cast<const Weight*>(widened);
          if (are_few)
            (its.bits == 8 ? kOf8Bits : kOf4Bits)[count - 1](its, block_at + header, panel_size, {at, next, block}, x,
                                                             of_stretch);
          else
            multiplies[count - 1](weights, size_t(size) * kLanes, weights, 0, size, x, (kPairs ? of_stretch : sums) + done);
          if constexpr (kPairs)
            for (int t = 0; t < count; t++) {
              const int number = (from + t) * inputs.num_groups() + (k + at) / its.input_group;
              const Floats by = splat(scales ? scales[number] : 1.0f);
              for (int j = 0; j < num_groups; j++)
                sums[done + j * count + t] += of_stretch[done + j * count + t] * (of_block[j].scales[group] * by);
            }
        }
      }
      block_at += block_bytes(its, block);
    }
    for (int i = first; i < end; i++) {
      const int from = tiles.begin(i), count = tiles.begin(i + 1) - from;
      for (int j = 0; j < num_groups; j++) {
        const int output = (panel + j) * kLanes;
        Floats* of_group = sums + num_groups * (from - begin) + j * count;
        if (layer.bias)
          for (int t = 0; t < count; t++) of_group[t] += load16(layer.bias + output);
        finisher.take(finisher.what, share, from, count, output, of_group);
      }
    }
  }
}

// As linears_of.
template <bool kPairs>
void linears_of_floats(Team& team, const Share* shares, int num_shares, const Finder& row, float* packed,
                       const Finisher& finisher) {
  const Linear& like = *shares[0].layer;
  const Quantized& its = *like.quantized;
  const InputsOf inputs{its, like.num_inputs};
  const int num_inputs = round_up(like.num_inputs, kInputsPadding), step = kPairs ? 2 : 1;
  const int num_blocks = (num_inputs + its.block - 1) / its.block;
  const int num_tokens = shares[num_shares - 1].first + shares[num_shares - 1].count;
  const int at_a_time = num_tokens == 1 ? num_blocks : num_shares == 1 ? 4 : 32;
  std::vector<float> scales(its.rounds_to_e4m3 ? size_t(num_tokens) * inputs.num_groups() : 0);
  auto scales_of = [&](int token) { return scales.empty() ? nullptr : scales.data() + size_t(token) * inputs.num_groups(); };
  if (its.rounds_to_e4m3) {
    const Numbering tokens(shares, num_shares, [](const Share& share) { return share.count; });
    team.each(tokens.count(), at_a_time, [&](int item) {
      const int s = tokens.share_of(item), t = item - tokens.begin(s);
      inputs.find_scales(row(s, t), scales_of(shares[s].first + t));
    });
  }
  const Numbering packing(shares, num_shares, [&](const Share& share) { return Tiles(share.count).count * num_blocks; });
  team.each(packing.count(), at_a_time, [&](int item) {
    const int s = packing.share_of(item), i = item - packing.begin(s);
    const Tiles tiles(shares[s].count);
    const int tile = i / num_blocks, begin = tiles.begin(tile), k = i % num_blocks * its.block;
    const int block = std::min(its.block, num_inputs - k), count = tiles.begin(tile + 1) - begin;
    const float* rows[kMostTokens];
    for (int t = 0; t < count; t++) rows[t] = row(s, begin + t);
    float* to = packed + size_t(shares[s].first) * (num_inputs / step) + tile_at(tiles, tile, k / step, block / step);
    inputs.template pack<kPairs>(rows, scales_of(shares[s].first + begin), count, k, block, to);
  });
  const int num_units = (like.num_outputs + kUnit - 1) / kUnit;
  const int piece = std::clamp((3 << 18) / (4 * num_inputs / step * kMostTokens), 16, kMostTiles);
  auto num_pieces = [&](const Share& share) { return (Tiles(share.count).count + piece - 1) / piece; };
  const Numbering units(shares, num_shares, [&](const Share& share) { return num_units * num_pieces(share); });
  team.each(units.count(), 1, [&](int item) {
    const int s = units.share_of(item), i = item - units.begin(s);
    const Share& share = shares[s];
    const Tiles tiles(share.count);
    const int first = i / num_units * piece, end = std::min(first + piece, tiles.count);
    unit_of_floats<kPairs>(*share.layer, i % num_units, packed + size_t(share.first) * (num_inputs / step),
                           scales_of(share.first), tiles, first, end, s, finisher);
  });
}

}  // namespace penstock

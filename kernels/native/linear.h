// Matrix products with packed weights.
//
// A weight [N, K] is packed in groups of 16 outputs: bf16 as [N / 16][K / 2][16][2], fp32 as [N / 16][K][16], padded
// with zeros. A group streams through memory in order, and each output has one accumulator that takes its products in
// the order of k. So a result never depends on how many tokens are computed beside it: a token's bits are the same
// alone, in any batch and in any chunk of a prompt.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "team.h"
#include "vectors.h"

namespace penstock {

struct Linear {  // as _Linear in library.py
  const void* weight;
  const float* bias;  // padded as the weight, or null
  int32_t num_outputs;
  int32_t num_inputs;
  int32_t is_bf16;
};

constexpr int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

constexpr int kUnitGroups = 4;                       // a unit of work; an even number: a gate and its up are in one
constexpr int kUnit = kUnitGroups * kLanes;          // outputs of a unit; weights are padded to whole ones
#if defined(__AVX512F__)
constexpr int kMostTokens = 12;  // of one pass over a unit's weights; twice as many sums of 16 floats fill the registers
#else
constexpr int kMostTokens = 3;
#endif

// Few tokens: more groups at a time, so that sums do not wait for each other.
constexpr int groups_at_a_time(int num_tokens) { return 2 * num_tokens <= kMostTokens ? 4 : 2; }

// The k-th of a group's packed values, as 16 floats. bf16 lies in pairs: of one load, the lower or the upper halves.
inline Floats weights_at(const float* group, int k) { return load16(group + size_t(k) * kLanes); }
inline Floats weights_at(const bf16* group, int k) {
  Words both = load<Words>(group + size_t(k / 2) * 2 * kLanes);
  return as_floats(k % 2 ? both & 0xffff0000u : both << 16);
}

// A unit's outputs for kTokens tokens: out [kUnitGroups][kTokens]. x: rows of `stride` floats.
template <int kTokens, typename Weight>
void compute_unit(const Weight* weight, int num_inputs, const float* x, size_t stride, Floats* out) {
  constexpr int kGroups = groups_at_a_time(kTokens);
  const size_t group = size_t(num_inputs) * kLanes;
  for (int first = 0; first < kUnitGroups; first += kGroups, weight += kGroups * group) {
    Floats sums[kGroups][kTokens] = {};
    auto take = [&](int k) __attribute__((always_inline)) {
      Floats w[kGroups];
      for (int g = 0; g < kGroups; g++) w[g] = weights_at(weight + g * group, k);
      for (int t = 0; t < kTokens; t++) {
        const Floats value = splat(x[t * stride + k]);
        for (int g = 0; g < kGroups; g++) sums[g][t] += w[g] * value;
      }
    };
    if constexpr (sizeof(Weight) == 2) {
      for (int k = 0; k < num_inputs; k += 2) {
        take(k);
        take(k + 1);
      }
    } else {
      for (int k = 0; k < num_inputs; k++) take(k);
    }
    for (int g = 0; g < kGroups; g++)
      for (int t = 0; t < kTokens; t++) out[(first + g) * kTokens + t] = sums[g][t];
  }
}

template <typename Weight>
using ComputeUnit = void (*)(const Weight*, int, const float*, size_t, Floats*);

template <typename Weight, size_t... kIndex>
constexpr std::array<ComputeUnit<Weight>, kMostTokens> compute_units(std::index_sequence<kIndex...>) {
  return {compute_unit<kIndex + 1, Weight>...};
}

// Tokens [first, end) of a unit; finish(token, output, 16 sums) takes the results.
template <typename Weight, typename Finish>
void unit_of_linear(const Linear& layer, int unit, const float* x, int stride, int first, int end, Finish& finish) {
  static constexpr auto kComputeUnits = compute_units<Weight>(std::make_index_sequence<kMostTokens>());
  // bf16 is packed in pairs: an odd last input has a zero beside it.
  const int inputs = sizeof(Weight) == 2 ? round_up(layer.num_inputs, 2) : layer.num_inputs;
  const Weight* weight = static_cast<const Weight*>(layer.weight) + size_t(unit) * kUnit * inputs;
  for (int count; first < end; first += count) {
    const int num_passes = (end - first + kMostTokens - 1) / kMostTokens;
    count = (end - first + num_passes - 1) / num_passes;
    Floats sums[kUnitGroups * kMostTokens];
    kComputeUnits[count - 1](weight, inputs, x + size_t(first) * stride, stride, sums);
    for (int g = 0; g < kUnitGroups; g++) {
      const int output = unit * kUnit + g * kLanes;
      const Floats bias = layer.bias ? load16(layer.bias + output) : Floats{};
      for (int t = 0; t < count; t++) finish(first + t, output, sums[g * count + t] + bias);
    }
  }
}

// x [num_tokens, stride], zero past its inputs, through a linear layer; outputs come in whole units.
// Tokens are cut so that a piece of x stays in the core's own cache while the weights stream by.
template <typename Finish>
void linear(Team& team, const Linear& layer, const float* x, int stride, int num_tokens, Finish finish) {
  const int num_units = (layer.num_outputs + kUnit - 1) / kUnit;
  const int piece = std::max((1 << 19) / (4 * stride) / kMostTokens, 2) * kMostTokens;
  const int num_pieces = (num_tokens + piece - 1) / piece;
  team.each(num_units * num_pieces, [&](int i) {
    const int first = i / num_units * piece, end = std::min(first + piece, num_tokens);
    if (layer.is_bf16)
      unit_of_linear<bf16>(layer, i % num_units, x, stride, first, end, finish);
    else
      unit_of_linear<float>(layer, i % num_units, x, stride, first, end, finish);
  });
}

}  // namespace penstock

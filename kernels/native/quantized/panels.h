// Common parts of products with a block of some panels: the block, and how sums of runs are scaled and added.
#pragma once

#include "inputs.h"
#include "layout.h"

namespace penstock {

constexpr int kPanels = 2;  // at a time; their sums of a run and of a group stay in registers
#if defined(__AVX512F__)
constexpr int kQuantizedTile = 6;  // tokens
#else
constexpr int kQuantizedTile = 2;
#endif
constexpr size_t kBlockAhead = 6144;    // prefetch distance beyond the block, in bytes of a panel
constexpr size_t kAheadAlone = 1024;   // the same for a single token, counted from the beginning of its block
constexpr int kSharePrefetch = 4;       // tiles
constexpr int kMostTokensAtOnce = 240;  // tokens that go through a block together

struct Panels {  // a block of several panels, unpacked
  const uint8_t* values;
  size_t panel;          // bytes from one to the next
  const Scales* scales;  // of each
  const uint8_t* ahead;  // what to prefetch: `ahead_step` bytes of each panel for 4 inputs
  size_t ahead_panel, ahead_step;
  int num_inputs, group, run;
  bool has_scales, has_zeros, has_minimums;

  // Prefetches as many bytes as a block has, beginning `distance` after a panel's beginning. The next panels begin
  // where `count` panels end.
  void set_ahead(const uint8_t* panel_begin, size_t size, size_t distance, int count, int bytes) {
    ahead = panel_begin + distance / size * count * size + distance % size;
    ahead_panel = size;
    ahead_step = bytes / (num_inputs / 4);
  }
};

inline Panels panels_of(const Linear& layer, int num_inputs) {
  const Quantized& its = *layer.quantized;
  Panels panels;
  panels.num_inputs = num_inputs;
  panels.group = std::min(its.group, its.block);
  panels.run = run_of(its, layer.num_inputs);
  panels.has_scales = its.scale_type != kNoScales;
  panels.has_zeros = its.has_zeros;
  panels.has_minimums = its.has_minimums;
  return panels;
}

enum Steps {  // how sums of runs are scaled
  kUnscaled,    // all inputs are one run: sums stay integers
  kOfTokens,    // by the scales of weights; a group is one run
  kOfGroups,    // by the scales of inputs, and then by those of weights, if there are any
};

// Scales and adds a token's sum of a run of a panel; `sum` is the token's sum of all runs so far. All sums are in the
// processor's own vectors, because GCC keeps larger ones in memory.
template <Steps kSteps>
inline void add_run(const PartInts (&of_run)[kParts], const InputBlock& x, int k, PartFloats (&of_group)[kParts],
                    Floats* sum) {
#pragma GCC unroll 4
  for (int i = 0; i < kParts; i++) {
    const PartFloats scaled = __builtin_convertvector(of_run[i], PartFloats);
    float* const to = reinterpret_cast<float*>(sum) + i * kPart;
    if constexpr (kSteps == kUnscaled)
      store(to, load<PartInts>(to) + of_run[i]);
    else if constexpr (kSteps == kOfTokens)
      of_group[i] = scaled;
    else
      of_group[i] += scaled * x.scales[k / kInputsPadding];
  }
}

inline void add_group(const Panels& its, const PartFloats (&of_group)[kParts], const InputBlock& x, int p, int j,
                      Floats* sum) {
#pragma GCC unroll 4
  for (int i = 0; i < kParts; i++) {
    float* const to = reinterpret_cast<float*>(sum) + i * kPart;
    PartFloats part = load<PartFloats>(to);
    part = its.has_scales ? part + part_of(its.scales[p].scales[j], i * kPart) * of_group[i] : part + of_group[i];
    if (its.has_minimums) part -= part_of(its.scales[p].minimums[j], i * kPart) * x.totals[j];
    store(to, part);
  }
}

}  // namespace penstock

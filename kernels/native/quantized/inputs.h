// Inputs of a product rounded to int8: scale = amax / 127, code = x / scale, rounded half to even, where amax is the
// largest magnitude of the inputs that share a scale. If one of these is NaN, the scale is NaN, and so are the results.
#pragma once

#include <vector>

#include "../linear/linear.h"
#include "layout.h"

namespace penstock {

// A token's inputs to a block. A run consists of the inputs whose products are summed as integers.
struct alignas(64) InputBlock {
  int8_t codes[kMostBlock];
  float scales[kMostBlock / kInputsPadding];  // one for each 32 inputs
  int32_t offsets[kMostGroups];               // for each run: -zero * its sum; -its sum if outputs have their own zeros
  float totals[kMostGroups];                  // for each group of weights, scaled unless the token has one scale
};
static_assert(sizeof(InputBlock) == kInputBlockFloats * sizeof(float));

inline bool has_scale_for_token(const Quantized& its, int num_inputs) { return its.input_group >= num_inputs; }

inline int run_of(const Quantized& its, int num_inputs) {
  const int group = std::min(its.group, its.block);
  if (has_scale_for_token(its, num_inputs)) return group;
  return group % kInputsPadding ? kInputsPadding / 2 : kInputsPadding;
}

inline int num_blocks(const Linear& layer) {
  return (layer.num_inputs + layer.quantized->block - 1) / layer.quantized->block;
}

inline float scale_of(const float* x, int num_inputs) {
  Words largest = {};  // compared as bits, where NaN is larger than any number
  for (int k = 0; k < num_inputs; k += kLanes) {
    const Words size = Words(load_some(x + k, num_inputs - k)) & 0x7fffffffu;
    largest = larger(largest, size);
  }
  return as_floats(max_of(largest))[0] / 127.0f;
}

// 16 codes.
inline Ints rounded(Floats x, float scale) {
  const Floats magic = splat(12582912.0f);  // 1.5 * 2**23: adding and taking it away rounds to an integer
  x /= splat(scale == 0.0f ? 1.0f : scale);
  x = x == x ? x : Floats{};
  x = smaller(larger(x, splat(-128.0f)), splat(127.0f));
  return __builtin_convertvector((x + magic) - magic, Ints);
}

// Rounds a token's inputs; its blocks are `stride` apart.
inline void round_token(const Linear& layer, const float* x, InputBlock* to, size_t stride) {
  typedef int8_t Codes __attribute__((vector_size(kLanes)));
  const Quantized& its = *layer.quantized;
  const int num_inputs = layer.num_inputs, run = run_of(its, num_inputs);
  const int group = std::min(its.group, its.block);
  const bool is_of_token = has_scale_for_token(its, num_inputs);
  static thread_local std::vector<float> ordered;
  if (its.order) {
    ordered.resize(num_inputs);
    for (int k = 0; k < num_inputs; k++) ordered[k] = x[its.order[k]];
    x = ordered.data();
  }
  float scale = its.input_scale;
  int next_scale = scale == 0.0f ? 0 : num_inputs;
  for (int begin = 0; begin < num_inputs; begin += its.block, to += stride) {
    const int end = std::min(begin + its.block, round_up(num_inputs, kInputsPadding));
    int32_t sums[kMostGroups];
    for (int k = begin, r = 0; k < end; r++) {
      Ints of_run = {};
      for (const int run_end = std::min(k + run, end); k < run_end; k += kLanes) {
        if (k == next_scale && k < num_inputs) {  // padding has no scale of its own
          scale = scale_of(x + k, std::min(its.input_group, num_inputs - k));
          next_scale += its.input_group;
        }
        to->scales[(k - begin) / kInputsPadding] = scale;
        const Ints codes = rounded(load_some(x + k, num_inputs - k), scale);
        store(to->codes + k - begin, __builtin_convertvector(codes, Codes));
        of_run += codes;
      }
      sums[r] = sum_of(of_run)[0];
    }
    std::memset(to->totals, 0, sizeof to->totals);
    for (int r = 0; r * run < end - begin; r++) to->offsets[r] = (its.has_zeros ? -1 : -its.zero) * sums[r];
    for (int r = 0; its.has_minimums && r * run < end - begin; r++)
      to->totals[r * run / group] += float(sums[r]) * (is_of_token ? 1.0f : to->scales[r * run / kInputsPadding]);
  }
}

}  // namespace penstock

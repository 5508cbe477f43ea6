// A short causal convolution over each channel of a row's tokens.
#pragma once

#include <algorithm>

#include "../machine/vectors.h"
#include "../operations/activations.h"

namespace penstock {

struct Convolution {  // as ConvolutionStruct in structs.py
  const float *weight, *bias;  // [width, channels], the newest input's weight last; [channels] or null
  int32_t channels, width, has_silu;
};

constexpr int kLongestConvolution = 4;  // as in recurrent.py

// Tokens of a row. In each array, tokens are `stride` floats apart.
struct ConvolutionRow {
  const float *x, *input_gate, *output_gate;  // gates may be null
  float *out, *state;                         // `out` may be `x`; state [width - 1, channels]
  int32_t stride, out_stride, count;
};

// 16 channels from `channel` on, or `lanes` of them. A token's result does not depend on how many tokens there are.
template <int kWidth, bool kIsWhole>
void convolve(const Convolution& op, const ConvolutionRow& row, int channel, int lanes) {
  auto read = [&](const float* at) { return kIsWhole ? load16(at + channel) : load_some(at + channel, lanes); };
  auto write = [&](float* at, Floats value) {
    if (kIsWhole)
      store(at + channel, value);
    else
      for (int i = 0; i < lanes; i++) at[channel + i] = value[i];
  };
  Floats weight[kWidth], window[kWidth];
  for (int j = 0; j < kWidth; j++) weight[j] = read(op.weight + size_t(j) * op.channels);
  for (int j = 0; j + 1 < kWidth; j++) window[j] = read(row.state + size_t(j) * op.channels);
  const Floats bias = op.bias ? read(op.bias) : Floats{};
  for (int t = 0; t < row.count; t++) {
    const size_t at = size_t(t) * row.stride;
    Floats x = read(row.x + at);
    if (row.input_gate) x *= read(row.input_gate + at);
    window[kWidth - 1] = x;
    Floats y = bias;
    for (int j = 0; j < kWidth; j++) y += window[j] * weight[j];
    if (op.has_silu) y = by_sigmoid(y, y);
    if (row.output_gate) y *= read(row.output_gate + at);
    write(row.out + size_t(t) * row.out_stride, y);
    for (int j = 0; j + 1 < kWidth; j++) window[j] = window[j + 1];
  }
  for (int j = 0; j + 1 < kWidth; j++) write(row.state + size_t(j) * op.channels, window[j]);
}

template <int kWidth>
void convolve(const Convolution& op, const ConvolutionRow& row, int begin, int end) {
  for (int channel = begin; channel < end; channel += kLanes) {
    const int lanes = std::min(kLanes, op.channels - channel);
    lanes == kLanes ? convolve<kWidth, true>(op, row, channel, lanes) : convolve<kWidth, false>(op, row, channel, lanes);
  }
}

// Channels [begin, end) of a row; `begin` is a multiple of 16.
inline void convolve(const Convolution& op, const ConvolutionRow& row, int begin, int end) {
  switch (op.width) {
    case 2:
      return convolve<2>(op, row, begin, end);
    case 3:
      return convolve<3>(op, row, begin, end);
    default:
      return convolve<4>(op, row, begin, end);
  }
}

}  // namespace penstock

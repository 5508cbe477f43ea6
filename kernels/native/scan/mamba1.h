// The scan of Mamba, token by token: 16 channels are the lanes of a vector, and their states stay in registers. A token's
// bits do not depend on the other tokens of its step.
#pragma once

#include "steps.h"

namespace penstock {

struct Mamba1 {  // as Mamba1Struct in structs.py
  const float *a, *dt_bias, *skip;  // a [state_size, channels], the others [channels]
  int32_t channels, state_size;
};

// Tokens of a row: b and c have `state_size` floats of each token, the others one for each channel.
struct Mamba1Row {
  const float *x, *dt, *b, *c;
  float *out, *state;  // state [state_size, channels]
  int32_t stride, dt_stride, gate_stride, out_stride, count;
};

// Scans up to 64 tokens with `kKeys` rows of the state from `key` on and adds what they read to `read`.
template <int kKeys, bool kIsWhole>
inline __attribute__((always_inline)) void scan_block(const Mamba1& op, const Mamba1Row& row, const Floats* dts,
                                                      const Floats* written, int count, int key, int channel, int lanes,
                                                      Floats* read) {
  Floats state[kKeys], a[kKeys];
  const size_t first = size_t(key) * op.channels + channel;
  for (int i = 0; i < kKeys; i++) {
    const size_t at = first + size_t(i) * op.channels;
    state[i] = kIsWhole ? load16(row.state + at) : load_some(row.state + at, lanes);
    a[i] = kIsWhole ? load16(op.a + at) : load_some(op.a + at, lanes);
  }
  for (int t = 0; t < count; t++) {
    const float *const b = row.b + size_t(t) * row.gate_stride + key, *const c = row.c + size_t(t) * row.gate_stride + key;
    Floats sums[2] = {};
    for (int i = 0; i < kKeys; i++) {
      state[i] *= exp16(dts[t] * a[i]);
      state[i] += written[t] * b[i];
      sums[i % 2] += state[i] * c[i];
    }
    read[t] += sums[0] + sums[1];
  }
  for (int i = 0; i < kKeys; i++) {
    float* const to = row.state + first + size_t(i) * op.channels;
    if (kIsWhole)
      store(to, state[i]);
    else
      for (int lane = 0; lane < lanes; lane++) to[lane] = state[i][lane];
  }
}

constexpr int kStatesAtOnce = kPart == 16 ? 8 : 4;  // as many as registers hold beside their decays

template <bool kIsWhole>
void scan_channels(const Mamba1& op, const Mamba1Row& row, int channel, int lanes) {
  auto some = [lanes](const float* from) { return kIsWhole ? load16(from) : load_some(from, lanes); };
  const Floats bias = some(op.dt_bias + channel), skip = some(op.skip + channel);
  for (int begin = 0; begin < row.count; begin += kScanned) {
    const int count = std::min(kScanned, row.count - begin);
    Mamba1Row now = row;
    now.b += size_t(begin) * row.gate_stride;
    now.c += size_t(begin) * row.gate_stride;
    Floats dts[kScanned], written[kScanned], read[kScanned];
    for (int t = 0; t < count; t++) {
      const Floats x = some(row.x + size_t(begin + t) * row.stride + channel);
      dts[t] = softplus16(some(row.dt + size_t(begin + t) * row.dt_stride + channel) + bias);
      written[t] = dts[t] * x;
      read[t] = skip * x;
    }
    int key = 0;
    for (; key + kStatesAtOnce <= op.state_size; key += kStatesAtOnce)
      scan_block<kStatesAtOnce, kIsWhole>(op, now, dts, written, count, key, channel, lanes, read);
    for (; key < op.state_size; key++)
      scan_block<1, kIsWhole>(op, now, dts, written, count, key, channel, lanes, read);
    for (int t = 0; t < count; t++) {
      float* const out = row.out + size_t(begin + t) * row.out_stride + channel;
      if (kIsWhole)
        store(out, read[t]);
      else
        for (int lane = 0; lane < lanes; lane++) out[lane] = read[t][lane];
    }
  }
}

// Channels [begin, end) of a row; `begin` is a multiple of 16.
inline void scan(const Mamba1& op, const Mamba1Row& row, int begin, int end) {
  for (int channel = begin; channel < end; channel += kLanes) {
    const int lanes = std::min(kLanes, op.channels - channel);
    lanes == kLanes ? scan_channels<true>(op, row, channel, lanes) : scan_channels<false>(op, row, channel, lanes);
  }
}

}  // namespace penstock

// The gated delta rule, token by token. What a token reads before it writes is added up while the token before it
// writes, so the state is read once for each token.
#pragma once

#include "steps.h"

namespace penstock {

struct GatedDelta {  // as GatedDeltaStruct in structs.py
  const float *a, *dt_bias;  // [num_heads]; the second one [num_heads, key_dim] if each number of a key decays by itself
  int32_t num_heads, num_key_heads, key_dim, value_dim;
  float max_beta;
  int32_t decays_by_key;
};

// Tokens of a row, for one of its value heads: all arrays are this head's.
struct GatedDeltaRow {
  const float *q, *k, *v, *dt, *b;
  float *out, *state;  // state [key_dim, value_dim]
  int32_t stride, dt_stride, gate_stride, out_stride, count;
};

// Up to 64 tokens' queries and keys [., key_dim], and the factors of their writes. Decays are [.], and `recalls` are the
// keys; or decays are [., key_dim], and `recalls` are the keys multiplied by them.
struct DeltaTokens {
  const float *q, *k, *recalls, *decays, *betas;
  int32_t count;
};

constexpr float kUnitEps = 1e-6f;  // as in gated_delta.py

// out = x * scale / |x|
inline void to_unit(const float* x, int n, float scale, float* out) {
  Floats squares = {};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) squares += load16(x + i) * load16(x + i);
  float total = sum_of(squares)[0];
  for (; i < n; i++) total += x[i] * x[i];
  scale /= std::sqrt(total + kUnitEps);
  for (i = 0; i < n; i++) out[i] = x[i] * scale;
}

// The keys' products with a state, added up in the order in which `scan_values` does it.
template <int kVectors>
inline __attribute__((always_inline)) void recall(const float* state, int stride, const float* k, int key_dim,
                                                  Floats (&sums)[kVectors]) {
  for (int i = 0; i < key_dim; i++)
    for (int j = 0; j < kVectors; j++) {
      const float* const at = state + size_t(i) * stride + j * kLanes;
      __builtin_prefetch(at + kFloatsAhead, 1);
      sums[j] += load16(at) * k[i];
    }
}

// Scans tokens for 16 * kVectors values from `v` on, whose state begins at `state`, and writes what they read to `out`.
// Lanes are independent, so their bits do not depend on how many there are.
template <bool kByKey, int kVectors>
inline __attribute__((always_inline)) void scan_values(const DeltaTokens& tokens, int key_dim, float* state, int stride,
                                                       const float* v, int v_stride, float* out, int out_stride) {
  Floats recalled[kVectors] = {};
  recall<kVectors>(state, stride, tokens.recalls, key_dim, recalled);
  for (int t = 0; t < tokens.count; t++) {
    const float *k = tokens.k + size_t(t) * key_dim, *q = tokens.q + size_t(t) * key_dim;
    const float* next = tokens.recalls + size_t(std::min(t + 1, tokens.count - 1)) * key_dim;
    const float* const decays = tokens.decays + (kByKey ? size_t(t) * key_dim : t);
    const Floats decay = splat(kByKey ? 1.0f : decays[0]);
    Floats delta[kVectors], read[kVectors] = {};
    for (int j = 0; j < kVectors; j++) {
      delta[j] = (load16(v + size_t(t) * v_stride + j * kLanes) - recalled[j] * decay) * tokens.betas[t];
      recalled[j] = Floats{};
    }
    for (int i = 0; i < key_dim; i++)
      for (int j = 0; j < kVectors; j++) {
        float* at = state + size_t(i) * stride + j * kLanes;
        Floats s = load16(at) * (kByKey ? splat(decays[i]) : decay);
        s += delta[j] * k[i];
        store(at, s);
        read[j] += s * q[i];
        recalled[j] += s * next[i];
      }
    for (int j = 0; j < kVectors; j++) store(out + size_t(t) * out_stride + j * kLanes, read[j]);
  }
}

// `scratch`: room for 4 * 64 * key_dim floats and a vector, then key_dim * 32 for a part of the state, then 64 * 32 twice.
constexpr int kValuesAtOnce = 2 * kLanes;
inline size_t delta_scratch(int key_dim) {
  return size_t(4 * kScanned) * key_dim + kLanes + size_t(key_dim) * kValuesAtOnce + 2 * kScanned * kValuesAtOnce;
}

// e**(a softplus(dt + dt_bias)) for the numbers of a key; `decays` has room for whole vectors.
inline void decays_of_key(const GatedDelta& op, const float* dt, int head, float* decays) {
  const float* const bias = op.dt_bias + size_t(head) * op.key_dim;
  for (int i = 0; i < op.key_dim; i += kLanes) {
    const int lanes = std::min(kLanes, op.key_dim - i);
    store(decays + i, exp16(softplus16(load_some(dt + i, lanes) + load_some(bias + i, lanes)) * op.a[head]));
  }
}

template <bool kByKey>
void scan(const GatedDelta& op, const GatedDeltaRow& row, int head, float* scratch) {
  const int key_dim = op.key_dim, value_dim = op.value_dim;
  float *const q = scratch, *const k = q + kScanned * key_dim, *const recalls = k + kScanned * key_dim;
  float *const key_decays = recalls + kScanned * key_dim, *const part = key_decays + kScanned * key_dim + kLanes;
  float *const values = part + key_dim * kValuesAtOnce, *const read = values + kScanned * kValuesAtOnce;
  for (int begin = 0; begin < row.count; begin += kScanned) {
    const int count = std::min(kScanned, row.count - begin);
    float decays[kScanned] = {}, betas[kScanned];
    for (int t = 0; t < count; t++) {
      const size_t at = size_t(begin + t) * row.stride, gate_at = size_t(begin + t) * row.gate_stride;
      const float* const dt = row.dt + size_t(begin + t) * row.dt_stride;
      if (!kByKey) decays[t] = op.a[head] * softplus(dt[0] + op.dt_bias[head]);
      betas[t] = op.max_beta / (1.0f + std::exp(-row.b[gate_at]));
      to_unit(row.q + at, key_dim, 1.0f / std::sqrt(float(key_dim)), q + t * key_dim);
      to_unit(row.k + at, key_dim, 1.0f, k + t * key_dim);
      if (!kByKey) continue;
      decays_of_key(op, dt, head, key_decays + t * key_dim);
      for (int i = t * key_dim; i < (t + 1) * key_dim; i++) recalls[i] = k[i] * key_decays[i];
    }
    if (!kByKey) exponentials(decays, count);
    const DeltaTokens tokens{q, k, kByKey ? recalls : k, kByKey ? key_decays : decays, betas, count};
    const float* const v = row.v + size_t(begin) * row.stride;
    float* const out = row.out + size_t(begin) * row.out_stride;
    int value = 0;
    if (count == 1)  // the state is used only once, so it stays where it is and is read in whole lines
      for (constexpr int kWide = kPart == 16 ? 8 : 2; value + kWide * kLanes <= value_dim; value += kWide * kLanes)
        scan_values<kByKey, kWide>(tokens, key_dim, row.state + value, value_dim, v + value, row.stride, out + value,
                           row.out_stride);
    for (; value < value_dim; value += kValuesAtOnce) {  // a part of the state, of the values and of the results
      const int width = std::min(kValuesAtOnce, value_dim - value);
      auto copy = [width](const float* from, int stride, float* to, int to_stride, int num_rows) {
        for (int i = 0; i < num_rows; i++) std::copy_n(from + size_t(i) * stride, width, to + size_t(i) * to_stride);
      };
      if (width < kValuesAtOnce) std::fill(part, read, 0.0f);
      copy(row.state + value, value_dim, part, kValuesAtOnce, key_dim);
      copy(v + value, row.stride, values, kValuesAtOnce, count);
      scan_values<kByKey, 2>(tokens, key_dim, part, kValuesAtOnce, values, kValuesAtOnce, read, kValuesAtOnce);
      copy(part, kValuesAtOnce, row.state + value, value_dim, key_dim);
      copy(read, kValuesAtOnce, out + value, row.out_stride, count);
    }
  }
}

}  // namespace penstock

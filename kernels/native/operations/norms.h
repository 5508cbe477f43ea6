// Norms of vectors.
#pragma once

#include "../pass.h"

namespace penstock {

enum NormKind { kNoNorm, kRms, kLayerNorm };  // as NORM_KINDS in program.py

struct NormWeights {  // as _NormWeights in program.py
  const float *weight, *bias;  // or null
  float eps;
  int32_t kind;
};

inline void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
  Floats squares = {};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Floats part = load16(x + i);
    squares += part * part;
  }
  float total = sum_of(squares)[0];
  for (; i < n; i++) total += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(total / n + eps);
  if (weight)
    for (i = 0; i < n; i++) out[i] = x[i] * scale * weight[i];
  else
    for (i = 0; i < n; i++) out[i] = x[i] * scale;
}

inline float mean_of(const float* x, int n, float taken, bool is_squared) {
  Floats sums = {};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Floats part = load16(x + i) - taken;
    sums += is_squared ? part * part : part;
  }
  float total = sum_of(sums)[0];
  for (; i < n; i++) total += is_squared ? (x[i] - taken) * (x[i] - taken) : x[i] - taken;
  return total / n;
}

inline void layer_norm(const float* x, const float* weight, const float* bias, int n, float eps, float* out) {
  const float mean = mean_of(x, n, 0.0f, false);
  const float scale = 1.0f / std::sqrt(mean_of(x, n, mean, true) + eps);
  for (int i = 0; i < n; i++) out[i] = (x[i] - mean) * scale * (weight ? weight[i] : 1.0f) + (bias ? bias[i] : 0.0f);
}

// x and `out` may be the same.
inline void normalize(const NormWeights& norm, const float* x, int n, float* out) {
  if (norm.kind == kRms)
    rms_norm(x, norm.weight, n, norm.eps, out);
  else if (norm.kind == kLayerNorm)
    layer_norm(x, norm.weight, norm.bias, n, norm.eps, out);
  else if (x != out)
    std::copy_n(x, n, out);
}

struct NormOperation {  // to = norm(from), or to += scale * norm(from), which overwrites `from`
  NormWeights norm;
  int32_t size, from, to, is_added;
  float scale;
};

inline void run(const Pass& pass, const NormOperation& op, int t) {
  float *from = pass.at(op.from, t), *to = pass.at(op.to, t);
  if (!op.is_added) return normalize(op.norm, from, op.size, to);
  normalize(op.norm, from, op.size, from);
  for (int i = 0; i < op.size; i++) to[i] += from[i] * op.scale;
}

}  // namespace penstock

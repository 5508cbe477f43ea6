// Norms of vectors.
#pragma once

#include "../pass.h"

namespace penstock {

enum NormKind { kNoNorm, kRms, kLayerNorm };  // as NORM_KINDS in builder.py

struct NormWeights {  // as NormWeightsStruct in structs.py
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

// to = norm(from), or to += scale * norm(from), which overwrites `from`; for each of `count` adjacent vectors. They begin
// at `begin` in `from`, and at `first` in `to`.
struct NormOperation {
  NormWeights norm;
  int32_t size, count, from, begin, to, first, is_added;
  float scale;
};

inline void run(const Pass& pass, const NormOperation& op, int t) {
  float *from = pass.at(op.from, t) + op.begin, *to = pass.at(op.to, t) + op.first;
  const int end = op.size * op.count;
  for (int i = 0; i < end; i += op.size) normalize(op.norm, from + i, op.size, (op.is_added ? from : to) + i);
  for (int i = 0; op.is_added && i < end; i++) to[i] += from[i] * op.scale;
}

struct Scaling {  // to[begin ..] *= scale * from[first ..], or to[begin ..] *= scale without a slot `from`
  int32_t size, from, first, to, begin;
  float scale;
};

inline void run(const Pass& pass, const Scaling& op, int t) {
  float* to = pass.at(op.to, t) + op.begin;
  const float* by = op.from < 0 ? nullptr : pass.at(op.from, t) + op.first;
  for (int i = 0; i < op.size; i++) to[i] *= by ? op.scale * by[i] : op.scale;
}

}  // namespace penstock

// q and k of each head: norms and rotation; k and v go into their pages.
#pragma once

#include "norms.h"

namespace penstock {

struct Heads {  // as _Heads in program.py
  NormWeights q_norm, k_norm;
  int32_t qkv;  // slot: all q heads, all k heads, all v heads
  int32_t num_q_heads, num_kv_heads, head_dim, layer;
  int32_t rotary;           // -1: positions do not rotate anything
  int32_t norm_size;        // what a norm sees: a head, or with 0 all heads at once
  int32_t norm_step;        // floats between the weights of two heads
  int32_t norms_follow_rotation;
  float growth_beta, growth_length;  // queries at position p grow by 1 + beta log(1 + floor((p + shift) / length))
  int32_t growth_shift;
};

inline void rotate(float* head, const float* cos_sin, int rotary_dim) {
  const int half = rotary_dim / 2;
  for (int d = 0; d < half; d++) {
    const float a = head[d], b = head[d + half], c = cos_sin[d], s = cos_sin[half + d];
    head[d] = a * c - b * s;
    head[d + half] = b * c + a * s;
  }
}

inline void normalize_heads(const Heads& op, NormWeights norm, float* heads, int num_heads) {
  const int end = num_heads * op.head_dim, size = op.norm_size ? op.norm_size : end;
  if (norm.kind == kNoNorm) return;
  for (int i = 0; i < end; i += size) {
    normalize(norm, heads + i, size, heads + i);
    if (norm.weight) norm.weight += op.norm_step;
    if (norm.bias) norm.bias += op.norm_step;
  }
}

template <typename Kv>
void run_heads(const Pass& pass, const Heads& op, int t) {
  const Batch& batch = pass.batch;
  const LayerPages& pages = pass.pool.layers[op.layer];
  const int dim = op.head_dim, q_size = op.num_q_heads * dim, num_rotated = op.num_q_heads + op.num_kv_heads;
  const int64_t slot = batch.groups[pages.group].slots[t];
  float *q = pass.at(op.qkv, t), *k = q + q_size;
  auto place_of = [&](int h) {  // where a head of the key or value goes in its page; values follow keys
    const bool is_v = h >= op.num_kv_heads;
    const size_t row = (slot / pages.page_size * op.num_kv_heads + h % op.num_kv_heads) * pages.page_size;
    return static_cast<Kv*>(is_v ? pages.values : pages.keys) + (row + slot % pages.page_size) * dim;
  };
  for (int h = 0; slot >= 0 && h < 2 * op.num_kv_heads; h++)  // the pages were last used a step ago
    for (size_t d = 0; d < size_t(dim); d += 64 / sizeof(Kv)) __builtin_prefetch(place_of(h) + d, 1);
  auto normalize_both = [&] {
    normalize_heads(op, op.q_norm, q, op.num_q_heads);
    normalize_heads(op, op.k_norm, k, op.num_kv_heads);
  };
  if (!op.norms_follow_rotation) normalize_both();
  if (op.rotary >= 0) {
    const float* cos_sin = pass.cos_sin(op.rotary, t);
    for (int h = 0; h < num_rotated; h++) rotate(q + h * dim, cos_sin, batch.rotaries[op.rotary].dim);
  }
  if (op.norms_follow_rotation) normalize_both();
  if (op.growth_beta) {
    const float grown = std::floor((batch.positions[t] + op.growth_shift) / op.growth_length);
    const float factor = 1.0f + op.growth_beta * std::log(1.0f + grown);
    for (int i = 0; i < q_size; i++) q[i] *= factor;
  }
  for (int h = 0; slot >= 0 && h < 2 * op.num_kv_heads; h++) {
    Kv* to = place_of(h);
    for (int d = 0; d < dim; d++) narrow(k[h * dim + d], to + d);
  }
}

inline void run(const Pass& pass, const Heads& op, int t) {
  pass.pool.is_bf16 ? run_heads<bf16>(pass, op, t) : run_heads<float>(pass, op, t);
}

}  // namespace penstock

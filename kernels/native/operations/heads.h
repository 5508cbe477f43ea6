// Norms and rotates q and k of each head, and writes k and v to their pages. Without KV heads there is only q.
#pragma once

#include "norms.h"

namespace penstock {

struct Heads {  // as Heads in structs.py
  NormWeights q_norm, k_norm, v_norm;
  int32_t qkv;  // slot: all q heads, all k heads, all v heads
  int32_t num_q_heads, num_kv_heads, head_dim, layer;
  int32_t rotary;           // -1: no rotation
  int32_t norm_size;        // floats that a norm spans: a head, or 0 for all heads at once
  int32_t norm_step;        // floats between the weights of two heads
  int32_t norms_follow_rotation;
  float growth_beta, growth_length;  // queries at position p grow by 1 + beta log(1 + floor((p + shift) / length))
  int32_t growth_shift;
  float k_scale, v_scale;  // a checkpoint's, for quantized pages; 0: each head of each token has its own
  int32_t gap;             // floats between q and k
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

// Where the heads of a token's key and value go in their pages: first the key's, then the value's.
template <typename Kv>
class HeadPlaces {
 public:
  HeadPlaces(const Heads& op, const LayerPages& pages, int64_t slot)
      : op_(op), pages_(pages), page_(slot / pages.page_size), offset_(slot % pages.page_size) {}

  // Always inlined, because GCC would drop calls of a function whose only effect is to prefetch.
  __attribute__((always_inline)) void prefetch(int h) const {
    const size_t count = kIsPlain ? op_.head_dim : code_bytes<Kv>(op_.head_dim);
    for (size_t i = 0; i < count; i += 64 / sizeof(Kv)) __builtin_prefetch(numbers(h) + i, 1);
    if constexpr (!kIsPlain) __builtin_prefetch(scales(h), 1);
  }

  void write(int h, const float* x) const {
    Kv* to = numbers(h);
    if constexpr (kIsPlain)
      for (int d = 0; d < op_.head_dim; d++) narrow(x[d], to + d);
    else
      quantize(x, op_.head_dim, h < op_.num_kv_heads ? op_.k_scale : op_.v_scale, to, scales(h));
  }

 private:
  static constexpr bool kIsPlain = std::is_arithmetic_v<Kv>;

  Kv* head(int h) const {
    Kv* all = static_cast<Kv*>(h < op_.num_kv_heads ? pages_.keys : pages_.values);
    const size_t size = kIsPlain ? size_t(pages_.page_size) * op_.head_dim : pages_.head_bytes;
    return all + (page_ * op_.num_kv_heads + h % op_.num_kv_heads) * size;
  }
  Kv* numbers(int h) const {
    return head(h) + size_t(offset_) * (kIsPlain ? op_.head_dim : code_bytes<Kv>(op_.head_dim));
  }
  uint16_t* scales(int h) const {
    auto* all = reinterpret_cast<uint16_t*>(head(h) + size_t(pages_.page_size) * code_bytes<Kv>(op_.head_dim));
    return all + size_t(offset_) * scales_of_head<Kv>(op_.head_dim);
  }

  const Heads& op_;
  const LayerPages& pages_;
  const size_t page_;
  const int offset_;
};

template <typename Kv>
void run_heads(const Pass& pass, const Heads& op, int t) {
  const Batch& batch = pass.batch;
  const LayerPages& pages = pass.pool.layers[op.layer];
  const int dim = op.head_dim, q_size = op.num_q_heads * dim, num_rotated = op.num_q_heads + op.num_kv_heads;
  const int64_t slot = batch.groups[pages.group].slots[t];
  float *q = pass.at(op.qkv, t), *k = q + q_size + op.gap;
  const HeadPlaces<Kv> places(op, pages, slot);
  for (int h = 0; slot >= 0 && h < 2 * op.num_kv_heads; h++) places.prefetch(h);  // they were last used a step ago
  auto normalize_both = [&] {
    normalize_heads(op, op.q_norm, q, op.num_q_heads);
    normalize_heads(op, op.k_norm, k, op.num_kv_heads);
  };
  if (!op.norms_follow_rotation) normalize_both();
  if (op.rotary >= 0) {
    const float* cos_sin = pass.cos_sin(op.rotary, t);
    for (int h = 0; h < num_rotated; h++)
      rotate((h < op.num_q_heads ? q : k - q_size) + h * dim, cos_sin, batch.rotaries[op.rotary].dim);
  }
  if (op.norms_follow_rotation) normalize_both();
  for (int h = 0; op.v_norm.kind != kNoNorm && h < op.num_kv_heads; h++) {
    float* v = k + (op.num_kv_heads + h) * dim;
    normalize(op.v_norm, v, dim, v);
  }
  if (op.growth_beta) {
    const float grown = std::floor((batch.positions[t] + op.growth_shift) / op.growth_length);
    const float factor = 1.0f + op.growth_beta * std::log(1.0f + grown);
    for (int i = 0; i < q_size; i++) q[i] *= factor;
  }
  for (int h = 0; slot >= 0 && h < 2 * op.num_kv_heads; h++) places.write(h, k + h * dim);
}

inline void run(const Pass& pass, const Heads& op, int t) {
  as_kv(pass.pool.kind, [&](auto* its) { run_heads<std::remove_pointer_t<decltype(its)>>(pass, op, t); });
}

}  // namespace penstock

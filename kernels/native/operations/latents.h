// Latent attention: a step writes the latents of its positions, and its queries attend over the pages.
#pragma once

#include "../attention/latents.h"
#include "../pass.h"

namespace penstock {

struct Latents {  // as Latents in structs.py
  LatentAttention attention;
  int32_t latents, q, to, layer, rotary;  // slots of [latent | key], of queries, and of results; rotary -1: no rotation
};

inline void run_keeping(const Pass& pass, const Latents& op, int t) {
  const LayerPages& pages = pass.pool.layers[op.layer];
  const int64_t slot = pass.batch.groups[pages.group].slots[t];
  const float* cos_sin = op.rotary < 0 ? nullptr : pass.cos_sin(op.rotary, t);
  auto keep = [&](auto* keys) { keep_latent(op.attention, pass.at(op.latents, t), pass.at(op.q, t), cos_sin, slot, keys); };
  pass.pool.kind == kKvBf16 ? keep(static_cast<bf16*>(pages.keys)) : keep(static_cast<float*>(pages.keys));
}

inline void run_attending(const Pass& pass, const Latents& op) {
  const LayerPages& pages = pass.pool.layers[op.layer];
  const AttentionRows rows = pass.rows_of(pages);
  const Slot &q = pass.slots[op.q], &out = pass.slots[op.to];
  LatentAttention layer = op.attention;
  layer.page_size = pages.page_size;
  auto attend = [&](const auto* keys) {
    latent_attention(*team, layer, keys, rows, q.data, q.stride, out.data, out.stride);
  };
  pass.pool.kind == kKvBf16 ? attend(static_cast<const bf16*>(pages.keys)) : attend(static_cast<const float*>(pages.keys));
}

inline double num_multiplications(const Latents& op, const Pass& pass) {
  const LatentAttention& layer = op.attention;
  const double for_token = double(layer.kv_rank) * (layer.nope_dim + layer.v_dim);
  return layer.num_heads *
         (for_token * (pass.batch.num_tokens + kReading) + (layer.key_dim() + layer.kv_rank) * pass.num_scores());
}

}  // namespace penstock

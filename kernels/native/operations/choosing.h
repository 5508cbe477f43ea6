// An indexer: a step writes the index keys of its positions, and chooses what its tokens attend to.
#pragma once

#include "../attention/choice.h"
#include "../pass.h"

namespace penstock {

struct Choosing {  // as Choosing in structs.py
  Indexer indexer;
  int32_t k, q, weights, layer, rotary;  // slots of index keys, index queries and the heads' weights
};

inline void run_keeping(const Pass& pass, const Choosing& op, int t) {
  const LayerPages& pages = pass.pool.layers[op.layer];
  const int64_t slot = pass.batch.groups[pages.group].slots[t];
  const float* cos_sin = pass.cos_sin(op.rotary, t);
  auto keep = [&](auto* keys) { keep_index_key(op.indexer, pass.at(op.k, t), pass.at(op.q, t), cos_sin, slot, keys); };
  pass.pool.kind == kKvBf16 ? keep(static_cast<bf16*>(pages.keys)) : keep(static_cast<float*>(pages.keys));
}

inline void run_choosing(const Pass& pass, const Choosing& op) {
  const LayerPages& pages = pass.pool.layers[op.layer];
  const AttentionRows rows = pass.rows_of(pages);
  const Slot &q = pass.slots[op.q], &weights = pass.slots[op.weights];
  auto run = [&](const auto* keys) {
    choose(*team, op.indexer, pages.page_size, keys, rows, q.data, q.stride, weights.data, weights.stride);
  };
  pass.pool.kind == kKvBf16 ? run(static_cast<const bf16*>(pages.keys)) : run(static_cast<const float*>(pages.keys));
}

inline double num_multiplications(const Choosing& op, const Pass& pass) {
  return double(op.indexer.num_heads) * op.indexer.head_dim * pass.num_scores();
}

}  // namespace penstock

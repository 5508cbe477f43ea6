// Attention of a step's queries over their rows' pages.
#pragma once

#include "../pass.h"

namespace penstock {

struct Attending {  // as Attending in structs.py
  int32_t qkv, to;  // slots; q comes first
  int32_t num_q_heads, num_kv_heads, head_dim, layer;
  int32_t window;  // as in AttentionShape
  float scale, softcap;
  const float* sinks;  // [num_q_heads], or null
};

template <typename Kv>
void run_attention(const Pass& pass, const Attending& op) {
  const LayerPages& pages = pass.pool.layers[op.layer];
  const AttentionShape shape{op.num_q_heads, op.num_kv_heads, op.head_dim, pages.page_size, op.window, op.scale,
                             0,              op.softcap,      op.sinks,    pages.head_bytes};
  const AttentionRows rows = pass.rows_of(pages, op.window);
  const Slot &q = pass.slots[op.qkv], &out = pass.slots[op.to];
  attention(*team, shape, static_cast<const Kv*>(pages.keys), static_cast<const Kv*>(pages.values), rows, q.data,
            q.stride, out.data, out.stride);
}

inline void run(const Pass& pass, const Attending& op) {
  as_kv(pass.pool.kind, [&](auto* its) { run_attention<std::remove_pointer_t<decltype(its)>>(pass, op); });
}

inline double num_multiplications(const Attending& op, const Pass& pass) {
  return 2 * op.num_q_heads * op.head_dim * pass.num_scores();
}

}  // namespace penstock

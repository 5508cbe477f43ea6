// A token's initial vector: that of its id, plus that of its position if positions are learned.
#pragma once

#include "../pass.h"
#include "../quantized/unpack.h"

namespace penstock {

struct Embedding {  // as Embedding in structs.py
  const void* table;  // [V, size], or null: the rows of `packed`
  Linear packed;
  int32_t kind, size, to;
  int32_t first, num_rows;  // the ids in this part of the table; other ids give zeros
  float scale;
  int32_t without_id;  // the row for tokens without an id; negative: they begin with the vector that they are given
};

struct Positions {
  const void* table;  // [., size]
  int32_t kind, size, to, offset;  // position p has row p + offset
};

// Row `id` of a packed [N, K] as floats.
inline void unpack_row(const Linear& layer, int id, float* out) {
  const int group = id / kLanes, lane = id % kLanes;
  if (layer.quantized) {
    unpack_quantized_row(layer, id, out);
  } else if (layer.kind != kFp32) {
    const size_t pairs = (layer.num_inputs + 1) / 2;
    const bf16* from = static_cast<const bf16*>(layer.weight) + group * pairs * 2 * kLanes + 2 * lane;
    for (int k = 0; k < layer.num_inputs; k++) out[k] = widen(from[size_t(k / 2) * 2 * kLanes + k % 2]);
  } else {
    const float* from = static_cast<const float*>(layer.weight) + size_t(group) * layer.num_inputs * kLanes + lane;
    for (int k = 0; k < layer.num_inputs; k++) out[k] = from[size_t(k) * kLanes];
  }
}

inline float table_value(const void* table, int kind, size_t at) {
  return kind == kFp32 ? static_cast<const float*>(table)[at] : widen(static_cast<const bf16*>(table)[at]);
}

inline void run(const Pass& pass, const Embedding& op, int t) {
  const bool has_id = pass.batch.input_ids[t] >= 0;
  const int id = (has_id ? pass.batch.input_ids[t] : op.without_id) - op.first;
  float* to = pass.at(op.to, t);
  if (!has_id && op.without_id < 0) {
    if (op.to) std::copy_n(pass.at(0, t), op.size, to);
    return;
  }
  if (id < 0 || id >= op.num_rows)
    std::fill_n(to, op.size, 0.0f);
  else if (op.table)
    for (int i = 0; i < op.size; i++) to[i] = table_value(op.table, op.kind, size_t(id) * op.size + i);
  else
    unpack_row(op.packed, id, to);
  if (op.scale != 1.0f)
    for (int i = 0; i < op.size; i++) to[i] *= op.scale;
}

inline void run(const Pass& pass, const Positions& op, int t) {
  float* to = pass.at(op.to, t);
  const size_t at = size_t(pass.batch.positions[t] + op.offset) * op.size;
  for (int i = 0; i < op.size; i++) to[i] += table_value(op.table, op.kind, at + i);
}

}  // namespace penstock

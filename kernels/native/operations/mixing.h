// Mixtures of experts, and the gate of the shared expert, which all tokens go through.
#pragma once

#include "../experts/experts.h"
#include "../pass.h"

namespace penstock {

struct Mixing {  // to = sums, or to += scale * sums; as Mixing in structs.py
  Experts experts;
  int32_t from, judged, to, is_added;  // judged: the slot that the router reads, as wide as `from`
  float scale;
};

struct Gating {  // to *= sigmoid(weights * from)
  const float* weights;
  int32_t num_inputs, size, from, to;
};

inline void run(const Pass& pass, const Mixing& op) {
  const Slot &x = pass.slots[op.from], &out = pass.slots[op.to];
  auto mix = [&](auto finish) {
    mix_experts(*team, op.experts, x.data, pass.slots[op.judged].data, x.stride, pass.batch.num_tokens,
                Turns{pass.batch.input_ids, pass.batch.positions}, pass.packed, finish);
  };
  if (op.is_added)
    mix([=, scale = op.scale](int t, int output, Floats sum) {
      float* at = out.data + size_t(t) * out.stride + output;
      store(at, load16(at) + sum * scale);
    });
  else
    mix([=](int t, int output, Floats sum) { store(out.data + size_t(t) * out.stride + output, sum); });
}

inline void run(const Pass& pass, const Gating& op, int t) {
  const float gate = sigmoid_gate(pass.at(op.from, t), op.weights, op.num_inputs);
  float* to = pass.at(op.to, t);
  for (int i = 0; i < op.size; i++) to[i] *= gate;
}

inline double num_multiplications(const Mixing& op, const Pass& pass) {
  const double num_tokens = pass.batch.num_tokens, num_held = op.experts.num_held();
  const double num_pairs = num_tokens * op.experts.routing.top_k * num_held / op.experts.routing.num_experts;
  const double of_expert = 3.0 * op.experts.inner() * op.experts.hidden();
  const double num_used = std::min<double>(num_pairs, num_held);
  return num_multiplications(op.experts.router, num_tokens) + of_expert * (num_pairs + kReading * num_used);
}

}  // namespace penstock

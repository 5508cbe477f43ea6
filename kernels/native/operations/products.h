// Products with weights, and what is done with their sums while they are in registers.
#pragma once

#include "../pass.h"
#include "activations.h"

namespace penstock {

enum Finish { kStore, kAdd, kActivate, kGate, kGateStored };  // as FINISHES in builder.py

struct Product {  // as Product in structs.py
  Linear linear;
  int32_t from, to, first, finish;  // first: where in slot `to` the outputs begin
  int32_t activation;  // for kActivate, kGate and kGateStored
  int32_t site;        // which of the products that adapters add to; negative: none
  float scale;         // for kAdd; for gates, applied before the activation
};

// What rows add to the product's sums; null if none adds something.
inline const Added* what_is_added(const Pass& pass, const Product& op) {
  static Added added;
  static std::vector<Added::Token> tokens;
  if (op.site < 0 || pass.adapted.empty()) return nullptr;
  tokens.clear();
  for (const AdaptedToken& each : pass.adapted)
    if (const LowRank* its = pass.adapters->at(op.site, each.row)) tokens.push_back({each.token, its});
  if (tokens.empty()) return nullptr;
  const Slot& from = pass.slots[op.from];
  added.compute(*team, tokens, from.data, from.stride, op.linear.num_inputs, op.linear.num_outputs,
                pass.batch.num_tokens);
  return &added;
}

inline void run(const Pass& pass, const Product& op) {
  const int stride = pass.slots[op.to].stride;
  float* out = pass.slots[op.to].data + op.first;
  const Added* const added = what_is_added(pass, op);
  auto multiply = [&](auto finish) {
    linear(*team, op.linear, pass.slots[op.from].data, pass.slots[op.from].stride, pass.batch.num_tokens, pass.packed,
           finish);
  };
  // Before an activation what is added must be part of the sum. Elsewhere it is added later, so that most products pay
  // nothing for what few rows need.
  auto whole = [=](int t, int output, Floats sum) { return added ? added->with(t, output, sum) : sum; };
  switch (op.finish) {
    case kStore:
      multiply([=](int t, int output, Floats sum) { store(out + size_t(t) * stride + output, sum); });
      return added ? added->add_to(out, stride, 1.0f) : void();
    case kAdd:
      multiply([=, scale = op.scale](int t, int output, Floats sum) {
        float* at = out + size_t(t) * stride + output;
        store(at, load16(at) + sum * scale);
      });
      return added ? added->add_to(out, stride, op.scale) : void();
    case kActivate:
      return multiply([=, activation = op.activation](int t, int output, Floats sum) {
        store(out + size_t(t) * stride + output, activated(activation, whole(t, output, sum)));
      });
    case kGateStored:  // the gates are stored, but not activated yet
      return multiply([=, activation = op.activation, scale = op.scale](int t, int output, Floats sum) {
        float* at = out + size_t(t) * stride + output;
        store(at, gated(activation, load16(at) * scale, whole(t, output, sum)));
      });
    default:
      // The gate and the up of an output are adjacent. The up comes second, and finishes both.
      return multiply([=, activation = op.activation, scale = op.scale](int t, int output, Floats sum) {
        float* at = out + size_t(t) * stride + output / 2 / kLanes * kLanes;
        sum = whole(t, output, sum);
        store(at, output / kLanes % 2 == 0 ? sum : gated(activation, load16(at) * scale, sum));
      });
  }
}

inline double num_multiplications(const Product& op, const Pass& pass) {
  return num_multiplications(op.linear, pass.batch.num_tokens);
}

}  // namespace penstock

// Intermediate results that are handed out, and vectors from outside that are added.
#pragma once

#include "../pass.h"

namespace penstock {

struct Tapping {  // taps[first ..] = from, in rows of `stride` floats
  int32_t from, size, first, stride;
};

inline void run(const Pass& pass, const Tapping& op, int t) {
  if (pass.batch.taps) std::copy_n(pass.at(op.from, t), op.size, pass.batch.taps + size_t(t) * op.stride + op.first);
}

struct Adding {  // to += added[first ..], in rows of `stride` floats
  int32_t to, size, first, stride;
};

inline void run(const Pass& pass, const Adding& op, int t) {
  if (!pass.batch.added) return;
  const float* added = pass.batch.added + size_t(t) * op.stride + op.first;
  float* to = pass.at(op.to, t);
  for (int i = 0; i < op.size; i++) to[i] += added[i];
}

}  // namespace penstock

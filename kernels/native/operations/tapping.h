// Intermediate results for others.
#pragma once

#include "../pass.h"

namespace penstock {

struct Tapping {  // taps[first ..] = from, in rows of `stride` floats
  int32_t from, size, first, stride;
};

inline void run(const Pass& pass, const Tapping& op, int t) {
  if (pass.batch.taps) std::copy_n(pass.at(op.from, t), op.size, pass.batch.taps + size_t(t) * op.stride + op.first);
}

}  // namespace penstock

// Sums over the ranks of a group. Each rank has multiplied a part of every product's inputs.
#pragma once

#include "../ranks/exchange.h"

namespace penstock {

struct Reducing {  // to = sum of `from` over the ranks, or to += scale * sum; as Reducing in structs.py
  RankGroup* group;
  const char* ahead;  // weights that are needed next, and are fetched while the rank waits
  int64_t ahead_bytes;
  int32_t size, from, to, is_added;
  float scale;
};

inline void run(const Pass& pass, const Reducing& op) {
  constexpr int kLine = 64, kLinesAtOnce = 8;
  const char *ahead = op.ahead, *const end = op.ahead + op.ahead_bytes;
  auto fetch = [&] {
    if (ahead >= end) return false;
    for (int i = 0; i < kLinesAtOnce; i++, ahead += kLine) __builtin_prefetch(ahead);
    return true;
  };
  const Slot &from = pass.slots[op.from], &to = pass.slots[op.to];
  add_up(*team, *op.group, from.data, from.stride, op.size, pass.batch.num_tokens, fetch,
         [&](int t, int i, Floats sum, int count) {
           float* const at = to.data + size_t(t) * to.stride + i;
           store_some(at, op.is_added ? load_some(at, count) + sum * op.scale : sum, count);
         });
}

}  // namespace penstock

// Common parts of scans: the tokens' step sizes, and the layout of states.
#pragma once

#include <algorithm>
#include <cmath>

#include "../machine/vectors.h"

namespace penstock {

constexpr int kScanned = 64;  // tokens that are prepared and scanned together

constexpr int kFloatsAhead = 512;  // prefetch distance while a state is read

// log(1 + e**x)
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// The same for 16 numbers, within a few ulp: with u = e**-|x| it is max(x, 0) + log(1 + u), and log(1 + u) is
// 2 artanh(u / (2 + u)), a series of odd powers of a number up to 1/3.
inline Floats softplus16(Floats x) {
  const Floats u = exp16(as_floats(Words(x) | 0x80000000u)), s = u / (2.0f + u), square = s * s;
  Floats sum = splat(1.0f / 15);
  for (int power = 13; power > 0; power -= 2) sum = sum * square + 1.0f / power;
  return larger(x, Floats{}) + 2.0f * s * sum;
}

// e**x of `count` numbers up to 0, in place; room for whole vectors.
inline void exponentials(float* x, int count) {
  for (int i = 0; i < count; i += kLanes) store(x + i, exp16(load16(x + i)));
}

}  // namespace penstock

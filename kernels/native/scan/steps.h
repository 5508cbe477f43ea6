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

// e**x of `count` numbers up to 0, in place; room for whole vectors.
inline void exponentials(float* x, int count) {
  for (int i = 0; i < count; i += kLanes) store(x + i, exp16(load16(x + i)));
}

}  // namespace penstock

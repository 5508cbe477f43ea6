// Activations of 16 floats.
#pragma once

#include "../machine/vectors.h"

namespace penstock {

enum Activation { kSilu, kGelu, kGeluTanh, kRelu, kRelu2, kClampedSwiglu };  // as ACTIVATIONS in builder.py

// x * sigmoid(y)
inline Floats by_sigmoid(Floats x, Floats y) { return x / (1.0f + exp16(smaller(-y, splat(88.0f)))); }

inline Floats activated(int activation, Floats x) {
  switch (activation) {
    case kSilu:
      return by_sigmoid(x, x);
    case kGelu:
      return 0.5f * x * (1.0f + erf16(x * 0.70710678118654752f));
    case kGeluTanh:  // (1 + tanh(y)) / 2 = sigmoid(2 y)
      return by_sigmoid(x, 1.5957691216057308f * (x + 0.044715f * x * x * x));
    case kRelu:
      return larger(x, Floats{});
    default:
      return larger(x, Floats{}) * larger(x, Floats{});
  }
}

inline Floats gated(int activation, Floats gate, Floats up) {
  if (activation != kClampedSwiglu) return activated(activation, gate) * up;
  const Floats most = splat(7.0f), g = smaller(gate, most);
  return (larger(smaller(up, most), -most) + 1.0f) * by_sigmoid(g, 1.702f * g);
}

}  // namespace penstock

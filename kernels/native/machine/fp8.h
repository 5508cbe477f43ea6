// FP8 e4m3 (sign, four bits of exponent, three of mantissa, no infinities; Micikevicius et al., "FP8 Formats for Deep
// Learning", 2022): exact widening, and rounding to it.
#pragma once

#include "vectors.h"

namespace penstock {

constexpr float kMostE4m3 = 448.0f;

// The values of codes; both NaN codes are NaN.
inline PartFloats from_e4m3(PartWords codes) {
  const PartWords size = codes & 0x7fu, sign = (codes & 0x80u) << 24;
  const PartWords normal = (size << 20) + (120u << 23);  // the exponent's bias is 7 there, and 127 here
  const PartWords tiny = PartWords(__builtin_convertvector(PartInts(size), PartFloats) * 0x1p-9f);
  const PartWords none = PartWords(PartInts(size) == 0x7f) & 0x7fc00000u;
  return PartFloats((PartInts(size) < 8 ? tiny : normal) | none | sign);
}

// The nearest value, ties to even, clamped to the largest; NaN stays NaN.
inline PartFloats rounded_to_e4m3(PartFloats x) {
  const PartInts size = PartInts(x) & 0x7fffffff, most = PartInts(PartFloats{} + kMostE4m3);
  const PartInts normal = (size + 0x7ffff + (size >> 20 & 1)) & 0x7ff00000;
  // Below the normal range numbers are 2**-9 apart: adding this and subtracting it again rounds to one of them.
  const PartFloats magic = PartFloats{} + 0x1.8p14f, shifted = PartFloats(size) + magic;
  PartInts number = size < (121 << 23) ? PartInts(shifted - magic) : normal > most ? most : normal;
  number = size > 0x7f800000 ? size : number;
  return PartFloats(PartWords(number) | (PartWords(x) & 0x80000000u));
}

}  // namespace penstock

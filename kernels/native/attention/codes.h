// Quantized keys and values, as kernels/attention/kv_quantization.py describes them: how the bytes of a head at one
// position are written, and how they are converted to floats.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "../machine/vectors.h"

namespace penstock {

enum KvKind { kKvFp32, kKvBf16, kKvInt8, kKvInt4, kKvE4M3, kKvE5M2 };  // as KV_KINDS in pool.py

template <int kBits>
struct IntegerCode {  // a byte of codes of 8 or 4 bits
  uint8_t byte;
};
using Int8 = IntegerCode<8>;
using Int4 = IntegerCode<4>;

template <int kExponentBits>
struct Fp8 {
  uint8_t byte;
};
using E4M3 = Fp8<4>;
using E5M2 = Fp8<5>;

template <typename Kv>
constexpr bool kIsFp8 = false;
template <int kExponentBits>
constexpr bool kIsFp8<Fp8<kExponentBits>> = true;

constexpr int kCodeGroup = 32;  // numbers of int4 that share a scale and a minimum

template <typename Kv>
constexpr bool kHasGroups = std::is_same_v<Kv, Int4>;
inline int num_code_groups(int dim) { return (dim + kCodeGroup - 1) / kCodeGroup; }
template <typename Kv>
int code_bytes(int dim) {
  return kHasGroups<Kv> ? num_code_groups(dim) * kCodeGroup / 2 : dim;
}
template <typename Kv>
int scales_of_head(int dim) {  // at one position
  return kHasGroups<Kv> ? 2 * num_code_groups(dim) : 1;
}

// Widens small floats with `kMantissa` bits of mantissa and exponents biased by `kBias`; the sign bit is handled
// elsewhere. Subnormals are converted without arithmetic on subnormal floats, which is slow on some processors.
template <int kMantissa, int kBias>
inline Floats widen_small(Words bits) {
  const Words moved = bits << (23 - kMantissa);
  const Floats least = as_floats(Words{} + (uint32_t(128 - kBias) << 23));  // the smallest normal
  const Floats subnormal = as_floats(moved + (uint32_t(128 - kBias) << 23)) - least;
  return bits < (1u << kMantissa) ? subnormal : as_floats(moved + (uint32_t(127 - kBias) << 23));
}

inline Floats widen_halves(Halves halves) {  // 16 finite fp16
#ifdef __AVX512F__
  return Floats(_mm512_cvtph_ps(__m256i(halves)));
#else
  const Words bits = __builtin_convertvector(halves, Words);
  const Words magnitude = Words(widen_small<10, 15>(bits & 0x7fffu));
  return as_floats(magnitude | (bits & 0x8000u) << 16);
#endif
}

inline float widen_half(uint16_t half) {
  const uint32_t bits = half & 0x7fff, word = (bits << 13) + ((127 - 15) << 23);
  float size;
  std::memcpy(&size, &word, 4);
  size = bits < 0x400 ? bits * 0x1p-24f : size;
  return half & 0x8000 ? -size : size;
}

inline uint16_t narrow_to_half(float x) {  // to nearest, ties to even; clamped to the largest
  uint32_t word;
  std::memcpy(&word, &x, 4);
  const uint16_t sign = word >> 16 & 0x8000;
  const float size = std::min(std::fabs(x), 65504.0f);
  if (size < 0x1p-14f) return sign | uint16_t(std::nearbyint(size * 0x1p24f));
  std::memcpy(&word, &size, 4);
  return sign | uint16_t((word + 0xfff + (word >> 13 & 1) - ((127u - 15) << 23)) >> 13);
}

template <int kExponentBits>
inline Floats load16(const Fp8<kExponentBits>* at) {
  typedef uint8_t Bytes __attribute__((vector_size(16)));
#ifdef __AVX512F__
  // An fp16 has as many bits of exponent or one more, so its exponent is off by a factor.
  const __m256i words = _mm256_cvtepi8_epi16(__m128i(load<Bytes>(at)));
  const __m256i moved = _mm256_slli_epi16(words, kExponentBits == 5 ? 8 : 7);
  if constexpr (kExponentBits == 5) return Floats(_mm512_cvtph_ps(moved));
  return Floats(_mm512_cvtph_ps(_mm256_and_si256(moved, _mm256_set1_epi16(int16_t(0xbfff))))) * 256.0f;
#else
  const Words bits = __builtin_convertvector(load<Bytes>(at), Words);
  const Words magnitude = Words(widen_small<7 - kExponentBits, (1 << (kExponentBits - 1)) - 1>(bits & 0x7fu));
  return as_floats(magnitude | (bits & 0x80u) << 24);
#endif
}

template <int kExponentBits>
inline float widen(Fp8<kExponentBits> x) {
  Fp8<kExponentBits> sixteen[kLanes] = {x};
  return load16(sixteen)[0];
}

template <int kExponentBits>
inline uint8_t narrow_to_fp8(float x) {  // x must not exceed the largest magnitude
  constexpr int kMantissa = 7 - kExponentBits, kBias = (1 << (kExponentBits - 1)) - 1;
  uint32_t word;
  std::memcpy(&word, &x, 4);
  const uint8_t sign = word >> 24 & 0x80;
  word &= 0x7fffffff;
  const float size = std::fabs(x);
  const float per_step = std::ldexp(1.0f, kBias + kMantissa - 1);  // subnormals are its inverse apart
  if (size * per_step < (1 << kMantissa)) return sign | uint8_t(std::nearbyint(size * per_step));
  constexpr int kDropped = 23 - kMantissa;
  const uint32_t rounded = word + (1u << (kDropped - 1)) - 1 + (word >> kDropped & 1);
  return sign | uint8_t((rounded - (uint32_t(127 - kBias) << 23)) >> kDropped);
}

// Stores a scale, and returns it as it was rounded.
inline float keep_scale(float scale, uint16_t* at) {
  *at = narrow_to_half(scale);
  return widen_half(*at);
}

inline float largest_of(const float* x, int size) {
  float largest = 0;
  for (int d = 0; d < size; d++) largest = std::max(largest, std::fabs(x[d]));
  return largest;
}

inline float within(float x, float least, float most) { return std::min(most, std::max(least, x)); }  // NaN: least

// Writes a head of one position; `scale`: the checkpoint's, or 0.
inline void quantize(const float* x, int dim, float scale, Int8* codes, uint16_t* scales) {
  scale = keep_scale(scale ? scale : largest_of(x, dim) / 127.0f, scales);
  scale = scale ? scale : 1.0f;
  for (int d = 0; d < dim; d++) {
    codes[d].byte = uint8_t(int8_t(std::nearbyint(within(x[d] / scale, -127.0f, 127.0f))));
  }
}

template <int kExponentBits>
inline void quantize(const float* x, int dim, float scale, Fp8<kExponentBits>* codes, uint16_t* scales) {
  const float largest = kExponentBits == 4 ? 448.0f : 57344.0f;
  scale = keep_scale(std::max(scale ? scale : largest_of(x, dim) / largest, 0x1p-14f), scales);
  for (int d = 0; d < dim; d++)
    codes[d].byte = narrow_to_fp8<kExponentBits>(within(x[d] / scale, -largest, largest));
}

inline void quantize(const float* x, int dim, float, Int4* codes, uint16_t* scales) {
  for (int first = 0; first < dim; first += kCodeGroup, x += kCodeGroup, codes += kCodeGroup / 2, scales += 2) {
    const int count = std::min(kCodeGroup, dim - first);
    const float minimum = keep_scale(*std::min_element(x, x + count), scales + 1);
    float above[kCodeGroup] = {}, most = 0;
    for (int d = 0; d < count; d++) {
      above[d] = x[d] - minimum;
      most = d ? std::max(most, above[d]) : above[d];
    }
    float scale = keep_scale(std::max(most / 15.0f, 0.0f), scales);
    scale = scale ? scale : 1.0f;
    uint8_t code[kCodeGroup];
    for (int d = 0; d < kCodeGroup; d++) code[d] = uint8_t(within(std::nearbyint(above[d] / scale), 0.0f, 15.0f));
    for (int i = 0; i < kCodeGroup / 2; i++) codes[i].byte = code[i] | code[i + kCodeGroup / 2] << 4;
  }
}

}  // namespace penstock

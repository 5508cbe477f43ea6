// Vectors of 16 floats in plain GNU C++: one register with AVX-512, two with AVX2, four elsewhere.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace penstock {

constexpr int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

constexpr int kLanes = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint16_t bf16;
constexpr Ints kLaneNumbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// As many lanes as the processor's own vectors have, because compilers compare and select larger ones lane by lane.
#if defined(__AVX512F__)
constexpr int kPart = 16;
#elif defined(__AVX2__)
constexpr int kPart = 8;
#else
constexpr int kPart = 4;
#endif
constexpr int kParts = kLanes / kPart;
typedef float PartFloats __attribute__((vector_size(4 * kPart)));
typedef int32_t PartInts __attribute__((vector_size(4 * kPart)));
typedef uint32_t PartWords __attribute__((vector_size(4 * kPart)));

template <typename Vector, typename T>
inline Vector load(const T* at) {
  Vector vector;
  std::memcpy(&vector, at, sizeof vector);
  return vector;
}

template <typename Vector, typename T>
inline void store(T* at, Vector vector) {
  std::memcpy(at, &vector, sizeof vector);
}

inline Floats splat(float x) { return x - Floats{}; }
inline Floats as_floats(Words words) { return load<Floats>(&words); }
inline Floats load16(const float* at) { return load<Floats>(at); }
// Keeps what is used several times in a register. GCC loads it again for each use, because an instruction can; but some
// processors load only one such vector a cycle.
template <typename Vector>
inline Vector in_register(Vector vector) {
#if defined(__AVX512F__)
  asm("" : "+v"(vector));
#endif
  return vector;
}
inline Floats load_some(const float* at, int count) {  // zeros past `count`
  if (count >= kLanes) return load16(at);
  Floats values = {};
  for (int i = 0; i < count; i++) values[i] = at[i];
  return values;
}
inline Floats load16(const bf16* at) { return as_floats(__builtin_convertvector(load<Halves>(at), Words) << 16); }

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
  uint32_t word = uint32_t(x) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

inline void narrow(float x, float* at) { *at = x; }
inline void narrow(float x, bf16* at) {  // to nearest, ties to even; NaN stays NaN
  uint32_t word;
  std::memcpy(&word, &x, 4);
  *at = std::isnan(x) ? 0x7fc0 : uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

// A part of the lanes, from `lane` on.
inline PartFloats part_of(const Floats& vector, int lane) {
  return load<PartFloats>(reinterpret_cast<const float*>(&vector) + lane);
}
inline PartWords part_of(const Words& vector, int lane) {
  return load<PartWords>(reinterpret_cast<const uint32_t*>(&vector) + lane);
}
inline PartInts part_of(const Ints& vector, int lane) {
  return load<PartInts>(reinterpret_cast<const int32_t*>(&vector) + lane);
}

// Two bf16 in the halves of a word; some processors multiply and add such pairs in one instruction.
struct Pair {
  uint32_t bits;
};

inline Floats add_products(Floats sum, Floats a, Floats b) { return sum + a * b; }

#ifdef __AVX512BF16__
constexpr bool kMultipliesPairs = true;

inline Floats add_products(Floats sum, Words a, Words b) {
  return Floats(_mm512_dpbf16_ps(__m512(sum), __m512bh(a), __m512bh(b)));
}

// 32 floats, rounded to nearest.
inline Words pairs_of(Floats low, Floats high) { return Words(_mm512_cvtne2ps_pbh(__m512(high), __m512(low))); }
#else
constexpr bool kMultipliesPairs = false;

inline PartFloats add_products(PartFloats sum, PartWords a, PartWords b) {
  sum += PartFloats(a & 0xffff0000u) * PartFloats(b & 0xffff0000u);
  return sum + PartFloats(a << 16) * PartFloats(b << 16);
}

inline Words pairs_of(Floats low, Floats high) {
  bf16 rounded[2 * kLanes];
  for (int i = 0; i < kLanes; i++) {
    narrow(low[i], rounded + i);
    narrow(high[i], rounded + kLanes + i);
  }
  return load<Words>(rounded);
}
#endif

// Lane i of `swapped<n>(v)` is lane i ^ n of v. After a sum or maximum over such steps, all lanes are equal.
template <int n, typename Vector>
inline Vector swapped(Vector v) {
  constexpr auto from = [](int i) { return i ^ n; };
  return __builtin_shufflevector(v, v, from(0), from(1), from(2), from(3), from(4), from(5), from(6), from(7), from(8),
                                 from(9), from(10), from(11), from(12), from(13), from(14), from(15));
}

// The 64 bits of each product. (A plain loop becomes sixteen scalar products where it is inlined into a larger one.)
inline void multiply_words(Words a, uint32_t b, Words& high, Words& low) {
#ifdef __AVX512F__
  const __m512i factor = _mm512_set1_epi32(b), odd_lanes = _mm512_srli_epi64(__m512i(a), 32);
  const __m512i even = _mm512_mul_epu32(__m512i(a), factor), odd = _mm512_mul_epu32(odd_lanes, factor);
  low = Words(_mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32)));
  high = Words(_mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd));
#else
  for (int i = 0; i < kLanes; i++) {
    const uint64_t product = uint64_t(a[i]) * b;
    high[i] = uint32_t(product >> 32);
    low[i] = uint32_t(product);
  }
#endif
}

// Bit i is set where lane i is not zero.
inline uint32_t bits_of(Ints lanes) {
#ifdef __AVX512F__
  return _mm512_test_epi32_mask(__m512i(lanes), __m512i(lanes));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; i++) bits |= uint32_t(lanes[i] != 0) << i;
  return bits;
#endif
}

template <typename Vector>
inline Vector larger(Vector a, Vector b) {
  return a > b ? a : b;
}
inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }

// The sum in all lanes, added by halves, always in the same order.
template <typename Vector>
inline Vector sum_of(Vector v) {
  v += swapped<8>(v);
  v += swapped<4>(v);
  v += swapped<2>(v);
  v += swapped<1>(v);
  return v;
}

template <typename Vector>
inline Vector max_of(Vector v) {
  v = larger(v, swapped<8>(v));
  v = larger(v, swapped<4>(v));
  v = larger(v, swapped<2>(v));
  v = larger(v, swapped<1>(v));
  return v;
}

// Transposes: four rounds of interleaving each row with the one eight rows on.
inline __attribute__((always_inline)) void transpose(Floats (&rows)[kLanes]) {
#ifdef __AVX512F__
#pragma GCC unroll 4
  for (int round = 0; round < 4; round++) {
    Floats mixed[kLanes];
    for (int i = 0; i < kLanes / 2; i++) {
      const Floats a = rows[i], b = rows[i + kLanes / 2];
      mixed[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      mixed[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    for (int i = 0; i < kLanes; i++) rows[i] = mixed[i];
  }
#else
  for (int i = 0; i < kLanes; i++)
    for (int j = 0; j < i; j++) {
      const float swapped = rows[i][j];
      rows[i][j] = rows[j][i];
      rows[j][i] = swapped;
    }
#endif
}

// e**x for x <= 88, within 2 ulp (Cephes' expf); 0 below -87, also for -inf.
inline Floats exp16(Floats x) {
  const Floats magic = splat(12582912.0f);  // 1.5 * 2**23: adding and taking it away rounds to an integer
  Ints is_tiny = x < splat(-87.0f);
  x = is_tiny ? splat(-87.0f) : x;
  Floats shifted = x * 1.44269504088896341f + magic;
  Floats n = shifted - magic;
  Floats r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Floats p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  Words power = Words(__builtin_convertvector(n, Ints) + 127) << 23;
  p = p * as_floats(power);
  return is_tiny ? Floats{} : p;
}

// tanh(x) within 2 ulp (Cephes' tanhf): a polynomial near zero, else by exp.
inline Floats tanh16(Floats x) {
  const Floats size = as_floats(Words(x) & 0x7fffffffu), square = x * x;
  Floats p = splat(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  p = p * square * x + x;
  const Floats far = 1.0f - 2.0f / (exp16(2.0f * (size > 20.0f ? splat(20.0f) : size)) + 1.0f);
  return size < 0.625f ? p : as_floats(Words(far) | (Words(x) & 0x80000000u));
}

// The error function, within 2e-7 (Abramowitz and Stegun, 7.1.26).
inline Floats erf16(Floats x) {
  const Floats size = as_floats(Words(x) & 0x7fffffffu), t = 1.0f / (1.0f + 0.3275911f * size);
  Floats p = splat(1.061405429f);
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const Floats erf = 1.0f - p * t * exp16(-size * size);
  return as_floats(Words(erf) | (Words(x) & 0x80000000u));
}

}  // namespace penstock

// Sums of products of bytes. Integer sums are exact, so they are the same on every processor.
#pragma once

#include "../machine/vectors.h"
#include "layout.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace penstock {

// Four signed bytes, in all lanes.
inline Words four_at(const int8_t* inputs) {
  uint32_t word;
  std::memcpy(&word, inputs, sizeof word);
  return Words{} + word;
}

// Written as assembly where there is an instruction: with the intrinsic, GCC copies registers, which makes products
// half as fast.
#if defined(__AVX512VNNI__)
inline Ints plus_dots(Ints sums, Bytes values, Words inputs) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(values), "v"(inputs));
  return sums;
}
#elif defined(__AVX512BW__)
// vpmaddubsw adds two products, which must fit into 16 bits: values' upper bits are multiplied separately.
inline Ints plus_dots(Ints sums, Bytes values, Words inputs) {
  const __m512i v = __m512i(values), x = __m512i(inputs);
  const __m512i low = _mm512_maddubs_epi16(_mm512_and_si512(v, _mm512_set1_epi8(127)), x);
  const __m512i high = _mm512_maddubs_epi16(_mm512_and_si512(_mm512_srli_epi16(v, 7), _mm512_set1_epi8(1)), x);
  const __m512i both = _mm512_add_epi32(_mm512_madd_epi16(low, _mm512_set1_epi16(1)),
                                        _mm512_madd_epi16(high, _mm512_set1_epi16(128)));
  return sums + Ints(both);
}
#elif defined(__AVX2__)
#if defined(__AVXVNNI__)
inline __m256i plus_dots(__m256i sums, __m256i values, __m256i inputs) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(values), "x"(inputs));
  return sums;
}
#else
// vpmaddubsw adds two products, which must fit into 16 bits: values' upper bits are multiplied separately.
inline __m256i plus_dots(__m256i sums, __m256i values, __m256i inputs) {
  const __m256i low = _mm256_maddubs_epi16(_mm256_and_si256(values, _mm256_set1_epi8(127)), inputs);
  const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(values, 7), _mm256_set1_epi8(1));
  const __m256i high = _mm256_maddubs_epi16(upper, inputs);
  sums = _mm256_add_epi32(sums, _mm256_madd_epi16(low, _mm256_set1_epi16(1)));
  return _mm256_add_epi32(sums, _mm256_madd_epi16(high, _mm256_set1_epi16(128)));
}
#endif
inline Ints plus_dots(Ints sums, Bytes values, Words inputs) {
  __m256i halves[2], of_values[2], of_inputs[2];
  std::memcpy(halves, &sums, 64);
  std::memcpy(of_values, &values, 64);
  std::memcpy(of_inputs, &inputs, 64);
  for (int i = 0; i < 2; i++) halves[i] = plus_dots(halves[i], of_values[i], of_inputs[i]);
  return load<Ints>(halves);
}
#else
inline Ints plus_dots(Ints sums, Bytes values, Words inputs) {
  const Words words = Words(values);
  for (int j = 0; j < 32; j += 8) sums += Ints(words >> j & 0xffu) * (Ints(inputs << (24 - j)) >> 24);
  return sums;
}
#endif

// The same for a part of a vector.
inline PartInts plus_part_dots(PartInts sums, PartWords values, PartWords inputs) {
#if defined(__AVX512F__)
  return plus_dots(sums, Bytes(values), inputs);
#elif defined(__AVX2__)
  return PartInts(plus_dots(__m256i(sums), __m256i(values), __m256i(inputs)));
#else
  for (int j = 0; j < 32; j += 8) sums += PartInts(values >> j & 0xffu) * (PartInts(inputs << (24 - j)) >> 24);
  return sums;
#endif
}

inline PartWords part_of_four_at(const int8_t* inputs) {
  uint32_t word;
  std::memcpy(&word, inputs, sizeof word);
  return PartWords{} + word;
}

inline PartInts load_part(const Ints& vector, int part) {
  return load<PartInts>(reinterpret_cast<const int32_t*>(&vector) + part * kPart);
}

}  // namespace penstock

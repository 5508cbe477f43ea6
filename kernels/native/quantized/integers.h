// Sums of products of bytes. Integer sums are exact, so they are the same on every processor.
#pragma once

#include "../machine/vectors.h"
#include "layout.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace penstock {

// Four signed bytes, in all lanes.
inline PartWords four_at(const int8_t* inputs) {
  uint32_t word;
  std::memcpy(&word, inputs, sizeof word);
  return PartWords{} + word;
}

// To each lane of `sums`: its four unsigned bytes of `values` by its four signed ones of `inputs`. Written as assembly
// where there is an instruction: with the intrinsic, GCC copies registers, which makes products half as fast.
inline PartInts plus_dots(PartInts sums, PartWords values, PartWords inputs) {
#if defined(__AVX512VNNI__)
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(values), "v"(inputs));
  return sums;
#elif defined(__AVX512BW__)
  // vpmaddubsw adds two products, which must fit into 16 bits: values' upper bits are multiplied separately.
  const __m512i v = __m512i(values), x = __m512i(inputs);
  const __m512i low = _mm512_maddubs_epi16(_mm512_and_si512(v, _mm512_set1_epi8(127)), x);
  const __m512i high = _mm512_maddubs_epi16(_mm512_and_si512(_mm512_srli_epi16(v, 7), _mm512_set1_epi8(1)), x);
  const __m512i both = _mm512_add_epi32(_mm512_madd_epi16(low, _mm512_set1_epi16(1)),
                                        _mm512_madd_epi16(high, _mm512_set1_epi16(128)));
  return sums + PartInts(both);
#elif defined(__AVXVNNI__)
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(values), "x"(inputs));
  return sums;
#elif defined(__AVX2__)
  // As with AVX-512.
  const __m256i v = __m256i(values), x = __m256i(inputs);
  const __m256i low = _mm256_maddubs_epi16(_mm256_and_si256(v, _mm256_set1_epi8(127)), x);
  const __m256i high = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(v, 7), _mm256_set1_epi8(1)), x);
  sums += PartInts(_mm256_madd_epi16(low, _mm256_set1_epi16(1)));
  return sums + PartInts(_mm256_madd_epi16(high, _mm256_set1_epi16(128)));
#else
  for (int j = 0; j < 32; j += 8) sums += PartInts(values >> j & 0xffu) * (PartInts(inputs << (24 - j)) >> 24);
  return sums;
#endif
}

}  // namespace penstock

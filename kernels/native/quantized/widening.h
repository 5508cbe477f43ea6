// Quantized weights as floats.
#pragma once

#include "../machine/fp8.h"
#include "layout.h"

namespace penstock {

constexpr int kBytesAhead = 2048;  // prefetch distance in codes

// Hides a product from the compiler, which would fuse it with the next operation and so round only once.
inline PartFloats kept_apart(PartFloats product) {
#if defined(__x86_64__)
  asm("" : "+v"(product));
#elif defined(__aarch64__)
  asm("" : "+w"(product));
#else
  asm("" : "+m"(product));
#endif
  return product;
}

// What codes stand for: first the codes of a whole vector are mapped, then each number.
struct Integers {
  PartWords values_of(PartWords codes) const { return codes; }
  PartFloats number(PartWords value) const { return __builtin_convertvector(PartInts(value), PartFloats); }
};
struct IntegersOfTable : Integers {
  const uint8_t* table;
  PartWords values_of(PartWords codes) const {
#if defined(__AVX512BW__)
    const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return PartWords(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), __m512i(codes)));
#elif defined(__AVX2__)
    const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return PartWords(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), __m256i(codes)));
#else
    uint8_t bytes[4 * kPart];
    store(bytes, codes);
    for (uint8_t& byte : bytes) byte = table[byte];
    return load<PartWords>(bytes);
#endif
  }
};
struct E4m3Values {
  PartWords values_of(PartWords codes) const { return codes; }
  PartFloats number(PartWords code) const { return from_e4m3(code); }
};
struct ValuesOfTable {
  const float* table;
  PartWords values_of(PartWords codes) const { return codes; }
  PartFloats number(PartWords code) const {
#if defined(__AVX512F__)
    return PartFloats(_mm512_i32gather_ps(__m512i(code), table, 4));
#elif defined(__AVX2__)
    return PartFloats(_mm256_i32gather_ps(table, __m256i(code), 4));
#else
    float found[kPart];
    for (int i = 0; i < kPart; i++) found[i] = table[code[i]];
    return load<PartFloats>(found);
#endif
  }
};
struct ValuesOfSmallTable : ValuesOfTable {  // of 4 bits
  PartFloats number(PartWords code) const {
#if defined(__AVX512F__)
    return PartFloats(_mm512_permutexvar_ps(__m512i(code), _mm512_loadu_ps(table)));
#elif defined(__AVX2__)
    const __m256 lower = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), __m256i(code));
    const __m256 upper = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), __m256i(code));
    return PartFloats(_mm256_blendv_ps(lower, upper, _mm256_castsi256_ps(_mm256_slli_epi32(__m256i(code), 28))));
#else
    return ValuesOfTable::number(code);
#endif
  }
};

struct Stretch {  // inputs [first, end) of a block of `block` inputs, multiples of 4
  int first, end, block;
};

template <int kBits, typename Numbers>
void widen_as(const Quantized& its, const Scales& scales, const uint8_t* codes, Stretch stretch, Numbers numbers,
              float* to) {
  for (int lane = 0; lane < kLanes; lane += kPart)
    for (int k = stretch.first; k < stretch.end;) {
      const int j = k / its.group, end = std::min(stretch.end, (j + 1) * its.group);
      const PartFloats scale = part_of(scales.scales[j], lane);
      PartFloats zero = PartFloats{} + float(its.zero);
      if (its.has_zeros) zero = __builtin_convertvector(part_of(scales.zeros[j], lane), PartFloats);
      for (; k < end; k += 4) {
        __builtin_prefetch(codes + k / 4 * 8 * kBits + kBytesAhead);
        const PartWords codes_here = codes_at<kBits, PartWords>(codes + 4 * lane, stretch.block / 4, k / 4);
        const PartWords values = numbers.values_of(codes_here);
        float* at = to + (k - stretch.first) * kLanes + lane;
        for (int i = 0; i < 4; i++)
          store(at + i * kLanes, scale * (numbers.number(values >> (8 * i) & 0xffu) - zero));
        if (!its.has_minimums) continue;
        const PartFloats minimum = part_of(scales.minimums[j], lane);
        for (int i = 0; i < 4; i++)
          store(at + i * kLanes, kept_apart(load<PartFloats>(at + i * kLanes)) - minimum);
      }
    }
}

// Widens a stretch of 16 outputs' weights [inputs][16], each to the number that `dequantized` computes. `scales` has
// the outputs' scales, if the block has none.
inline void widen(const Quantized& its, const Scales& scales, const uint8_t* codes, Stretch stretch, float* to) {
  if (its.values_are_e4m3) return widen_as<8>(its, scales, codes, stretch, E4m3Values(), to);
  auto of_bits = [&]<int kBits>(std::integral_constant<int, kBits>) {
    if constexpr (kBits == 4)
      if (its.values) return widen_as<4>(its, scales, codes, stretch, ValuesOfSmallTable{{its.values}}, to);
    if (its.has_table) return widen_as<kBits>(its, scales, codes, stretch, IntegersOfTable{{}, its.table}, to);
    if (its.values) return widen_as<kBits>(its, scales, codes, stretch, ValuesOfTable{its.values}, to);
    widen_as<kBits>(its, scales, codes, stretch, Integers(), to);
  };
  switch (its.bits) {
    case 2:
      return of_bits(std::integral_constant<int, 2>());
    case 3:
      return of_bits(std::integral_constant<int, 3>());
    case 4:
      return of_bits(std::integral_constant<int, 4>());
    case 5:
      return of_bits(std::integral_constant<int, 5>());
    case 6:
      return of_bits(std::integral_constant<int, 6>());
    default:
      return of_bits(std::integral_constant<int, 8>());
  }
}

// Each code's value as bf16: a vector of pairs for the first two inputs, and one for the other two.
struct PairsOfTable {
#ifdef __AVX512VBMI__
  __m512i bytes[2][2];

  explicit PairsOfTable(const Quantized& its) {
    for (int i = 0; i < 4; i++) bytes[i / 2][i % 2] = _mm512_loadu_si512(its.pair_bytes + 64 * i);
  }

  template <int kBits>
  __m512i looked_up(int byte, __m512i codes) const {
    if (kBits < 8) return _mm512_permutexvar_epi8(codes, bytes[byte][0]);
    return _mm512_permutex2var_epi8(bytes[byte][0], codes, bytes[byte][1]);
  }

  template <int kBits>
  void widen(Words codes, Words* to) const {
    const __m512i by_pairs = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    const __m512i ordered = _mm512_shuffle_epi8(__m512i(codes), by_pairs);
    const __m512i lower = looked_up<kBits>(0, ordered);
    __m512i upper = looked_up<kBits>(1, ordered);
    if (kBits == 8) upper = _mm512_ternarylogic_epi64(upper, ordered, _mm512_set1_epi8(-128), 0xf8);  // with its sign
    to[0] = Words(_mm512_unpacklo_epi8(lower, upper));
    to[1] = Words(_mm512_unpackhi_epi8(lower, upper));
  }
#else
  const uint8_t* bytes;

  explicit PairsOfTable(const Quantized& its) : bytes(its.pair_bytes) {}

  template <int kBits>
  void widen(Words codes, Words* to) const {
    for (int i = 0; i < 64; i++) {
      const uint32_t code = codes[i / 4] >> (8 * (i % 4)) & 255;
      const uint32_t value = (bytes[code & 127] | bytes[128 + (code & 127)] << 8 | (code & 128) << 8);
      Words& pairs = to[i % 4 / 2];
      pairs[i / 4] = i % 2 ? pairs[i / 4] | value << 16 : value;
    }
  }
#endif
};

template <int kBits>
void widen_to_pairs_of(const Quantized& its, const uint8_t* codes, Stretch stretch, Words* to) {
  const PairsOfTable table(its);
  for (int k = stretch.first; k < stretch.end; k += 4, to += 2) {
    __builtin_prefetch(codes + k / 4 * 8 * kBits + kBytesAhead);
    table.widen<kBits>(codes_at<kBits>(codes, stretch.block / 4, k / 4), to);
  }
}

// Widens a stretch of 16 outputs' codes of 4 or 8 bits to values [inputs / 2][16][2] in bf16, without their scales.
inline void widen_to_pairs(const Quantized& its, const uint8_t* codes, Stretch stretch, Words* to) {
  its.bits == 8 ? widen_to_pairs_of<8>(its, codes, stretch, to) : widen_to_pairs_of<4>(its, codes, stretch, to);
}

// The scales of a block of panel `panel`: those before its codes, or its outputs' scales.
inline void scales_of_block(const Quantized& its, const uint8_t* block, int panel, int num_inputs, Scales& to) {
  if (its.output_scales)
    to.scales[0] = load16(its.output_scales + panel * kLanes);
  else
    unpack_scales(its, block, num_inputs, to);
}

}  // namespace penstock

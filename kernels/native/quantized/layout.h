// How quantized weights are stored in memory.
//
// Like all weights, they are in groups of 16 outputs, here called panels, padded with zeros to whole units. A panel is
// read from memory in order. It consists of blocks of `block` inputs, at most 256. The last block may be shorter, but
// is padded to a multiple of 32. A block has its scales before its codes:
//
//   super-scales, super-minimums   fp16[16] each, if there are any; those of the block
//   scales                         [J][16], J = groups in the block; none if an output has only one (`output_scales`)
//   zeros                          uint8[J][16], unless all weights have the same zero
//   minimums                       [J][16], of the type of the scales
//   padding to 64 bytes
//   codes                          planes of 8, 4, 2 or 1 bits: 8 for codes of 8 bits; 4 and 2 for 6 bits; 4 and 1 for
//                                  5 bits; 4 for 4 bits; 2 and 1 for 3 bits; 2 for 2 bits. Lower bits come first.
//
// Unpacked, codes are vectors of 64 bytes: [inputs / 4][16 outputs][4 inputs], as instructions that multiply bytes need
// them (VNNI; 64 inputs are a tile of AMX). In a plane of w bits, 8 / w such vectors share one: vector i is in bits
// w * (i % (8 / w)) and up of vector i / (8 / w).
//
// With a table of values, a code stands for a byte: value = table[code]. All values are unsigned; for a format with
// signed values, `zero` is in the middle. So each weight is scale * (value - zero) - minimum. Values that cannot be
// such integers are floats (`values`).
#pragma once

#include <algorithm>

#include "../machine/vectors.h"

namespace penstock {

enum ScaleType { kNoScales, kHalfScales, kBf16Scales, kFloatScales, kByteScales, kSignedByteScales };

struct Quantized {  // as QuantizedStruct in layout.py
  const float* output_scales;  // [outputs, padded like the weight], if the blocks have no scales
  const int32_t* order;        // input k is number order[k] of x; null: k
  const float* values;         // [2**bits], the values of codes; null: integers
  const uint8_t* pair_bytes;   // [2][128], if there are values: the lower and the upper bytes of 128 values as bf16
  float input_scale;           // of all inputs; 0: each group of inputs has its own
  int32_t input_group;         // inputs of a token that share a scale; at least K: one scale for each token
  int32_t bits, group, block;
  int32_t zero;
  int32_t scale_type;  // a ScaleType
  int32_t has_super, has_zeros, has_minimums, has_table;
  int32_t values_are_e4m3, rounds_to_e4m3;  // the latter of inputs
  uint8_t table[16];
};

constexpr int kMostBlock = 256;     // inputs
constexpr int kInputsPadding = 32;  // the inputs in a vector of a 1-bit plane
constexpr int kMostGroups = 16;     // in a block
constexpr int kInputBlockFloats = 112;  // room for a token's rounded inputs to a block; as in layout.py

typedef uint8_t Bytes __attribute__((vector_size(64)));

constexpr int size_of_scale(int type) {
  return type == kNoScales ? 0 : type == kFloatScales ? 4 : type <= kBf16Scales ? 2 : 1;
}
inline int size_of_scale(const Quantized& its) { return size_of_scale(its.scale_type); }

inline int groups_of_block(const Quantized& its, int num_inputs) { return (num_inputs + its.group - 1) / its.group; }

// Bytes before the codes.
inline int header_bytes(const Quantized& its, int num_inputs) {
  const int scales = groups_of_block(its, num_inputs) * size_of_scale(its);
  const int zeros = its.has_zeros ? groups_of_block(its, num_inputs) : 0;
  const int super = its.has_super ? 2 * (1 + its.has_minimums) : 0;
  return round_up(kLanes * (super + scales * (1 + its.has_minimums) + zeros), 64);
}

// Bytes of a block with this many inputs, which are padded.
inline int block_bytes(const Quantized& its, int num_inputs) {
  return header_bytes(its, num_inputs) + kLanes * num_inputs / 8 * its.bits;
}

inline size_t panel_bytes(const Quantized& its, int num_inputs) {
  const int padded = round_up(num_inputs, kInputsPadding), rest = padded % its.block;
  return size_t(padded / its.block) * block_bytes(its, its.block) + (rest ? block_bytes(its, rest) : 0);
}

constexpr int bits_of_first_plane(int bits) { return bits == 8 ? 8 : bits >= 4 ? 4 : 2; }

struct Scales {  // of a block of a panel, [groups]
  Floats scales[kMostGroups], minimums[kMostGroups];
  Ints zeros[kMostGroups];
};

// The following functions load as many numbers as a part of a vector has. (Compilers make slow code of plain
// conversions.)

inline PartFloats load_halves(const uint8_t* at) {
#if defined(__AVX512F__)
  return PartFloats(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))));
#elif defined(__F16C__) && defined(__AVX2__)
  return PartFloats(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
#else  // moves the exponent to its place, and changes its bias; this works for subnormal numbers, too
  uint32_t words[kPart];
  for (int i = 0; i < kPart; i++) {
    const uint32_t half = at[2 * i] | at[2 * i + 1] << 8;
    words[i] = (half & 0x7fffu) << 13 | (half & 0x8000u) << 16;
  }
  return load<PartFloats>(words) * 0x1p112f;
#endif
}

inline PartFloats load_bf16(const uint8_t* at) {
#if defined(__AVX512F__)
  return load16(reinterpret_cast<const bf16*>(at));
#elif defined(__AVX2__)
  return PartFloats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))), 16));
#else
  float numbers[kPart];
  for (int i = 0; i < kPart; i++) numbers[i] = widen(reinterpret_cast<const bf16*>(at)[i]);
  return load<PartFloats>(numbers);
#endif
}

inline PartInts load_bytes(const uint8_t* at) {
#if defined(__AVX512F__)
  return PartInts(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
#elif defined(__AVX2__)
  return PartInts(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
#else
  int32_t numbers[kPart];
  for (int i = 0; i < kPart; i++) numbers[i] = at[i];
  return load<PartInts>(numbers);
#endif
}

inline PartInts signed_bytes(PartInts bytes) { return bytes << 24 >> 24; }

template <int kType>
inline PartFloats load_scales(const uint8_t* at) {
  if constexpr (kType == kHalfScales) return load_halves(at);
  if constexpr (kType == kBf16Scales) return load_bf16(at);
  if constexpr (kType == kFloatScales) return load<PartFloats>(at);
  if constexpr (kType == kByteScales) return __builtin_convertvector(load_bytes(at), PartFloats);
  return __builtin_convertvector(signed_bytes(load_bytes(at)), PartFloats);
}

template <int kType>
inline void unpack_scales_of(const Quantized& its, const uint8_t* block, int groups, Scales& to) {
  constexpr int size = size_of_scale(kType);
  for (int lane = 0; lane < kLanes; lane += kPart) {
    PartFloats super = PartFloats{} + 1.0f, super_minimum = super;
    const uint8_t* at = block;
    if (its.has_super) {
      super = load_halves(at + 2 * lane);
      at += 2 * kLanes;
      if (its.has_minimums) {
        super_minimum = load_halves(at + 2 * lane);
        at += 2 * kLanes;
      }
    }
    auto unpack = [&](PartFloats by, Floats* scales) {
      for (int j = 0; j < groups; j++, at += size * kLanes)
        store(reinterpret_cast<float*>(scales + j) + lane, by * load_scales<kType>(at + size * lane));
    };
    if (size) unpack(super, to.scales);
    for (int j = 0; its.has_zeros && j < groups; j++, at += kLanes)
      store(reinterpret_cast<int32_t*>(to.zeros + j) + lane, load_bytes(at + lane));
    if (its.has_minimums) unpack(super_minimum, to.minimums);
  }
}

// The numbers before the codes of a block.
inline void unpack_scales(const Quantized& its, const uint8_t* block, int num_inputs, Scales& to) {
  const int groups = groups_of_block(its, num_inputs);
  switch (its.scale_type) {
    case kHalfScales:
      return unpack_scales_of<kHalfScales>(its, block, groups, to);
    case kBf16Scales:
      return unpack_scales_of<kBf16Scales>(its, block, groups, to);
    case kFloatScales:
      return unpack_scales_of<kFloatScales>(its, block, groups, to);
    case kByteScales:
      return unpack_scales_of<kByteScales>(its, block, groups, to);
    case kSignedByteScales:
      return unpack_scales_of<kSignedByteScales>(its, block, groups, to);
    default:
      return unpack_scales_of<kNoScales>(its, block, groups, to);
  }
}

// Vector i of a plane, or as much of it as fits, in the lowest bits of each byte.
template <int kWidth, typename Vector = Words>
inline Vector in_plane(const uint8_t* plane, int i) {
  constexpr int kShared = 8 / kWidth;
  constexpr uint32_t kMask = 0x01010101u * ((1 << kWidth) - 1);
  return load<Vector>(plane + i / kShared * 64) >> (kWidth * (i % kShared)) & kMask;
}

// Vector i of a block's codes, or as much of it as fits.
template <int kBits, typename Vector = Words>
inline Vector codes_at(const uint8_t* codes, int num_vectors, int i) {
  constexpr int kFirst = bits_of_first_plane(kBits), kSecond = kBits - kFirst;
  Vector found = in_plane<kFirst, Vector>(codes, i);
  if constexpr (kSecond > 0) found |= in_plane<kSecond, Vector>(codes + num_vectors * 8 * kFirst, i) << kFirst;
  return found;
}

// The table's entry for each byte; bytes are below 16.
inline Bytes looked_up(const uint8_t* table, Bytes codes) {
#if defined(__AVX512BW__)
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return Bytes(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), __m512i(codes)));
#else
  Bytes values;
  for (int i = 0; i < 64; i++) values[i] = table[codes[i]];
  return values;
#endif
}

// With the codes' values, if there is a table.
template <int kFirst, int kSecond>
inline const uint8_t* unpack_planes(const uint8_t* table, const uint8_t* codes, int num_inputs, uint8_t* to) {
  const uint8_t* second = codes + num_inputs * 2 * kFirst;
  uint8_t* at = to;
  for (int k = 0; k < num_inputs; k += 32, at += 512, codes += 64 * kFirst, second += 64 * kSecond)
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      Words vector = in_plane<kFirst>(codes, i);
      if constexpr (kSecond > 0) vector |= in_plane<kSecond>(second, i) << kFirst;
      store(at + i * 64, vector);
    }
  for (int i = 0; table && i < 16 * num_inputs; i += 64) store(to + i, looked_up(table, load<Bytes>(to + i)));
  return to;
}

// Where the codes of a block begin.
inline const uint8_t* codes_of(const Quantized& its, const uint8_t* block, int num_inputs) {
  return block + header_bytes(its, num_inputs);
}

// The values of a block's codes, [inputs / 4][16][4]. Codes of 8 bits are used in place; others are unpacked to `to`.
inline const uint8_t* unpacked_codes(const Quantized& its, const uint8_t* block, int num_inputs, uint8_t* to) {
  const uint8_t* const codes = codes_of(its, block, num_inputs);
  const uint8_t* const table = its.has_table ? its.table : nullptr;
  switch (its.bits) {
    case 2:
      return unpack_planes<2, 0>(table, codes, num_inputs, to);
    case 3:
      return unpack_planes<2, 1>(table, codes, num_inputs, to);
    case 4:
      return unpack_planes<4, 0>(table, codes, num_inputs, to);
    case 5:
      return unpack_planes<4, 1>(table, codes, num_inputs, to);
    case 6:
      return unpack_planes<4, 2>(table, codes, num_inputs, to);
    default:
      return codes;
  }
}

}  // namespace penstock

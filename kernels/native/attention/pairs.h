// Attention over pages of bf16, for processors that multiply and add pairs of bf16 in one instruction.
//
// Queries are rounded to bf16 after scaling, and weights before they are multiplied with values. Scores, maxima, masses
// and sums are floats. A word of keys or queries has two neighbouring numbers of one key or query; a word of values has
// the numbers of two neighbouring keys.
#pragma once

#ifdef __AVX512BF16__
#include <algorithm>
#include <cstring>

#include "blocks.h"

namespace penstock {

constexpr int kPairLanes = 2 * kLanes;

inline Words splat_word(uint32_t word) { return word - Words{}; }

// 32 numbers, or what there is of them and zeros.
inline Words load_pairs(const bf16* at, int count) {
  if (count >= kPairLanes) return load<Words>(at);
  Words words = {};
  std::memcpy(&words, at, count * sizeof(bf16));
  return words;
}

// Transposes keys to [padded dim / 2][16] words. Prefetches as `turn_keys` does.
inline void turn_key_pairs(const Places<bf16>& places, const Places<bf16>& next, int dim, int padded, uint32_t* keys) {
  for (int d = 0; d < padded; d += kPairLanes) {
    Floats rows[kLanes];
    for (int j = 0; j < kLanes; j++) {
      __builtin_prefetch(places.values[j] + d);
      __builtin_prefetch(next.keys[j] + d);
      rows[j] = as_floats(load_pairs(places.keys[j] + d, dim - d));
    }
    transpose(rows);
    for (int i = 0; i < kLanes; i++) store(keys + (d / 2 + i) * kLanes, rows[i]);
  }
}

// 16 numbers, or what there is of them and zeros.
inline Words load_halves(const bf16* at, int count) {
  Halves halves = {};
  if (count >= kLanes)
    halves = load<Halves>(at);
  else
    std::memcpy(&halves, at, count * sizeof(bf16));
  return __builtin_convertvector(halves, Words);
}

// Joins the values of neighbouring keys: [8][padded dim] words.
inline void pair_values(const Places<bf16>& places, int dim, int padded, uint32_t* values) {
  for (int j = 0; j < kLanes; j += 2, values += padded)
    for (int d = 0; d < padded; d += kLanes) {
      const Words even = load_halves(places.values[j] + d, dim - d);
      const Words odd = load_halves(places.values[j + 1] + d, dim - d);
      store(values + d, even | odd << 16);
    }
}

// A query times `scale`, rounded: [padded dim / 2] words.
inline void round_query(const float* from, int dim, int padded, float scale, uint32_t* query) {
  for (int d = 0; d < padded; d += kPairLanes) {
    const Floats low = load_some(from + d, dim - d);
    const Floats high = load_some(from + d + kLanes, dim - d - kLanes);
    store(query + d / 2, pairs_of(low * scale, high * scale));
  }
}

// As `score`; num_words: of a query.
template <int kCount, int kTogether>
inline void score_pairs(const uint32_t* queries, const uint32_t* keys, int num_words, int first,
                        Floats (&scores)[kTogether][kVectors]) {
  Floats sums[kTogether][kCount][2] = {};
  keys += first * kLanes * num_words;
  for (int d = 0; d < num_words; d += 2)
    for (int i = 0; i < 2; i++) {
      Words of_keys[kCount];
      for (int v = 0; v < kCount; v++)
        of_keys[v] = in_register(load<Words>(keys + (v * num_words + d + i) * kLanes));
      for (int r = 0; r < kTogether; r++) {
        const Words query = splat_word(queries[r * num_words + d + i]);
        for (int v = 0; v < kCount; v++) sums[r][v][i] = add_products(sums[r][v][i], query, of_keys[v]);
      }
    }
  for (int r = 0; r < kTogether; r++)
    for (int v = 0; v < kCount; v++) scores[r][first + v] = sums[r][v][0] + sums[r][v][1];
}

// As `accumulate`; values: [keys / 2][padded] words.
template <int kFloats, int kTogether>
inline void accumulate_pairs(const Words (&weights)[kTogether][kBlockKeys / kPairLanes], const float (&kept)[kTogether],
                             const uint32_t* values, int at, int num_words, int padded, float* sums) {
  sums += at;
  values += at;
  Floats sum[kTogether][kFloats];
  for (int r = 0; r < kTogether; r++)
    for (int f = 0; f < kFloats; f++) sum[r][f] = load16(sums + r * padded + f * kLanes) * kept[r];
  const uint32_t* words[kTogether];
  for (int r = 0; r < kTogether; r++) words[r] = reinterpret_cast<const uint32_t*>(weights[r]);
  for (int j = 0; j < num_words; j++, values += padded) {
    Words value[kFloats];
    for (int f = 0; f < kFloats; f++) value[f] = in_register(load<Words>(values + f * kLanes));
    for (int r = 0; r < kTogether; r++)
      for (int f = 0; f < kFloats; f++) sum[r][f] = add_products(sum[r][f], splat_word(words[r][j]), value[f]);
  }
  for (int r = 0; r < kTogether; r++)
    for (int f = 0; f < kFloats; f++) store(sums + r * padded + f * kLanes, sum[r][f]);
}

// As `take_block`; padded: of queries and keys.
template <int kTogether>
inline void take_pairs(const uint32_t* queries, const uint32_t* keys, const uint32_t* values, const Seen* seen,
                       int window, float softcap, int block, int num_vectors, int padded, int padded_values,
                       float* maxima, float* masses, float* sums) {
  Floats scores[kTogether][kVectors] = {};
  float weights[kTogether][kBlockKeys] = {}, kept[kTogether];
  int first = 0;
  for (; first + 2 <= num_vectors; first += 2) score_pairs<2>(queries, keys, padded / 2, first, scores);
  if (first < num_vectors) score_pairs<1>(queries, keys, padded / 2, first, scores);
  weigh(scores, seen, window, softcap, block, num_vectors, maxima, masses, weights, kept);
  Words rounded[kTogether][kBlockKeys / kPairLanes];
  for (int r = 0; r < kTogether; r++)
    for (int v = 0; v < kBlockKeys / kPairLanes; v++)
      rounded[r][v] = pairs_of(load16(weights[r] + v * kPairLanes), load16(weights[r] + v * kPairLanes + kLanes));
  constexpr int kAtATime = kTogether <= 2 ? 4 : 2;
  const int num_words = num_vectors * kLanes / 2;
  int d = 0;
  for (; d + kAtATime * kLanes <= padded_values; d += kAtATime * kLanes)
    accumulate_pairs<kAtATime>(rounded, kept, values, d, num_words, padded_values, sums);
  for (; d < padded_values; d += kLanes)
    accumulate_pairs<1>(rounded, kept, values, d, num_words, padded_values, sums);
}

// As FloatBlock.
struct PairBlock {
  using Number = bf16;
  static constexpr int kPadding = kPairLanes;

  uint32_t *queries, *keys, *values;  // [queries][padded / 2], [vectors][padded / 2][16], [keys / 2][padded_values]
  int padded, padded_values;

  PairBlock(float* queries, float* keys, float* values, int padded, int padded_values)
      : queries(reinterpret_cast<uint32_t*>(queries)),
        keys(reinterpret_cast<uint32_t*>(keys)),
        values(reinterpret_cast<uint32_t*>(values)),
        padded(padded),
        padded_values(padded_values) {}

  void put_query(int p, const float* from, int dim, float scale) {
    round_query(from, dim, padded, scale, queries + p * padded / 2);
  }

  void put(int v, const Places<bf16>& places, const Places<bf16>& next, int dim, int value_dim) {
    turn_key_pairs(places, next, dim, padded, keys + v * kLanes * padded / 2);
    pair_values(places, value_dim, padded_values, values + v * kLanes / 2 * padded_values);
  }

  template <int kTogether>
  void take(int p, const Seen* seen, const AttentionShape& shape, int block, int num_vectors, float* maxima,
            float* masses, float* sums) const {
    take_pairs<kTogether>(queries + p * padded / 2, keys, values, seen, shape.window, shape.softcap, block,
                          num_vectors, padded, padded_values, maxima, masses, sums);
  }
};

}  // namespace penstock
#endif

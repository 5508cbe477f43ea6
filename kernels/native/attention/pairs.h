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
  else if (count > 0)
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

// As FloatBlock.
struct PairBlock {
  using Stored = bf16;
  static constexpr int kPadding = kPairLanes, kValuePadding = kLanes;

  uint32_t *queries, *keys, *joined;  // [queries][padded / 2], [vectors][padded / 2][16], [keys / 2][padded_values]
  int padded, padded_values;
  const uint32_t* values[kBlockKeys / 2];

  PairBlock(float* queries, float* keys, float* joined, int padded, int padded_values)
      : queries(reinterpret_cast<uint32_t*>(queries)),
        keys(reinterpret_cast<uint32_t*>(keys)),
        joined(reinterpret_cast<uint32_t*>(joined)),
        padded(padded),
        padded_values(padded_values) {
    for (int j = 0; j < kBlockKeys / 2; j++) values[j] = this->joined + j * padded_values;
  }

  void put_query(int p, const float* from, int dim, float scale) {
    round_query(from, dim, padded, scale, queries + p * query_size());
  }

  void put(int v, const Places<bf16>& places, const Places<bf16>& next, int dim, int value_dim) {
    turn_key_pairs(places, next, dim, padded, keys + v * kLanes * query_size());
    pair_values(places, value_dim, padded_values, joined + v * kLanes / 2 * padded_values);
  }

  int query_size() const { return padded / 2; }

  static int together(int num_pairs) { return num_together(num_pairs); }
  void begin(int) const {}
  void take(int p, int count, const Taking& taking) const {
    take_pairs(queries, keys, values, query_size(), p, count, taking);
  }
};

}  // namespace penstock
#endif

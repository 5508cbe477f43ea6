// Blocks of keys and values as fp32: their scores, and their weighted sums.
#pragma once

#include <algorithm>
#include <type_traits>

#include "blocks.h"

namespace penstock {

// Transposes keys to [padded dim][16] in fp32. It also prefetches their values and the `next` keys, because a page is
// too short for the hardware prefetchers to get going.
template <typename Kv>
void turn_keys(const Places<Kv>& places, const Places<Kv>& next, int dim, int padded, float* keys) {
  for (int d = 0; d < padded; d += kLanes) {
    Floats rows[kLanes];
    for (int j = 0; j < kLanes; j++) {
      __builtin_prefetch(places.values[j] + d);
      __builtin_prefetch(next.keys[j] + d);
      if (d + kLanes <= dim)
        rows[j] = load16(places.keys[j] + d);
      else
        for (int i = 0; i < kLanes; i++) rows[j][i] = d + i < dim ? widen(places.keys[j][d + i]) : 0.0f;
      if constexpr (kIsFp8<Kv>) rows[j] *= places.of_keys[j];
    }
    transpose(rows);
    for (int i = 0; i < kLanes; i++) store(keys + (d + i) * kLanes, rows[i]);
  }
}

// Finds 16 values as whole vectors of fp32: in place if they already are, else converted into `room`, [16][padded dim].
template <typename Kv>
void find_values(const Places<Kv>& places, int dim, int padded, float* room, const float** values) {
  if constexpr (std::is_same_v<Kv, float>)
    if (dim == padded) {
      std::copy_n(places.values, kLanes, values);
      return;
    }
  for (int j = 0; j < kLanes; j++, room += padded) {
    float scale = 1.0f;
    if constexpr (kIsFp8<Kv>) scale = places.of_values[j];
    int d = 0;
    for (; d + kLanes <= dim; d += kLanes) {
      const Floats value = load16(places.values[j] + d);
      store(room + d, kIsFp8<Kv> ? value * scale : value);
    }
    for (; d < padded; d++) room[d] = d < dim ? widen(places.values[j][d]) * scale : 0.0f;
    values[j] = room;
  }
}

// Scores of `kCount` vectors starting at `first`. Each has two partial sums, to hide the latency of the additions.
template <int kCount, int kTogether>
inline void score(const float* queries, const float* keys, int padded, int first,
                  Floats (&scores)[kTogether][kVectors]) {
  Floats sums[kTogether][kCount][2] = {};
  keys += first * kLanes * padded;
  for (int d = 0; d < padded; d += 2)
    for (int i = 0; i < 2; i++) {
      Floats of_keys[kCount];
      for (int v = 0; v < kCount; v++) of_keys[v] = in_register(load16(keys + (v * padded + d + i) * kLanes));
      for (int r = 0; r < kTogether; r++) {
        const Floats query = splat(queries[r * padded + d + i]);
        for (int v = 0; v < kCount; v++) sums[r][v][i] += query * of_keys[v];
      }
    }
  for (int r = 0; r < kTogether; r++)
    for (int v = 0; v < kCount; v++) scores[r][first + v] = sums[r][v][0] + sums[r][v][1];
}

// Adds the weighted values to `sums`: kFloats times 16 floats of each, starting at `at`.
template <int kFloats, int kTogether>
inline void accumulate(const float (&weights)[kTogether][kBlockKeys], const float (&kept)[kTogether],
                       const float* const* values, int at, int num_keys, int padded, float* sums) {
  sums += at;
  Floats sum[kTogether][kFloats];
  for (int r = 0; r < kTogether; r++)
    for (int f = 0; f < kFloats; f++) sum[r][f] = load16(sums + r * padded + f * kLanes) * kept[r];
  for (int j = 0; j < num_keys; j++) {
    Floats value[kFloats];
    for (int f = 0; f < kFloats; f++) value[f] = load16(values[j] + at + f * kLanes);
    for (int r = 0; r < kTogether; r++)
      for (int f = 0; f < kFloats; f++) sum[r][f] += weights[r][j] * value[f];
  }
  for (int r = 0; r < kTogether; r++)
    for (int f = 0; f < kFloats; f++) store(sums + r * padded + f * kLanes, sum[r][f]);
}

// Updates the running maxima, masses and sums of kTogether pairs with the first `num_vectors` times 16 keys of a block.
template <int kTogether>
inline void take_block(const float* queries, const float* keys, const float* const* values, const Seen* seen,
                       int window, float softcap, int block, int num_vectors, int padded, int padded_values,
                       float* maxima, float* masses, float* sums) {
  Floats scores[kTogether][kVectors] = {};
  float weights[kTogether][kBlockKeys], kept[kTogether];
  int first = 0;
  for (; first + 2 <= num_vectors; first += 2) score<2>(queries, keys, padded, first, scores);
  if (first < num_vectors) score<1>(queries, keys, padded, first, scores);
  weigh(scores, seen, window, softcap, block, num_vectors, maxima, masses, weights, kept);
  // With few pairs, more floats at a time hide the latency of the additions.
  constexpr int kAtATime = kTogether <= 2 ? 4 : 2;
  int d = 0;
  for (; d + kAtATime * kLanes <= padded_values; d += kAtATime * kLanes)
    accumulate<kAtATime>(weights, kept, values, d, num_vectors * kLanes, padded_values, sums);
  for (; d < padded_values; d += kLanes)
    accumulate<1>(weights, kept, values, d, num_vectors * kLanes, padded_values, sums);
}

// A block of keys and values, and the queries that it is computed with. Each head of a token is a query of its own,
// number `p`.
template <typename Kv>
struct FloatBlock {
  using Number = Kv;
  static constexpr int kPadding = kLanes;  // of queries and keys

  float *queries, *keys, *widened;  // [queries][padded], [vectors][padded][16], [keys][padded_values]
  int padded, padded_values;
  const float* values[kBlockKeys];

  void put_query(int p, const float* from, int dim, float scale) {
    for (int d = 0; d < padded; d++) queries[p * padded + d] = d < dim ? from[d] * scale : 0.0f;
  }

  // Keys number v * 16 and on, and their values.
  void put(int v, const Places<Kv>& places, const Places<Kv>& next, int dim, int value_dim) {
    turn_keys(places, next, dim, padded, keys + v * kLanes * padded);
    find_values(places, value_dim, padded_values, widened + v * kLanes * padded_values, values + v * kLanes);
  }

  template <int kTogether>
  void take(int p, const Seen* seen, const AttentionShape& shape, int block, int num_vectors, float* maxima,
            float* masses, float* sums) const {
    take_block<kTogether>(queries + p * padded, keys, values, seen, shape.window, shape.softcap, block, num_vectors,
                          padded, padded_values, maxima, masses, sums);
  }
};

}  // namespace penstock

// Blocks of keys and values as fp32.
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

// A block of keys and values, and the queries that it is computed with. Each head of a token is a query of its own,
// number `p`.
template <typename Kv>
struct FloatBlock {
  using Stored = Kv;
  static constexpr int kPadding = kLanes, kValuePadding = kLanes;  // of queries and keys

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

  int query_size() const { return padded; }

  // How many pairs of a query and a head are computed at a time.
  static int together(int num_pairs) { return num_together(num_pairs); }

  // Called once, before the first block.
  void begin(int) const {}

  // Pairs number p and on.
  void take(int p, int count, const Taking& taking) const {
    take_pairs(queries, keys, values, query_size(), p, count, taking);
  }
};

}  // namespace penstock

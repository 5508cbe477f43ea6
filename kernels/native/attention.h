// Paged attention in one pass over K and V (Dao et al., 2022): blocks of 64 keys with a running maximum and sum.
//
// Blocks begin at multiples of 64 positions, regardless of the query's position, the window and the page size, and a
// query's sums add their terms in one fixed order: its bits are the same in a decode step and in any chunk of a
// prefill. Keys are transposed once, 16 at a time, so that the keys of one vector of scores are adjacent.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace penstock {

struct AttentionShape {
  int num_q_heads, num_kv_heads, head_dim, page_size, window;  // window 0: none
  float scale;
};

constexpr int kQueryTile = 8;  // queries of one row that share a pass over the keys
constexpr int kMostTogether = 4;  // (query, head) pairs whose sums fit in registers
constexpr int kVectors = 4;  // vectors of 16 keys in a block
constexpr int kBlockKeys = kVectors * kLanes;

// Where 16 keys and values of one head are; past the last key, zeros.
template <typename Kv>
struct Places {
  const Kv *keys[kLanes], *values[kLanes];
};

template <typename Kv>
Places<Kv> find_keys(const AttentionShape& shape, const Kv* k_pages, const Kv* v_pages, const int32_t* pages,
                     int kv_head, int first, int end, const Kv* zeros) {
  Places<Kv> places;
  int page = first / shape.page_size, offset = first % shape.page_size;  // one division for all keys
  for (int j = 0; j < kLanes; j++, offset++) {
    if (offset == shape.page_size) {
      page++;
      offset = 0;
    }
    if (first + j < end) {
      const size_t head = size_t(pages[page]) * shape.num_kv_heads + kv_head;
      const size_t at = (head * shape.page_size + offset) * shape.head_dim;
      places.keys[j] = k_pages + at;
      places.values[j] = v_pages + at;
    } else {
      places.keys[j] = places.values[j] = zeros;
    }
  }
  return places;
}

// Transposes keys to [padded dim][16] in fp32. It also prefetches their values and the `next` keys: a page is too short
// for the hardware prefetchers to get going.
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
    int d = 0;
    for (; d + kLanes <= dim; d += kLanes) store(room + d, load16(places.values[j] + d));
    for (; d < padded; d++) room[d] = d < dim ? widen(places.values[j][d]) : 0.0f;
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
    for (int i = 0; i < 2; i++)
      for (int r = 0; r < kTogether; r++) {
        const Floats query = splat(queries[r * padded + d + i]);
        for (int v = 0; v < kCount; v++) sums[r][v][i] += query * load16(keys + (v * padded + d + i) * kLanes);
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

// Updates the running maxima, masses (one sum per lane) and sums of kTogether pairs with the first `num_vectors` times
// 16 keys of a block. Keys that a query does not see do not change a bit of them.
template <int kTogether>
inline void take_block(const float* queries, const float* keys, const float* const* values, const int* positions,
                       int window, int block, int num_vectors, int padded, float* maxima, float* masses, float* sums) {
  Floats scores[kTogether][kVectors] = {};
  float weights[kTogether][kBlockKeys], kept[kTogether];
  int first = 0;
  for (; first + 2 <= num_vectors; first += 2) score<2>(queries, keys, padded, first, scores);
  if (first < num_vectors) score<1>(queries, keys, padded, first, scores);
  for (int r = 0; r < kTogether; r++)
    for (int v = 0; v < num_vectors; v++) {
      // A query does not see the keys after it, nor those before its window.
      const int position = positions[r] - block - v * kLanes;
      Ints is_hidden = kLaneNumbers > position;
      if (window) is_hidden |= kLaneNumbers <= position - window;
      scores[r][v] = is_hidden ? splat(-INFINITY) : scores[r][v];
    }
  for (int r = 0; r < kTogether; r++) {
    Floats most = scores[r][0];
    for (int v = 1; v < num_vectors; v++) most = larger(most, scores[r][v]);
    most = larger(splat(maxima[r]), max_of(most));
    // Before a query's first key its maximum is -inf. Zero instead keeps the weights zero rather than NaN.
    const Floats top = most == splat(-INFINITY) ? Floats{} : most;
    kept[r] = maxima[r] == most[0] ? 1.0f : exp16(splat(maxima[r]) - top)[0];
    maxima[r] = most[0];
    Floats mass = load16(masses + r * kLanes) * kept[r];
    for (int v = 0; v < num_vectors; v++) {
      const Floats weight = exp16(scores[r][v] - top);
      store(weights[r] + v * kLanes, weight);
      mass += weight;
    }
    store(masses + r * kLanes, mass);
  }
  // With few pairs, more floats at a time hide the latency of the additions.
  constexpr int kAtATime = kTogether <= 2 ? 4 : 2;
  int d = 0;
  for (; d + kAtATime * kLanes <= padded; d += kAtATime * kLanes)
    accumulate<kAtATime>(weights, kept, values, d, num_vectors * kLanes, padded, sums);
  for (; d < padded; d += kLanes) accumulate<1>(weights, kept, values, d, num_vectors * kLanes, padded, sums);
}

// One kv head's attention for `num_queries` <= kQueryTile neighbouring queries of one row.
//
// q: [num_queries] rows of `stride` floats with all heads of a token; the first query is at `first_position`.
// k_pages, v_pages: one layer's [pages, Hk, page_size, D]. out: rows of `out_stride` floats.
template <typename Kv>
void attend(const AttentionShape& shape, const Kv* k_pages, const Kv* v_pages, const int32_t* pages, int kv_head,
            const float* q, int stride, int num_queries, int first_position, float* out, int out_stride) {
  const int group = shape.num_q_heads / shape.num_kv_heads, dim = shape.head_dim;
  const int padded = (dim + kLanes - 1) / kLanes * kLanes;
  const int num_pairs = num_queries * group, together = num_pairs <= 2 ? num_pairs : kMostTogether;
  const int room = (num_pairs + together - 1) / together * together;
  thread_local std::vector<Floats> scratch;  // aligned: loads across two cache lines take twice as long
  thread_local std::vector<int> positions;
  scratch.resize(std::max(scratch.size(), size_t(padded) / kLanes * (2 * room + 2 * kBlockKeys + 1) + 2 * room));
  positions.assign(room, first_position + num_queries - 1);
  float* queries = reinterpret_cast<float*>(scratch.data());
  float* sums = queries + size_t(room) * padded;
  float* zeros = sums + size_t(room) * padded;
  float* masses = zeros + padded;  // [pairs][16]
  float* maxima = masses + size_t(room) * kLanes;
  float* keys = maxima + size_t(room) * kLanes;
  float* widened = keys + size_t(kBlockKeys) * padded;
  const float* values[kBlockKeys];
  std::fill(queries, maxima, 0.0f);
  for (int p = 0; p < num_pairs; p++) {
    const float* from = q + size_t(p / group) * stride + (kv_head * group + p % group) * dim;
    for (int d = 0; d < dim; d++) queries[p * padded + d] = from[d] * shape.scale;
    positions[p] = first_position + p / group;
  }
  std::fill(maxima, maxima + room, -INFINITY);
  const int last = first_position + num_queries - 1;
  const int begin = shape.window ? std::max(0, first_position - shape.window + 1) / kBlockKeys * kBlockKeys : 0;
  auto find = [&](int first) {
    return find_keys(shape, k_pages, v_pages, pages, kv_head, first, last + 1, reinterpret_cast<const Kv*>(zeros));
  };
  Places<Kv> here = find(begin);
  for (int block = begin; block <= last; block += kBlockKeys) {
    const int num_vectors = (std::min(kBlockKeys, last + 1 - block) + kLanes - 1) / kLanes;
    for (int v = 0; v < num_vectors; v++) {
      const Places<Kv> next = find(block + (v + 1) * kLanes);
      turn_keys(here, next, dim, padded, keys + v * kLanes * padded);
      find_values(here, dim, padded, widened + v * kLanes * padded, values + v * kLanes);
      here = next;
    }
    for (int p = 0; p < num_pairs; p += together) {
      const auto take = together == 1 ? take_block<1> : together == 2 ? take_block<2> : take_block<kMostTogether>;
      take(queries + p * padded, keys, values, positions.data() + p, shape.window, block, num_vectors, padded,
           maxima + p, masses + p * kLanes, sums + p * padded);
    }
  }
  for (int p = 0; p < num_pairs; p++) {
    float* to = out + size_t(p / group) * out_stride + (kv_head * group + p % group) * dim;
    const float mass = sum_of(load16(masses + p * kLanes))[0];
    for (int d = 0; d < dim; d++) to[d] = sums[p * padded + d] / mass;
  }
}

}  // namespace penstock

// Paged attention in one pass over K and V (Dao et al., 2022): blocks of 16 keys with a running maximum and sum.
//
// Blocks begin at multiples of 16 positions, whatever the query's own position, its window or the pages' size, and a
// query's sums take their terms in one fixed order: its bits are the same in a decode step and in any chunk of a
// prefill. Each block is turned around once, so that the 16 keys of a score vector lie side by side.
#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace penstock {

struct AttentionShape {
  int num_q_heads, num_kv_heads, head_dim, page_size, window;  // window 0: none
  float scale;
};

constexpr int kQueryTile = 8;  // queries of one row that share a pass over the keys
constexpr int kMostTogether = 4;  // (query, head) pairs whose sums are kept in registers at a time
constexpr Ints kLaneNumbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

struct Block {  // of 16 positions or, at the end, fewer: where each one's head lies in a layer's keys and in its values
  int num_keys = 0;
  size_t at[kLanes];
};

inline Block find_block(const AttentionShape& shape, const int32_t* pages, int kv_head, int first, int end) {
  Block block{std::clamp(end - first, 0, kLanes), {}};
  int page = first / shape.page_size, offset = first % shape.page_size;  // one division for the block, not one a key
  for (int j = 0; j < block.num_keys; j++, offset++) {
    if (offset == shape.page_size) {
      page++;
      offset = 0;
    }
    block.at[j] = ((size_t(pages[page]) * shape.num_kv_heads + kv_head) * shape.page_size + offset) * shape.head_dim;
  }
  return block;
}

// A block of one head: keys [padded dim][16], values [16][padded dim], in fp32. Asks for the next one on the way: a page
// is no longer than what the processor's own prefetchers take to begin.
template <typename Kv>
void load_block(const AttentionShape& shape, const Kv* k_pages, const Kv* v_pages, const Block& block,
                const Block& next, int padded, float* keys, float* values) {
  const int dim = shape.head_dim, num_keys = block.num_keys;
  const size_t* at = block.at;
  for (int d = 0; d < padded; d += kLanes) {
    Floats rows[kLanes];
    for (int j = 0; j < next.num_keys && d * sizeof(Kv) % 64 == 0; j++) {
      __builtin_prefetch(k_pages + next.at[j] + d);
      __builtin_prefetch(v_pages + next.at[j] + d);
    }
    if (num_keys == kLanes && d + kLanes <= dim) {
      for (int j = 0; j < kLanes; j++) rows[j] = load16(k_pages + at[j] + d);
      for (int j = 0; j < kLanes; j++) store(values + j * padded + d, load16(v_pages + at[j] + d));
    } else {
      for (int j = 0; j < kLanes; j++)
        for (int i = 0; i < kLanes; i++) {
          const bool is_there = j < num_keys && d + i < dim;
          rows[j][i] = is_there ? widen(k_pages[at[j] + d + i]) : 0.0f;
          values[j * padded + d + i] = is_there ? widen(v_pages[at[j] + d + i]) : 0.0f;
        }
    }
    transpose(rows);
    for (int i = 0; i < kLanes; i++) store(keys + (d + i) * kLanes, rows[i]);
  }
}

// Four partial sums per score vector: a single chain of additions would wait for each.
template <int kTogether>
inline void score(const float* queries, const float* keys, int padded, Floats (&scores)[kTogether]) {
  Floats sums[kTogether][4] = {};
  for (int d = 0; d < padded; d += 4)
    for (int i = 0; i < 4; i++) {
      const Floats key = load16(keys + (d + i) * kLanes);
      for (int r = 0; r < kTogether; r++) sums[r][i] += queries[r * padded + d + i] * key;
    }
  for (int r = 0; r < kTogether; r++) scores[r] = (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]);
}

template <int kTogether>
inline void accumulate(const float (&weights)[kTogether][kLanes], const float (&kept)[kTogether], const float* values,
                       int padded, float* sums) {
  for (int d = 0; d < padded; d += kLanes) {
    Floats sum[kTogether];
    for (int r = 0; r < kTogether; r++) sum[r] = load16(sums + r * padded + d) * kept[r];
    for (int j = 0; j < kLanes; j++) {
      const Floats value = load16(values + j * padded + d);
      for (int r = 0; r < kTogether; r++) sum[r] += weights[r][j] * value;
    }
    for (int r = 0; r < kTogether; r++) store(sums + r * padded + d, sum[r]);
  }
}

// What kTogether pairs make of a block: their running maxima, masses and sums are brought up to date.
template <int kTogether>
inline void take_block(const float* queries, const float* keys, const float* values, const int* positions, int window,
                       int block, int padded, float* maxima, float* masses, float* sums) {
  Floats scores[kTogether], most[kTogether], weights[kTogether];
  float weight[kTogether][kLanes], kept[kTogether];
  score(queries, keys, padded, scores);
  for (int r = 0; r < kTogether; r++) {
    // What a query does not see: keys after it, and before its window.
    Ints is_hidden = kLaneNumbers > positions[r] - block;
    if (window) is_hidden |= kLaneNumbers <= positions[r] - window - block;
    scores[r] = is_hidden ? splat(-INFINITY) : scores[r];
    most[r] = larger(splat(maxima[r]), max_of(scores[r]));
  }
  for (int r = 0; r < kTogether; r++) {
    // Before a query's first key, its maximum is -inf: zero in its place keeps the weights zero, and not NaN.
    const Floats top = most[r] == splat(-INFINITY) ? Floats{} : most[r];
    weights[r] = exp16(scores[r] - top);
    store(weight[r], weights[r]);
    kept[r] = maxima[r] == most[r][0] ? 1.0f : exp16(splat(maxima[r]) - top)[0];
    maxima[r] = most[r][0];
  }
  for (int r = 0; r < kTogether; r++) masses[r] = masses[r] * kept[r] + sum_of(weights[r])[0];
  accumulate(weight, kept, values, padded, sums);
}

// One kv head's attention for `num_queries` <= kQueryTile neighbouring queries of one row.
//
// q: [num_queries] rows of `stride` floats, heads of the whole token in it; `first_position` of the first query.
// k_pages, v_pages: one layer's [pages, Hk, page_size, D]. out: rows of `out_stride` floats.
template <typename Kv>
void attend(const AttentionShape& shape, const Kv* k_pages, const Kv* v_pages, const int32_t* pages, int kv_head,
            const float* q, int stride, int num_queries, int first_position, float* out, int out_stride) {
  const int group = shape.num_q_heads / shape.num_kv_heads, dim = shape.head_dim;
  const int padded = (dim + kLanes - 1) / kLanes * kLanes;
  const int num_pairs = num_queries * group, together = num_pairs <= 2 ? num_pairs : kMostTogether;
  const int room = (num_pairs + together - 1) / together * together;
  thread_local std::vector<float> scratch;
  thread_local std::vector<int> positions;
  scratch.assign(size_t(padded) * (2 * room + 2 * kLanes) + 2 * room, 0.0f);
  positions.assign(room, first_position + num_queries - 1);
  float* queries = scratch.data();
  float* sums = queries + size_t(room) * padded;
  float* keys = sums + size_t(room) * padded;
  float* values = keys + size_t(kLanes) * padded;
  float* maxima = values + size_t(kLanes) * padded;
  float* masses = maxima + room;
  for (int p = 0; p < num_pairs; p++) {
    const float* from = q + size_t(p / group) * stride + (kv_head * group + p % group) * dim;
    for (int d = 0; d < dim; d++) queries[p * padded + d] = from[d] * shape.scale;
    positions[p] = first_position + p / group;
  }
  std::fill(maxima, maxima + room, -INFINITY);
  const int last = first_position + num_queries - 1;
  const int begin = shape.window ? std::max(0, first_position - shape.window + 1) / kLanes * kLanes : 0;
  Block here = find_block(shape, pages, kv_head, begin, last + 1);
  for (int block = begin; block <= last; block += kLanes) {
    const Block next = find_block(shape, pages, kv_head, block + kLanes, last + 1);
    load_block(shape, k_pages, v_pages, here, next, padded, keys, values);
    here = next;
    for (int p = 0; p < num_pairs; p += together) {
      const auto take = together == 1 ? take_block<1> : together == 2 ? take_block<2> : take_block<kMostTogether>;
      take(queries + p * padded, keys, values, positions.data() + p, shape.window, block, padded, maxima + p, masses + p,
           sums + p * padded);
    }
  }
  for (int p = 0; p < num_pairs; p++) {
    float* to = out + size_t(p / group) * out_stride + (kv_head * group + p % group) * dim;
    for (int d = 0; d < dim; d++) to[d] = sums[p * padded + d] / masses[p];
  }
}

}  // namespace penstock

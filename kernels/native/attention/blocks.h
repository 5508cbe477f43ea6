// What all ways of computing a block of keys share: where the keys are, which of them a query sees, and how scores
// become weights.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "../machine/vectors.h"
#include "codes.h"

namespace penstock {

struct AttentionShape {
  int num_q_heads, num_kv_heads, head_dim, page_size;  // head_dim: of queries and keys
  int window;  // 0: none; negative: chunks of -window positions
  float scale;
  int value_dim = 0;             // 0: head_dim
  float softcap = 0;             // scores become softcap * tanh(score / softcap); 0: none
  const float* sinks = nullptr;  // [num_q_heads], logits without values; null: none
  int head_bytes = 0;            // of quantized pages
  int entry_dim = 0;             // numbers from one key to the next, if something else is kept behind a key; 0: none

  int group() const { return num_q_heads / num_kv_heads; }
  int of_values() const { return value_dim ? value_dim : head_dim; }
};

// Where a row's keys and values are. For a node of a tree of drafts, the positions of the tree are elsewhere: position
// p from `first_placed` on is where a row without a tree has position places[p - first_placed]. Keys are still taken in
// the order of their positions, so a node gets the same bits as if the tokens of its path were decoded one by one.
struct RowPages {
  const int32_t* pages;             // the row's part of a page table
  const int32_t* places = nullptr;  // up to the last position that the node sees
  int first_placed = INT32_MAX;

  int place(int position) const { return position < first_placed ? position : places[position - first_placed]; }
};

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
constexpr bool kMultipliesTiles = true;
#else
constexpr bool kMultipliesTiles = false;
#endif
constexpr int kQueryTile = kMultipliesTiles ? 32 : 8;  // queries of one row that share a pass over the keys
constexpr int kMostShared = 1 << 16;  // most floats of such queries and sums: they stay in a core's own cache
constexpr int kMostTogether = 4;  // (query, head) pairs whose sums fit in registers
constexpr int kVectors = 4;  // vectors of 16 keys in a block
constexpr int kBlockKeys = kVectors * kLanes;

// Where 16 keys and values of one head are. Outside of [begin, end) nothing is read, and zeros are used instead.
struct NoPlaceScales {};
struct PlaceScales {  // one for each of the 16
  float of_keys[kLanes], of_values[kLanes];
};
template <typename Kv>
struct Places : std::conditional_t<kIsFp8<Kv>, PlaceScales, NoPlaceScales> {
  const Kv *keys[kLanes], *values[kLanes];
};

template <typename Kv>
Places<Kv> find_keys(const AttentionShape& shape, const Kv* k_pages, const Kv* v_pages, const RowPages& row, int kv_head,
                     int first, int begin, int end, const Kv* zeros) {
  Places<Kv> places;
  const int dim = shape.head_dim, value_dim = shape.of_values();
  int page = first / shape.page_size, offset = first % shape.page_size;  // one division for all keys
  for (int j = 0; j < kLanes; j++, offset++) {
    if (offset == shape.page_size) {
      page++;
      offset = 0;
    }
    if (first + j >= row.first_placed && first + j < end) {
      const int place = row.place(first + j);
      page = place / shape.page_size;
      offset = place % shape.page_size;
    }
    if (first + j >= begin && first + j < end) {
      const size_t head = size_t(row.pages[page]) * shape.num_kv_heads + kv_head;
      if constexpr (kIsFp8<Kv>) {
        const Kv *k_head = k_pages + head * shape.head_bytes, *v_head = v_pages + head * shape.head_bytes;
        auto scale = [&](const Kv* of_head) {
          return widen_half(reinterpret_cast<const uint16_t*>(of_head + shape.page_size * dim)[offset]);
        };
        places.keys[j] = k_head + offset * dim;
        places.values[j] = v_head + offset * dim;
        places.of_keys[j] = scale(k_head);
        places.of_values[j] = scale(v_head);
        continue;
      }
      const size_t slot = head * shape.page_size + offset;
      places.keys[j] = k_pages + slot * (shape.entry_dim ? shape.entry_dim : dim);
      places.values[j] = v_pages ? v_pages + slot * value_dim : places.keys[j];
    } else {
      places.keys[j] = places.values[j] = zeros;
      if constexpr (kIsFp8<Kv>) places.of_keys[j] = places.of_values[j] = 0.0f;
    }
  }
  return places;
}

__attribute__((noinline)) inline void cap(float softcap, Floats* scores, int count) {
  for (int i = 0; i < count; i++) scores[i] = softcap * tanh16(scores[i] / softcap);
}

// The first position that a query sees; with chunks, the first one of its own chunk.
inline int first_seen(int position, int window) {
  return window < 0 ? position - position % -window : window ? std::max(0, position - window + 1) : 0;
}

struct Seen {
  int first, last;  // positions
};

// Fills in what each pair of a query and a head sees. Further entries, up to `room`, repeat the last query. Returns the
// range that all pairs together see.
inline Seen look(std::vector<Seen>& seen, int room, int heads, int num_queries, int first_position, int window,
                 const int32_t* last_seen) {
  seen.resize(room);
  Seen all{INT32_MAX, -1};
  for (int p = 0; p < room; p++) {
    const int query = std::min(p / heads, num_queries - 1), position = first_position + query;
    seen[p] = {first_seen(position, window), last_seen ? int(last_seen[query]) : position};
    all = {std::min(all.first, seen[p].first), std::max(all.last, seen[p].last)};
  }
  return all;
}

// From scores of a block to weights: updates the running maxima and masses (one sum per lane) of kTogether pairs. The
// sums so far must be multiplied by `kept`. Keys that a query does not see do not change a bit of its results.
template <int kTogether>
inline void weigh(Floats (&scores)[kTogether][kVectors], const Seen* seen, int window, float softcap, int block,
                  int num_vectors, float* maxima, float* masses, float (&weights)[kTogether][kBlockKeys],
                  float (&kept)[kTogether]) {
  if (softcap) cap(softcap, scores[0], kTogether * kVectors);
  for (int r = 0; r < kTogether; r++)
    for (int v = 0; v < num_vectors; v++) {
      const int at = block + v * kLanes;
      Ints is_hidden = kLaneNumbers > seen[r].last - at;
      if (window) is_hidden |= kLaneNumbers < seen[r].first - at;
      scores[r][v] = is_hidden ? splat(-INFINITY) : scores[r][v];
    }
  for (int r = 0; r < kTogether; r++) {
    Floats most = scores[r][0];
    for (int v = 1; v < num_vectors; v++) most = larger(most, scores[r][v]);
    most = larger(splat(maxima[r]), max_of(most));
    // Before a query's first key its maximum is -inf. Using zero instead keeps the weights zero rather than NaN.
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
}

// Weights as pairs of bf16, of neighbouring keys. With an odd number of vectors, a vector of zeros follows.
inline void round_weights(const float* weights, int num_keys, uint32_t* rounded) {
  for (int j = 0; j < num_keys; j += 2 * kLanes) {
    const Floats upper = j + kLanes < num_keys ? load16(weights + j + kLanes) : Floats{};
    store(rounded + j / 2, pairs_of(load16(weights + j), upper));
  }
}

// Products are of floats, or of words with a pair of bf16 each.
template <typename Number>
using VectorOf = std::conditional_t<std::is_same_v<Number, float>, Floats, Words>;

inline Floats in_all_lanes(float x) { return splat(x); }
inline Words in_all_lanes(uint32_t word) { return word - Words{}; }

// Scores of `kCount` vectors starting at `first`. Each has two partial sums, to hide the latency of the additions.
template <int kCount, int kTogether, typename Number>
inline void score(const Number* queries, const Number* keys, int size, int first,
                  Floats (&scores)[kTogether][kVectors]) {
  Floats sums[kTogether][kCount][2] = {};
  keys += first * kLanes * size;
  for (int d = 0; d < size; d += 2)
    for (int i = 0; i < 2; i++) {
      VectorOf<Number> of_keys[kCount];
      for (int v = 0; v < kCount; v++)
        of_keys[v] = in_register(load<VectorOf<Number>>(keys + (v * size + d + i) * kLanes));
      for (int r = 0; r < kTogether; r++) {
        const VectorOf<Number> query = in_all_lanes(queries[r * size + d + i]);
        for (int v = 0; v < kCount; v++) sums[r][v][i] = add_products(sums[r][v][i], query, of_keys[v]);
      }
    }
  for (int r = 0; r < kTogether; r++)
    for (int v = 0; v < kCount; v++) scores[r][first + v] = sums[r][v][0] + sums[r][v][1];
}

// Adds the weighted values to `sums`: kFloats times 16 floats of each, starting at `at`. A pair of bf16 has the weights
// or values of two keys.
template <int kFloats, int kTogether, typename Number, int kNumbers>
inline void accumulate(const Number (&weights)[kTogether][kNumbers], const float (&kept)[kTogether],
                       const Number* const* values, int at, int count, int padded, float* sums) {
  sums += at;
  Floats sum[kTogether][kFloats];
  for (int r = 0; r < kTogether; r++)
    for (int f = 0; f < kFloats; f++) sum[r][f] = load16(sums + r * padded + f * kLanes) * kept[r];
  for (int j = 0; j < count; j++) {
    VectorOf<Number> value[kFloats];
    for (int f = 0; f < kFloats; f++) value[f] = in_register(load<VectorOf<Number>>(values[j] + at + f * kLanes));
    for (int r = 0; r < kTogether; r++)
      for (int f = 0; f < kFloats; f++) sum[r][f] = add_products(sum[r][f], in_all_lanes(weights[r][j]), value[f]);
  }
  for (int r = 0; r < kTogether; r++)
    for (int f = 0; f < kFloats; f++) store(sums + r * padded + f * kLanes, sum[r][f]);
}

template <int kTogether, typename Number, int kNumbers>
inline void accumulate_all(const Number (&weights)[kTogether][kNumbers], const float (&kept)[kTogether],
                           const Number* const* values, int count, int padded, float* sums) {
  // With few queries, more floats at a time hide the latency of the additions.
  constexpr int kAtATime = kTogether <= 2 ? 4 : 2;
  int d = 0;
  for (; d + kAtATime * kLanes <= padded; d += kAtATime * kLanes)
    accumulate<kAtATime>(weights, kept, values, d, count, padded, sums);
  for (; d < padded; d += kLanes) accumulate<1>(weights, kept, values, d, count, padded, sums);
}

// What the pairs of a query and a head have come to, and the block of keys that is taken next.
struct Taking {
  const Seen* seen;  // [pairs], as the others
  int window;
  float softcap;
  int at, num_vectors;  // the first key's position; 16 keys each
  float *maxima, *masses, *sums;  // [pairs], [pairs][16], [pairs][padded_values]
  int padded_values;
};

// Updates the running maxima, masses and sums of kTogether pairs, number p and on, with the first keys of a block.
// size: numbers of a query.
template <int kTogether, typename Number>
inline void take_block(const Number* queries, const Number* keys, const Number* const* values, int size, int p,
                       const Taking& taking) {
  const int num_vectors = taking.num_vectors, padded_values = taking.padded_values;
  Floats scores[kTogether][kVectors] = {};
  float weights[kTogether][kBlockKeys], kept[kTogether];
  queries += p * size;
  int first = 0;
  for (; first + 2 <= num_vectors; first += 2) score<2>(queries, keys, size, first, scores);
  if (first < num_vectors) score<1>(queries, keys, size, first, scores);
  weigh(scores, taking.seen + p, taking.window, taking.softcap, taking.at, num_vectors, taking.maxima + p,
        taking.masses + p * kLanes, weights, kept);
  float* const sums = taking.sums + p * padded_values;
  const int num_keys = num_vectors * kLanes;
  if constexpr (std::is_same_v<Number, float>) {
    accumulate_all(weights, kept, values, num_keys, padded_values, sums);
  } else {
    Number rounded[kTogether][kBlockKeys / 2];
    for (int r = 0; r < kTogether; r++) round_weights(weights[r], num_keys, rounded[r]);
    accumulate_all(rounded, kept, values, num_keys / 2, padded_values, sums);
  }
}

// As many pairs at a time as there are, or as fit in registers.
inline int num_together(int num_pairs) { return num_pairs <= 2 ? num_pairs : kMostTogether; }

template <typename Number>
inline void take_pairs(const Number* queries, const Number* keys, const Number* const* values, int size, int p,
                       int count, const Taking& taking) {
  const auto take = count == 1   ? take_block<1, Number>
                    : count == 2 ? take_block<2, Number>
                                 : take_block<kMostTogether, Number>;
  take(queries, keys, values, size, p, taking);
}

}  // namespace penstock

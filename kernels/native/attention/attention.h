// Paged attention in one pass over K and V (Dao et al., 2022): blocks of 64 keys with a running maximum and sum.
//
// Blocks begin at multiples of 64 positions, regardless of the query's position, the window and the page size. A
// query's sums add their terms in one fixed order. So its bits are the same in a decode step and in any chunk of a
// prefill. Keys are transposed once, 16 at a time, so that the keys of one vector of scores are adjacent.
//
// A head's sink (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023) acts as a logit before
// its first key: the running maximum and the mass begin with it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "../machine/team.h"
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

constexpr int kQueryTile = 8;  // queries of one row that share a pass over the keys
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
      places.keys[j] = k_pages + slot * dim;
      places.values[j] = v_pages ? v_pages + slot * value_dim : places.keys[j];
    } else {
      places.keys[j] = places.values[j] = zeros;
      if constexpr (kIsFp8<Kv>) places.of_keys[j] = places.of_values[j] = 0.0f;
    }
  }
  return places;
}

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

// Attention of `num_heads` of the query heads that share a kv head, for `num_queries` <= kQueryTile neighbouring
// queries of one row. Pages with only positions that no query sees are not touched.
//
// q: [num_queries] rows of `stride` floats with all heads of a token; the first query is at `first_position`.
// k_pages, v_pages: one layer's [pages, Hk, page_size, head_dim or value_dim]; without v_pages a value is the first
// part of its key. first_head, num_heads: counted within the group; 0 heads: all. out: rows of `out_stride` floats.
// last_seen: that of these queries, as in AttentionRows.
template <typename Kv>
void attend(const AttentionShape& shape, const Kv* k_pages, const Kv* v_pages, const RowPages& row, int kv_head,
            const float* q, int stride, int num_queries, int first_position, float* out, int out_stride,
            int first_head = 0, int num_heads = 0, const int32_t* last_seen = nullptr) {
  const int heads = num_heads ? num_heads : shape.group(), first = kv_head * shape.group() + first_head;
  const int dim = shape.head_dim, value_dim = shape.of_values();
  const int padded = round_up(dim, kLanes), padded_values = round_up(value_dim, kLanes);
  const int num_pairs = num_queries * heads, together = num_pairs <= 2 ? num_pairs : kMostTogether;
  const int room = round_up(num_pairs, together);
  thread_local std::vector<Floats> scratch;  // aligned: loads across two cache lines take twice as long
  thread_local std::vector<Seen> seen;
  const size_t wanted = (room + kBlockKeys + 1) * size_t(padded + padded_values) / kLanes + 2 * room;
  scratch.resize(std::max(scratch.size(), wanted));
  const auto [begin, last] = look(seen, room, heads, num_queries, first_position, shape.window, last_seen);
  float* queries = reinterpret_cast<float*>(scratch.data());
  float* sums = queries + size_t(room) * padded;
  float* zeros = sums + size_t(room) * padded_values;
  float* masses = zeros + std::max(padded, padded_values);  // [pairs][16]
  float* maxima = masses + size_t(room) * kLanes;
  float* keys = maxima + size_t(room) * kLanes;
  float* widened = keys + size_t(kBlockKeys) * padded;
  const float* values[kBlockKeys];
  std::fill(queries, maxima, 0.0f);
  std::fill(maxima, maxima + room, -INFINITY);
  for (int p = 0; p < num_pairs; p++) {
    const int head = first + p % heads;
    const float* from = q + size_t(p / heads) * stride + head * dim;
    for (int d = 0; d < dim; d++) queries[p * padded + d] = from[d] * shape.scale;
    if (shape.sinks) {
      maxima[p] = shape.sinks[head];
      masses[p * kLanes] = 1.0f;
    }
  }
  auto find = [&, begin = begin, last = last](int at) {
    return find_keys(shape, k_pages, v_pages, row, kv_head, at, begin, last + 1, reinterpret_cast<const Kv*>(zeros));
  };
  const int first_block = begin / kBlockKeys * kBlockKeys;
  Places<Kv> here = find(first_block);
  for (int block = first_block; block <= last; block += kBlockKeys) {
    const int num_vectors = (std::min(kBlockKeys, last + 1 - block) + kLanes - 1) / kLanes;
    for (int v = 0; v < num_vectors; v++) {
      const Places<Kv> next = find(block + (v + 1) * kLanes);
      turn_keys(here, next, dim, padded, keys + v * kLanes * padded);
      find_values(here, value_dim, padded_values, widened + v * kLanes * padded_values, values + v * kLanes);
      here = next;
    }
    for (int p = 0; p < num_pairs; p += together) {
      const auto take = together == 1 ? take_block<1> : together == 2 ? take_block<2> : take_block<kMostTogether>;
      take(queries + p * padded, keys, values, seen.data() + p, shape.window, shape.softcap, block, num_vectors,
           padded, padded_values, maxima + p, masses + p * kLanes, sums + p * padded_values);
    }
  }
  for (int p = 0; p < num_pairs; p++) {
    float* to = out + size_t(p / heads) * out_stride + (first + p % heads) * value_dim;
    const float mass = sum_of(load16(masses + p * kLanes))[0];
    for (int d = 0; d < value_dim; d++) to[d] = sums[p * padded_values + d] / mass;
  }
}

struct AttentionRows {  // the N rows of a step
  int num_rows, page_table_stride;
  const int32_t* query_start_loc;  // [N + 1]
  const int32_t* seq_lens;         // [N]
  const int32_t* page_table;       // [., page_table_stride]; entries before a row's window are not read
  const int32_t* table_rows = nullptr;  // [N]: the rows' rows of the page table; null: 0, 1, 2, ...
  const int32_t* paths = nullptr;       // [N, path_stride]: `first_placed`, and places; null: there are no trees
  int path_stride = 0;
  const int32_t* last_seen = nullptr;  // [T]: the last position that a token sees; null: its own

  RowPages pages_of(int row) const {
    const int32_t* pages = page_table + size_t(table_rows ? table_rows[row] : row) * page_table_stride;
    if (!paths) return {pages};
    const int32_t* path = paths + size_t(row) * path_stride;
    return {pages, path + 1, path[0]};
  }
};

// Attention of all of a step's queries. q: [T, stride], the heads of a token one after the other; out: [T, out_stride].
//
// The work is divided among threads by rows' queries and by kv heads. The query heads of a kv head are divided, too, if
// there are many, or if there would be too few units of work. The division does not change the bits.
template <typename Kv>
void attention(Team& team, const AttentionShape& shape, const Kv* k_pages, const Kv* v_pages, const AttentionRows& rows,
               const float* q, int stride, float* out, int out_stride) {
  struct Unit {
    int row, first, count, kv_head, first_head, num_heads;
  };
  static std::vector<Unit> units;
  units.clear();
  const int group = shape.group();
  int num_tiles = 0;
  for (int row = 0; row < rows.num_rows; row++)
    num_tiles += (rows.query_start_loc[row + 1] - rows.query_start_loc[row] + kQueryTile - 1) / kQueryTile;
  const int for_threads = (team.size() - 1) / std::max(1, num_tiles * shape.num_kv_heads) + 1;
  for (int row = 0; row < rows.num_rows; row++)
    for (int first = rows.query_start_loc[row]; first < rows.query_start_loc[row + 1]; first += kQueryTile) {
      const int count = std::min(kQueryTile, rows.query_start_loc[row + 1] - first);
      const int for_cache = group * count * (shape.head_dim + shape.of_values()) / kMostShared + 1;
      const int heads = round_up((group - 1) / std::max(for_cache, for_threads) + 1, kMostTogether);
      for (int kv_head = 0; kv_head < shape.num_kv_heads; kv_head++)
        for (int head = 0; head < group; head += heads)
          units.push_back({row, first, count, kv_head, head, std::min(heads, group - head)});
    }
  team.each(int(units.size()), 1, [&](int n) {
    // Later queries see more keys. They come first, so that no thread gets a long unit at the end.
    const Unit& unit = units[units.size() - 1 - n];
    const int begin = rows.query_start_loc[unit.row], end = rows.query_start_loc[unit.row + 1];
    const int position = rows.seq_lens[unit.row] - (end - begin) + (unit.first - begin);
    attend(shape, k_pages, v_pages, rows.pages_of(unit.row), unit.kv_head, q + size_t(unit.first) * stride, stride,
           unit.count, position, out + size_t(unit.first) * out_stride, out_stride, unit.first_head, unit.num_heads,
           rows.last_seen ? rows.last_seen + unit.first : nullptr);
  });
}

}  // namespace penstock

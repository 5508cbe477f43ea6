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
#include "floats.h"
#include "pairs.h"
#include "tiles.h"

namespace penstock {

// See `attend`; Block: FloatBlock, PairBlock or TileBlock.
template <typename Block, typename Kv = typename Block::Stored>
void attend_in(const AttentionShape& shape, const Kv* k_pages, const Kv* v_pages, const RowPages& row, int kv_head,
               const float* q, int stride, int num_queries, int first_position, float* out, int out_stride,
               int first_head, int num_heads, const int32_t* last_seen) {
  const int heads = num_heads ? num_heads : shape.group(), first = kv_head * shape.group() + first_head;
  const int dim = shape.head_dim, value_dim = shape.of_values();
  const int padded = round_up(dim, Block::kPadding), padded_values = round_up(value_dim, Block::kValuePadding);
  const int num_pairs = num_queries * heads, together = Block::together(num_pairs);
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
  Block block{queries, keys, keys + size_t(kBlockKeys) * padded, padded, padded_values};
  std::fill(queries, maxima, 0.0f);
  std::fill(maxima, maxima + room, -INFINITY);
  for (int p = 0; p < num_pairs; p++) {
    const int head = first + p % heads;
    block.put_query(p, q + size_t(p / heads) * stride + head * dim, dim, shape.scale);
    if (shape.sinks) {
      maxima[p] = shape.sinks[head];
      masses[p * kLanes] = 1.0f;
    }
  }
  block.begin(together);
  auto find = [&, begin = begin, last = last](int at) {
    return find_keys(shape, k_pages, v_pages, row, kv_head, at, begin, last + 1, reinterpret_cast<const Kv*>(zeros));
  };
  const int first_block = begin / kBlockKeys * kBlockKeys;
  Places<Kv> here = find(first_block);
  for (int at = first_block; at <= last; at += kBlockKeys) {
    const int num_vectors = (std::min(kBlockKeys, last + 1 - at) + kLanes - 1) / kLanes;
    for (int v = 0; v < num_vectors; v++) {
      const Places<Kv> next = find(at + (v + 1) * kLanes);
      block.put(v, here, next, dim, value_dim);
      here = next;
    }
    const Taking taking{seen.data(), shape.window, shape.softcap, at,           num_vectors,
                        maxima,      masses,       sums,          padded_values};
    for (int p = 0; p < num_pairs; p += together) block.take(p, together, taking);
  }
  for (int p = 0; p < num_pairs; p++) {
    float* to = out + size_t(p / heads) * out_stride + (first + p % heads) * value_dim;
    const float mass = sum_of(load16(masses + p * kLanes))[0];
    for (int d = 0; d < value_dim; d++) to[d] = sums[p * padded_values + d] / mass;
  }
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
  auto in = attend_in<FloatBlock<Kv>>;
#ifdef __AVX512BF16__
  // Latents are multiplied as floats: what rounding of their queries would cost has not been measured.
  if constexpr (std::is_same_v<Kv, bf16>)
    if (v_pages) in = kMultipliesTiles && may_use_tiles() ? attend_in<TileBlock> : attend_in<PairBlock>;
#endif
  in(shape, k_pages, v_pages, row, kv_head, q, stride, num_queries, first_position, out, out_stride, first_head,
     num_heads, last_seen);
}

struct AttentionRows {  // the N rows of a step
  int num_rows, page_table_stride;
  const int32_t* query_start_loc;  // [N + 1]
  const int32_t* seq_lens;         // [N]
  const int32_t* page_table;       // [., page_table_stride]; entries before a row's window are not read
  const int32_t* table_rows = nullptr;  // [N]: the rows' rows of the page table; null: 0, 1, 2, ...
  const int32_t* paths = nullptr;       // [N, path_stride]: `first_placed`, and places; null: there are no trees
  int path_stride = 0;
  const int32_t* path_rows = nullptr;   // [N]: the rows' rows of `paths`, negative: no path; null: 0, 1, 2, ...
  const int32_t* last_seen = nullptr;  // [T]: the last position that a token sees; null: its own

  RowPages pages_of(int row) const {
    const int32_t* pages = page_table + size_t(table_rows ? table_rows[row] : row) * page_table_stride;
    if (!paths) return {pages};
    const int its_path = path_rows ? path_rows[row] : row;
    if (its_path < 0) return {pages};
    const int32_t* path = paths + size_t(its_path) * path_stride;
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

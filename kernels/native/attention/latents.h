// Multi-head latent attention (DeepSeek-V2, 2024): a position keeps a latent and one rotated key for all heads.
//
// It is computed the absorbed way: queries are projected to the latent space, and the results are projected back, head
// by head. Expanding the latents of a context to each head's keys and values would need fewer products for long chunks
// of a prompt, but then a token's bits would depend on its chunk.
#pragma once

#include <algorithm>
#include <vector>

#include "../linear/linear.h"
#include "../machine/memory.h"
#include "../operations/heads.h"
#include "attention.h"
#include "choice.h"

namespace penstock {

struct LatentAttention {
  const Linear* into;    // [num_heads], nope_dim -> kv_rank: from a query's unrotated part to the latent space
  const Linear* out_of;  // [num_heads], kv_rank -> v_dim: from a latent to a value
  NormWeights norm;      // of the latents
  int32_t num_heads, kv_rank, nope_dim, rope_dim, v_dim, page_size;
  float scale;
  int32_t entry_dim;  // numbers that the pages keep of a position: the latent, the rotated key, and perhaps an index key
  int32_t top_k;      // an indexer chooses so many of more positions; 0: there is none

  int key_dim() const { return kv_rank + rope_dim; }
  int q_dim() const { return nope_dim + rope_dim; }
};

constexpr int kMostAbsorbed = 1 << 13;  // (token, head) pairs whose queries are in the latent space at the same time

// Norms and rotates [latent | key] of a token, `key_dim` floats, and writes it to `slot` of its pages [pages, 1,
// page_size, entry_dim], unless `slot` is negative. Rotates the heads of the token's queries [num_heads, q_dim]. Without
// `cos_sin` nothing is rotated.
template <typename Kv>
void keep_latent(const LatentAttention& layer, float* latent, float* q, const float* cos_sin, int64_t slot, Kv* pages) {
  Kv* to = slot < 0 ? nullptr : pages + slot * layer.entry_dim;
  for (size_t d = 0; to && d < size_t(layer.key_dim()); d += 64 / sizeof(Kv)) __builtin_prefetch(to + d, 1);
  normalize(layer.norm, latent, layer.kv_rank, latent);
  if (cos_sin) rotate(latent + layer.kv_rank, cos_sin, layer.rope_dim);
  for (int h = 0; cos_sin && h < layer.num_heads; h++) rotate(q + h * layer.q_dim() + layer.nope_dim, cos_sin, layer.rope_dim);
  for (int d = 0; to && d < layer.key_dim(); d++) narrow(latent[d], to + d);
}

// The parts of a step's rows that are in tokens [first, end). With an indexer, a token that sees more than `top_k`
// positions is a row of its own, with as many positions as were chosen.
class PartOfRows {
 public:
  AttentionRows of(const AttentionRows& all, int first, int end, int top_k) {
    query_start_loc_.assign(1, 0);
    seq_lens_.clear();
    table_rows_.clear();
    path_rows_.clear();
    for (int row = 0; row < all.num_rows; row++) {
      const int begin = std::max(first, all.query_start_loc[row]);
      const int its_end = std::min(end, all.query_start_loc[row + 1]);
      if (begin >= its_end) continue;
      const int table_row = all.table_rows ? all.table_rows[row] : row;
      const int ahead = all.seq_lens[row] - all.query_start_loc[row + 1];  // of token t, t + 1 + ahead are seen
      const int end_of_all = top_k ? std::clamp(top_k - ahead, begin, its_end) : its_end;
      if (begin < end_of_all) add(end_of_all - first, end_of_all + ahead, table_row, -1);
      for (int t = end_of_all; t < its_end; t++) add(t + 1 - first, top_k, table_row, t);
    }
    AttentionRows part = all;
    part.num_rows = int(seq_lens_.size());
    part.query_start_loc = query_start_loc_.data();
    part.seq_lens = seq_lens_.data();
    part.table_rows = table_rows_.data();
    if (all.last_seen) part.last_seen = all.last_seen + first;
    if (top_k) {
      part.paths = choice.places.data();
      part.path_stride = choice.stride;
      part.path_rows = path_rows_.data();
    }
    return part;
  }

 private:
  void add(int end, int seq_len, int table_row, int path_row) {
    query_start_loc_.push_back(end);
    seq_lens_.push_back(seq_len);
    table_rows_.push_back(table_row);
    path_rows_.push_back(path_row);
  }

  std::vector<int32_t> query_start_loc_, seq_lens_, table_rows_, path_rows_;
};

// Scratch memory for the current step.
inline Buffer room_for_latents;
inline PartOfRows part_of_rows;

// A product for each head: from [num_tokens, from_stride] with heads that are `from_step` apart; `to` likewise.
inline void by_head(Team& team, const Linear* layers, int num_heads, int num_tokens, const float* from, int from_stride,
                    int from_step, float* packed, float* to, int to_stride, int to_step) {
  std::vector<Share> shares;
  for (int h = 0; h < num_heads; h++) shares.push_back({layers + h, h * num_tokens, num_tokens});
  auto row = [=](int head, int t) { return from + size_t(t) * from_stride + head * from_step; };
  const int num_outputs = layers->num_outputs;
  linears(team, shares.data(), num_heads, row, packed, [=](int head, int t, int output, Floats sum) {
    float* at = to + size_t(t) * to_stride + head * to_step + output;
    const int count = std::min(kLanes, num_outputs - output);  // the floats after these belong to other heads
    if (count == kLanes)
      store(at, sum);
    else
      for (int i = 0; i < count; i++) at[i] = sum[i];
  });
}

// Attention of all of a step's queries over pages that `keep_latent` has written. q: [tokens, stride], each token's
// heads [num_heads, q_dim], rotated; out: [tokens, out_stride], heads of v_dim.
template <typename Kv>
void latent_attention(Team& team, const LatentAttention& layer, const Kv* pages, const AttentionRows& rows,
                      const float* q, int stride, float* out, int out_stride) {
  const int heads = layer.num_heads, key_dim = layer.key_dim(), num_tokens = rows.query_start_loc[rows.num_rows];
  const int at_once = std::min(num_tokens, std::max(1, kMostAbsorbed / heads));
  const int queries_stride = heads * key_dim, found_size = heads * layer.kv_rank;
  const int found_stride = round_up(found_size, 2), packed_size = round_up(std::max(layer.nope_dim, layer.kv_rank), 2);
  const size_t row_size = queries_stride + found_stride + heads * packed_size;
  float* queries = room_for_latents.of(at_once * row_size);
  float* found = queries + size_t(at_once) * queries_stride;
  float* packed = found + size_t(at_once) * found_stride;
  AttentionShape shape{heads, 1, key_dim, layer.page_size, 0, layer.scale};
  shape.value_dim = layer.kv_rank;
  shape.entry_dim = layer.entry_dim;
  for (int first = 0; first < num_tokens; first += at_once) {
    const int count = std::min(at_once, num_tokens - first);
    const float* from = q + size_t(first) * stride;
    team.each(count, 16, [&](int t) {
      found[size_t(t + 1) * found_stride - 1] = 0.0f;  // one float past an odd number of inputs is multiplied by zero
      for (int h = 0; h < heads; h++)
        std::copy_n(from + size_t(t) * stride + h * layer.q_dim() + layer.nope_dim, layer.rope_dim,
                    queries + size_t(t) * queries_stride + h * key_dim + layer.kv_rank);
    });
    by_head(team, layer.into, heads, count, from, stride, layer.q_dim(), packed, queries, queries_stride, key_dim);
    attention(team, shape, pages, static_cast<const Kv*>(nullptr), part_of_rows.of(rows, first, first + count, layer.top_k),
              queries, queries_stride, found, found_stride);
    by_head(team, layer.out_of, heads, count, found, found_stride, layer.kv_rank, packed,
            out + size_t(first) * out_stride, out_stride, layer.v_dim);
  }
}

}  // namespace penstock

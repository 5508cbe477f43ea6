// Which positions a token attends to: those that an indexer scores highest (DeepSeek-V3.2, 2025).
//
//   score(t, s) = sum over heads h of weight[t, h] * max(0, q[t, h] . k[s])
//
// Each score is a sum in one fixed order, so a token's choice does not depend on its chunk or its batch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "../machine/team.h"
#include "../operations/heads.h"
#include "attention.h"

namespace penstock {

struct Indexer {  // as IndexerStruct in latents.py
  NormWeights norm;  // of index keys
  int32_t num_heads, head_dim, rope_dim, top_k;
  int32_t first, entry_dim;  // an index key begins at number `first` of an entry of the pages
  float scale;               // of the heads' weights
};

// What the tokens of a step attend to, in every layer until the next one that chooses. Static like other scratch memory.
struct Choice {
  std::vector<int32_t> places;  // [T, 1 + top_k]: 0, as in `AttentionRows::paths`, then positions in ascending order
  int stride = 0;

  int32_t* of(int token) { return places.data() + size_t(token) * stride; }
};
inline Choice choice;

// Norms and rotates a token's index key, rotates its index queries, and writes the key to `slot` of the pages, unless
// that is negative.
template <typename Kv>
void keep_index_key(const Indexer& its, float* key, float* q, const float* cos_sin, int64_t slot, Kv* pages) {
  normalize(its.norm, key, its.head_dim, key);
  rotate(key, cos_sin, its.rope_dim);
  for (int h = 0; h < its.num_heads; h++) rotate(q + h * its.head_dim, cos_sin, its.rope_dim);
  if (slot < 0) return;
  Kv* to = pages + slot * its.entry_dim + its.first;
  for (int d = 0; d < its.head_dim; d++) narrow(key[d], to + d);
}

constexpr int kScoredTogether = 8;         // heads whose sums fit in registers
constexpr int kSegment = 512;              // keys that a thread scores at a time
constexpr size_t kMostScores = 1 << 22;    // scores of tokens that are held at once
inline Buffer room_for_scores;

// Scores of 16 positions for one token. keys: [head_dim][16].
inline Floats score(const Indexer& its, const float* keys, const float* q, const float* weights) {
  Floats total = {};
  for (int h = 0; h < its.num_heads; h += kScoredTogether) {
    Floats sums[kScoredTogether] = {};
    const int count = std::min(kScoredTogether, its.num_heads - h);
    if (count == kScoredTogether) {
      for (int d = 0; d < its.head_dim; d++) {
        const Floats key = load16(keys + d * kLanes);
        for (int i = 0; i < kScoredTogether; i++) sums[i] += key * q[(h + i) * its.head_dim + d];
      }
    } else {
      for (int d = 0; d < its.head_dim; d++)
        for (int i = 0; i < count; i++) sums[i] += load16(keys + d * kLanes) * q[(h + i) * its.head_dim + d];
    }
    for (int i = 0; i < count; i++) total += (sums[i] > 0.0f ? sums[i] : Floats{}) * (weights[h + i] * its.scale);
  }
  return total == total ? total : Floats{} - INFINITY;  // NaN has no order
}

// Chooses for every token of a step that sees more than `top_k` positions; the others have no path.
//
// q: [tokens, q_stride] and weights: [tokens, weights_stride], as `keep_index_key` has left them.
template <typename Kv>
void choose(Team& team, const Indexer& its, int page_size, const Kv* pages, const AttentionRows& rows, const float* q,
            int q_stride, const float* weights, int weights_stride) {
  struct Token {
    int token, row, num_seen;
  };
  static std::vector<Token> tokens;
  tokens.clear();
  int longest = 0;
  for (int row = 0; row < rows.num_rows; row++)
    for (int t = rows.query_start_loc[row]; t < rows.query_start_loc[row + 1]; t++) {
      const int num_seen = rows.seq_lens[row] - (rows.query_start_loc[row + 1] - t) + 1;
      if (num_seen <= its.top_k) continue;
      tokens.push_back({t, row, num_seen});
      longest = std::max(longest, num_seen);
    }
  if (tokens.empty()) return;
  choice.stride = its.top_k + 1;
  choice.places.resize(size_t(rows.query_start_loc[rows.num_rows]) * choice.stride);
  const size_t width = round_up(longest, kSegment);
  const int at_once = int(std::clamp(kMostScores / width, size_t(1), tokens.size()));
  const int padded = round_up(its.head_dim, kLanes), num_segments = int(width / kSegment);
  float* scores = room_for_scores.of(at_once * width);
  for (int first = 0; first < int(tokens.size()); first += at_once) {
    const int count = std::min(at_once, int(tokens.size()) - first);
    // Neighbours of one row share the keys of a segment, which are turned once for all of them.
    const int together = std::min(count, std::max(1, count * num_segments / (4 * team.size())));
    const int num_groups = (count + together - 1) / together;
    team.each(num_groups * num_segments, 1, [&](int unit) {
      thread_local std::vector<Floats> room;
      room.resize(std::max(room.size(), size_t(padded)));
      float* keys = reinterpret_cast<float*>(room.data());
      const int segment = unit % num_segments, begin = unit / num_segments * together;
      const int end = std::min(count, begin + together);
      for (int from = begin, to; from < end; from = to) {
        const Token& one = tokens[first + from];
        int most = one.num_seen;
        for (to = from + 1; to < end && tokens[first + to].row == one.row; to++)
          most = std::max(most, tokens[first + to].num_seen);
        const RowPages its_pages = rows.pages_of(one.row);
        auto find = [&](int at) {
          Places<Kv> places;
          for (int j = 0; j < kLanes; j++) {
            const int position = std::min(at + j, most - 1);
            const size_t slot = size_t(its_pages.pages[position / page_size]) * page_size + position % page_size;
            places.keys[j] = places.values[j] = pages + slot * its.entry_dim + its.first;
          }
          return places;
        };
        Places<Kv> here = find(segment * kSegment);
        for (int at = segment * kSegment; at < std::min(most, (segment + 1) * kSegment); at += kLanes) {
          const Places<Kv> next = find(at + kLanes);
          turn_keys(here, next, its.head_dim, padded, keys);
          here = next;
          for (int i = from; i < to; i++) {
            const Token& token = tokens[first + i];
            const float* of_heads = weights + size_t(token.token) * weights_stride;
            store(scores + size_t(i) * width + at,
                  score(its, keys, q + size_t(token.token) * q_stride, of_heads));
          }
        }
      }
    });
    team.each(count, 1, [&](int i) {
      thread_local std::vector<float> sorted;
      const Token& token = tokens[first + i];
      float* all = scores + size_t(i) * width;
      sorted.assign(all, all + token.num_seen);
      std::nth_element(sorted.begin(), sorted.begin() + its.top_k - 1, sorted.end(), std::greater<float>());
      const float least = sorted[its.top_k - 1];
      int num_equal = its.top_k;  // how many of those with the least score are chosen: the earliest
      for (int s = 0; s < token.num_seen; s++) num_equal -= all[s] > least;
      int32_t* place = choice.of(token.token);
      *place++ = 0;
      for (int s = 0; s < token.num_seen; s++)
        if (all[s] > least || (all[s] == least && num_equal-- > 0)) *place++ = s;
    });
  }
}

}  // namespace penstock

// Exchanges of numbers between ranks of one host, in memory that they share.
//
// Arrays go through this memory in parts of a bounded size, which stay in caches. The exchange of a part needs one
// meeting.
#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>

#include "../machine/memory.h"
#include "../machine/vectors.h"
#include "../pass.h"
#include "meeting.h"

namespace penstock {

constexpr int kWorthSharing = 1 << 14;  // floats in a part from which three or more ranks divide the additions

// The sum of 16 floats at `at` of the ranks' parts, added in the order of the ranks.
inline Floats sum_over_ranks(const RankGroup& group, size_t at, int count) {
  Floats sum = load_some(part_of_rank<float>(group, 0) + at, count);
  for (int rank = 1; rank < group.num_ranks; rank++) sum += load_some(part_of_rank<float>(group, rank) + at, count);
  return sum;
}

inline void store_some(float* at, Floats values, int count) {
  if (count >= kLanes) return store(at, values);
  for (int i = 0; i < count; i++) at[i] = values[i];
}

// Adds up rows of `size` floats over the ranks; a row must fit into a part. take(row, i, sums, n) gets sums i..i+n-1 of
// a row, n <= 16. All ranks get the same bits, which do not depend on the number of rows.
template <typename Idle, typename Take>
void add_up_shared(Team& team, RankGroup& group, const float* x, size_t stride, int size, int num_rows, Idle idle,
                   Take take) {
  const int num_ranks = group.num_ranks, at_once = int(group.part_bytes / sizeof(float) / size);
  for (int first = 0; first < num_rows; first += at_once, group.num_exchanges++) {
    const int count = std::min(at_once, num_rows - first);
    float* const own = part_of_rank<float>(group, group.rank);
    team.each(count, together(size), [&](int t) {
      std::memcpy(own + size_t(t) * size, x + (first + t) * stride, size * sizeof(float));
    });
    meet(group, idle);
    // Each rank adds up some of the rows, in its own part. No other rank reads those rows there before the second
    // meeting.
    const bool is_shared = num_ranks > 2 && count >= num_ranks && count * size >= kWorthSharing;
    if (is_shared) {
      const int begin = int64_t(count) * group.rank / num_ranks, end = int64_t(count) * (group.rank + 1) / num_ranks;
      team.each(end - begin, together(size), [&](int t) {
        const size_t row = size_t(begin + t) * size;
        for (int i = 0; i < size; i += kLanes)
          store_some(own + row + i, sum_over_ranks(group, row + i, size - i), size - i);
      });
      meet(group, idle);
    }
    team.each(count, together(size), [&](int t) {
      const size_t row = size_t(t) * size;
      const float* const sums = part_of_rank<float>(group, int((int64_t(t + 1) * num_ranks - 1) / count)) + row;
      for (int i = 0; i < size; i += kLanes) {
        const Floats sum = is_shared ? load_some(sums + i, size - i) : sum_over_ranks(group, row + i, size - i);
        take(first + t, i, sum, std::min(kLanes, size - i));
      }
    });
  }
}

// The same between hosts, by the callback of the group.
template <typename Take>
void add_up_elsewhere(Team& team, RankGroup& group, const float* x, size_t stride, int size, int num_rows, Take take) {
  static Buffer buffer;
  float* const sums = buffer.of(size_t(num_rows) * size);
  for (int t = 0; t < num_rows; t++) std::copy_n(x + t * stride, size, sums + size_t(t) * size);
  group.numbers = sums;
  group.num_numbers = int64_t(num_rows) * size;
  if (!group.ask()) throw GivenUp();
  team.each(num_rows, together(size), [&](int t) {
    for (int i = 0; i < size; i += kLanes)
      take(t, i, load_some(sums + size_t(t) * size + i, size - i), std::min(kLanes, size - i));
  });
}

// The same for rows of any size, wherever the ranks are.
template <typename Idle, typename Take>
void add_up(Team& team, RankGroup& group, const float* x, size_t stride, int size, int num_rows, Idle idle, Take take) {
  if (!group.memory) return add_up_elsewhere(team, group, x, stride, size, num_rows, take);
  const int most = group.part_bytes / sizeof(float);
  for (int from = 0; from < size; from += most)
    add_up_shared(team, group, x + from, stride, std::min(most, size - from), num_rows, idle,
                  [=](int t, int i, Floats sum, int n) { take(t, from + i, sum, n); });
}

constexpr auto kNothing = [] { return false; };  // nothing to do while a rank waits

// Puts the sum over the ranks in place of `count` floats.
inline void add_up_in_place(Team& team, RankGroup& group, float* x, int64_t count) {
  constexpr int kRow = 4096;
  auto add_up_rows = [&](float* rows, int size, int num_rows) {
    add_up_shared(team, group, rows, size, size, num_rows, kNothing, [=](int t, int i, Floats sum, int n) {
      store_some(rows + size_t(t) * size + i, sum, n);
    });
  };
  const int num_rows = int(count / kRow), rest = int(count % kRow);
  if (num_rows) add_up_rows(x, kRow, num_rows);
  if (rest) add_up_rows(x + size_t(num_rows) * kRow, rest, 1);
}

// x [num_rows, widths[rank]] of each rank -> out [num_rows, sum of widths], columns in the order of the ranks; in
// bytes.
inline void gather(Team& team, RankGroup& group, const char* x, int64_t num_rows, const int64_t* widths, char* out) {
  const int64_t part = group.part_bytes, stride = std::accumulate(widths, widths + group.num_ranks, int64_t(0));
  const int64_t longest = num_rows * *std::max_element(widths, widths + group.num_ranks);
  for (int64_t begin = 0; begin < longest; begin += part, group.num_exchanges++) {
    const int64_t own = std::min(begin + part, num_rows * widths[group.rank]) - begin;
    if (own > 0) std::memcpy(part_of_rank<char>(group, group.rank), x + begin, own);
    meet(group, kNothing);
    char* to = out;
    for (int rank = 0; rank < group.num_ranks; to += widths[rank++]) {
      const int64_t width = widths[rank], end = std::min(begin + part, num_rows * width);
      const char* const from = part_of_rank<char>(group, rank);
      if (begin >= end) continue;
      const int first = int(begin / width), last = int((end - 1) / width);
      team.each(last - first + 1, together(int(width / sizeof(float)) + 1), [&](int i) {
        const int64_t row = (first + i) * width, from_byte = std::max(begin, row), to_byte = std::min(end, row + width);
        std::memcpy(to + (first + i) * stride + (from_byte - row), from + (from_byte - begin), to_byte - from_byte);
      });
    }
  }
}

// Copies the bytes of rank `source` to all others.
inline void broadcast(RankGroup& group, char* x, int64_t num_bytes, int source) {
  for (int64_t begin = 0; begin < num_bytes; begin += group.part_bytes, group.num_exchanges++) {
    const int64_t count = std::min<int64_t>(group.part_bytes, num_bytes - begin);
    char* const part = part_of_rank<char>(group, source);
    if (group.rank == source) std::memcpy(part, x + begin, count);
    meet(group, kNothing);
    if (group.rank != source) std::memcpy(x + begin, part, count);
  }
}

}  // namespace penstock

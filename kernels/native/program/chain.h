// Heads that guess token by token, each from their own output for the token before: all guesses of a step in one call.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "../sampling/drawing.h"
#include "step.h"

namespace penstock {

struct Chain {  // as _Chain in chain.py
  const Program *layers, *output;  // of `output`, only the output matrix is used
  const Pool* pool;
  NormWeights norm;          // of the output matrix's inputs
  const int64_t* token_ids;  // the token of each output; null: output t is token t
  void* kept;                // [R * num_kept, H], the model's last hidden states of each row, a ring buffer
  int32_t* kept_positions;   // [R, num_kept], the positions of these
  int32_t* num_done;         // [R], each row's first position that these layers may not have computed
  int32_t vocab_size, num_kept, kept_is_bf16;

  size_t place(int64_t row, int position) const { return row * num_kept + position % num_kept; }
};

// While an object of this class lives, steps do not count as the model's.
class Uncounted {
 public:
  Uncounted() : counter_(std::exchange(layer_counter, nullptr)) {}
  ~Uncounted() { layer_counter = counter_; }

 private:
  int64_t* const counter_;
};

inline void read_kept(const Chain& chain, int64_t row, int position, float* to) {
  const int size = chain.layers->hidden_size;
  const size_t at = chain.place(row, position) * size;
  if (chain.kept_is_bf16)
    for (int i = 0; i < size; i++) to[i] = widen(static_cast<const bf16*>(chain.kept)[at + i]);
  else
    std::copy_n(static_cast<const float*>(chain.kept) + at, size, to);
}

// Keeps the model's hidden state of each row's last token, from hidden [T, H].
inline void keep(const Chain& chain, int num_rows, const int32_t* rows, const int32_t* start, const int32_t* num_new,
                 const float* hidden) {
  const int size = chain.layers->hidden_size;
  for (int b = 0; b < num_rows; b++) {
    hidden += size_t(num_new[b]) * size;
    const int position = start[b] + num_new[b] - 1;
    const size_t place = chain.place(rows[b], position);
    chain.kept_positions[place] = position;
    const float* const from = hidden - size;
    if (chain.kept_is_bf16)
      for (int i = 0; i < size; i++) narrow(from[i], static_cast<bf16*>(chain.kept) + place * size + i);
    else
      std::copy_n(from, size, static_cast<float*>(chain.kept) + place * size);
  }
}

// The begin of the run of kept hidden states before a row's last token; positions that these layers have computed are
// left out.
inline int first_new(const Chain& chain, int64_t row, int position) {
  int first = position;
  const int least = std::min(chain.num_done[row], position - 1);
  while (first > least && first > 0 && chain.kept_positions[chain.place(row, first - 1)] == first - 1) first--;
  return first;
}

// x [count, H], overwritten -> logits [count, V], which the next call overwrites
static float* logits_of(const Chain& chain, float* x, int count) {
  static Buffer normed, of_outputs, of_tokens;
  const int size = chain.layers->hidden_size, num_outputs = chain.output->head.num_outputs;
  if (chain.norm.kind != kNoNorm) {
    float* to = normed.of(size_t(count) * size);
    for (int i = 0; i < count; i++) normalize(chain.norm, x + size_t(i) * size, size, to + size_t(i) * size);
    x = to;
  }
  float* logits = of_outputs.of(size_t(count) * num_outputs);
  project(*chain.output, x, count, logits);
  if (!chain.token_ids) return logits;
  float* all = of_tokens.of(size_t(count) * chain.vocab_size);
  std::fill_n(all, size_t(count) * chain.vocab_size, -INFINITY);
  for (int i = 0; i < count; i++)
    for (int j = 0; j < num_outputs; j++)
      all[size_t(i) * chain.vocab_size + chain.token_ids[j]] = logits[size_t(i) * num_outputs + j];
  return all;
}

// For each of N rows, guesses the most[b] tokens after its last one, if the hidden state before that one is kept.
// counts [N]; tokens [sum of counts], which are also written after the rows' tokens.
static void guess(const Chain& chain, const Sampling& sampling, Rows tables, const int32_t* positions,
                  const int32_t* most, int32_t* counts, int32_t* tokens) {
  static Buffer states;
  static std::vector<int32_t> order, rows, first, num_new, last, ones, next, drawn, ends;
  const Uncounted uncounted;
  const int size = chain.layers->hidden_size;
  for (auto* each : {&order, &rows, &first, &num_new, &last, &ends}) each->clear();
  int num_tokens = 0, num_guesses = 0;
  for (int b = 0; b < tables.num_rows; b++) {
    const bool is_asked = positions[b] > 0 && first_new(chain, tables.rows[b], positions[b]) < positions[b];
    counts[b] = is_asked ? most[b] : 0;
    ends.push_back(num_guesses += counts[b]);
    if (counts[b]) order.push_back(b);
  }
  if (order.empty()) return;
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return counts[a] > counts[b]; });
  for (const int b : order) {
    rows.push_back(tables.rows[b]);
    first.push_back(first_new(chain, tables.rows[b], positions[b]));
    num_new.push_back(positions[b] - first.back());
    last.push_back(positions[b]);
    num_tokens += num_new.back();
    chain.num_done[rows.back()] = positions[b];
  }
  const int num_asked = order.size();
  float* const hidden = states.of(size_t(num_tokens) * size);
  float* to = hidden;
  for (int i = 0; i < num_asked; i++)
    for (int at = first[i]; at < last[i]; at++, to += size) read_kept(chain, rows[i], at, to);
  tables.num_rows = num_asked;
  tables.hidden = hidden;
  tables.rows = rows.data();
  tables.start = first.data();
  tables.num_new = num_new.data();
  compute(*chain.layers, *chain.pool, tables, nullptr);
  const float* from = hidden - size;
  for (int i = 0; i < num_asked; i++) {
    from += size_t(num_new[i]) * size;
    if (from != hidden + size_t(i) * size) std::copy_n(from, size, hidden + size_t(i) * size);
  }
  ones.assign(num_asked, 1);
  next.resize(num_asked);
  drawn.resize(num_asked);
  tables.start = last.data();
  tables.num_new = ones.data();
  for (int guessed = 0;; guessed++) {
    for (int i = 0; i < tables.num_rows; i++) next[i] = last[i] + 1;
    float* logits = logits_of(chain, hidden, tables.num_rows);
    draw_rows(sampling, rows.data(), next.data(), tables.num_rows, logits, chain.vocab_size, drawn.data());
    for (int i = 0; i < tables.num_rows; i++)
      tokens[ends[order[i]] - counts[order[i]] + guessed] = std::max(drawn[i], 0);
    while (tables.num_rows && counts[order[tables.num_rows - 1]] == guessed + 1) tables.num_rows--;
    if (!tables.num_rows) return;
    compute(*chain.layers, *chain.pool, tables, nullptr);
    for (int i = 0; i < tables.num_rows; i++) last[i]++;
  }
}

}  // namespace penstock

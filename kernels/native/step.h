// A whole step: from rows of tables to logits.
#pragma once

#include <algorithm>
#include <vector>

#include "dense.h"
#include "memory.h"

namespace penstock {

struct Rows {  // a step of N rows: what it computes, and the tables with its inputs, one row of each per row
  int32_t num_rows, num_samples, token_ids_stride, page_table_stride, rotary_dim;
  const int32_t *rows, *start, *num_new;  // [N]: row, first position, number of positions
  const int64_t* samples;                 // [S], ascending: which of the N rows sample a token
  const int32_t *token_ids, *page_table;
  const float* cos_sin;  // [positions, rotary_dim]
  void* kv;
};

// Makes a batch's tensors from its rows. The next step overwrites them.
class Inputs {
 public:
  Batch of(const Model& model, const Rows& rows) {
    int num_tokens = 0, width = 0;
    for (int b = 0; b < rows.num_rows; b++) {
      num_tokens += rows.num_new[b];
      width = std::max(width, (rows.start[b] + rows.num_new[b] + model.page_size - 1) / model.page_size);
    }
    ids_.resize(num_tokens);
    slots_.resize(num_tokens);
    cos_sin_.resize(size_t(num_tokens) * rows.rotary_dim);
    query_start_loc_.assign(1, 0);
    seq_lens_.clear();
    page_table_.resize(size_t(rows.num_rows) * width);
    for (int b = 0; b < rows.num_rows; b++) add(model, rows, b, width);
    Batch batch{num_tokens, rows.num_rows, rows.rotary_dim, width};
    batch.input_ids = ids_.data();
    batch.cos_sin = cos_sin_.data();
    batch.slots = slots_.data();
    batch.query_start_loc = query_start_loc_.data();
    batch.seq_lens = seq_lens_.data();
    batch.page_table = page_table_.data();
    batch.kv = rows.kv;
    batch.out = hidden_.of(size_t(num_tokens) * model.hidden_size);
    return batch;
  }

 private:
  void add(const Model& model, const Rows& rows, int b, int width) {
    const int start = rows.start[b], count = rows.num_new[b], token = query_start_loc_.back();
    const int32_t* pages = rows.page_table + int64_t(rows.rows[b]) * rows.page_table_stride;
    std::copy_n(pages, width, page_table_.begin() + size_t(b) * width);
    std::copy_n(rows.token_ids + int64_t(rows.rows[b]) * rows.token_ids_stride + start, count, ids_.begin() + token);
    std::copy_n(rows.cos_sin + size_t(start) * rows.rotary_dim, size_t(count) * rows.rotary_dim,
                cos_sin_.begin() + size_t(token) * rows.rotary_dim);
    for (int i = 0; i < count; i++) {
      const int position = start + i;
      slots_[token + i] = int64_t(pages[position / model.page_size]) * model.page_size + position % model.page_size;
    }
    seq_lens_.push_back(start + count);
    query_start_loc_.push_back(token + count);
  }

  std::vector<int32_t> ids_, query_start_loc_, seq_lens_, page_table_;
  std::vector<int64_t> slots_;
  std::vector<float> cos_sin_;
  Buffer hidden_;
};

// Computes the rows' tokens, and logits [S, V] for the rows that sample.
static void compute(const Model& model, const Rows& rows, float* logits) {
  static Inputs inputs;
  const Batch batch = inputs.of(model, rows);
  forward(model, batch);
  for (int i = 0; i < rows.num_samples; i++) {  // each row's last token; it moves forward or stays
    const int from = batch.query_start_loc[rows.samples[i] + 1] - 1;
    const float* hidden = batch.out + size_t(from) * model.hidden_size;
    if (from != i) std::copy_n(hidden, model.hidden_size, batch.out + size_t(i) * model.hidden_size);
  }
  if (rows.num_samples) project(model, batch.out, rows.num_samples, logits);
}

}  // namespace penstock

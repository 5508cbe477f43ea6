// A whole step: from rows of tables to logits.
#pragma once

#include <algorithm>
#include <vector>

#include "../machine/memory.h"
#include "program.h"

namespace penstock {

struct PageTable {  // of one page group; as _PageTable in program.py
  const int32_t* pages;  // [rows, stride]
  int32_t stride, page_size;
};

struct Rows {  // a step of N rows: what it computes, and tables of inputs with one row for each sequence
  int32_t num_rows, num_samples, token_ids_stride, num_groups;
  const int32_t *rows, *start, *num_new;  // [N]: row, first position, number of positions
  const int64_t* samples;                 // [S], ascending: which of the N rows sample a token
  const int32_t* token_ids;
  const PageTable* page_tables;
  const Rotary* rotaries;  // by position
  float* hidden;  // [T, H], slot 0, if the caller reads or fills it; else null
  float* taps;    // as in Batch
  const int32_t* paths;  // [N, path_stride], as in AttentionRows; rows of trees have one new position
  int32_t path_stride;
};

// Makes a batch's tensors from its rows. The next step overwrites them.
class Inputs {
 public:
  Batch of(const Program& program, const Rows& rows) {
    query_start_loc_.assign(1, 0);
    for (auto* each : {&seq_lens_, &table_rows_, &ends_}) each->clear();
    for (int b = 0; b < rows.num_rows; b++) {
      const int end = rows.start[b] + rows.num_new[b];
      ends_.push_back(query_start_loc_.back() + rows.num_new[b]);
      if (continues(rows, b)) {
        query_start_loc_.back() = ends_.back();
        seq_lens_.back() = end;
        continue;
      }
      query_start_loc_.push_back(ends_.back());
      seq_lens_.push_back(end);
      table_rows_.push_back(rows.rows[b]);
    }
    const int num_tokens = query_start_loc_.back();
    ids_.resize(num_tokens);
    positions_.resize(num_tokens);
    slots_.resize(size_t(num_tokens) * rows.num_groups);
    groups_.clear();
    for (int group = 0; group < rows.num_groups; group++) {
      const PageTable& table = rows.page_tables[group];
      groups_.push_back({slots_.data() + size_t(num_tokens) * group, table.pages, table.stride});
    }
    for (int b = 0; b < rows.num_rows; b++) add(rows, b, num_tokens);
    Batch batch{num_tokens, int(seq_lens_.size())};
    batch.input_ids = ids_.data();
    batch.positions = positions_.data();
    batch.query_start_loc = query_start_loc_.data();
    batch.seq_lens = seq_lens_.data();
    batch.table_rows = batch.state_rows = table_rows_.data();
    batch.groups = groups_.data();
    batch.rotaries = rows.rotaries;
    batch.taps = rows.taps;
    batch.paths = rows.paths;
    batch.path_stride = rows.path_stride;
    batch.out = rows.hidden ? rows.hidden : hidden_.of(size_t(num_tokens) * program.hidden_size);
    return batch;
  }

  // The last of the batch's tokens that is of row b.
  int last_token(int64_t b) const { return ends_[b] - 1; }

 private:
  // Whether row b continues the row before it, as drafts do; then attention reads their common keys once.
  static bool continues(const Rows& rows, int b) {
    return b && !rows.paths && rows.rows[b] == rows.rows[b - 1] && rows.start[b] == rows.start[b - 1] + rows.num_new[b - 1];
  }

  void add(const Rows& rows, int b, int num_tokens) {
    const int start = rows.start[b], count = rows.num_new[b], token = ends_[b] - count;
    const int32_t* path = rows.paths ? rows.paths + int64_t(b) * rows.path_stride : nullptr;
    const int place = path && start >= path[0] ? path[1 + start - path[0]] : start;
    std::copy_n(rows.token_ids + int64_t(rows.rows[b]) * rows.token_ids_stride + place, count, ids_.begin() + token);
    for (int i = 0; i < count; i++) positions_[token + i] = start + i;
    for (int group = 0; group < rows.num_groups; group++) {
      const PageTable& table = rows.page_tables[group];
      const int32_t* pages = table.pages + int64_t(rows.rows[b]) * table.stride;
      int64_t* slots = slots_.data() + size_t(num_tokens) * group + token;
      for (int i = 0; i < count; i++) {
        const int at = place + i;
        slots[i] = int64_t(pages[at / table.page_size]) * table.page_size + at % table.page_size;
      }
    }
  }

  std::vector<int32_t> ids_, query_start_loc_, seq_lens_, table_rows_, ends_;
  std::vector<int64_t> positions_, slots_;
  std::vector<GroupPages> groups_;
  Buffer hidden_;
};

// Computes the rows' tokens, and logits [S, V] for the rows that sample, unless `logits` is null.
static void compute(const Program& program, const Pool& pool, const Rows& rows, float* logits) {
  static Inputs inputs;
  const Batch batch = inputs.of(program, rows);
  forward(program, pool, batch);
  if (!logits) return;
  static Buffer chosen;  // a separate buffer, because the caller may read `hidden`
  float* last = rows.hidden ? chosen.of(size_t(rows.num_samples) * program.hidden_size) : batch.out;
  for (int i = 0; i < rows.num_samples; i++) {  // each row's last token moves forward or stays
    const int from = inputs.last_token(rows.samples[i]);
    const float* hidden = batch.out + size_t(from) * program.hidden_size;
    if (rows.hidden || from != i) std::copy_n(hidden, program.hidden_size, last + size_t(i) * program.hidden_size);
  }
  if (rows.num_samples) project(program, last, rows.num_samples, logits);
}

}  // namespace penstock

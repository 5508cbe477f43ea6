// One step's pass through a program: its tokens, their pages, and the slots that operations read and write.
#pragma once

#include <vector>

#include "attention/integers.h"
#include "linear/linear.h"
#include "machine/memory.h"
#include "machine/team.h"
#include "machine/vectors.h"
#include "operations/adapting.h"

namespace penstock {

struct GroupPages {  // where a batch's tokens are in the pages of one page group
  const int64_t* slots;       // [T]; negative: not written
  const int32_t* page_table;  // [rows, page_table_stride]
  int32_t page_table_stride;
};

struct Rotary {  // the angles of one kind of rotation
  const float* cos_sin;  // [positions or T, dim]: cosines, then sines
  int32_t dim;
  int32_t is_by_position;  // else it has a row for each token
};

struct Batch {  // T tokens, N rows; as _Batch in program.py
  int32_t num_tokens, num_rows;
  const int32_t* input_ids;        // [T]
  const int64_t* positions;        // [T]
  const int32_t* query_start_loc;  // [N + 1]
  const int32_t* seq_lens;         // [N]
  const int32_t* table_rows;       // [N]: rows of the page tables, or null: 0, 1, 2, ...
  const GroupPages* groups;
  const Rotary* rotaries;
  float* out;   // [T, H], slot 0
  float* taps;  // [T, .], see Tapping; or null
  const float* added;  // [T, .], see Adding; or null
  const int32_t* paths;  // as in AttentionRows
  int32_t path_stride;
  const int32_t* state_rows;  // [N]: the rows of the states, or null
  const int32_t* last_seen;   // as in AttentionRows
};

struct LayerPages {  // as _LayerPages in pool.py
  void *keys, *values;  // [pages, Hk, page_size, D]; quantized [pages, Hk, head_bytes]
  int32_t group, page_size, head_bytes;
};

struct RowStates {  // a layer's states of all rows; as _RowStates in pool.py
  float* data;
  int64_t row_size;  // floats
};

struct Pool {
  const LayerPages* layers;
  const RowStates* states;  // as the operations number them
  int32_t kind;  // of KvKind
};

// Calls `work` with a null pointer of the element type of this kind of pages.
template <typename Work>
void as_kv(int kind, Work work) {
  switch (kind) {
    case kKvFp32:
      return work(static_cast<float*>(nullptr));
    case kKvBf16:
      return work(static_cast<bf16*>(nullptr));
    case kKvInt8:
      return work(static_cast<Int8*>(nullptr));
    case kKvInt4:
      return work(static_cast<Int4*>(nullptr));
    case kKvE4M3:
      return work(static_cast<E4M3*>(nullptr));
    default:
      return work(static_cast<E5M2*>(nullptr));
  }
}

struct Slot {  // fp32, a row for each token
  float* data;
  int32_t stride;  // floats
};

constexpr double kReading = 5;  // reading a weight takes as long as multiplying it by this many tokens

inline double num_multiplications(const Linear& layer, int num_tokens) {
  return double(layer.num_outputs) * layer.num_inputs * (num_tokens + kReading);
}

// How many rows of `num_floats` floats are worth handing to another core.
inline int together(int num_floats) { return std::max(1, 4096 / num_floats); }

struct AdaptedToken {
  int token, row;
};

struct Pass {
  const Batch& batch;
  const Pool& pool;
  float* packed;  // room for the inputs of any product
  const Adapters* adapters = nullptr;
  std::vector<AdaptedToken> adapted = {};  // tokens of rows with adapters
  std::vector<Slot> slots = {};

  // Notes whose rows have adapters.
  void find_adapted() {
    if (!adapters || !adapters->num_adapted || !batch.state_rows) return;
    for (int b = 0; b < batch.num_rows; b++) {
      const int row = batch.state_rows[b];
      if (row < 0 || row >= adapters->num_rows || adapters->slots[row] < 0) continue;
      for (int t = batch.query_start_loc[b]; t < batch.query_start_loc[b + 1]; t++) adapted.push_back({t, row});
    }
  }

  float* at(int slot, int t) const { return slots[slot].data + size_t(t) * slots[slot].stride; }

  const float* cos_sin(int rotary, int t) const {
    const Rotary& angles = batch.rotaries[rotary];
    return angles.cos_sin + size_t(angles.is_by_position ? batch.positions[t] : t) * angles.dim;
  }

  AttentionRows rows_of(const LayerPages& layer) const {
    const GroupPages& group = batch.groups[layer.group];
    return {batch.num_rows, group.page_table_stride, batch.query_start_loc, batch.seq_lens, group.page_table,
            batch.table_rows, batch.paths, batch.path_stride, nullptr, batch.last_seen};
  }

  // The number of pairs of a query and a key that it may see.
  double num_scores() const {
    double sum = 0;
    for (int row = 0; row < batch.num_rows; row++) {
      const double num_queries = batch.query_start_loc[row + 1] - batch.query_start_loc[row];
      sum += num_queries * batch.seq_lens[row];
    }
    return sum;
  }
};

}  // namespace penstock

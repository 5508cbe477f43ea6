// The forward pass of the dense decoder on a CPU, all layers in one call. Activations are fp32 throughout; weights
// are fp32 or bf16 as stored, keys and values fp32 or bf16.
#pragma once

#include <vector>

#include "attention.h"
#include "linear.h"
#include "memory.h"
#include "team.h"
#include "vectors.h"

namespace penstock {

struct Layer {
  const float* input_norm;
  const float* q_norm;  // [D] or null
  const float* k_norm;
  const float* mlp_norm;
  Linear qkv, o, gate_up, down;  // gate_up: 16 gates, their 16 ups, the next 16 gates, ...
  int32_t window;                // 0: none
};

enum Activation { kSilu, kGelu, kGeluTanh };

struct Model {
  int32_t hidden_size, intermediate_size, num_layers, num_q_heads, num_kv_heads, head_dim, vocab_size, activation;
  float eps, scale;
  const float* final_norm;
  const void* embedding;  // [V, H], or null: the rows of lm_head
  int32_t embedding_kind, kv_is_bf16, page_size, num_pages;
  const Layer* layers;
  Linear lm_head;
};

struct Batch {  // T tokens, N rows
  int32_t num_tokens, num_rows, rotary_dim, page_table_stride;
  const int32_t* input_ids;        // [T]
  const float* cos_sin;            // [T, rotary_dim]: cosines, then sines
  const int64_t* slots;            // [T]; negative: not written
  const int32_t* query_start_loc;  // [N + 1]
  const int32_t* seq_lens;         // [N]
  const int32_t* page_table;       // [N, page_table_stride]
  void* kv;                        // [layers, 2, pages, Hk, page_size, D]
  float* out;                      // [T, H], normed
};

inline void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
  Floats squares = {};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Floats part = load16(x + i);
    squares += part * part;
  }
  float total = sum_of(squares)[0];
  for (; i < n; i++) total += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(total / n + eps);
  for (i = 0; i < n; i++) out[i] = x[i] * scale * weight[i];
}

inline void rotate(float* head, const float* cos_sin, int rotary_dim) {
  const int half = rotary_dim / 2;
  for (int d = 0; d < half; d++) {
    const float a = head[d], b = head[d + half], c = cos_sin[d], s = cos_sin[half + d];
    head[d] = a * c - b * s;
    head[d + half] = b * c + a * s;
  }
}

inline Floats activated(int activation, Floats gate, Floats up) {
  if (activation == kSilu) return gate / (1.0f + exp16(-gate)) * up;
  Floats out;
  for (int i = 0; i < kLanes; i++) {
    const float g = gate[i];
    out[i] = activation == kGelu ? 0.5f * g * (1.0f + std::erf(g * 0.70710678118654752f))
                                 : 0.5f * g * (1.0f + std::tanh(0.79788456080286536f * (g + 0.044715f * g * g * g)));
  }
  return out * up;
}

// Row `id` of a packed [N, K] as floats.
inline void unpack_row(const Linear& layer, int id, float* out) {
  const int group = id / kLanes, lane = id % kLanes;
  if (layer.kind != kFp32) {
    const size_t pairs = (layer.num_inputs + 1) / 2;
    const bf16* from = static_cast<const bf16*>(layer.weight) + group * pairs * 2 * kLanes + 2 * lane;
    for (int k = 0; k < layer.num_inputs; k++) out[k] = widen(from[size_t(k / 2) * 2 * kLanes + k % 2]);
  } else {
    const float* from = static_cast<const float*>(layer.weight) + size_t(group) * layer.num_inputs * kLanes + lane;
    for (int k = 0; k < layer.num_inputs; k++) out[k] = from[size_t(k) * kLanes];
  }
}

inline void embed(const Model& model, int id, float* out) {
  if (!model.embedding) return unpack_row(model.lm_head, id, out);
  const size_t at = size_t(id) * model.hidden_size;
  for (int i = 0; i < model.hidden_size; i++)
    out[i] = model.embedding_kind == kBf16 ? widen(static_cast<const bf16*>(model.embedding)[at + i])
                                           : static_cast<const float*>(model.embedding)[at + i];
}

constexpr double kReading = 5;  // reading a weight takes as long as multiplying it with this many tokens

inline double num_multiplications(const Linear& layer, int num_tokens) {
  return double(layer.num_outputs) * layer.num_inputs * (num_tokens + kReading);
}

inline double num_multiplications(const Model& model, const Batch& batch) {
  const Layer& layer = model.layers[0];
  double in_layer = 0;
  for (const Linear* linear : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down})
    in_layer += num_multiplications(*linear, batch.num_tokens);
  for (int row = 0; row < batch.num_rows; row++) {
    const double num_queries = batch.query_start_loc[row + 1] - batch.query_start_loc[row];
    in_layer += 2 * model.num_q_heads * model.head_dim * num_queries * batch.seq_lens[row];
  }
  return in_layer * model.num_layers;
}

// How many rows of this many floats are worth handing to another core.
inline int together(int num_floats) { return std::max(1, 4096 / num_floats); }

struct Task {  // some queries of one row
  int row, first, count;
};

template <typename Kv>
static void forward_with(const Model& model, const Batch& batch) {
  const int hidden = model.hidden_size, dim = model.head_dim, num_tokens = batch.num_tokens;
  const int num_heads = model.num_q_heads + 2 * model.num_kv_heads;
  const int q_size = model.num_q_heads * dim;
  // Strides leave room for what a product writes past its outputs, and for the zero after an odd number of inputs.
  const int x_stride = round_up(hidden, kUnit), qkv_stride = round_up(num_heads * dim, kUnit);
  const int attended_stride = round_up(q_size, kLanes), inner_stride = round_up(model.intermediate_size, kUnit);
  const int packed_stride = std::max({x_stride, attended_stride, inner_stride});
  static Buffer buffer;
  const size_t row_size = 2 * x_stride + qkv_stride + attended_stride + inner_stride + packed_stride;
  float* residual = buffer.of(row_size * num_tokens);
  float* x = residual + size_t(num_tokens) * x_stride;
  float* qkv = x + size_t(num_tokens) * x_stride;
  float* attended = qkv + size_t(num_tokens) * qkv_stride;
  float* inner = attended + size_t(num_tokens) * attended_stride;
  float* packed = inner + size_t(num_tokens) * inner_stride;
  for (int t = 0; t < num_tokens; t++) {  // one float past an odd number of inputs is multiplied by zero
    std::fill(x + size_t(t) * x_stride + hidden, x + size_t(t + 1) * x_stride, 0.0f);
    std::fill(attended + size_t(t) * attended_stride + q_size, attended + size_t(t + 1) * attended_stride, 0.0f);
  }
  std::vector<Task> tasks;
  for (int row = 0; row < batch.num_rows; row++)
    for (int first = batch.query_start_loc[row]; first < batch.query_start_loc[row + 1]; first += kQueryTile)
      tasks.push_back({row, first, std::min(kQueryTile, batch.query_start_loc[row + 1] - first)});
  const int of_hidden = together(hidden);
  const size_t page_floats = size_t(model.num_kv_heads) * model.page_size * dim;
  const size_t half_layer = page_floats * model.num_pages;

  team->run(num_multiplications(model, batch), [&] {
    team->each(num_tokens, of_hidden, [&](int t) {
      float* row = residual + size_t(t) * x_stride;
      embed(model, batch.input_ids[t], row);
      rms_norm(row, model.layers[0].input_norm, hidden, model.eps, x + size_t(t) * x_stride);
    });
    for (int i = 0; i < model.num_layers; i++) {
      const Layer& layer = model.layers[i];
      Kv* k_pages = static_cast<Kv*>(batch.kv) + 2 * i * half_layer;
      Kv* v_pages = k_pages + half_layer;
      linear(*team, layer.qkv, x, x_stride, num_tokens, packed, [&](int t, int output, Floats sum) {
        store(qkv + size_t(t) * qkv_stride + output, sum);
      });
      team->each(num_tokens, together(num_heads * dim), [&](int t) {
        const float* cos_sin = batch.cos_sin + size_t(t) * batch.rotary_dim;
        const int64_t slot = batch.slots[t];
        float* head = qkv + size_t(t) * qkv_stride;
        auto place_of = [&](int h) {  // where a head of the key or value goes in its page
          const bool is_v = h >= model.num_q_heads + model.num_kv_heads;
          const int kv_head = (h - model.num_q_heads) % model.num_kv_heads;
          const size_t row = (slot / model.page_size * model.num_kv_heads + kv_head) * model.page_size;
          return (is_v ? v_pages : k_pages) + (row + slot % model.page_size) * dim;
        };
        for (int h = model.num_q_heads; slot >= 0 && h < num_heads; h++)  // the pages were last used a step ago
          for (size_t d = 0; d < size_t(dim); d += 64 / sizeof(Kv)) __builtin_prefetch(place_of(h) + d, 1);
        for (int h = 0; h < num_heads; h++, head += dim) {
          const bool is_q = h < model.num_q_heads, is_v = h >= model.num_q_heads + model.num_kv_heads;
          if (!is_v) {
            const float* norm = is_q ? layer.q_norm : layer.k_norm;
            if (norm) rms_norm(head, norm, dim, model.eps, head);
            rotate(head, cos_sin, batch.rotary_dim);
          }
          if (is_q || slot < 0) continue;
          Kv* to = place_of(h);
          for (int d = 0; d < dim; d++) narrow(head[d], to + d);
        }
      });
      const AttentionShape shape{model.num_q_heads, model.num_kv_heads, dim,
                                 model.page_size,   layer.window,       model.scale};
      team->each(int(tasks.size()) * model.num_kv_heads, 1, [&](int n) {
        // Later queries see more keys. They come first, so that no thread gets a long one at the end.
        const Task& task = tasks[tasks.size() - 1 - n / model.num_kv_heads];
        const int begin = batch.query_start_loc[task.row], end = batch.query_start_loc[task.row + 1];
        const int position = batch.seq_lens[task.row] - (end - begin) + (task.first - begin);
        attend<Kv>(shape, k_pages, v_pages, batch.page_table + size_t(task.row) * batch.page_table_stride,
                   n % model.num_kv_heads, qkv + size_t(task.first) * qkv_stride, qkv_stride, task.count, position,
                   attended + size_t(task.first) * attended_stride, attended_stride);
      });
      auto add = [&](int t, int output, Floats sum) {
        float* at = residual + size_t(t) * x_stride + output;
        store(at, load16(at) + sum);
      };
      linear(*team, layer.o, attended, attended_stride, num_tokens, packed, add);
      team->each(num_tokens, of_hidden, [&](int t) {
        rms_norm(residual + size_t(t) * x_stride, layer.mlp_norm, hidden, model.eps, x + size_t(t) * x_stride);
      });
      // The gate and the up of an output are adjacent: the up, which comes second, finishes both.
      linear(*team, layer.gate_up, x, x_stride, num_tokens, packed, [&](int t, int output, Floats sum) {
        float* at = inner + size_t(t) * inner_stride + output / 2 / kLanes * kLanes;
        if (output / kLanes % 2 == 0)
          store(at, sum);
        else
          store(at, activated(model.activation, load16(at), sum));
      });
      linear(*team, layer.down, inner, inner_stride, num_tokens, packed, add);
      const bool is_last = i + 1 == model.num_layers;
      const float* norm = is_last ? model.final_norm : model.layers[i + 1].input_norm;
      team->each(num_tokens, of_hidden, [&](int t) {
        float* to = is_last ? batch.out + size_t(t) * hidden : x + size_t(t) * x_stride;
        rms_norm(residual + size_t(t) * x_stride, norm, hidden, model.eps, to);
      });
    }
  });
}

static void forward(const Model& model, const Batch& batch) {
  if (model.kv_is_bf16)
    forward_with<bf16>(model, batch);
  else
    forward_with<float>(model, batch);
}

// x [num_tokens, H] -> out [num_tokens, V]
static void project(const Model& model, const float* x, int num_tokens, float* out) {
  const int hidden = model.hidden_size, vocab = model.vocab_size;
  const float* rows = x;
  const int stride = round_up(hidden, 2);  // the product reads inputs in pairs
  static Buffer buffer;
  float* packed = buffer.of(2 * size_t(num_tokens) * stride);
  if (stride != hidden) {
    float* padded = packed + size_t(num_tokens) * stride;
    for (int t = 0; t < num_tokens; t++) {
      std::copy_n(x + size_t(t) * hidden, hidden, padded + size_t(t) * stride);
      padded[size_t(t) * stride + hidden] = 0.0f;
    }
    rows = padded;
  }
  team->run(num_multiplications(model.lm_head, num_tokens), [&] {
    linear(*team, model.lm_head, rows, stride, num_tokens, packed, [&](int t, int output, Floats sum) {
      float* at = out + size_t(t) * vocab + output;
      if (output >= vocab) return;
      if (output + kLanes <= vocab)
        store(at, sum);
      else
        for (int i = 0; i < vocab - output; i++) at[i] = sum[i];
    });
  });
}

}  // namespace penstock

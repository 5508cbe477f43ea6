// Operations of layers with states: convolutions and scans over each row's new tokens, and the gated norms after them.
#pragma once

#include "../pass.h"
#include "../scan/convolution.h"
#include "../scan/gated_delta.h"
#include "../scan/mamba1.h"
#include "../scan/mamba2.h"
#include "norms.h"

namespace penstock {

// Calls `work(row of the batch, first token, number of tokens, part)` for all parts of each row that has tokens.
template <typename Work>
void each_part_of_rows(const Pass& pass, int num_parts, int together, Work work) {
  const Batch& batch = pass.batch;
  team->each(batch.num_rows * num_parts, together, [&](int i) {
    const int row = i / num_parts, first = batch.query_start_loc[row], count = batch.query_start_loc[row + 1] - first;
    if (count) work(row, first, count, i % num_parts);
  });
}

inline float* state_of(const Pass& pass, int number, int row) {
  const RowStates& states = pass.pool.states[number];
  return states.data + size_t(pass.batch.state_rows[row]) * states.row_size;
}

struct Convolving {  // as Convolving in structs.py
  Convolution convolution;
  int32_t from, first, input_gate, output_gate;  // a slot, and where in it x and the gates begin; -1: no gate
  int32_t to, to_first, state;
};

inline void run(const Pass& pass, const Convolving& op) {
  constexpr int kChannels = 8 * kLanes;
  const int channels = op.convolution.channels, num_parts = (channels + kChannels - 1) / kChannels;
  const int tokens = std::max(1, pass.batch.num_tokens / std::max(1, pass.batch.num_rows));
  each_part_of_rows(pass, num_parts, together(kChannels * tokens), [&](int row, int first, int count, int part) {
    const float* from = pass.at(op.from, first);
    auto gate = [&](int at) { return at < 0 ? nullptr : from + at; };
    const ConvolutionRow its{from + op.first, gate(op.input_gate), gate(op.output_gate),
                             pass.at(op.to, first) + op.to_first, state_of(pass, op.state, row),
                             pass.slots[op.from].stride, pass.slots[op.to].stride, count};
    convolve(op.convolution, its, part * kChannels, std::min(channels, (part + 1) * kChannels));
  });
}

inline double num_multiplications(const Convolving& op, const Pass& pass) {
  return double(op.convolution.channels) * op.convolution.width * pass.batch.num_tokens;
}

struct Mamba2Scanning {  // as Mamba2Scanning in structs.py
  Mamba2 scan;
  int32_t from, x, b, c, dt;  // a slot, and where in it they begin
  int32_t to, state;
};

inline void run(const Pass& pass, const Mamba2Scanning& op) {
  const Mamba2& its = op.scan;
  const int size = its.state_size, dim = its.head_dim, heads_of_group = its.num_heads / its.num_groups;
  each_part_of_rows(pass, its.num_heads, 1, [&](int row, int first, int count, int head) {
    static thread_local Buffer buffer;
    const float* from = pass.at(op.from, first);
    const int group = head / heads_of_group * size;
    const Mamba2Row part{from + op.x + head * dim, from + op.b + group, from + op.c + group, from + op.dt + head,
                         pass.at(op.to, first) + head * dim, state_of(pass, op.state, row) + size_t(head) * size * dim,
                         pass.slots[op.from].stride, pass.slots[op.to].stride, count};
    scan(its, part, head, buffer.of(kScanned * round_up(dim, kLanes)));
  });
}

inline double num_multiplications(const Mamba2Scanning& op, const Pass& pass) {
  const Mamba2& its = op.scan;
  return double(its.num_heads) * its.head_dim * its.state_size * (3 * pass.batch.num_tokens + pass.batch.num_rows * kReading);
}

struct Mamba1Scanning {  // as Mamba1Scanning in structs.py
  Mamba1 scan;
  int32_t from, x, dts;      // slots, and where in the first one x begins
  int32_t gates, b, c;  // another slot, and where in it they begin
  int32_t to, state;
};

inline void run(const Pass& pass, const Mamba1Scanning& op) {
  constexpr int kChannels = 4 * kLanes;
  const int channels = op.scan.channels, num_parts = (channels + kChannels - 1) / kChannels;
  each_part_of_rows(pass, num_parts, 1, [&](int row, int first, int count, int part) {
    const float* const gates = pass.at(op.gates, first);
    const Mamba1Row its{pass.at(op.from, first) + op.x, pass.at(op.dts, first), gates + op.b, gates + op.c,
                        pass.at(op.to, first), state_of(pass, op.state, row), pass.slots[op.from].stride,
                        pass.slots[op.dts].stride, pass.slots[op.gates].stride, pass.slots[op.to].stride, count};
    scan(op.scan, its, part * kChannels, std::min(channels, (part + 1) * kChannels));
  });
}

// An exponential is about as much work as ten multiplications.
inline double num_multiplications(const Mamba1Scanning& op, const Pass& pass) {
  const double size = double(op.scan.channels) * op.scan.state_size;
  return size * (13 * pass.batch.num_tokens + pass.batch.num_rows * kReading);
}

struct DeltaScanning {  // as DeltaScanning in structs.py
  GatedDelta scan;
  int32_t from, q, k, v;  // a slot, and where in it they begin
  int32_t steps, dt;      // another one
  int32_t gates, b;       // and another one
  int32_t to, state;
};

inline void run(const Pass& pass, const DeltaScanning& op) {
  const GatedDelta& its = op.scan;
  const int heads_of_key = its.num_heads / its.num_key_heads;
  each_part_of_rows(pass, its.num_heads, 1, [&](int row, int first, int count, int head) {
    static thread_local Buffer buffer;
    const float *from = pass.at(op.from, first), *steps = pass.at(op.steps, first) + op.dt;
    const int key = head / heads_of_key * its.key_dim, value = head * its.value_dim;
    const GatedDeltaRow part{from + op.q + key, from + op.k + key, from + op.v + value,
                             steps + head * (its.decays_by_key ? its.key_dim : 1),
                             pass.at(op.gates, first) + op.b + head, pass.at(op.to, first) + value,
                             state_of(pass, op.state, row) + size_t(value) * its.key_dim, pass.slots[op.from].stride,
                             pass.slots[op.steps].stride, pass.slots[op.gates].stride, pass.slots[op.to].stride, count};
    float* const scratch = buffer.of(delta_scratch(its.key_dim));
    its.decays_by_key ? scan<true>(its, part, head, scratch) : scan<false>(its, part, head, scratch);
  });
}

inline double num_multiplications(const DeltaScanning& op, const Pass& pass) {
  const GatedDelta& its = op.scan;
  return double(its.num_heads) * its.key_dim * its.value_dim * (4 * pass.batch.num_tokens + pass.batch.num_rows * kReading);
}

// x = norm(x * silu(gate)), or x = norm(x) * silu(gate), or with the gate's sigmoid; the norm, if there is one, is over
// each `group_size` floats
struct GatedNorm {  // as GatedNorm in structs.py
  NormWeights norm;
  int32_t x, gate, gate_first, size, group_size, weight_step, norms_first;
  int32_t is_sigmoid;
};

// x *= sigmoid(gate), or x *= silu(gate)
inline void open(const float* gate, int n, int is_sigmoid, float* x) {
  auto opened = [&](Floats gates) { return by_sigmoid(is_sigmoid ? splat(1.0f) : gates, gates); };
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(x + i, load16(x + i) * opened(load16(gate + i)));
  const Floats rest = i < n ? opened(load_some(gate + i, n - i)) : Floats{};
  for (int lane = 0; i + lane < n; lane++) x[i + lane] *= rest[lane];
}

inline void run(const Pass& pass, const GatedNorm& op, int t) {
  float* x = pass.at(op.x, t);
  const float* gate = pass.at(op.gate, t) + op.gate_first;
  if (!op.norms_first) open(gate, op.size, op.is_sigmoid, x);
  NormWeights norm = op.norm;
  for (int i = 0; i < op.size && norm.kind != kNoNorm; i += op.group_size) {
    normalize(norm, x + i, op.group_size, x + i);
    norm.weight += op.weight_step;
  }
  if (op.norms_first) open(gate, op.size, op.is_sigmoid, x);
}

}  // namespace penstock

// What some rows add to a product: B (A x), of two narrow matrices that differ from row to row (LoRA; Hu et al., 2021).
//
// A token's terms are added in one fixed order that depends on its own matrices alone, so its bits are the same in any
// batch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../linear/linear.h"
#include "../machine/memory.h"
#include "../machine/team.h"
#include "../machine/vectors.h"

namespace penstock {

struct LowRank {  // as LowRank in adapting.py; without a: nothing is added
  const void* a;  // [segments * rank, inputs in units of 16], zeros behind them
  const void* b;  // [outputs in whole units / 16, rank, 16], zeros behind them: read in order
  const uint8_t* segments;  // of each 16 outputs: which `rank` rows of A they are multiplied with
  int32_t rank, num_inner, is_bf16;  // num_inner: rows of A
};

struct Adapters {  // as AdaptersStruct in adapting.py
  const LowRank* of_sites;    // [sites, slots]
  const int32_t* slots;       // [rows]: the slot of each row; negative: none
  int32_t num_slots, num_rows, num_adapted;  // the last: rows that have one

  const LowRank* at(int site, int row) const {
    if (row < 0 || row >= num_rows || slots[row] < 0) return nullptr;
    const LowRank* found = of_sites + int64_t(site) * num_slots + slots[row];
    return found->a ? found : nullptr;
  }
};

constexpr int kAdaptedOutputs = 1024;  // of a token, that a thread computes at a time

template <typename Number>
inline float dot(const Number* a, const float* x, int count) {
  Floats sums[4] = {};
  int k = 0;
  for (; k + 4 * kLanes <= count; k += 4 * kLanes)
    for (int i = 0; i < 4; i++) sums[i] += load16(a + k + i * kLanes) * load16(x + k + i * kLanes);
  for (; k < count; k += kLanes) sums[0] += load16(a + k) * load_some(x + k, count - k);
  return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]))[0];
}

template <typename Number>
inline void add_outputs(const LowRank& its, const float* inner, int first, int end, float* out) {
  const Number* b = static_cast<const Number*>(its.b) + size_t(first) * its.rank;
  for (int n = first; n < end; n += kLanes) {
    const float* by = inner + its.segments[n / kLanes] * its.rank;
    Floats sums[2] = {};
    int r = 0;
    for (; r + 2 <= its.rank; r += 2, b += 2 * kLanes) {
      sums[0] += load16(b) * by[r];
      sums[1] += load16(b + kLanes) * by[r + 1];
    }
    if (r < its.rank) {
      sums[0] += load16(b) * by[r];
      b += kLanes;
    }
    store(out + n, sums[0] + sums[1]);
  }
}

// What the tokens of a batch add to one product.
class Added {
 public:
  struct Token {  // that adds something
    int number;
    const LowRank* its;
  };

  // Computes it. x: [num_tokens, stride], with num_inputs floats each.
  void compute(Team& team, const std::vector<Token>& tokens, const float* x, int stride, int num_inputs,
               int num_outputs, int num_tokens) {
    const int padded_inputs = round_up(num_inputs, kLanes), width = round_up(num_outputs, kUnit);
    int most = 0;
    for (const Token& token : tokens) most = std::max(most, token.its->num_inner);
    float* const inner = inner_.of(tokens.size() * size_t(most));
    data_ = out_.of(tokens.size() * size_t(width));
    width_ = width;
    places_.assign(num_tokens, -1);
    for (size_t i = 0; i < tokens.size(); i++) places_[tokens[i].number] = int(i);
    team.each(int(tokens.size()), 1, [&](int i) {
      const LowRank& its = *tokens[i].its;
      const float* from = x + size_t(tokens[i].number) * stride;
      for (int r = 0; r < its.num_inner; r++) {
        const size_t at = size_t(r) * padded_inputs;
        inner[size_t(i) * most + r] = its.is_bf16 ? dot(static_cast<const bf16*>(its.a) + at, from, num_inputs)
                                                  : dot(static_cast<const float*>(its.a) + at, from, num_inputs);
      }
    });
    const int pieces = (width + kAdaptedOutputs - 1) / kAdaptedOutputs;
    team.each(int(tokens.size()) * pieces, 1, [&](int item) {
      const int i = item / pieces, first = item % pieces * kAdaptedOutputs, end = std::min(width, first + kAdaptedOutputs);
      const LowRank& its = *tokens[i].its;
      const float* of_token = inner + size_t(i) * most;
      float* const to = data_ + size_t(i) * width;
      if (its.is_bf16)
        add_outputs<bf16>(its, of_token, first, end, to);
      else
        add_outputs<float>(its, of_token, first, end, to);
    });
  }

  // Adds it to stored outputs: rows of `stride` floats.
  void add_to(float* out, int stride, float scale) const {
    for (size_t t = 0; t < places_.size(); t++) {
      if (places_[t] < 0) continue;
      const float* from = data_ + size_t(places_[t]) * width_;
      float* to = out + t * stride;
      for (int n = 0; n < width_; n += kLanes) store(to + n, load16(to + n) + load16(from + n) * scale);
    }
  }

  // A vector of outputs of a product's sums, with what the token adds.
  Floats with(int t, int output, Floats sum) const {
    return places_[t] < 0 ? sum : sum + load16(data_ + size_t(places_[t]) * width_ + output);
  }

 private:
  Buffer inner_, out_;
  std::vector<int> places_;
  float* data_ = nullptr;
  int width_ = 0;
};

}  // namespace penstock

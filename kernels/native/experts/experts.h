// A mixture of experts: each token goes through a few of many MLPs.
//
// The tokens of an expert go through its weights together, so each used expert's weights are read once. All experts are
// one phase of the team, so none waits for another. A token's experts are added in the order of their numbers, so its
// bits are the same alone and in any batch.
#pragma once

#include <vector>

#include "../linear/linear.h"
#include "../machine/memory.h"
#include "../operations/activations.h"
#include "routing.h"

namespace penstock {

// The experts that this process holds, if others hold the rest. A token's other experts are not computed here.
struct HeldExperts {
  const int32_t* numbers;     // [num_experts]: number among the held ones, in order; -1: not held here
  const int32_t* copies;      // [num_experts]: which copy is held here; -1: none
  const int32_t* num_copies;  // [num_experts]
  int64_t* tokens;            // [held]: counts the tokens that each has computed
  int32_t count;

  // The number of the held expert that serves this turn; -1: another rank's copy does.
  int32_t serving(int32_t expert, int64_t turn) const {
    return turn % num_copies[expert] == copies[expert] ? numbers[expert] : -1;
  }
};

// A token's turn decides which copies of its experts serve it: the same in any batch, and on every rank.
struct Turns {
  const int32_t* ids = nullptr;
  const int64_t* positions = nullptr;

  int64_t of(int t) const { return positions[t] + ids[t]; }
  Turns after(int count) const { return ids ? Turns{ids + count, positions + count} : Turns{}; }
};

struct Experts {
  Linear router;          // not of kind kBf16Pairs: its inputs are not rounded
  const Linear* gate_up;  // [held experts]; 16 gates, their 16 ups, the next 16 gates, ...; or ups alone
  const Linear* down;     // [held experts]
  Routing routing;
  const HeldExperts* held;  // null: all
  int32_t activation;
  int32_t multiplies_input;  // whether the input is multiplied by an expert's weight, instead of the output
  int32_t is_gated;

  int hidden() const { return gate_up->num_inputs; }
  int inner() const { return down->num_inputs; }
  int num_held() const { return held ? held->count : routing.num_experts; }
};

// Which experts a step's tokens go to. Places number all (token, expert) pairs that are computed here, sorted by expert
// and then by token.
struct Assignment {
  int top_k;
  std::vector<int32_t> ids;     // [tokens, top_k], ascending for each token; if held, numbers of held experts, or -1
  std::vector<float> weights;   // [tokens, top_k]
  std::vector<int32_t> places;  // [tokens, top_k]; -1: not computed here
  std::vector<int32_t> tokens;  // [places]
  std::vector<float> scales;    // [places], factors of inputs
  std::vector<int> used;        // the experts that have tokens

  // Makes room for `num_tokens`.
  void resize(int num_tokens, int k) {
    top_k = k;
    for (auto* numbers : {&ids, &places, &tokens}) numbers->resize(size_t(num_tokens) * k);
    for (auto* numbers : {&weights, &scales}) numbers->resize(size_t(num_tokens) * k);
  }

  // Routes token t.
  void assign(const Routing& routing, float* logits, int t) {
    int32_t* const its = ids.data() + size_t(t) * top_k;
    float* const theirs = weights.data() + size_t(t) * top_k;
    route(routing, logits, its, theirs);
    for (int i = 1; i < top_k; i++)
      for (int j = i; j > 0 && its[j - 1] > its[j]; j--) {
        std::swap(its[j - 1], its[j]);
        std::swap(theirs[j - 1], theirs[j]);
      }
  }

  // Keeps only the experts of token t that are held here and serve it.
  void keep(const HeldExperts& held, int t, int64_t turn) {
    int32_t* const its = ids.data() + size_t(t) * top_k;
    for (int i = 0; i < top_k; i++) its[i] = held.serving(its[i], turn);
  }

  int num_places() const { return begins_.back(); }

  // Numbers the places once all tokens are routed; begins[e] is the first place of expert e.
  void number(int num_experts) {
    begins_.assign(num_experts + 1, 0);
    used.clear();
    for (int32_t id : ids)
      if (id >= 0) begins_[id + 1]++;
    for (int e = 0; e < num_experts; e++) {
      if (begins_[e + 1]) used.push_back(e);
      begins_[e + 1] += begins_[e];
    }
    next_ = begins_;
    for (size_t i = 0; i < ids.size(); i++) {
      if (ids[i] < 0) {
        places[i] = -1;
        continue;
      }
      places[i] = next_[ids[i]]++;
      tokens[places[i]] = int32_t(i / top_k);
      scales[places[i]] = weights[i];
    }
  }

  // Adds each expert's count of tokens to `to`.
  void count(int64_t* to) const {
    for (int e : used) to[e] += begins_[e + 1] - begins_[e];
  }

  // One share for each used expert: its tokens go through its layer.
  std::vector<Share> shares(const Linear* layers) const {
    std::vector<Share> made;
    for (int e : used) made.push_back({layers + e, begins_[e], begins_[e + 1] - begins_[e]});
    return made;
  }

 private:
  std::vector<int> begins_, next_;
};

// That of the current step.
inline Assignment assignment;
inline Buffer room_for_experts;

constexpr size_t kRoomForExperts = 1 << 26;  // floats, unless a single token wants more

// Floats of the room for experts that a token takes.
inline size_t floats_of_token(const Experts& layer) {
  const size_t of_inputs = round_up(layer.hidden(), kUnit) + packed_width(*layer.gate_up);
  const size_t of_place = of_inputs + round_up(layer.inner(), kUnit) + packed_width(*layer.down);
  return round_up(layer.routing.num_experts, kUnit) + layer.routing.top_k * of_place;
}

// `mix_experts` for no more tokens than there is room for.
template <typename Finish>
void mix_some(Team& team, const Experts& layer, const float* x, const float* judged, int stride, int num_tokens,
              Turns turns, float* packed, Finish finish) {
  const Routing& routing = layer.routing;
  const int top_k = routing.top_k, hidden = layer.hidden();
  const size_t num_places = size_t(num_tokens) * top_k;
  const int logits_stride = round_up(routing.num_experts, kUnit), in_stride = round_up(hidden, kUnit);
  const int inner_stride = round_up(layer.inner(), kUnit);
  float* logits = room_for_experts.of(num_tokens * floats_of_token(layer));
  float* inputs = logits + size_t(num_tokens) * logits_stride;  // and outputs
  float* packed_inputs = inputs + num_places * in_stride;
  float* inner = packed_inputs + num_places * packed_width(*layer.gate_up);
  float* packed_inner = inner + num_places * inner_stride;
  assignment.resize(num_tokens, top_k);

  linear(team, layer.router, judged, stride, num_tokens, packed, [=](int t, int output, Floats sum) {
    store(logits + size_t(t) * logits_stride + output, sum);
  });
  team.each(num_tokens, 16, [&](int t) { assignment.assign(routing, logits + size_t(t) * logits_stride, t); });
  if (layer.held)
    for (int t = 0; t < num_tokens; t++) assignment.keep(*layer.held, t, turns.of(t));
  assignment.number(layer.num_held());
  if (layer.held) assignment.count(layer.held->tokens);
  const int of_hidden = std::max(1, 4096 / in_stride);
  if (layer.multiplies_input)
    team.each(assignment.num_places(), of_hidden, [&](int place) {
      const float *from = x + size_t(assignment.tokens[place]) * stride, by = assignment.scales[place];
      float* to = inputs + size_t(place) * in_stride;
      for (int i = 0; i < in_stride; i++) to[i] = i < hidden ? from[i] * by : 0.0f;
    });
  const std::vector<Share> up = assignment.shares(layer.gate_up), down = assignment.shares(layer.down);
  const int num_used = int(up.size());
  const Share* shares = up.data();
  const int32_t* tokens = assignment.tokens.data();
  const bool is_scaled = layer.multiplies_input;
  auto input = [=](int share, int i) {
    const int place = shares[share].first + i;
    return is_scaled ? inputs + size_t(place) * in_stride : x + size_t(tokens[place]) * stride;
  };
  const bool is_gated = layer.is_gated;
  if (num_used) linears(team, shares, num_used, input, packed_inputs, [=, &layer](int share, int i, int output, Floats sum) {
    if (!is_gated) {
      store(inner + size_t(shares[share].first + i) * inner_stride + output, activated(layer.activation, sum));
      return;
    }
    float* at = inner + size_t(shares[share].first + i) * inner_stride + output / 2 / kLanes * kLanes;
    store(at, output / kLanes % 2 == 0 ? sum : gated(layer.activation, load16(at), sum));
  });
  auto of_inner = [=](int share, int i) { return inner + size_t(shares[share].first + i) * inner_stride; };
  if (num_used) linears(team, down.data(), num_used, of_inner, packed_inner, [=](int share, int i, int output, Floats sum) {
    store(inputs + size_t(shares[share].first + i) * in_stride + output, sum);
  });
  team.each(num_tokens, of_hidden, [&](int t) {
    const size_t first = size_t(t) * top_k;
    for (int output = 0; output < hidden; output += kLanes) {
      Floats sum = {};
      for (int i = 0; i < top_k; i++) {
        const int place = assignment.places[first + i];
        if (place < 0) continue;
        const Floats part = load16(inputs + size_t(place) * in_stride + output);
        sum += is_scaled ? part : assignment.weights[first + i] * part;
      }
      finish(t, output, sum);
    }
  });
}

// x [num_tokens, stride], zero past its inputs, goes through the experts that the router chooses by `judged`, which has
// the same shape; finish(token, output, 16 sums) takes the outputs. `turns` matter only if not all experts are held.
// `packed` has room for all inputs of all tokens.
template <typename Finish>
void mix_experts(Team& team, const Experts& layer, const float* x, const float* judged, int stride, int num_tokens,
                 Turns turns, float* packed, Finish finish) {
  const int at_once = int(std::max<size_t>(1, kRoomForExperts / floats_of_token(layer)));
  for (int first = 0; first < num_tokens; first += at_once)
    mix_some(team, layer, x + size_t(first) * stride, judged + size_t(first) * stride, stride,
             std::min(at_once, num_tokens - first), turns.after(first), packed, [=](int t, int output, Floats sum) { finish(first + t, output, sum); });
}

// A shared expert's gate: the sigmoid of the product of a token and a vector of `num_inputs` weights.
inline float sigmoid_gate(const float* x, const float* weights, int num_inputs) {
  Floats products = {};
  int i = 0;
  for (; i + kLanes <= num_inputs; i += kLanes) products += load16(x + i) * load16(weights + i);
  float sum = sum_of(products)[0];
  for (; i < num_inputs; i++) sum += x[i] * weights[i];
  return 1.0f / (1.0f + std::exp(-sum));
}

}  // namespace penstock

// Which experts a token goes to, and with which weights. The docstrings of `kernels/experts/routing.py` give the rules.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "../machine/vectors.h"

namespace penstock {

enum RoutingKind { kSoftmax, kSigmoid, kTopSoftmax };  // as Routing.kind

struct Routing {
  const float* correction;  // [num_experts] or null
  const float* expert_scales;  // the same
  int32_t num_experts, top_k, kind, num_groups, top_groups;
  int32_t judges_by_two;  // groups are judged by the sum of their two best; else by their best
  int32_t renormalizes;
  float renormalize_eps, scale;

  bool goes_by_logits() const { return kind == kTopSoftmax || !(correction || (num_groups > 1 && judges_by_two)); }
};

// Finds the numbers of the `count` highest values, the best first; among equals, the lowest number first.
inline void find_best(const float* values, int num_values, int count, int32_t* best) {
  for (int i = 0, found = 0; i < num_values; i++) {
    if (found == count && !(values[i] > values[best[count - 1]])) continue;
    int at = found < count ? found++ : count - 1;
    for (; at > 0 && values[i] > values[best[at - 1]]; at--) best[at] = best[at - 1];
    best[at] = i;
  }
}

// In place. The `count` numbers are summed in their order, so the sum is the same in any batch.
inline void softmax(float* values, int count) {
  const float most = *std::max_element(values, values + count);
  float sum = 0;
  for (int i = 0; i < count; i += kLanes) {
    const Floats raised = exp16(load_some(values + i, count - i) - most);
    for (int j = i; j < std::min(count, i + kLanes); j++) sum += values[j] = raised[j - i];
  }
  for (int i = 0; i < count; i++) values[i] /= sum;
}

// logits [num_experts], overwritten -> ids [top_k], the best first, and their weights [top_k]. If logits are NaN, ids
// are arbitrary different experts.
inline void route(const Routing& routing, float* logits, int32_t* ids, float* weights) {
  thread_local std::vector<float> choice, judged;
  thread_local std::vector<int32_t> groups;
  const int count = routing.num_experts, size = count / routing.num_groups;
  float* const scores = logits;
  if (routing.goes_by_logits()) choice.assign(logits, logits + count);
  if (routing.kind == kSoftmax) softmax(scores, count);
  for (int i = 0; routing.kind == kSigmoid && i < count; i++) scores[i] = 1.0f / (1.0f + std::exp(-scores[i]));
  if (!routing.goes_by_logits()) choice.assign(scores, scores + count);
  for (int i = 0; routing.correction && i < count; i++) choice[i] += routing.correction[i];
  if (routing.num_groups > 1) {
    judged.resize(routing.num_groups);
    groups.resize(routing.top_groups);
    for (int g = 0; g < routing.num_groups; g++) {
      int32_t best[2] = {};
      const float* of_group = choice.data() + g * size;
      find_best(of_group, size, routing.judges_by_two ? 2 : 1, best);
      judged[g] = of_group[best[0]] + (routing.judges_by_two ? of_group[best[1]] : 0.0f);
    }
    find_best(judged.data(), routing.num_groups, routing.top_groups, groups.data());
    for (int g = 0; g < routing.num_groups; g++)
      if (std::find(groups.begin(), groups.end(), g) == groups.end())
        std::fill_n(choice.begin() + g * size, size, -INFINITY);
  }
  find_best(choice.data(), count, routing.top_k, ids);
  for (int i = 0; i < routing.top_k; i++) weights[i] = scores[ids[i]];
  if (routing.kind == kTopSoftmax) softmax(weights, routing.top_k);
  if (routing.renormalizes) {
    const float sum = std::accumulate(weights, weights + routing.top_k, 0.0f) + routing.renormalize_eps;
    for (int i = 0; i < routing.top_k; i++) weights[i] /= sum;
  }
  for (int i = 0; i < routing.top_k; i++)
    weights[i] *= routing.expert_scales ? routing.scale * routing.expert_scales[ids[i]] : routing.scale;
}

}  // namespace penstock

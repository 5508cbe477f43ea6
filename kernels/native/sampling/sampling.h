// Draws a row's token as `kernels/sampling/sampling.py` does, in passes over its logits: bias, mask and penalties,
// temperature, filters, and the Gumbel-max draw with counter-based noise (its convention: `kernels/sampling/philox.py`).
#pragma once

#include <algorithm>
#include <vector>

#include "../machine/vectors.h"

namespace penstock {

// Philox-4x32-10 for 16 counters (group, position, 0, 0) under one key; words[j] are those of token ids 4 * group + j.
inline void philox16(uint64_t key, uint32_t position, Words group, Words (&words)[4]) {
  Words c0 = group, c1 = Words{} + position, c2 = {}, c3 = {};
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  for (int round = 0; round < 10; round++) {
    Words high0, low0, high2, low2;
    multiply_words(c0, 0xD2511F53u, high0, low0);
    multiply_words(c2, 0xCD9E8D57u, high2, low2);
    c0 = high2 ^ c1 ^ k0;
    c1 = low2;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

// The natural logarithm of x > 0, normal, within 2 ulp (Cephes' logf).
inline Floats log16(Floats x) {
  Ints bits = load<Ints>(&x);
  Ints exponent = (bits >> 23) - 126;
  bits = (bits & 0x007fffff) | 0x3f000000;  // the mantissa in [0.5, 1)
  Floats m = load<Floats>(&bits);
  const Ints is_small = m < splat(0.70710678118654752f);
  exponent = is_small ? exponent - 1 : exponent;
  m = (is_small ? m + m : m) - 1.0f;
  const Floats square = m * m;
  Floats p = splat(7.0376836292e-2f);
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  const Floats e = __builtin_convertvector(exponent, Floats);
  Floats y = p * m * square + e * -2.12194440e-4f - 0.5f * square;
  return m + y + e * 0.693359375f;
}

inline Floats gumbel16(Words words) {
  const Floats u = (__builtin_convertvector(Ints(words >> 9), Floats) + 0.5f) * 0x1p-23f;
  return -log16(-log16(u));
}

struct Sampling {  // as _Sampling in library.py: the rows' parameters, described in kernels/sampling/sampling_state.py
  const float *temperature, *top_p, *min_p, *repetition_penalty, *presence_penalty, *frequency_penalty;
  const int64_t *seed, *top_k, *min_tokens, *num_prompt_tokens;
  int32_t* token_ids;       // [rows, max_len]
  const int32_t* stop_ids;  // [rows, num_stop_ids], -1: none
  const int32_t* bias_ids;  // [rows, num_bias_ids], -1: none
  const float* bias_values;
  int32_t max_len, num_stop_ids, num_bias_ids;
};

constexpr int kNotFinite = -1, kNothingLeft = -2;  // in place of a token, as in kernels/sampling/sampling_state.py

constexpr float kNoiseRange = 20.0f;  // noise lies in [-2.82, 16.64]: a token this far below the best one cannot win
constexpr float kFewRange = 8.0f;     // the few tokens this close to the best usually have all mass that top-p keeps

// 16 logits, or fewer at the end of a row.
inline Floats load_logits(const float* z, int count) {
  if (count >= kLanes) return load16(z);
  Floats logits = splat(-INFINITY);
  for (int i = 0; i < count; i++) logits[i] = z[i];
  return logits;
}

// Whether any logit is NaN. `sum` is the sum of all logits, in any order. They are searched only if the sum is NaN.
inline bool has_nan(const float* z, int vocab_size, Floats sum) {
  return std::isnan(sum_of(sum)[0]) && std::any_of(z, z + vocab_size, [](float logit) { return std::isnan(logit); });
}

// Why no token can be drawn from logits with the maximum `top`; 0 if one can.
inline int failure_of(bool is_nan, float top) {
  if (is_nan || top == INFINITY) return kNotFinite;
  return top == -INFINITY ? kNothingLeft : 0;
}

// log(sum(exp(z))) of a row, always in the same order: blocks of 64 vectors, whose sums are added up.
inline float log_sum_exp(const float* z, int vocab_size) {
  Floats most = splat(-INFINITY), sum = {};
  for (int first = 0; first < vocab_size; first += kLanes) {
    const Floats logits = load_logits(z + first, vocab_size - first);
    most = larger(most, logits);
    if (vocab_size - first >= kLanes) sum += logits;  // past the end of a row come infinities
  }
  for (int i = vocab_size / kLanes * kLanes; i < vocab_size; i++) sum[0] += z[i];
  const float top = max_of(most)[0];
  if (has_nan(z, vocab_size, sum)) return NAN;
  if (std::isinf(top)) return top;
  Floats total = {};
  for (int block = 0; block < vocab_size; block += 64 * kLanes) {
    const int end = std::min(block + 64 * kLanes, vocab_size);
    Floats of_block = {};
    for (int first = block; first < end; first += kLanes)
      of_block += exp16(load_logits(z + first, vocab_size - first) - top);
    total += of_block;
  }
  return top + std::log(sum_of(total)[0]);
}

// The id in the largest lane; of equals, the lowest id.
inline int winner_of(Floats best, Ints ids) {
  int winner = 0;
  for (int i = 1; i < kLanes; i++)
    if (best[i] > best[winner] || (best[i] == best[winner] && ids[i] < ids[winner])) winner = i;
  return ids[winner];
}

// The id of the largest logit (of equals, the lowest), or why there is none.
inline int argmax(const float* z, int vocab_size) {
  Floats best = splat(-INFINITY), sum = {};
  Ints best_id = {};
  for (int first = 0; first < vocab_size; first += kLanes) {
    const Floats logits = load_logits(z + first, vocab_size - first);
    const Ints wins = logits > best;
    best = wins ? logits : best;
    best_id = wins ? kLaneNumbers + first : best_id;
    sum += logits;
  }
  const int failure = failure_of(has_nan(z, vocab_size, sum), max_of(best)[0]);
  return failure ? failure : winner_of(best, best_id);
}

// Every fourth number of four vectors, starting with the j-th: lane i is number 4 * i + j.
template <int j>
inline Floats every_fourth(const Floats (&z)[4]) {
  constexpr auto of_two = [](Floats a, Floats b) {  // in the first eight lanes
    constexpr int k = j + 16;
    return __builtin_shufflevector(a, b, j, j + 4, j + 8, j + 12, k, k + 4, k + 8, k + 12, j, j, j, j, j, j, j, j);
  };
  const Floats low = of_two(z[0], z[1]), high = of_two(z[2], z[3]);
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
}

// The id of the largest z + noise among those with z >= threshold; of equals, the lowest; 0 if there is none.
inline int gumbel_argmax(const float* z, int vocab_size, float threshold, uint64_t key, uint32_t position) {
  Floats best = splat(-INFINITY);
  Ints best_id = {};
  for (int first = 0; first < vocab_size; first += 4 * kLanes) {
    Floats logits[4];
    for (int i = 0; i < 4; i++) logits[i] = load_logits(z + first + i * kLanes, vocab_size - first - i * kLanes);
    const Floats most = larger(larger(logits[0], logits[1]), larger(logits[2], logits[3]));
    if (!bits_of(most >= splat(threshold))) continue;
    Words words[4];
    philox16(key, position, Words(kLaneNumbers + first / 4), words);
    const Floats turned[4] = {every_fourth<0>(logits), every_fourth<1>(logits), every_fourth<2>(logits),
                              every_fourth<3>(logits)};
    for (int j = 0; j < 4; j++) {  // lane i holds token first + 4 * i + j
      const Floats score = turned[j] >= splat(threshold) ? turned[j] + gumbel16(words[j]) : splat(-INFINITY);
      const Ints id = 4 * kLaneNumbers + (first + j);
      const Ints wins = (score > best) | ((score == best) & (id < best_id));
      best = wins ? score : best;
      best_id = wins ? id : best_id;
    }
  }
  return winner_of(best, best_id);
}

inline void penalise(const Sampling& rows, int64_t row, int position, float* z, int vocab_size) {
  const float repetition = rows.repetition_penalty[row];
  const float presence = rows.presence_penalty[row], frequency = rows.frequency_penalty[row];
  if (repetition == 1 && presence == 0 && frequency == 0) return;
  constexpr int32_t kIsKnown = 1 << 30;
  thread_local std::vector<int32_t> known;  // per token: whether it occurs, and how often in the output
  if (known.size() < size_t(vocab_size)) known.resize(vocab_size);
  const int32_t* tokens = rows.token_ids + row * rows.max_len;
  for (int i = 0; i < position; i++)
    if (uint32_t(tokens[i]) < uint32_t(vocab_size)) {
      int32_t& state = known[tokens[i]];
      state = (state | kIsKnown) + (i >= rows.num_prompt_tokens[row]);
    }
  for (int i = 0; i < position; i++) {
    const int id = tokens[i];
    if (uint32_t(id) >= uint32_t(vocab_size) || !known[id]) continue;
    const int count = known[id] & ~kIsKnown;
    known[id] = 0;
    z[id] = z[id] > 0 ? z[id] / repetition : z[id] * repetition;
    z[id] -= count * frequency + (count ? presence : 0.0f);
  }
}

// Bias, mask of stop ids, penalties.
inline void adjust(const Sampling& rows, int64_t row, int position, float* z, int vocab_size) {
  const int32_t* bias_ids = rows.bias_ids + row * rows.num_bias_ids;
  for (int i = 0; i < rows.num_bias_ids; i++)
    if (bias_ids[i] >= 0 && bias_ids[i] < vocab_size) z[bias_ids[i]] += rows.bias_values[row * rows.num_bias_ids + i];
  const int32_t* stop_ids = rows.stop_ids + row * rows.num_stop_ids;
  if (position - rows.num_prompt_tokens[row] < rows.min_tokens[row])
    for (int i = 0; i < rows.num_stop_ids; i++)
      if (stop_ids[i] >= 0 && stop_ids[i] < vocab_size) z[stop_ids[i]] = -INFINITY;
  penalise(rows, row, position, z, vocab_size);
}

// Divides the logits by the temperature. Returns their maximum, or NaN if any of them is NaN.
inline float temper(float* z, int vocab_size, float temperature) {
  Floats most = splat(-INFINITY), sum = {};
  int i = 0;
  for (; i + kLanes <= vocab_size; i += kLanes) {
    const Floats logits = load16(z + i) / temperature;
    store(z + i, logits);
    most = larger(most, logits);
    sum += logits;
  }
  float top = max_of(most)[0];
  for (; i < vocab_size; i++) {
    top = std::max(top, z[i] /= temperature);
    sum += z[i];
  }
  return has_nan(z, vocab_size, sum) ? NAN : top;
}

struct Candidate {
  float logit, weight;
};

// The smallest logit such that the candidates above it have less than `wanted` of the weight; at most `top`, the
// largest. This is quickselect (Hoare, 1961) by weight: only what the answer needs is sorted.
inline float least_of_heaviest(std::vector<Candidate>& candidates, double wanted, float top) {
  auto begin = candidates.begin(), end = candidates.end();
  double above = 0;
  while (begin != end && above < wanted) {
    const float a = begin->logit, b = begin[(end - begin) / 2].logit, c = end[-1].logit;
    const float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
    auto weight_of = [](auto from, auto to) {
      double weight = 0;
      for (; from != to; ++from) weight += from->weight;
      return weight;
    };
    const auto equal = std::partition(begin, end, [&](const Candidate& other) { return other.logit > pivot; });
    const double of_larger = weight_of(begin, equal);
    if (above + of_larger >= wanted) {
      end = equal;
      continue;
    }
    const auto smaller = std::partition(equal, end, [&](const Candidate& other) { return other.logit == pivot; });
    top = pivot;
    above += of_larger + weight_of(equal, smaller);
    begin = smaller;
  }
  return top;
}

inline bool is_larger(const Candidate& one, const Candidate& other) { return one.logit > other.logit; }

// Drops all candidates below the k-th largest. Returns the smallest that is left.
inline float keep_largest(std::vector<Candidate>& candidates, size_t k, float least) {
  if (candidates.size() <= k) return least;
  const auto last = candidates.begin() + (k - 1);
  std::nth_element(candidates.begin(), last, candidates.end(), is_larger);
  least = last->logit;
  const auto is_below = [&](const Candidate& candidate) { return candidate.logit < least; };
  candidates.erase(std::remove_if(candidates.begin(), candidates.end(), is_below), candidates.end());
  return least;
}

// The smallest tempered logit that top-k and top-p keep among logits of at least `floor`, which already includes min-p.
inline float least_kept(const Sampling& rows, int64_t row, const float* z, int vocab_size, float top, float floor) {
  const size_t k = rows.top_k[row] > 0 ? rows.top_k[row] : vocab_size;
  const float p = rows.top_p[row];
  const bool is_of_all = rows.top_k[row] <= 0 && rows.min_p[row] <= 0;  // top-p is a share of the weight of all tokens
  thread_local std::vector<Candidate> candidates;
  for (const bool is_last : {!is_of_all, true}) {
    float least = is_last ? floor : std::max(floor, top - kFewRange);
    candidates.clear();
    size_t enough = 4 * k + 4 * kLanes;  // candidates after which all but the k largest are dropped
    Floats of_all = {};
    for (int first = 0; first < vocab_size; first += kLanes) {
      const Floats logits = load_logits(z + first, vocab_size - first);
      uint32_t found = bits_of(logits >= splat(least));
      if (!is_of_all && !found) continue;
      const Floats weights = exp16(logits - top);
      of_all += weights;
      for (; found; found &= found - 1) {
        const int i = __builtin_ctz(found);
        candidates.push_back({logits[i], weights[i]});
      }
      if (candidates.size() > enough) {
        least = keep_largest(candidates, k, least);
        enough = std::max(enough, 2 * candidates.size());  // many may equal the k-th
      }
    }
    least = keep_largest(candidates, k, least);
    if (p >= 1) return least;
    double total = 0;
    for (const Candidate& candidate : candidates) total += candidate.weight;
    const double wanted = p * (is_of_all ? sum_of(of_all)[0] : total);
    if (total >= wanted || is_last) return std::max(least, least_of_heaviest(candidates, wanted, top));
  }
  return floor;
}

// Draws the token at `position` of a row, or returns why there is none; z [vocab_size] is overwritten.
inline int draw(const Sampling& rows, int64_t row, int position, float* z, int vocab_size) {
  adjust(rows, row, position, z, vocab_size);
  if (rows.temperature[row] <= 0) return argmax(z, vocab_size);
  const float top = temper(z, vocab_size, rows.temperature[row]);
  if (const int failure = failure_of(std::isnan(top), top)) return failure;
  float least = top - kNoiseRange;
  if (rows.min_p[row] > 0) least = std::max(least, top + std::log(rows.min_p[row]));
  if (rows.top_k[row] > 0 || rows.top_p[row] < 1) least = least_kept(rows, row, z, vocab_size, top, least);
  return gumbel_argmax(z, vocab_size, least, uint64_t(rows.seed[row]), uint32_t(position));
}

// Sets the logits of tokens whose bit is not set to minus infinity.
inline void mask_tokens(float* logits, int vocab_size, const int32_t* words) {
  for (int first = 0; first < vocab_size; first += 32) {
    const uint32_t word = uint32_t(words[first / 32]);
    if (word == ~0u) continue;
    const int num_tokens = std::min(32, vocab_size - first);
    for (int i = 0; i < num_tokens; i++)
      if (!(word >> i & 1)) logits[first + i] = -INFINITY;
  }
}

}  // namespace penstock

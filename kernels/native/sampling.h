// The draw of sampling: Gumbel-max over counter-based noise. `kernels/philox.py` has the convention.
#pragma once

#include "vectors.h"

namespace penstock {

// Philox-4x32-10 for 16 counters (group, position, 0, 0) under one key; words[j] are those of token ids 4 * group + j.
inline void philox16(uint64_t key, uint32_t position, Words group, Words (&words)[4]) {
  uint32_t c0[kLanes], c1[kLanes], c2[kLanes] = {}, c3[kLanes] = {};
  store(c0, group);
  for (int i = 0; i < kLanes; i++) c1[i] = position;
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  for (int round = 0; round < 10; round++) {
    for (int i = 0; i < kLanes; i++) {
      const uint64_t a = uint64_t(c0[i]) * 0xD2511F53u, b = uint64_t(c2[i]) * 0xCD9E8D57u;
      c0[i] = uint32_t(b >> 32) ^ c1[i] ^ k0;
      c1[i] = uint32_t(b);
      c2[i] = uint32_t(a >> 32) ^ c3[i] ^ k1;
      c3[i] = uint32_t(a);
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  words[0] = load<Words>(c0);
  words[1] = load<Words>(c1);
  words[2] = load<Words>(c2);
  words[3] = load<Words>(c3);
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

// The id of the largest z + noise among those with z >= threshold; the lowest of equals, and 0 if there is none.
inline int64_t gumbel_argmax(const float* z, int vocab_size, float threshold, uint64_t key, uint32_t position) {
  Floats best = splat(-INFINITY);
  Ints best_id = {};
  const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int first = 0; first < vocab_size; first += 4 * kLanes) {
    float logits[4 * kLanes];
    bool is_any = false;
    for (int i = 0; i < 4 * kLanes; i++) {
      logits[i] = first + i < vocab_size ? z[first + i] : -INFINITY;
      is_any |= logits[i] >= threshold;
    }
    if (!is_any) continue;
    Words words[4];
    philox16(key, position, Words(lanes + first / 4), words);
    for (int j = 0; j < 4; j++) {  // lane i holds token first + 4 * i + j
      Floats logit;
      for (int i = 0; i < kLanes; i++) logit[i] = logits[4 * i + j];
      const Floats score = logit >= splat(threshold) ? logit + gumbel16(words[j]) : splat(-INFINITY);
      const Ints id = 4 * lanes + (first + j);
      const Ints wins = (score > best) | ((score == best) & (id < best_id));
      best = wins ? score : best;
      best_id = wins ? id : best_id;
    }
  }
  int winner = 0;
  for (int i = 1; i < kLanes; i++)
    if (best[i] > best[winner] || (best[i] == best[winner] && best_id[i] < best_id[winner])) winner = i;
  return best_id[winner];
}

// The logits of tokens whose bit is not set become minus infinity.
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

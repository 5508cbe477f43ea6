// Tokens for the rows of a step, drawn by the whole team.
#pragma once

#include "../machine/team.h"
#include "sampling.h"

namespace penstock {

constexpr double kPerDraw = 200;  // cost per token of a random draw (a hash, logarithms), in multiplications
constexpr double kPerRead = 20;   // cost per token of a greedy draw
constexpr double kPerSum = 40;    // cost per token of a sum of exponentials

// Draws a token for each of `count` rows from logits [count, V], and writes it to its position in the row, where the
// next step reads it. A negative number says why a row has no token.
static void draw_rows(const Sampling& sampling, const int32_t* rows, const int32_t* positions, int count, float* logits,
                      int vocab_size, int32_t* out) {
  double multiplications = 0;
  for (int i = 0; i < count; i++)
    multiplications += (sampling.temperature[rows[i]] > 0 ? kPerDraw : kPerRead) * vocab_size;
  team->run(multiplications, [&] {
    team->each(count, 1, [&](int i) {
      out[i] = draw(sampling, rows[i], positions[i], logits + size_t(i) * vocab_size, vocab_size);
      // A row without a token ends, but its next step may be under way and must read a valid token.
      sampling.token_ids[int64_t(rows[i]) * sampling.max_len + positions[i]] = std::max(out[i], 0);
    });
  });
}

// out[i] = log(sum(exp(z))) of row i of logits [count, vocab_size].
static void log_sum_exp_rows(const float* logits, int count, int vocab_size, float* out) {
  team->run(kPerSum * count * vocab_size, [&] {
    team->each(count, 1, [&](int i) { out[i] = log_sum_exp(logits + size_t(i) * vocab_size, vocab_size); });
  });
}

}  // namespace penstock

// The scan of Mamba 2, token by token with the state in registers. It needs as many multiplications as in chunks, and a
// token's bits do not depend on the other tokens of its step.
#pragma once

#include "steps.h"

namespace penstock {

struct Mamba2 {  // as Mamba2Struct in structs.py
  const float *a, *dt_bias, *skip;  // [num_heads]; the last two or null
  float min_dt, max_dt;
  int32_t num_heads, num_groups, head_dim, state_size;
};

// Tokens of a row, for one of its heads: x, b, c, dt and out are this head's.
struct Mamba2Row {
  const float *x, *b, *c, *dt;
  float *out, *state;  // state [state_size, head_dim]
  int32_t stride, out_stride, count;
};

// Scans up to 64 tokens with `kKeys` rows of the state from `key` on and 16 lanes of values, and adds what they read to
// `read`.
template <int kKeys, bool kIsWhole>
inline __attribute__((always_inline)) void scan_block(const Mamba2& op, const Mamba2Row& row, const float* dts,
                                                      const float* decays, int count, int key, int value, int lanes,
                                                      float* read, int read_stride) {
  Floats state[kKeys];
  float* const at = row.state + size_t(key) * op.head_dim + value;
  for (int i = 0; i < kKeys; i++) {
    const float* from = at + size_t(i) * op.head_dim;
    state[i] = kIsWhole ? load16(from) : load_some(from, lanes);
  }
  for (int t = 0; t < count; t++) {
    const float* const x = row.x + size_t(t) * row.stride + value;
    const float *const b = row.b + size_t(t) * row.stride + key, *const c = row.c + size_t(t) * row.stride + key;
    const Floats written = (kIsWhole ? load16(x) : load_some(x, lanes)) * dts[t], decay = splat(decays[t]);
    Floats sums[2] = {};
    for (int i = 0; i < kKeys; i++) {
      state[i] *= decay;
      state[i] += written * b[i];
      sums[i % 2] += state[i] * c[i];
    }
    float* const to = read + size_t(t) * read_stride + value;
    store(to, load16(to) + (sums[0] + sums[1]));
  }
  for (int i = 0; i < kKeys; i++) {
    float* to = at + size_t(i) * op.head_dim;
    if (kIsWhole)
      store(to, state[i]);
    else
      for (int lane = 0; lane < lanes; lane++) to[lane] = state[i][lane];
  }
}

// The same for one token and `kVectors` vectors of values: the state is read line by line, which is best for memory.
template <int kKeys, int kVectors>
inline __attribute__((always_inline)) void step_block(const Mamba2& op, const Mamba2Row& row, float dt, float by, int key,
                                                      int value, float* read) {
  float* const at = row.state + size_t(key) * op.head_dim + value;
  const Floats decay = splat(by);
  Floats written[kVectors], sums[2][kVectors] = {};
  for (int j = 0; j < kVectors; j++) written[j] = load16(row.x + value + j * kLanes) * dt;
  for (int i = 0; i < kKeys; i++)
    for (int j = 0; j < kVectors; j++) {
      float* const to = at + size_t(i) * op.head_dim + j * kLanes;
      __builtin_prefetch(to + kFloatsAhead, 1);
      Floats state = load16(to);
      state *= decay;
      state += written[j] * row.b[key + i];
      sums[i % 2][j] += state * row.c[key + i];
      store(to, state);
    }
  for (int j = 0; j < kVectors; j++) {
    float* const to = read + value + j * kLanes;
    store(to, load16(to) + (sums[0][j] + sums[1][j]));
  }
}

constexpr int kKeysAtOnce = kPart == 16 ? 16 : 4;  // as many as registers hold

inline void scan(const Mamba2& op, const Mamba2Row& row, int head, float* read) {
  const int dim = op.head_dim, read_stride = round_up(dim, kLanes);
  const float a = op.a[head], bias = op.dt_bias ? op.dt_bias[head] : 0.0f, skip = op.skip ? op.skip[head] : 0.0f;
  for (int begin = 0; begin < row.count; begin += kScanned) {
    const int count = std::min(kScanned, row.count - begin);
    Mamba2Row now = row;
    now.x += size_t(begin) * row.stride;
    now.b += size_t(begin) * row.stride;
    now.c += size_t(begin) * row.stride;
    float dts[kScanned], decays[kScanned] = {};
    for (int t = 0; t < count; t++) {
      const float dt = softplus(row.dt[size_t(begin + t) * row.stride] + bias);
      dts[t] = std::min(std::max(dt, op.min_dt), op.max_dt);
      decays[t] = dts[t] * a;
    }
    exponentials(decays, count);
    std::fill_n(read, count * read_stride, 0.0f);
    auto scan_keys = [&](auto keys, int key) {
      constexpr int kKeys = decltype(keys)::value;
      int value = 0;
      if (count == 1)
        for (constexpr int kWide = kPart == 16 ? 4 : 2; value + kWide * kLanes <= dim; value += kWide * kLanes)
          step_block<kKeys, kWide>(op, now, dts[0], decays[0], key, value, read);
      for (; value < dim; value += kLanes) {
        if (value + kLanes <= dim)
          scan_block<kKeys, true>(op, now, dts, decays, count, key, value, kLanes, read, read_stride);
        else
          scan_block<kKeys, false>(op, now, dts, decays, count, key, value, dim - value, read, read_stride);
      }
    };
    int key = 0;
    for (; key + kKeysAtOnce <= op.state_size; key += kKeysAtOnce)
      scan_keys(std::integral_constant<int, kKeysAtOnce>(), key);
    for (; key < op.state_size; key++) scan_keys(std::integral_constant<int, 1>(), key);
    for (int t = 0; t < count; t++) {
      const float* x = now.x + size_t(t) * row.stride;
      float* out = row.out + size_t(begin + t) * row.out_stride;
      for (int i = 0; i < dim; i++) out[i] = read[t * read_stride + i] + skip * x[i];
    }
  }
}

}  // namespace penstock

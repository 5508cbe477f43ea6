// Packs weights into the layout of linear.h, and unpacks them.
#pragma once

#include "../machine/team.h"
#include "linear.h"

namespace penstock {

// Source row of packed output n: `interleaved` weights are [2 * half, K], gates above ups.
inline int source_row(int n, int num_outputs, bool interleaved) {
  if (!interleaved) return n < num_outputs ? n : -1;
  const int half = num_outputs / 2, row = n / (2 * kLanes) * kLanes + n % kLanes;
  if (row >= half) return -1;
  return n / kLanes % 2 ? half + row : row;
}

template <typename T>
void pack(const T* weight, int num_outputs, int num_inputs, bool interleaved, int num_packed, T* out) {
  const int per_word = sizeof(float) / sizeof(T);  // a pair of bf16 moves as one word
  const int inputs = round_up(num_inputs, per_word);
  team->run(kLargeWork, [&] {
    team->each(num_packed / kLanes, 1, [&](int group) {
      const T* rows[kLanes];
      for (int lane = 0; lane < kLanes; lane++) {
        const int row = source_row(group * kLanes + lane, num_outputs, interleaved);
        rows[lane] = row < 0 ? nullptr : weight + size_t(row) * num_inputs;
      }
      T* to = out + size_t(group) * inputs * kLanes;
      int k = 0;
      for (; k + kLanes * per_word <= num_inputs; k += kLanes * per_word) {
        Floats columns[kLanes];
        for (int lane = 0; lane < kLanes; lane++) columns[lane] = rows[lane] ? load<Floats>(rows[lane] + k) : Floats{};
        transpose(columns);
        for (int i = 0; i < kLanes; i++, to += kLanes * per_word) store(to, columns[i]);
      }
      for (; k < inputs; k += per_word)
        for (int lane = 0; lane < kLanes; lane++)
          for (int j = 0; j < per_word; j++) *to++ = !rows[lane] || k + j >= num_inputs ? T{} : rows[lane][k + j];
    });
  });
}

template <typename T>
void unpack(const T* packed, int num_outputs, int num_inputs, bool interleaved, int num_packed, T* weight) {
  const int per_word = sizeof(float) / sizeof(T);
  const int inputs = round_up(num_inputs, per_word);
  team->run(kLargeWork, [&] {
    team->each(num_packed / kLanes, 1, [&](int group) {
      const T* from = packed + size_t(group) * inputs * kLanes;
      T* rows[kLanes];
      for (int lane = 0; lane < kLanes; lane++) {
        const int row = source_row(group * kLanes + lane, num_outputs, interleaved);
        rows[lane] = row < 0 ? nullptr : weight + size_t(row) * num_inputs;
      }
      int k = 0;
      for (; k + kLanes * per_word <= num_inputs; k += kLanes * per_word) {
        Floats columns[kLanes];
        for (int i = 0; i < kLanes; i++, from += kLanes * per_word) columns[i] = load<Floats>(from);
        transpose(columns);
        for (int lane = 0; lane < kLanes; lane++)
          if (rows[lane]) store(rows[lane] + k, columns[lane]);
      }
      for (; k < inputs; k += per_word)
        for (int lane = 0; lane < kLanes; lane++)
          for (int j = 0; j < per_word; j++, from++)
            if (rows[lane] && k + j < num_inputs) rows[lane][k + j] = *from;
    });
  });
}

}  // namespace penstock

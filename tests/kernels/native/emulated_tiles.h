// The instructions for tiles of 8-bit integers and of bf16 (AMX) in plain C++, for processors without them: included
// before the kernels, which then take them for the processor's own. As Intel's manual describes LDTILECFG, STTILECFG,
// TILELOADD, TDPBSUD, and TDPBF16PS, but for its flushing of denormals.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#undef __AMX_TILE__
#undef __AMX_INT8__
#undef __AMX_BF16__
#define __AMX_TILE__ 1
#define __AMX_INT8__ 1
#define __AMX_BF16__ 1
#define _tile_loadconfig emulated_loadconfig
#define _tile_storeconfig emulated_storeconfig
#define syscall(...) 0

struct EmulatedTile {
  int rows = 0, row_bytes = 0;
  uint8_t data[16][64];
};
inline thread_local EmulatedTile emulated[8];

inline void check_tile(bool is_right) {
  if (!is_right) std::abort();
}

inline void emulated_loadconfig(const void* from) {
  const uint8_t* bytes = static_cast<const uint8_t*>(from);
  check_tile(bytes[0] == 1 && bytes[1] == 0);
  for (int i = 0; i < 8; i++) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, bytes + 16 + 2 * i, 2);
    emulated[i].rows = bytes[48 + i];
    emulated[i].row_bytes = row_bytes;
    check_tile(emulated[i].rows <= 16 && row_bytes <= 64 && (emulated[i].rows == 0) == (row_bytes == 0));
  }
}

inline void emulated_storeconfig(void* to) {
  uint8_t* bytes = static_cast<uint8_t*>(to);
  std::memset(bytes, 0, 64);
  for (int i = 0; i < 8; i++) {
    const uint16_t row_bytes = uint16_t(emulated[i].row_bytes);
    std::memcpy(bytes + 16 + 2 * i, &row_bytes, 2);
    bytes[48 + i] = uint8_t(emulated[i].rows);
    if (emulated[i].rows) bytes[0] = 1;
  }
}

inline void _tile_zero(int i) {
  check_tile(emulated[i].rows > 0);
  std::memset(emulated[i].data, 0, sizeof emulated[i].data);
}

inline void _tile_loadd(int i, const void* from, size_t stride) {
  _tile_zero(i);
  for (int row = 0; row < emulated[i].rows; row++)
    std::memcpy(emulated[i].data[row], static_cast<const uint8_t*>(from) + row * stride, emulated[i].row_bytes);
}

inline void _tile_stored(int i, void* to, size_t stride) {
  check_tile(emulated[i].rows > 0);
  for (int row = 0; row < emulated[i].rows; row++)
    std::memcpy(static_cast<uint8_t*>(to) + row * stride, emulated[i].data[row], emulated[i].row_bytes);
}

// sums += a * b, of signed and unsigned bytes.
inline void _tile_dpbsud(int sums, int a, int b) {
  EmulatedTile &c = emulated[sums], &x = emulated[a], &w = emulated[b];
  check_tile(c.rows == x.rows && c.row_bytes == w.row_bytes && x.row_bytes == 4 * w.rows);
  for (int m = 0; m < c.rows; m++)
    for (int n = 0; n < c.row_bytes / 4; n++) {
      uint32_t sum;
      std::memcpy(&sum, c.data[m] + 4 * n, 4);
      for (int k = 0; k < x.row_bytes; k++) sum += uint32_t(int8_t(x.data[m][k]) * int(w.data[k / 4][4 * n + k % 4]));
      std::memcpy(c.data[m] + 4 * n, &sum, 4);
    }
}

// sums += a * b, of pairs of bf16: the products of first and of second numbers are summed apart.
inline void _tile_dpbf16ps(int sums, int a, int b) {
  EmulatedTile &c = emulated[sums], &x = emulated[a], &w = emulated[b];
  check_tile(c.rows == x.rows && c.row_bytes == w.row_bytes && x.row_bytes == 4 * w.rows);
  const auto number = [](const uint8_t* at) {
    uint16_t half;
    std::memcpy(&half, at, 2);
    const uint32_t word = uint32_t(half) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
  };
  for (int m = 0; m < c.rows; m++)
    for (int n = 0; n < c.row_bytes / 4; n++) {
      float of_pair[2] = {}, sum;
      for (int k = 0; k < w.rows; k++)
        for (int i = 0; i < 2; i++)
          of_pair[i] = __builtin_fmaf(number(x.data[m] + 4 * k + 2 * i), number(w.data[k] + 4 * n + 2 * i), of_pair[i]);
      std::memcpy(&sum, c.data[m] + 4 * n, 4);
      sum += of_pair[0] + of_pair[1];
      std::memcpy(c.data[m] + 4 * n, &sum, 4);
    }
}

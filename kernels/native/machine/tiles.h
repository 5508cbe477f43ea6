// The processor's tile registers (AMX), whose instructions multiply up to 16 tokens with 16 outputs.
#pragma once

#if defined(__AMX_TILE__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#endif

namespace penstock {

constexpr int kTileRows = 16;  // tokens

#if defined(__AMX_TILE__)
// Asks the system to let this process use tiles; returns whether it does.
inline bool may_use_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool may = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return may;
}

struct alignas(64) TileShapes {  // as the processor reads them
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int num_rows, int num_bytes) {
    rows[tile] = uint8_t(num_rows);
    row_bytes[tile] = uint16_t(num_rows ? num_bytes : 0);
  }
};

// Gives this thread's tiles these shapes, if they have others: asking costs next to nothing, setting them takes as long
// as a thousand multiplications. They are left so; the system releases them when the processor idles.
inline void configure_tiles(const TileShapes& shapes) {
  TileShapes current;
  _tile_storeconfig(&current);
  if (std::memcmp(&shapes, &current, sizeof shapes)) _tile_loadconfig(&shapes);
}
#else
constexpr bool may_use_tiles() { return false; }
#endif

}  // namespace penstock

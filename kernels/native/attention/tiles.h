// Attention over pages of bf16 by tiles (AMX): scores and sums of up to 32 pairs of a query and a head at a time.
//
// What is in a block is as in pairs.h, which is also how tiles of weights are stored: 16 pairs of a key's numbers, for
// 16 keys; or 16 pairs of keys, for 16 numbers of their values. An instruction adds the products of a row and a column
// in one fixed order, whatever else is in the tiles, and blocks begin at fixed positions. So a query's bits are the
// same in any chunk. A step that decodes has the heads that share keys as its rows.
#pragma once

#include "../machine/tiles.h"
#include "pairs.h"

#ifdef __AVX512BF16__
namespace penstock {

#if defined(__AMX_BF16__)
// As FloatBlock.
struct TileBlock : PairBlock {
  static constexpr int kValuePadding = kPairLanes;  // two tiles of sums are computed at a time
  static constexpr int kMostRows = 2 * kTileRows;

  using PairBlock::PairBlock;

  // All pairs in as few turns as there can be, of nearly equal size.
  static int together(int num_pairs) {
    const int turns = (num_pairs + kMostRows - 1) / kMostRows;
    return round_up((num_pairs + turns - 1) / turns, kMostTogether);
  }

  // Tiles 0 to 3 are sums, of two tiles of rows by two of columns; 4 and 5 are rows of queries or weights, 6 and 7 keys
  // or values.
  void begin(int together) const {
    const int first = std::min(together, kTileRows), second = together - first;
    TileShapes shapes;
    for (int tile : {0, 1, 4}) shapes.set(tile, first, 64);
    for (int tile : {2, 3, 5}) shapes.set(tile, second, 64);
    for (int tile : {6, 7}) shapes.set(tile, kTileRows, 64);
    configure_tiles(shapes);
  }

  void put(int v, const Places<bf16>& places, const Places<bf16>& next, int dim, int value_dim) {
    PairBlock::put(v, places, next, dim, value_dim);
    if (v % 2 == 0)  // a tile has the values of 32 keys; if there are only 16, zeros meet the other weights, zeros, too
      std::fill_n(joined + (v + 1) * kLanes / 2 * padded_values, kLanes / 2 * padded_values, 0);
  }

  void take(int p, int count, const Taking& taking) const {
    alignas(64) float scores[kMostRows][kBlockKeys];
    alignas(64) uint32_t rounded[kMostRows][kBlockKeys / 2];
    const int num_vectors = taking.num_vectors;
    const bool has_second = count > kTileRows;
    score_tiles(queries + p * query_size(), num_vectors, has_second, scores[0]);
    for (int r = 0; r < count; r += kMostTogether) {
      Floats of_pairs[kMostTogether][kVectors];
      float weights[kMostTogether][kBlockKeys], kept[kMostTogether];
      for (int i = 0; i < kMostTogether; i++)
        for (int v = 0; v < kVectors; v++)
          of_pairs[i][v] = v < num_vectors ? load16(scores[r + i] + v * kLanes) : Floats{};
      weigh(of_pairs, taking.seen + p + r, taking.window, taking.softcap, taking.at, num_vectors,
            taking.maxima + p + r, taking.masses + (p + r) * kLanes, weights, kept);
      for (int i = 0; i < kMostTogether; i++) {
        round_weights(weights[i], num_vectors * kLanes, rounded[r + i]);
        if (kept[i] == 1.0f) continue;
        float* const sums = taking.sums + (p + r + i) * padded_values;
        for (int d = 0; d < padded_values; d += kLanes) store(sums + d, load16(sums + d) * kept[i]);
      }
    }
    add_tiles(rounded[0], num_vectors, has_second, taking.sums + p * padded_values);
  }

 private:
  // scores: [rows][kBlockKeys]. For an odd number of vectors, the scores behind them are of no keys.
  void score_tiles(const uint32_t* rows, int num_vectors, bool has_second, float* scores) const {
    const size_t size = query_size(), row_bytes = size * 4, score_bytes = kBlockKeys * 4;
    asm volatile("" : : : "memory");  // compilers do not know that tiles are loaded from memory
    for (int v = 0; v < num_vectors; v += 2, scores += 2 * kLanes) {
      const uint32_t *row = rows, *key = keys + v * kLanes * size;
      _tile_zero(0);
      _tile_zero(1);
      if (has_second) {
        _tile_zero(2);
        _tile_zero(3);
      }
      for (size_t d = 0; d < size; d += kLanes, row += kLanes, key += kLanes * kLanes) {
        _tile_loadd(4, row, row_bytes);
        _tile_loadd(6, key, 64);
        _tile_loadd(7, key + kLanes * size, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (has_second) {
          _tile_loadd(5, row + kTileRows * size, row_bytes);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_stored(0, scores, score_bytes);
      _tile_stored(1, scores + kLanes, score_bytes);
      if (has_second) {
        _tile_stored(2, scores + kTileRows * kBlockKeys, score_bytes);
        _tile_stored(3, scores + kTileRows * kBlockKeys + kLanes, score_bytes);
      }
    }
    asm volatile("" : : : "memory");
  }

  // Adds the weighted values to `sums`, [rows][padded_values].
  void add_tiles(const uint32_t* weights, int num_vectors, bool has_second, float* sums) const {
    const size_t value_bytes = size_t(padded_values) * 4, weight_bytes = kBlockKeys / 2 * 4;
    asm volatile("" : : : "memory");
    for (int d = 0; d < padded_values; d += kPairLanes) {
      float *const first = sums + d, *const second = first + size_t(kTileRows) * padded_values;
      _tile_loadd(0, first, value_bytes);
      _tile_loadd(1, first + kLanes, value_bytes);
      if (has_second) {
        _tile_loadd(2, second, value_bytes);
        _tile_loadd(3, second + kLanes, value_bytes);
      }
      const uint32_t *weight = weights, *value = joined + d;
      for (int v = 0; v < num_vectors; v += 2, weight += kLanes, value += size_t(kLanes) * padded_values) {
        _tile_loadd(4, weight, weight_bytes);
        _tile_loadd(6, value, value_bytes);
        _tile_loadd(7, value + kLanes, value_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (has_second) {
          _tile_loadd(5, weight + kTileRows * kBlockKeys / 2, weight_bytes);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_stored(0, first, value_bytes);
      _tile_stored(1, first + kLanes, value_bytes);
      if (has_second) {
        _tile_stored(2, second, value_bytes);
        _tile_stored(3, second + kLanes, value_bytes);
      }
    }
    asm volatile("" : : : "memory");
  }
};
#else
using TileBlock = PairBlock;  // not used
#endif

}  // namespace penstock
#endif

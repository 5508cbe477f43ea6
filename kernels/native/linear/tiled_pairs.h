// Products of bf16 weights with inputs that are rounded to bf16, by tiles (AMX).
//
// 32 packed inputs of a group of outputs are a tile as they are stored: 16 pairs of inputs, for 16 outputs each. Inputs
// are packed in tiles, too: [tiles of tokens][32 inputs][tokens][32]. Two tiles of tokens and two groups are multiplied
// at a time, so that each tile that was loaded is used twice. Weights go through the L1 cache block by block, and the
// inputs of many tiles stay in the L2 cache.
//
// An instruction adds the products of a token and an output in one fixed order, whatever else is in the tiles. Steps of
// any size go this way, so a token's bits are the same in all of them.
#pragma once

#include "../machine/tiles.h"
#include "linear.h"

namespace penstock {

#if defined(__AMX_BF16__)
constexpr int kTilePairs = 16;                     // of inputs, in a tile
constexpr int kTileWords = kTileRows * kTilePairs;  // of a whole tile of weights
constexpr int kTilesOfBlock = 16;                  // tiles of weights that are multiplied with all tokens in turn
constexpr int kMostTokenTiles = 32;                // that go through a unit's weights together
constexpr int kTiledInputBytes = 5 << 18;          // of those; they stay in the core's own L2 cache
constexpr int kTilesAhead = 2;                     // prefetch distance for a tile of tokens that is alone

// Weights or packed inputs of `count` tiles.
typedef const uint32_t* TileWords;

inline void prefetch_tile(TileWords at) {
  for (int row = 0; row < kTilePairs; row++) __builtin_prefetch(at + row * kLanes);
}

struct TokenTile {
  TileWords inputs;  // [tiles][tokens][pairs]
  int num_tokens;
  Floats* sums;  // [groups][tokens]
};

// Adds to the sums of two tiles of tokens and two groups; `count` tiles of inputs. Prefetches as many weights of both.
template <bool kAsks>
inline void multiply_tiles(const TokenTile& one, const TokenTile& other, TileWords weight, size_t group, int count,
                           TileWords ahead, size_t ahead_group) {
  asm volatile("" : : : "memory");  // compilers do not know that tiles are loaded from memory
  _tile_loadd(0, one.sums, 64);
  _tile_loadd(1, one.sums + one.num_tokens, 64);
  _tile_loadd(2, other.sums, 64);
  _tile_loadd(3, other.sums + other.num_tokens, 64);
  for (int i = 0; i < count; i++, weight += kTileWords, ahead += kTileWords) {
    _tile_loadd(6, weight, 64);
    _tile_loadd(4, one.inputs + i * one.num_tokens * kTilePairs, 64);
    _tile_loadd(7, weight + group, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, other.inputs + i * other.num_tokens * kTilePairs, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (kAsks) prefetch_tile(ahead);
    _tile_dpbf16ps(2, 5, 6);
    if (kAsks) prefetch_tile(ahead + ahead_group);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, one.sums, 64);
  _tile_stored(1, one.sums + one.num_tokens, 64);
  _tile_stored(2, other.sums, 64);
  _tile_stored(3, other.sums + other.num_tokens, 64);
  asm volatile("" : : : "memory");
}

// The same for one tile of tokens and all groups of a unit, whose weights are read from memory once.
inline void multiply_tile_alone(const TokenTile& tokens, TileWords weight, size_t group, int count) {
  static_assert(kUnitGroups == 4);
  const int n = tokens.num_tokens;
  asm volatile("" : : : "memory");
  _tile_loadd(0, tokens.sums, 64);
  _tile_loadd(1, tokens.sums + n, 64);
  _tile_loadd(2, tokens.sums + 2 * n, 64);
  _tile_loadd(3, tokens.sums + 3 * n, 64);
  for (int i = 0; i < count; i++, weight += kTileWords) {
    // Past a group's end, what follows the unit's groups is asked for: the next unit.
    TileWords ahead = weight + kTilesAhead * kTileWords + (i + kTilesAhead < count ? 0 : 3 * group);
    _tile_loadd(4, tokens.inputs + i * n * kTilePairs, 64);
    _tile_loadd(5, weight, 64);
    prefetch_tile(ahead);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, weight + group, 64);
    prefetch_tile(ahead + group);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, weight + 2 * group, 64);
    prefetch_tile(ahead + 2 * group);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, weight + 3 * group, 64);
    prefetch_tile(ahead + 3 * group);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, tokens.sums, 64);
  _tile_stored(1, tokens.sums + n, 64);
  _tile_stored(2, tokens.sums + 2 * n, 64);
  _tile_stored(3, tokens.sums + 3 * n, 64);
  asm volatile("" : : : "memory");
}

// Shapes for this many tokens in two tiles: 0 to 3 are sums, 4 and 5 inputs, 6 and 7 weights.
inline TileShapes shapes_of_pairs(int num_tokens, int num_others) {
  TileShapes shapes;
  for (int tile : {0, 1, 4}) shapes.set(tile, num_tokens, 64);
  for (int tile : {2, 3, 5}) shapes.set(tile, num_others, 64);
  for (int tile : {6, 7}) shapes.set(tile, kTilePairs, 64);
  return shapes;
}

// Shapes for one tile of tokens: 0 to 3 are sums, 4 is inputs, 5 to 7 are weights.
inline TileShapes shapes_of_pairs_alone(int num_tokens) {
  TileShapes shapes;
  for (int tile = 0; tile < 5; tile++) shapes.set(tile, num_tokens, 64);
  for (int tile = 5; tile < 8; tile++) shapes.set(tile, kTilePairs, 64);
  return shapes;
}

// All tokens in tiles: one, or an even number of nearly equal ones.
inline Tiles token_tiles(int num_tokens) {
  Tiles tiles(num_tokens, kTileRows);
  if (tiles.count > 1) tiles.count = round_up(tiles.count, 2);
  return tiles;
}

// The last tile of each of a unit's groups, if it is not whole, filled up with zeros.
struct LastTiles {
  alignas(64) uint32_t words[kUnitGroups * kTileWords];

  LastTiles(TileWords unit, size_t group, int first_pair, int num_pairs) {
    if (num_pairs == 0) return;
    std::fill_n(words, kUnitGroups * kTileWords, 0);
    for (int g = 0; g < kUnitGroups; g++)
      std::memcpy(words + g * kTileWords, unit + g * group + size_t(first_pair) * kLanes, size_t(num_pairs) * 64);
  }
};

// As `unit_of_linear`, for packed inputs of token tiles [first, end).
inline void unit_by_tiles(const Linear& layer, int unit, TileWords packed, const Tiles& tiles, int first, int end,
                          int share, const Finisher& finisher) {
  const int pairs = (layer.num_inputs + 1) / 2, whole = pairs / kTilePairs, rest = pairs % kTilePairs;
  const int padded = round_up(pairs, kTilePairs), begin = tiles.begin(first);
  const size_t group = size_t(pairs) * kLanes;
  const TileWords weight = static_cast<TileWords>(layer.weight) + unit * kUnitGroups * group;
  const LastTiles last(weight, group, whole * kTilePairs, rest);
  Floats sums[2 * kMostTokenTiles * kTileRows];  // [tiles][groups][tokens]
  const auto finish = [&](int tokens, int first_group, int num_groups, Floats* of_tile) {
    const int from = tiles.begin(tokens), count = tiles.begin(tokens + 1) - from;
    for (int g = 0; g < num_groups; g++, of_tile += count) {
      const int output = unit * kUnit + (first_group + g) * kLanes;
      if (layer.bias)
        for (int t = 0; t < count; t++) of_tile[t] += load16(layer.bias + output);
      finisher.take(finisher.what, share, from, count, output, of_tile);
    }
  };
  const auto tokens_of = [&](int i, int num_groups, int from_tile) {
    const int from = tiles.begin(i), count = tiles.begin(i + 1) - from;
    return TokenTile{packed + size_t(from) * padded + size_t(from_tile) * count * kTilePairs, count,
                     sums + num_groups * (from - begin)};
  };
  if (tiles.count == 1) {
    std::fill_n(sums, kUnitGroups * tiles.num_tokens, Floats{});
    configure_tiles(shapes_of_pairs_alone(tiles.num_tokens));
    multiply_tile_alone(tokens_of(0, kUnitGroups, 0), weight, group, whole);
    if (rest) multiply_tile_alone(tokens_of(0, kUnitGroups, whole), last.words, kTileWords, 1);
    return finish(0, 0, kUnitGroups, sums);
  }
  for (int g = 0; g < kUnitGroups; g += 2) {
    std::fill_n(sums, 2 * (tiles.begin(end) - begin), Floats{});
    for (int k = 0; k == 0 || k < whole; k += kTilesOfBlock) {  // once even if no tile is whole
      const TileWords here = weight + g * group + size_t(k) * kTileWords;
      const int count = std::min(kTilesOfBlock, whole - k);
      const bool is_last = k + kTilesOfBlock >= whole;
      const TileWords next = is_last ? weight + (g + 2) * group : here + kTilesOfBlock * kTileWords;
      for (int i = first; i < end; i += 2) {
        const TokenTile one = tokens_of(i, 2, k), other = tokens_of(i + 1, 2, k);
        configure_tiles(shapes_of_pairs(one.num_tokens, other.num_tokens));
        if (i == first)
          multiply_tiles<true>(one, other, here, group, count, next, group);
        else
          multiply_tiles<false>(one, other, here, group, count, next, group);
        if (is_last && rest)
          multiply_tiles<false>(tokens_of(i, 2, whole), tokens_of(i + 1, 2, whole), last.words + g * kTileWords,
                                kTileWords, 1, next, group);
      }
    }
    for (int i = first; i < end; i++) finish(i, g, 2, sums + 2 * (tiles.begin(i) - begin));
  }
}

// As `linears_of` for other weights.
inline void linears_by_tiles(Team& team, const Share* shares, int num_shares, const Finder& row, float* packed,
                             const Finisher& finisher) {
  const Linear& like = *shares[0].layer;
  const int steps = (like.num_inputs + 2 * kTilePairs - 1) / (2 * kTilePairs), width = steps * kTilePairs;
  uint32_t* const words = reinterpret_cast<uint32_t*>(packed);
  const Numbering packing(shares, num_shares, [](const Share& share) { return token_tiles(share.count).count; });
  team.each(packing.count(), num_shares == 1 ? 1 : 8, [&](int item) {
    const int s = packing.share_of(item), i = item - packing.begin(s);
    const Tiles tiles = token_tiles(shares[s].count);
    const int begin = tiles.begin(i), count = tiles.begin(i + 1) - begin;
    uint32_t* const to = words + (size_t(shares[s].first) + begin) * width;
    for (int t = 0; t < count; t++) {
      const float* from = row(s, begin + t);
      for (int k = 0; k < steps; k++, from += 2 * kLanes) {
        const int left = like.num_inputs - 2 * kTilePairs * k;
        store(to + (size_t(k) * count + t) * kTilePairs,
              pairs_of(load_some(from, left), load_some(from + kLanes, left - kLanes)));
      }
    }
  });
  const int num_units = (like.num_outputs + kUnit - 1) / kUnit;
  const int piece = std::clamp(kTiledInputBytes / (steps * kTileWords * 4) / 2 * 2, 4, kMostTokenTiles);
  auto num_pieces = [&](const Share& share) { return (token_tiles(share.count).count + piece - 1) / piece; };
  const Numbering units(shares, num_shares, [&](const Share& share) { return num_units * num_pieces(share); });
  team.each(units.count(), 1, [&](int item) {
    const int s = units.share_of(item), i = item - units.begin(s);
    const Share& share = shares[s];
    const Tiles tiles = token_tiles(share.count);
    const int first = i / num_units * piece, end = std::min(first + piece, tiles.count);
    unit_by_tiles(*share.layer, i % num_units, words + size_t(share.first) * width, tiles, first, end, s, finisher);
  });
}
#else
inline void linears_by_tiles(Team&, const Share*, int, const Finder&, float*, const Finisher&) {}
#endif

}  // namespace penstock

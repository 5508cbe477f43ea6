// Matrix products with packed weights.
//
// On a processor that multiplies pairs of bf16, inputs are also rounded to bf16 and packed in pairs (`kBf16Pairs`).
//
// A weight [N, K] is packed in groups of 16 outputs: bf16 as [N / 16][K / 2][16][2], fp32 as [N / 16][K][16], padded
// with zeros. A group is read from memory in order, and each output has one accumulator that adds its products in the
// order of k. So a result does not depend on the number of tokens in the step: a token's bits are the same alone, in
// any batch and in any chunk of a prompt.
//
// Tokens are divided into tiles whose sums stay in registers. Tiles are packed, so that the values of one input are
// adjacent. Several tiles go through the weights block by block, so that a block is read from memory once and from the
// L1 cache afterwards (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008). Later blocks
// are prefetched by instructions, because hardware prefetchers stop at the end of every 4 KiB page.
#pragma once

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>
#include <vector>

#include "../machine/team.h"
#include "../machine/tiles.h"
#include "../machine/vectors.h"
#include "../quantized/layout.h"

namespace penstock {

enum WeightKind {  // how a weight is stored and multiplied; as WEIGHT_KINDS in library.py
  kFp32,
  kBf16,
  kBf16Pairs,  // stored as kBf16; inputs are rounded to bf16, too, and multiplied in pairs
  kQuantizedInt8,  // stored as quantized/layout.h says; inputs are rounded to int8
  kQuantizedFp32,  // stored likewise; inputs are rounded only if the weight says so
  kQuantizedBf16,  // stored likewise; values of a table and inputs are rounded to bf16
};

struct Linear {  // as LinearStruct in library.py
  const void* weight;
  const float* bias;  // padded like the weight, or null
  int32_t num_outputs;
  int32_t num_inputs;
  int32_t kind;  // a WeightKind
  const Quantized* quantized;  // describes the weight if it is quantized
};

constexpr int kUnitGroups = 4;               // in a unit of work; even, so that a gate and its up are in one unit
constexpr int kUnit = kUnitGroups * kLanes;  // outputs of a unit; weights are padded to whole ones
#if defined(__AVX512F__)
constexpr int kMostTokens = 12;  // in a tile; two groups' sums for this many tokens fill the registers
#else
constexpr int kMostTokens = 3;
#endif
constexpr int kMostTiles = 20;  // tiles that go through a unit's weights together
constexpr int kBlock = 128;     // inputs; for these, two groups' weights and one tile fit in the L1 cache
constexpr int kWorthWidening = 8;  // from this many tiles on, a block is widened to fp32 once for all
constexpr int kInputsAhead = 16;   // prefetch distance within a tile, which comes from the L2 cache
constexpr int kAhead = 1024;    // prefetch distance in weights for a tile that is alone

// With few tokens, more groups at a time hide the latency of the additions.
constexpr int groups_at_a_time(int num_tokens) { return 2 * num_tokens <= kMostTokens ? 4 : 2; }

// A group's packed values of input k, from lane `lane` on, as floats. bf16 is stored in pairs: a load gives two, in its
// lower and upper halves.
inline PartFloats weights_at(const float* group, int k, int lane) {
  return load<PartFloats>(group + size_t(k) * kLanes + lane);
}
inline PartFloats weights_at(const bf16* group, int k, int lane) {
  const PartWords both = load<PartWords>(group + (size_t(k / 2) * kLanes + lane) * 2);
  return PartFloats(k % 2 ? both & 0xffff0000u : both << 16);
}

// Pairs are used as they are stored.
inline PartWords weights_at(const Pair* group, int k, int lane) {
  return load<PartWords>(group + size_t(k) * kLanes + lane);
}

// An input in all lanes, in the form of the weights.
inline PartFloats input_at(const float* x, PartFloats) { return *x - PartFloats{}; }
inline PartWords input_at(const float* x, PartWords) {
  uint32_t word;
  std::memcpy(&word, x, sizeof word);
  return PartWords{} + word;
}

inline PartFloats plus_product(PartFloats sum, PartFloats weights, PartFloats input) { return sum + weights * input; }
inline PartFloats plus_product(PartFloats sum, PartWords weights, PartWords input) {
  return add_products(sum, weights, input);
}

// sums [kGroups][kTokens] += the products of `num_inputs` inputs; x [num_inputs][kTokens]. It also prefetches as many
// stored weights of kAsked groups, starting at `ahead`. Groups are `group` weights apart; as stored, `stored_group`.
template <int kTokens, int kGroups, int kAsked, typename Weight, typename Stored>
void multiply(const Weight* weight, size_t group, const Stored* ahead, size_t stored_group, int num_inputs,
              const float* x, Floats* sums) {
  constexpr int kStep = sizeof(Weight) == 2 ? 2 : 1;  // bf16 is stored in pairs
  typedef PartFloats Part __attribute__((may_alias));
  Part* const parts = reinterpret_cast<Part*>(sums);  // (`load` and `store` would copy them through the stack.)
  PartFloats kept[kGroups][kTokens][kParts];
  for (int g = 0; g < kGroups; g++)
    for (int t = 0; t < kTokens; t++)
      for (int p = 0; p < kParts; p++) kept[g][t][p] = parts[(g * kTokens + t) * kParts + p];
  for (int k = 0; k < num_inputs; k += kStep, weight += kStep * kLanes, ahead += kStep * kLanes, x += kStep * kTokens) {
    __builtin_prefetch(x + kInputsAhead * kTokens);
    for (int g = 0; g < kAsked; g++) __builtin_prefetch(ahead + g * stored_group);
    for (int j = 0; j < kStep; j++)
      for (int p = 0; p < kParts; p++) {
        decltype(weights_at(weight, j, 0)) w[kGroups];
        for (int g = 0; g < kGroups; g++) w[g] = weights_at(weight + g * group, j, p * kPart);
        for (int t = 0; t < kTokens; t++) {
          const auto value = input_at(x + j * kTokens + t, w[0]);
          for (int g = 0; g < kGroups; g++) kept[g][t][p] = plus_product(kept[g][t][p], w[g], value);
        }
      }
  }
  for (int g = 0; g < kGroups; g++)
    for (int t = 0; t < kTokens; t++)
      for (int p = 0; p < kParts; p++) parts[(g * kTokens + t) * kParts + p] = kept[g][t][p];
}

template <typename Weight, typename Stored>
using Multiply = void (*)(const Weight*, size_t, const Stored*, size_t, int, const float*, Floats*);

// By the number of tokens in a tile.
template <typename Weight, size_t... kIndex>
constexpr std::array<Multiply<Weight, Weight>, kMostTokens> for_a_tile_alone(std::index_sequence<kIndex...>) {
  return {multiply<kIndex + 1, groups_at_a_time(kIndex + 1), groups_at_a_time(kIndex + 1), Weight, Weight>...};
}
template <typename Weight, typename Stored, bool kAsks, size_t... kIndex>
constexpr std::array<Multiply<Weight, Stored>, kMostTokens> for_one_of_several(std::index_sequence<kIndex...>) {
  return {multiply<kIndex + 1, 2, kAsks, Weight, Stored>...};
}

struct Tiles {  // tokens in as few tiles as there can be, of nearly equal size
  int num_tokens, count;
  explicit Tiles(int num_tokens, int most = kMostTokens)
      : num_tokens(num_tokens), count((num_tokens + most - 1) / most) {}
  int begin(int tile) const { return int(int64_t(num_tokens) * tile / count); }
};

// Where a tile's inputs k.. begin in the packed inputs: [blocks][tiles][inputs of the block][tokens of the tile].
inline size_t tile_at(const Tiles& tiles, int tile, int k, int block) {
  return size_t(k) * tiles.num_tokens + size_t(tiles.begin(tile)) * block;
}

struct Part {  // of a unit's work: inputs [k, k + block) of tiles [first, end)
  const Tiles& tiles;
  int first, end, k, block;
};

// A part for two groups. Its first two tiles prefetch the groups' next blocks.
template <typename Weight, typename Stored>
void multiply_part(const Part& part, const Weight* weight, size_t group, const Stored* next, size_t stored_group,
                   const float* packed, Floats* sums) {
  static constexpr auto kSizes = std::make_index_sequence<kMostTokens>();
  static constexpr auto kAsking = for_one_of_several<Weight, Stored, true>(kSizes);
  static constexpr auto kOthers = for_one_of_several<Weight, Stored, false>(kSizes);
  const Tiles& tiles = part.tiles;
  for (int i = part.first; i < part.end; i++) {
    const auto& of_size = i < part.first + 2 ? kAsking : kOthers;
    of_size[tiles.begin(i + 1) - tiles.begin(i) - 1](
        weight, group, i == part.first ? next : next + stored_group, stored_group, part.block,
        packed + tile_at(tiles, i, part.k, part.block), sums + 2 * (tiles.begin(i) - tiles.begin(part.first)));
  }
}

// bf16 is packed in pairs: an odd number of inputs is padded with a zero.
template <typename Weight>
int num_packed_inputs(const Linear& layer) {
  if (std::is_same_v<Weight, Pair>) return (layer.num_inputs + 1) / 2;
  return sizeof(Weight) == 2 ? round_up(layer.num_inputs, 2) : layer.num_inputs;
}

// What is done with sums, called by pointer, so that products are compiled once instead of for each use. A call for a
// tile and 16 outputs costs next to nothing compared to the product.
struct Finisher {
  const void* what;
  void (*take)(const void* what, int share, int first, int count, int output, const Floats* sums);
};
template <typename Finish>
Finisher finisher_of(const Finish& finish) {
  return {&finish, [](const void* what, int share, int first, int count, int output, const Floats* sums) {
            const Finish& finish = *static_cast<const Finish*>(what);
            for (int t = 0; t < count; t++) finish(share, first + t, output, sums[t]);
          }};
}

struct Finder {  // where the inputs of each share are
  const void* what;
  const float* (*find)(const void* what, int share, int i);
  const float* operator()(int share, int i) const { return find(what, share, i); }
};
template <typename Row>
Finder finder_of(const Row& row) {
  return {&row, [](const void* what, int share, int i) -> const float* {
            return (*static_cast<const Row*>(what))(share, i);
          }};
}

// Tiles [first, end) of a unit; the finisher takes the results.
template <typename Weight>
void unit_of_linear(const Linear& layer, int unit, const float* packed, const Tiles& tiles, int first, int end,
                    int share, const Finisher& finisher) {
  static constexpr auto kAlone = for_a_tile_alone<Weight>(std::make_index_sequence<kMostTokens>());
  const int inputs = num_packed_inputs<Weight>(layer);
  const size_t group = size_t(inputs) * kLanes;
  const Weight* weight = static_cast<const Weight*>(layer.weight) + unit * kUnitGroups * group;
  const int begin = tiles.begin(first);
  const int num_groups = tiles.count == 1 ? groups_at_a_time(tiles.num_tokens) : 2;
  // A pair is twice as large as a bf16. With this many groups at once, the distance in bytes should stay the same.
  const int ahead = std::is_same_v<Weight, Pair> && num_groups > 2 ? kAhead / 2 : kAhead;
  Floats sums[2 * kMostTiles * kMostTokens];  // [tiles][groups][tokens of a tile]
  alignas(64) float widened[2 * kBlock * kLanes];  // a block of two groups, converted from bf16 once for many tiles
  for (int g = 0; g < kUnitGroups; g += num_groups, weight += num_groups * group) {
    std::fill_n(sums, num_groups * (tiles.begin(end) - begin), Floats{});
    if (tiles.count == 1)
      kAlone[tiles.num_tokens - 1](weight, group, weight + ahead, group, inputs, packed, sums);
    for (int k = 0; tiles.count > 1 && k < inputs; k += kBlock) {
      const int block = std::min(kBlock, inputs - k);
      const Weight* here = weight + size_t(k) * kLanes;
      const Weight* next = k + kBlock < inputs ? here + kBlock * kLanes : weight + 2 * group;
      const Part part{tiles, first, end, k, block};
      const bool is_widened = sizeof(Weight) == 2 && end - first >= kWorthWidening;
      if constexpr (sizeof(Weight) == 2)
        if (is_widened) {
          for (int j = 0; j < 2; j++)
            for (int i = 0; i < block; i++)
              for (int lane = 0; lane < kLanes; lane += kPart)
                store(widened + (j * block + i) * kLanes + lane, weights_at(here + j * group, i, lane));
          multiply_part<float, Weight>(part, widened, size_t(block) * kLanes, next, group, packed, sums);
        }
      if (!is_widened) multiply_part(part, here, group, next, group, packed, sums);
    }
    for (int i = first; i < end; i++) {
      const int from = tiles.begin(i), count = tiles.begin(i + 1) - from;
      for (int j = 0; j < num_groups; j++) {
        const int output = unit * kUnit + (g + j) * kLanes;
        Floats* of_group = sums + num_groups * (from - begin) + j * count;
        if (layer.bias)
          for (int t = 0; t < count; t++) of_group[t] += load16(layer.bias + output);
        finisher.take(finisher.what, share, from, count, output, of_group);
      }
    }
  }
}

// Transposes inputs [k, k + block) of a tile with its tokens at `rows`.
inline void pack_tile(const float* const* rows, int num_tokens, int k, int block, float* to) {
  const int end = k + block;
  // Storing a column also writes the vector's lanes past its end; the following columns overwrite these.
  for (; (end - k - kLanes) * num_tokens >= kLanes - num_tokens; k += kLanes) {
    Floats columns[kLanes] = {};
    for (int t = 0; t < num_tokens; t++) columns[t] = load16(rows[t] + k);
    transpose(columns);
    for (int i = 0; i < kLanes; i++, to += num_tokens) store(to, columns[i]);
  }
  for (; k < end; k++)
    for (int t = 0; t < num_tokens; t++) *to++ = rows[t][k];
}

// Like pack_tile, for rows of `num_inputs` floats that are rounded to bf16; k and block count pairs.
inline void pack_tile_of_pairs(const float* const* rows, int num_tokens, int num_inputs, int k, int block, float* to) {
  float pairs[kMostTokens * kBlock];
  const float* rounded[kMostTokens];
  for (int t = 0; t < num_tokens; t++) {
    const float* from = rows[t] + 2 * k;
    rounded[t] = pairs + t * kBlock;
    for (int i = 0; i < block; i += kLanes) {
      const int left = num_inputs - 2 * (k + i);
      store(pairs + t * kBlock + i, pairs_of(load_some(from + 2 * i, left), load_some(from + 2 * i + kLanes, left - kLanes)));
    }
  }
  pack_tile(rounded, num_tokens, 0, block, to);
}

struct Share {  // of all inputs, [first, first + count), count > 0, go through this layer
  const Linear* layer;
  int first, count;
};

// The work on several shares: items are numbered one share after the other.
class Numbering {
 public:
  template <typename Count>
  Numbering(const Share* shares, int num_shares, Count count) : begins_(num_shares + 1) {
    for (int s = 0; s < num_shares; s++) begins_[s + 1] = begins_[s] + count(shares[s]);
  }
  int count() const { return begins_.back(); }
  int share_of(int item) const {
    if (begins_.size() == 2) return 0;
    return int(std::upper_bound(begins_.begin(), begins_.end(), item) - begins_.begin()) - 1;
  }
  int begin(int share) const { return begins_[share]; }

 private:
  std::vector<int> begins_;
};

template <typename Weight>
void linears_of(Team& team, const Share* shares, int num_shares, const Finder& row, float* packed,
                const Finisher& finisher) {
  constexpr bool kOfPairs = std::is_same_v<Weight, Pair>;
  const Linear& like = *shares[0].layer;
  const int inputs = num_packed_inputs<Weight>(like), num_blocks = (inputs + kBlock - 1) / kBlock;
  const auto is_packed = [&](const Share& share) { return share.count > 1 || kOfPairs; };
  const Numbering packing(shares, num_shares, [&](const Share& share) { return Tiles(share.count).count * num_blocks; });
  const int num_inputs = shares[num_shares - 1].first + shares[num_shares - 1].count;
  // A few tokens would be done before another core could start.
  const int at_a_time = num_inputs == 1 ? num_blocks : num_shares == 1 ? 4 : 32;
  if (kOfPairs || num_inputs > num_shares)
    team.each(packing.count(), at_a_time, [&](int item) {
      const int s = packing.share_of(item), i = item - packing.begin(s);
      const Share& share = shares[s];
      const Tiles tiles(share.count);
      const int tile = i / num_blocks, begin = tiles.begin(tile), k = i % num_blocks * kBlock;
      const int block = std::min(kBlock, inputs - k), count = tiles.begin(tile + 1) - begin;
      if (!is_packed(share)) return;
      const float* rows[kMostTokens];
      for (int t = 0; t < count; t++) rows[t] = row(s, begin + t);
      float* to = packed + size_t(share.first) * inputs + tile_at(tiles, tile, k, block);
      if constexpr (kOfPairs)
        pack_tile_of_pairs(rows, count, like.num_inputs, k, block, to);
      else
        pack_tile(rows, count, k, block, to);
    });
  const int num_units = (like.num_outputs + kUnit - 1) / kUnit;
  // This many tiles stay in the core's own cache while weights stream by.
  const int piece = std::clamp((3 << 18) / (4 * inputs * kMostTokens), 16, kMostTiles);
  auto num_pieces = [&](const Share& share) { return (Tiles(share.count).count + piece - 1) / piece; };
  const Numbering units(shares, num_shares, [&](const Share& share) { return num_units * num_pieces(share); });
  team.each(units.count(), 1, [&](int item) {
    const int s = units.share_of(item), i = item - units.begin(s);
    const Share& share = shares[s];
    const Tiles tiles(share.count);
    const int first = i / num_units * piece, end = std::min(first + piece, tiles.count);
    const float* from = is_packed(share) ? packed + size_t(share.first) * inputs : row(s, 0);
    unit_of_linear<Weight>(*share.layer, i % num_units, from, tiles, first, end, s, finisher);
  });
}

// For kQuantizedInt8; in quantized/products.h.
void quantized_linears(Team& team, const Share* shares, int num_shares, const Finder& row, float* packed,
                       const Finisher& finisher);

// For kQuantizedFp32 or, with kPairs, kQuantizedBf16; in quantized/floats.h.
template <bool kPairs>
void linears_of_floats(Team& team, const Share* shares, int num_shares, const Finder& row, float* packed,
                       const Finisher& finisher);

// For kBf16Pairs on processors with tiles; in tiled_pairs.h.
inline void linears_by_tiles(Team& team, const Share* shares, int num_shares, const Finder& row, float* packed,
                             const Finisher& finisher);

// Layers of one shape and kind, each with its own inputs, in one phase: no layer waits for another, and each weight is
// read once.
//
// row(share, i): where the i-th input of a share is, zero past its end. finish(share, i, output, 16 sums) takes the
// outputs, in whole units. `packed` has room for all inputs of all shares, in order: `packed_width` floats for each.
template <typename Row, typename Finish>
void linears(Team& team, const Share* shares, int num_shares, const Row& row, float* packed, const Finish& finish) {
  const int kind = shares[0].layer->kind;
  const auto of_weights = kind == kQuantizedInt8   ? quantized_linears
                          : kind == kQuantizedFp32 ? linears_of_floats<false>
                          : kind == kQuantizedBf16 ? linears_of_floats<true>
                          : kind == kBf16Pairs     ? (may_use_tiles() ? linears_by_tiles : linears_of<Pair>)
                          : kind == kBf16          ? linears_of<bf16>
                                                   : linears_of<float>;
  of_weights(team, shares, num_shares, finder_of(row), packed, finisher_of(finish));
}

// Room that a product needs for each token's inputs, in floats.
inline int packed_width(const Linear& layer) {
  if (layer.kind != kQuantizedInt8) return round_up(layer.num_inputs, kUnit);
  return round_up(layer.num_inputs, layer.quantized->block) / layer.quantized->block * kInputBlockFloats;
}

// x [num_tokens, stride], zero past its inputs, through a linear layer; outputs come in whole units, as
// finish(token, output, 16 sums). `packed` has room for all inputs of all tokens.
template <typename Finish>
void linear(Team& team, const Linear& layer, const float* x, int stride, int num_tokens, float* packed, Finish finish) {
  const Share all{&layer, 0, num_tokens};
  auto row = [=](int, int t) { return x + size_t(t) * stride; };
  linears(team, &all, 1, row, packed, [=](int, int t, int output, Floats sum) { finish(t, output, sum); });
}

}  // namespace penstock

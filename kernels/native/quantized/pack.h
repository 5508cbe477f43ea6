// Packs quantized weights into the layout of layout.h.
#pragma once

#include "../linear/pack.h"
#include "layout.h"

namespace penstock {

struct QuantizedSource {  // a matrix [N, K], as SourceStruct in layout.py; all arrays have the rows of the codes
  const uint8_t* codes;                              // [N, K]
  const uint8_t *scales, *minimums;                  // [N, groups] of the layout's type
  const uint8_t* zeros;                              // [N, groups]
  const uint8_t *super_scales, *super_minimums;      // fp16[N, supers]
  int32_t num_outputs, num_inputs, num_groups, num_supers;
};

// Copies numbers of 16 rows, column after column; 0 where there is no row.
inline uint8_t* pack_columns(const uint8_t* from, int row_size, const int (&rows)[kLanes], int first, int count,
                             int size, uint8_t* to) {
  for (int j = first; j < first + count; j++)
    for (int lane = 0; lane < kLanes; lane++, to += size)
      if (rows[lane] >= 0) std::memcpy(to, from + (size_t(rows[lane]) * row_size + j) * size, size);
  return to;
}

// Adds a vector of codes to the planes of its block.
inline void put_in_plane(uint8_t* plane, int width, int i, Words bits) {
  const int shared = 8 / width;
  uint8_t* at = plane + i / shared * 64;
  store(at, load<Words>(at) | bits << (width * (i % shared)));
}

// Packs a block of a panel into memory that is zero.
inline void pack_block(const Quantized& its, const QuantizedSource& from, const int (&rows)[kLanes], int k,
                       int num_inputs, uint8_t* to) {
  const int groups = groups_of_block(its, std::min(num_inputs, from.num_inputs - k)), padded = groups_of_block(its, num_inputs);
  const int j = k / its.group, size = size_of_scale(its), skipped = (padded - groups) * kLanes;
  uint8_t* header = to;
  if (its.has_super) {
    header = pack_columns(from.super_scales, from.num_supers, rows, k / its.block, 1, 2, header);
    if (its.has_minimums) header = pack_columns(from.super_minimums, from.num_supers, rows, k / its.block, 1, 2, header);
  }
  if (size) header = pack_columns(from.scales, from.num_groups, rows, j, groups, size, header) + skipped * size;
  if (its.has_zeros) header = pack_columns(from.zeros, from.num_groups, rows, j, groups, 1, header) + skipped;
  if (its.has_minimums) pack_columns(from.minimums, from.num_groups, rows, j, groups, size, header);

  to += header_bytes(its, num_inputs);
  const int first_bits = bits_of_first_plane(its.bits), second_bits = its.bits - first_bits;
  const Words first_mask = Words{} + 0x01010101u * ((1 << first_bits) - 1);
  uint8_t* second = to + num_inputs * 2 * first_bits;
  for (int i = 0; i < num_inputs; i += 4 * kLanes) {  // as words of four inputs
    Floats words[kLanes] = {};
    const int count = std::min(4 * kLanes, std::min(num_inputs, from.num_inputs - k) - i);
    for (int lane = 0; lane < kLanes; lane++)
      if (rows[lane] >= 0 && count > 0)
        std::memcpy(&words[lane], from.codes + size_t(rows[lane]) * from.num_inputs + k + i, count);
    transpose(words);
    for (int j = 0; j < kLanes && i + 4 * j < num_inputs; j++) {
      const Words codes = load<Words>(&words[j]);
      put_in_plane(to, first_bits, i / 4 + j, codes & first_mask);
      if (second_bits) put_in_plane(second, second_bits, i / 4 + j, (codes & ~first_mask) >> first_bits);
    }
  }
}

inline void pack_quantized(const Quantized& its, const QuantizedSource& from, bool interleaved, int num_packed,
                           uint8_t* to) {
  const size_t size = panel_bytes(its, from.num_inputs);
  const int num_inputs = round_up(from.num_inputs, kInputsPadding);
  team->run(kLargeWork, [&] {
    team->each(num_packed / kLanes, 1, [&](int panel) {
      int rows[kLanes];
      for (int lane = 0; lane < kLanes; lane++)
        rows[lane] = source_row(panel * kLanes + lane, from.num_outputs, interleaved);
      uint8_t* at = to + panel * size;
      std::memset(at, 0, size);
      for (int k = 0; k < num_inputs; k += its.block) {
        const int block = std::min(its.block, num_inputs - k);
        pack_block(its, from, rows, k, block, at);
        at += block_bytes(its, block);
      }
    });
  });
}

}  // namespace penstock

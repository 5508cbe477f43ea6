// Paged attention over keys and values of 8 or 4 bits. Blocks, their order and the softmax are as in attention.h. The
// products are of integers, so codes are never widened to floats:
//
//   score = scale of the query * scale of the key * sum(rounded query * code)
//   out   = sum over blocks of unit * sum(rounded(weight * scale of the value / unit) * code)
//
// Queries are rounded to 16 bits relative to their largest number, weights to 16 bits relative to the largest weight of
// their block (`unit`). The relative error is 2**-16, far below that of the codes. In int4 each group of 32 numbers has
// sums of its own, and its minimums are multiplied as floats.
//
// Sums of integers are exact, and a key that a query does not see has a weight of 0. So a query's bits are the same in
// a decode step and in any chunk of a prefill, as in attention.h.
#pragma once

#include "attention.h"
#include "codes.h"

namespace penstock {

typedef int16_t Shorts __attribute__((vector_size(64)));

// sum + a.low * b.low + a.high * b.high of the 16-bit halves of each lane.
inline Ints add_pairs(Ints sum, Ints a, Ints b) {
#if defined(__AVX512VNNI__)
  return Ints(_mm512_dpwssd_epi32(__m512i(sum), __m512i(a), __m512i(b)));
#elif defined(__AVX512BW__)
  return sum + Ints(_mm512_madd_epi16(__m512i(a), __m512i(b)));
#elif defined(__AVX2__)
  __m256i products[2];
  for (int i = 0; i < 2; i++)
    products[i] = _mm256_madd_epi16(load<__m256i>(reinterpret_cast<const char*>(&a) + 32 * i),
                                    load<__m256i>(reinterpret_cast<const char*>(&b) + 32 * i));
  return sum + load<Ints>(products);
#else
  return sum + (a >> 16) * (b >> 16) + (a << 16 >> 16) * (b << 16 >> 16);
#endif
}

inline Ints splat_int(int32_t x) { return x - Ints{}; }

// To the nearest integers, of magnitudes below 2**22.
inline Ints round16(Floats x) {
  const Floats magic = splat(12582912.0f);  // 1.5 * 2**23: adding it rounds to an integer
  return Ints(x + magic) - Ints(magic);
}

constexpr int kMostRounded = 32767;

// The largest magnitude of a rounded query whose sums over `dim` codes fit in 32 bits.
inline float most_rounded(int dim) { return std::min(kMostRounded, int(2147483647u / (127u * unsigned(dim)))); }

// 16 neighbouring positions of one head, beginning at a multiple of 16: rows of codes, rows of scales.
struct Sixteen {
  const uint8_t* codes;  // null: no query sees any of these positions
  const uint16_t* scales;
};

// 16 dwords, each `stride` dwords after the one before.
inline Words load_strided(const uint16_t* at, int stride) {
#ifdef __AVX512F__
  return Words(_mm512_i32gather_epi32(__m512i(kLaneNumbers * stride), at, 4));
#else
  Words words;
  for (int j = 0; j < kLanes; j++) {
    uint32_t word;
    std::memcpy(&word, at + 2 * j * stride, 4);
    words[j] = word;
  }
  return words;
#endif
}

template <typename Code>
class CodedHead {
 public:
  CodedHead(const AttentionShape& shape, const Code* data, const RowPages& row, int kv_head, int begin, int end)
      : shape_(shape), data_(&data->byte), row_(row), kv_head_(kv_head), begin_(begin), end_(end) {}

  int row_bytes() const { return code_bytes<Code>(shape_.head_dim); }
  int num_scales() const { return scales_of_head<Code>(shape_.head_dim); }

  // Positions of small pages, or of a tree, are copied to `room`, first rows of codes, then scales.
  Sixteen find(int first, uint8_t* room) const {
    if (first + kLanes <= begin_ || first >= end_) return {};
    if (are_neighbours(first)) return {codes(first), scales(first)};
    const int size = row_bytes(), scale_bytes = 2 * num_scales();
    uint8_t* of_scales = room + kLanes * size;
    for (int j = 0; j < kLanes; j++) {
      if (first + j < begin_ || first + j >= end_) continue;
      std::memcpy(room + j * size, codes(first + j), size);
      std::memcpy(of_scales + j * scale_bytes, scales(first + j), scale_bytes);
    }
    return {room, reinterpret_cast<const uint16_t*>(of_scales)};
  }

  size_t room_bytes() const { return kLanes * (row_bytes() + 2 * num_scales()); }

  // [num_scales][stride], of which 16 positions are written; 0 for positions that no query sees.
  void widen_scales(const Sixteen& its, int first, float* out, int stride) const {
    const Ints positions = kLaneNumbers + first;
    const Ints is_seen = (positions >= begin_) & (positions < end_);
    auto put = [&](int i, Halves halves) { store(out + i * stride, is_seen ? widen_halves(halves) : Floats{}); };
    const int count = num_scales();
    for (int i = 0; i < count; i += 2) {
      if constexpr (kHasGroups<Code>) {  // a scale and a minimum are a dword
        const Words both = its.codes ? load_strided(its.scales + i, count / 2) : Words{};
        put(i, __builtin_convertvector(both & 0xffffu, Halves));
        put(i + 1, __builtin_convertvector(both >> 16, Halves));
      } else {
        put(i, its.codes ? load<Halves>(its.scales) : Halves{});
      }
    }
  }

  // Always inlined, because GCC would drop calls of a function whose only effect is to prefetch.
  __attribute__((always_inline)) void prefetch(int first) const {
    if (!are_neighbours(first) || first + kLanes <= begin_ || first >= end_) return;
    const uint8_t* at = codes(first);
    const uint16_t* of_codes = scales(first);
    for (int i = 0; i < kLanes * row_bytes(); i += 64) __builtin_prefetch(at + i);
    for (int i = 0; i < kLanes * num_scales(); i += 32) __builtin_prefetch(of_codes + i);
  }

 private:
  bool are_neighbours(int first) const {
    return shape_.page_size >= kLanes && (first + kLanes <= row_.first_placed || end_ <= row_.first_placed);
  }
  const uint8_t* head(int place) const {
    const size_t page = row_.pages[place / shape_.page_size];
    return data_ + (page * shape_.num_kv_heads + kv_head_) * shape_.head_bytes;
  }
  const uint8_t* codes(int position) const {
    const int place = row_.place(position);
    return head(place) + size_t(place % shape_.page_size) * row_bytes();
  }
  const uint16_t* scales(int position) const {
    const int place = row_.place(position);
    const uint8_t* all = head(place) + size_t(shape_.page_size) * row_bytes();
    return reinterpret_cast<const uint16_t*>(all) + size_t(place % shape_.page_size) * num_scales();
  }

  const AttentionShape& shape_;
  const uint8_t* data_;
  const RowPages& row_;
  const int kv_head_, begin_, end_;
};

inline Floats load_bytes(const uint8_t* at, int count) {  // zeros past `count`
  if (count >= 64) return load<Floats>(at);
#ifdef __AVX512BW__
  return Floats(_mm512_castsi512_ps(_mm512_maskz_loadu_epi8((uint64_t(1) << count) - 1, at)));
#else
  Floats bytes = {};
  std::memcpy(&bytes, at, count);
  return bytes;
#endif
}

// The order in which products take a key's numbers. Each dword of codes becomes kWords lanes of two 16-bit numbers.
template <typename Code>
struct Order {
  static constexpr int kWords = kHasGroups<Code> ? 4 : 2;

  static int num_dwords(int dim) { return (code_bytes<Code>(dim) + 3) / 4; }

  // The first of the two numbers in lane `word` of a dword. The second number comes two later.
  static int number(int dword, int word) {
    if (!kHasGroups<Code>) return 4 * dword + word;
    return dword / 4 * kCodeGroup + dword % 4 * 4 + (word & 1) + (word >> 1) * (kCodeGroup / 2);
  }

  static void split(Ints dwords, Ints* out) {
    if constexpr (kHasGroups<Code>) {
      for (int word = 0; word < kWords; word++) out[word] = dwords >> (4 * (word >> 1) + 8 * (word & 1)) & 0x000f000f;
    } else {
      out[0] = Ints(Shorts(dwords) << 8 >> 8);
      out[1] = Ints(Shorts(dwords) >> 8);
    }
  }
};

// Transposes 16 keys: lane j of out[i] has two numbers of key j.
template <typename Code>
void turn_codes(const uint8_t* codes, int dim, Ints* out) {
  const int size = code_bytes<Code>(dim), num_dwords = Order<Code>::num_dwords(dim);
  for (int first = 0; first < num_dwords; first += kLanes) {
    Floats rows[kLanes];
    for (int j = 0; j < kLanes; j++) rows[j] = load_bytes(codes + j * size + 4 * first, size - 4 * first);
    transpose(rows);
    for (int i = 0; i < std::min(kLanes, num_dwords - first); i++, out += Order<Code>::kWords)
      Order<Code>::split(Ints(rows[i]), out);
  }
}

// Values of 16 positions, two positions in a lane: out[pair * num_vectors + i] has numbers 16 i to 16 i + 15 of both.
template <typename Code>
void pair_values(const uint8_t* codes, int dim, Ints* out) {
  typedef int8_t Bytes __attribute__((vector_size(16)));
  typedef int8_t Both __attribute__((vector_size(32)));
  const int size = code_bytes<Code>(dim);
  for (int j = 0; j < kLanes; j += 2, codes += 2 * size)
    for (int d = 0; d < size; d += 16) {
      Bytes a = {}, b = {};
      if (d + 16 <= size) {
        a = load<Bytes>(codes + d);
        b = load<Bytes>(codes + size + d);
      } else {
        std::memcpy(&a, codes + d, size - d);
        std::memcpy(&b, codes + size + d, size - d);
      }
      const Both both = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9,
                                                25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      const Ints pairs = Ints(__builtin_convertvector(both, Shorts));
      if constexpr (kHasGroups<Code>) {
        *out++ = pairs & 0x000f000f;
        *out++ = pairs >> 4 & 0x000f000f;
      } else {
        *out++ = pairs;
      }
    }
}

// What the queries share in their pass over a block: keys and values of up to 64 positions.
struct CodedBlock {
  const Ints *keys, *values;               // [kVectors][num_steps]; [32 pairs][num_vectors]
  const float *key_scales, *value_scales;  // [numbers][64]
  int num_steps, num_groups, dims;         // dims: vectors of 16 numbers in a value
};

// A query, rounded for the products.
struct RoundedQuery {
  float scale;
  const float* sums;  // [num_groups], for int4: the factors of the minimums
};

template <typename Code, int kCount, int kTogether>
inline void score_codes(const CodedBlock& block, const int32_t* queries, const RoundedQuery* rounded, int first,
                        Floats (&scores)[kTogether][kVectors]) {
  const int each = block.num_steps / block.num_groups;
  Floats found[kTogether][kCount] = {};
  for (int group = 0; group < block.num_groups; group++) {
    Ints sums[kTogether][kCount] = {};
    for (int step = group * each; step < (group + 1) * each; step++)
      for (int r = 0; r < kTogether; r++) {
        const Ints query = splat_int(queries[r * block.num_steps + step]);
        for (int v = 0; v < kCount; v++)
          sums[r][v] = add_pairs(sums[r][v], block.keys[(first + v) * block.num_steps + step], query);
      }
    const float* scales = block.key_scales + size_t(group) * (kHasGroups<Code> ? 2 : 1) * kBlockKeys + first * kLanes;
    for (int r = 0; r < kTogether; r++)
      for (int v = 0; v < kCount; v++) {
        found[r][v] += __builtin_convertvector(sums[r][v], Floats) * load16(scales + v * kLanes);
        if (kHasGroups<Code>) found[r][v] += rounded[r].sums[group] * load16(scales + kBlockKeys + v * kLanes);
      }
  }
  for (int r = 0; r < kTogether; r++)
    for (int v = 0; v < kCount; v++) scores[r][first + v] = found[r][v] * rounded[r].scale;
}

// Weights times the scales of values, rounded to 16 bits.
struct RoundedWeights {
  int16_t numbers[kBlockKeys];
  float unit, minimum;  // minimum: for int4, the weighted sum of the group's minimums
};

template <typename Code>
inline void round_weights(const CodedBlock& block, int group, const float (&weights)[kBlockKeys], int num_vectors,
                          RoundedWeights& out) {
  typedef int16_t Narrow __attribute__((vector_size(32)));
  const float* scales = block.value_scales + size_t(group) * (kHasGroups<Code> ? 2 : 1) * kBlockKeys;
  Floats scaled[kVectors], most = {}, minimum = {};
  for (int v = 0; v < num_vectors; v++) {
    const Floats weight = load16(weights + v * kLanes);
    scaled[v] = weight * load16(scales + v * kLanes);
    most = larger(most, scaled[v]);
    if (kHasGroups<Code>) minimum += weight * load16(scales + kBlockKeys + v * kLanes);
  }
  const float largest = max_of(most)[0];
  out.unit = largest / kMostRounded;
  out.minimum = kHasGroups<Code> ? sum_of(minimum)[0] : 0.0f;
  const float inverse = largest > 1e-30f ? kMostRounded / largest : 0.0f;  // smaller ones add nothing
  for (int v = 0; v < num_vectors; v++)
    store(out.numbers + v * kLanes, __builtin_convertvector(round16(scaled[v] * inverse), Narrow));
}

template <typename Code, int kDims, int kTogether>
inline void accumulate_codes(const CodedBlock& block, const RoundedWeights* weights, const float (&kept)[kTogether],
                             int at, int num_vectors, int padded, float* sums) {
  Ints found[kTogether][kDims] = {};
  const RoundedWeights* its[kTogether];
  for (int r = 0; r < kTogether; r++)
    its[r] = weights + r * block.num_groups + (kHasGroups<Code> ? at * kLanes / kCodeGroup : 0);
  const Ints* value = block.values + at;
  for (int pair = 0; pair < num_vectors * kLanes / 2; pair++, value += block.dims)
    for (int r = 0; r < kTogether; r++) {
      int32_t both;
      std::memcpy(&both, its[r]->numbers + 2 * pair, 4);
      const Ints weight = splat_int(both);
      for (int d = 0; d < kDims; d++) found[r][d] = add_pairs(found[r][d], value[d], weight);
    }
  for (int r = 0; r < kTogether; r++)
    for (int d = 0; d < kDims; d++) {
      float* sum = sums + r * padded + (at + d) * kLanes;
      Floats added = __builtin_convertvector(found[r][d], Floats) * its[r]->unit;
      if (kHasGroups<Code>) added += its[r]->minimum;
      store(sum, load16(sum) * kept[r] + added);
    }
}

template <typename Code, int kTogether>
inline void take_codes(const CodedBlock& block, const int32_t* queries, const RoundedQuery* rounded,
                       const Seen* seen, int window, float softcap, int first_key, int num_vectors,
                       RoundedWeights* rounded_weights, float* maxima, float* masses, float* sums) {
  Floats scores[kTogether][kVectors] = {};
  float weights[kTogether][kBlockKeys], kept[kTogether];
  if (num_vectors == kVectors)
    score_codes<Code, kVectors>(block, queries, rounded, 0, scores);
  else
    for (int v = 0; v < num_vectors; v++) score_codes<Code, 1>(block, queries, rounded, v, scores);
  weigh(scores, seen, window, softcap, first_key, num_vectors, maxima, masses, weights, kept);
  for (int r = 0; r < kTogether; r++)
    for (int group = 0; group < block.num_groups; group++)
      round_weights<Code>(block, group, weights[r], num_vectors, rounded_weights[r * block.num_groups + group]);
  const int padded = block.dims * kLanes;
  constexpr int kAtATime = kTogether <= 2 && !kHasGroups<Code> ? 4 : 2;
  int d = 0;
  for (; d + kAtATime <= block.dims; d += kAtATime)
    accumulate_codes<Code, kAtATime>(block, rounded_weights, kept, d, num_vectors, padded, sums);
  for (; d < block.dims; d++)
    accumulate_codes<Code, 1>(block, rounded_weights, kept, d, num_vectors, padded, sums);
}

// Rounds a head of a query, [dim], into lanes for the products; its scale includes `factor`.
template <typename Code>
RoundedQuery round_query(const float* query, int dim, float factor, int32_t* lanes, float* sums) {
  const float largest = largest_of(query, dim), most = most_rounded(dim);
  const float inverse = largest > 1e-30f ? most / largest : 0.0f;
  auto rounded = [&](int d) { return d < dim ? int(std::nearbyint(query[d] * inverse)) : 0; };
  std::fill(sums, sums + num_code_groups(dim), 0.0f);
  for (int d = 0; kHasGroups<Code> && d < dim; d++) sums[d / kCodeGroup] += float(rounded(d));
  for (int dword = 0; dword < Order<Code>::num_dwords(dim); dword++)
    for (int word = 0; word < Order<Code>::kWords; word++) {
      const int d = Order<Code>::number(dword, word);
      *lanes++ = int32_t(uint32_t(uint16_t(rounded(d))) | uint32_t(rounded(d + 2)) << 16);
    }
  return {largest / most * factor, sums};
}

// As `attend` in attention.h.
template <int kBits>
void attend(const AttentionShape& shape, const IntegerCode<kBits>* k_pages, const IntegerCode<kBits>* v_pages,
            const RowPages& row, int kv_head, const float* q, int stride, int num_queries, int first_position,
            float* out, int out_stride, int first_head = 0, int num_heads = 0, const int32_t* last_seen = nullptr) {
  using Code = IntegerCode<kBits>;
  const int heads = num_heads ? num_heads : shape.group(), first = kv_head * shape.group() + first_head;
  const int dim = shape.head_dim, padded = round_up(dim, kHasGroups<Code> ? kCodeGroup : kLanes);
  const int num_pairs = num_queries * heads;
  thread_local std::vector<Seen> seen;
  const auto [begin, last] = look(seen, num_pairs, heads, num_queries, first_position, shape.window, last_seen);
  const CodedHead<Code> key_codes(shape, k_pages, row, kv_head, begin, last + 1);
  const CodedHead<Code> value_codes(shape, v_pages, row, kv_head, begin, last + 1);
  CodedBlock block;
  block.num_steps = Order<Code>::num_dwords(dim) * Order<Code>::kWords;
  block.num_groups = kHasGroups<Code> ? num_code_groups(dim) : 1;
  block.dims = padded / kLanes;
  const int num_scales = key_codes.num_scales();

  thread_local std::vector<Ints> integers;
  thread_local std::vector<Floats> floats;
  thread_local std::vector<RoundedWeights> weights;
  thread_local std::vector<RoundedQuery> rounded;
  thread_local std::vector<uint8_t> gathered;
  const auto at_least = [](auto& vector, size_t size) {
    vector.resize(std::max(vector.size(), size));
    return vector.data();
  };
  const size_t num_query_lanes = round_up(num_pairs * block.num_steps, kLanes);
  const size_t num_keys = kVectors * size_t(block.num_steps), num_values = kBlockKeys / 2 * size_t(block.dims);
  Ints* keys = at_least(integers, num_keys + num_values + num_query_lanes / kLanes);
  Ints* values = keys + num_keys;
  int32_t* queries = reinterpret_cast<int32_t*>(values + num_values);
  const int num_sums = num_pairs * num_code_groups(dim);
  float* sums = reinterpret_cast<float*>(at_least(
      floats, size_t(num_pairs) * (block.dims + 1) + 2 * num_scales * kVectors + (num_pairs + num_sums) / kLanes + 2));
  float* masses = sums + size_t(num_pairs) * padded;
  float* key_scales = masses + num_pairs * kLanes;
  float* value_scales = key_scales + num_scales * kBlockKeys;
  float* maxima = value_scales + num_scales * kBlockKeys;
  float* query_sums = maxima + num_pairs;
  RoundedWeights* rounded_weights = at_least(weights, size_t(kMostTogether) * block.num_groups);
  const size_t room = key_codes.room_bytes();
  uint8_t* gather_room = at_least(gathered, 2 * room);
  block.keys = keys;
  block.values = values;
  block.key_scales = key_scales;
  block.value_scales = value_scales;

  std::fill(sums, key_scales, 0.0f);
  std::fill(maxima, maxima + num_pairs, -INFINITY);
  rounded.resize(num_pairs);
  for (int p = 0; p < num_pairs; p++) {
    const int head = first + p % heads;
    const float* from = q + size_t(p / heads) * stride + head * dim;
    rounded[p] = round_query<Code>(from, dim, shape.scale, queries + p * block.num_steps,
                                   query_sums + p * num_code_groups(dim));
    if (shape.sinks) {
      maxima[p] = shape.sinks[head];
      masses[p * kLanes] = 1.0f;
    }
  }
  for (int first_key = begin / kBlockKeys * kBlockKeys; first_key <= last; first_key += kBlockKeys) {
    const int num_vectors = (std::min(kBlockKeys, last + 1 - first_key) + kLanes - 1) / kLanes;
    for (int v = 0; v < num_vectors; v++) {
      const int at = first_key + v * kLanes;
      key_codes.prefetch(at + kBlockKeys);  // a page is too short for the hardware prefetchers to get going
      value_codes.prefetch(at + kBlockKeys);
      const Sixteen of_keys = key_codes.find(at, gather_room), of_values = value_codes.find(at, gather_room + room);
      key_codes.widen_scales(of_keys, at, key_scales + v * kLanes, kBlockKeys);
      value_codes.widen_scales(of_values, at, value_scales + v * kLanes, kBlockKeys);
      if (of_keys.codes) turn_codes<Code>(of_keys.codes, dim, keys + v * block.num_steps);
      if (of_values.codes) pair_values<Code>(of_values.codes, dim, values + v * kLanes / 2 * block.dims);
    }
    for (int p = 0; p < num_pairs; p += kMostTogether) {
      const int together = std::min(kMostTogether, num_pairs - p);
      const auto take = together == 1   ? take_codes<Code, 1>
                        : together == 2 ? take_codes<Code, 2>
                        : together == 3 ? take_codes<Code, 3>
                                        : take_codes<Code, kMostTogether>;
      take(block, queries + p * block.num_steps, rounded.data() + p, seen.data() + p, shape.window, shape.softcap,
           first_key, num_vectors, rounded_weights, maxima + p, masses + p * kLanes, sums + p * padded);
    }
  }
  for (int p = 0; p < num_pairs; p++) {
    float* to = out + size_t(p / heads) * out_stride + (first + p % heads) * dim;
    const float mass = sum_of(load16(masses + p * kLanes))[0];
    for (int d = 0; d < dim; d++) to[d] = sums[p * padded + d] / mass;
  }
}

}  // namespace penstock

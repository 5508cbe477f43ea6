// The functions that library.py, program.py and chain.py call.
#include "attention/latents.h"
#include "experts/experts.h"
#include "linear/pack.h"
#include "linear/tiled_pairs.h"
#include "machine/memory.h"
#include "machine/team.h"
#include "machine/vectors.h"
#include "program/chain.h"
#include "program/program.h"
#include "program/step.h"
#include "quantized/floats.h"
#include "quantized/pack.h"
#include "quantized/products.h"
#include "quantized/unpack.h"
#include "ranks/exchange.h"

#include <new>
#include <stdexcept>

using namespace penstock;

// Return codes, because exceptions must not leave these functions: the caller is not C++.
enum Answer { kDone, kNoMemory, kFailed, kGivenUp };  // as in library.py

template <typename Work>
static int answer(Work work) {
  try {
    work();
    return kDone;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  } catch (const std::length_error&) {  // of a vector: more than any memory
    return kNoMemory;
  } catch (const GivenUp&) {
    return kGivenUp;
  } catch (...) {
    return kFailed;
  }
}

extern "C" {

int penstock_set_threads(int num_threads, double worth_waking) {
  return answer([&] {
    if (team && team->size() == num_threads && team->worth_waking() == worth_waking) return;
    team = new Team(num_threads, worth_waking);  // only tests make a second one
  });
}

// Whether one instruction multiplies pairs of bf16 (rather than several that emulate it).
int penstock_multiplies_pairs() { return kMultipliesPairs; }

// Whether one instruction multiplies tiles of them.
int penstock_multiplies_tiles() { return may_use_tiles(); }

// Asks for huge pages before a range is first touched: streaming weights then needs fewer address translations.
int penstock_advise_huge_pages(void* begin, size_t num_bytes) {
  advise_huge_pages(begin, num_bytes);
  return kDone;
}

// Reads a range as fast as possible, as the reference for measurements.
int penstock_read(const float* data, size_t num_floats) {
  constexpr size_t kPart = 1 << 16, kFloatsAhead = 512;  // floats
  std::atomic<uint32_t> seen = 0;  // keeps the compiler from dropping the reads
  return answer([&] {
    team->run(kLargeWork, [&] {
      team->each(int(num_floats / kPart), 1, [&](int i) {
        Floats sums[4] = {};
        for (size_t k = 0; k < kPart / 4; k += kLanes)
          for (int j = 0; j < 4; j++) {  // four streams, as in the products
            const float* at = data + i * kPart + j * kPart / 4 + k;
            __builtin_prefetch(at + kFloatsAhead);
            sums[j] += load16(at);
          }
        seen += uint32_t(sum_of(sums[0] + sums[1] + sums[2] + sums[3])[0]);
      });
    });
  });
}

int penstock_pack(const void* weight, int num_outputs, int num_inputs, int kind, int interleaved, int num_packed,
                  void* out) {
  auto pack_as = [&](auto type) {
    using T = decltype(type);
    pack(static_cast<const T*>(weight), num_outputs, num_inputs, interleaved, num_packed, static_cast<T*>(out));
  };
  return answer([&] { kind == kFp32 ? pack_as(float()) : pack_as(bf16()); });
}

// Bytes of 16 packed outputs of a quantized weight.
size_t penstock_panel_bytes(const Quantized* layout, int num_inputs) { return panel_bytes(*layout, num_inputs); }

int penstock_pack_quantized(const Quantized* layout, const QuantizedSource* source, int interleaved, int num_packed,
                            uint8_t* out) {
  return answer([&] { pack_quantized(*layout, *source, interleaved, num_packed, out); });
}

int penstock_unpack(const void* packed, int num_outputs, int num_inputs, int kind, int interleaved, int num_packed,
                    void* out) {
  auto unpack_as = [&](auto type) {
    using T = decltype(type);
    unpack(static_cast<const T*>(packed), num_outputs, num_inputs, interleaved, num_packed, static_cast<T*>(out));
  };
  return answer([&] { kind == kFp32 ? unpack_as(float()) : unpack_as(bf16()); });
}

// The same of a quantized weight, as fp32 or bf16.
int penstock_unpack_quantized(const Linear* layer, int num_outputs, int interleaved, int num_packed, int to_bf16,
                              void* out) {
  return answer([&] {
    if (to_bf16)
      unpack_quantized(*layer, num_outputs, interleaved, num_packed, static_cast<bf16*>(out));
    else
      unpack_quantized(*layer, num_outputs, interleaved, num_packed, static_cast<float*>(out));
  });
}

// Rows of a weight that is not interleaved, as fp32 [num_rows, K].
int penstock_rows(const Linear* layer, const int64_t* ids, int num_rows, float* out) {
  return answer([&] {
    team->run(double(num_rows) * layer->num_inputs * kLanes, [&] {
      team->each(num_rows, 1, [&](int i) { unpack_row(*layer, int(ids[i]), out + size_t(i) * layer->num_inputs); });
    });
  });
}

// From now on each step writes to `counter` how many layers have written their keys and values; null: stop doing so.
int penstock_count_layers(int64_t* counter) {
  layer_counter = counter;
  return kDone;
}

int penstock_forward(const Program* program, const Pool* pool, const Batch* batch) {
  return answer([&] { forward(*program, *pool, *batch); });
}

int penstock_logits(const Program* program, const float* x, int num_tokens, float* out) {
  return answer([&] { project(*program, x, num_tokens, out); });
}

int penstock_step(const Program* program, const Pool* pool, const Rows* rows, float* logits) {
  return answer([&] { compute(*program, *pool, *rows, logits); });
}

// Operations of ranks that share memory; see ranks/exchange.h.
int penstock_meet(RankGroup* group) {
  return answer([&] { meet(*group, kNothing); });
}

int penstock_add_up(RankGroup* group, float* x, int64_t count) {
  return answer([&] { team->run(double(count), [&] { add_up_in_place(*team, *group, x, count); }); });
}

int penstock_gather(RankGroup* group, const char* x, int64_t num_rows, const int64_t* widths, char* out) {
  return answer([&] { team->run(0, [&] { gather(*team, *group, x, num_rows, widths, out); }); });
}

int penstock_broadcast(RankGroup* group, char* x, int64_t num_bytes, int source) {
  return answer([&] { broadcast(*group, x, num_bytes, source); });
}

// See `draw_rows`.
int penstock_draw(const Sampling* sampling, const int32_t* rows, const int32_t* positions, int count, float* logits,
                  int vocab_size, int32_t* out) {
  return answer([&] { draw_rows(*sampling, rows, positions, count, logits, vocab_size, out); });
}

// See `log_sum_exp_rows`.
int penstock_log_sum_exp(const float* logits, int count, int vocab_size, float* out) {
  return answer([&] { log_sum_exp_rows(logits, count, vocab_size, out); });
}

// Operations of heads that guess token by token; see chain.h.
int penstock_keep(const Chain* chain, int num_rows, const int32_t* rows, const int32_t* start, const int32_t* num_new,
                  const float* hidden) {
  keep(*chain, num_rows, rows, start, num_new, hidden);
  return kDone;
}

int penstock_guess(const Chain* chain, const Sampling* sampling, const Rows* rows, const int32_t* positions,
                   const int32_t* most, int32_t* counts, int32_t* tokens) {
  return answer([&] { guess(*chain, *sampling, *rows, positions, most, counts, tokens); });
}

// logits [., V]; words [num_masked, ceil(V / 32)]: a row may draw token t if bit t % 32 of word t / 32 is set.
int penstock_mask_tokens(float* logits, int vocab_size, const int64_t* rows, int num_masked, const int32_t* words) {
  const int num_words = (vocab_size + 31) / 32;
  for (int i = 0; i < num_masked; i++)
    mask_tokens(logits + rows[i] * vocab_size, vocab_size, words + size_t(i) * num_words);
  return kDone;
}

// A product alone: x [num_tokens, stride] -> out [num_tokens, out_stride], both strides in whole units.
int penstock_linear(const Linear* layer, const float* x, int stride, int num_tokens, float* packed, float* out,
                    int out_stride) {
  return answer([&] {
    team->run(kLargeWork, [&] {
      linear(*team, *layer, x, stride, num_tokens, packed,
             [&](int t, int output, Floats sum) { store(out + size_t(t) * out_stride + output, sum); });
    });
  });
}

// An activation alone. x: [num_rows, stride], with the gates in the first `width` numbers of a row and what they are
// multiplied with in the next ones, if `is_gated`; out: [num_rows, out_stride]. Width and strides are multiples of 16.
int penstock_activate(int activation, int is_gated, const float* x, int stride, int num_rows, int width, float* out,
                      int out_stride) {
  return answer([&] {
    team->run(kLargeWork, [&] {
      team->each(num_rows, 4, [&](int row) {
        const float* from = x + size_t(row) * stride;
        float* to = out + size_t(row) * out_stride;
        for (int i = 0; i < width; i += kLanes)
          store(to + i, is_gated ? gated(activation, load16(from + i), load16(from + width + i))
                                 : activated(activation, load16(from + i)));
      });
    });
  });
}

// Attention alone; as `attention` in attention.h.
int penstock_attention(const AttentionShape* shape, const void* k_pages, const void* v_pages, int kv_kind,
                       const AttentionRows* rows, const float* q, int stride, float* out, int out_stride) {
  auto attend_as = [&](auto* type) {
    using Kv = std::remove_pointer_t<decltype(type)>;
    attention(*team, *shape, static_cast<const Kv*>(k_pages), static_cast<const Kv*>(v_pages), *rows, q, stride, out,
              out_stride);
  };
  return answer([&] { team->run(kLargeWork, [&] { as_kv(kv_kind, attend_as); }); });
}

// Routing alone, for tests: logits [num_tokens, num_experts], overwritten -> ids and weights [num_tokens, top_k].
int penstock_route(const Routing* routing, float* logits, int num_tokens, int32_t* ids, float* weights) {
  return answer([&] {
    for (int t = 0; t < num_tokens; t++)
      route(*routing, logits + t * routing->num_experts, ids + t * routing->top_k, weights + t * routing->top_k);
  });
}

// Experts alone, for tests: x [num_tokens, stride] -> out [num_tokens, out_stride], both strides in whole units. Ids
// and positions of the tokens are needed if some experts are held elsewhere.
int penstock_experts(const Experts* layer, const float* x, int stride, int num_tokens, const int32_t* ids,
                     const int64_t* positions, float* packed, float* out, int out_stride) {
  return answer([&] {
    team->run(kLargeWork, [&] {
      mix_experts(*team, *layer, x, x, stride, num_tokens, Turns{ids, positions}, packed,
                  [&](int t, int output, Floats sum) { store(out + size_t(t) * out_stride + output, sum); });
    });
  });
}

// Latent attention alone, for tests. latents: [num_tokens, latent_stride]; cos_sin: [num_tokens, rope_dim]; slots:
// [num_tokens]; q, out: as for `latent_attention`. All but `rows` and `out` are overwritten.
int penstock_latent_attention(const LatentAttention* layer, void* pages, int kv_is_bf16, const AttentionRows* rows,
                              float* latents, int latent_stride, const float* cos_sin, const int64_t* slots, float* q,
                              int stride, float* out, int out_stride) {
  auto attend_as = [&](auto type) {
    auto* typed = static_cast<decltype(type)*>(pages);
    team->each(rows->query_start_loc[rows->num_rows], 1, [&](int t) {
      keep_latent(*layer, latents + size_t(t) * latent_stride, q + size_t(t) * stride,
                  cos_sin + size_t(t) * layer->rope_dim, slots[t], typed);
    });
    latent_attention(*team, *layer, typed, *rows, q, stride, out, out_stride);
  };
  return answer([&] { team->run(kLargeWork, [&] { kv_is_bf16 ? attend_as(bf16()) : attend_as(float()); }); });
}

// An indexer alone, for tests. k: [num_tokens, head_dim]; q: [num_tokens, heads * head_dim]; weights: [num_tokens,
// heads]; cos_sin, slots: as above. places: [num_tokens, top_k], written for tokens that see more. All but `rows` and
// `places` are overwritten.
int penstock_choose(const Indexer* its, int page_size, void* pages, int kv_is_bf16, const AttentionRows* rows, float* k,
                    float* q, const float* weights, const float* cos_sin, const int64_t* slots, int32_t* places) {
  const int num_tokens = rows->query_start_loc[rows->num_rows], q_stride = its->num_heads * its->head_dim;
  auto choose_as = [&](auto type) {
    auto* typed = static_cast<decltype(type)*>(pages);
    team->each(num_tokens, 1, [&](int t) {
      keep_index_key(*its, k + size_t(t) * its->head_dim, q + size_t(t) * q_stride,
                     cos_sin + size_t(t) * its->rope_dim, slots[t], typed);
    });
    choose(*team, *its, page_size, typed, *rows, q, q_stride, weights, its->num_heads);
  };
  return answer([&] {
    team->run(kLargeWork, [&] { kv_is_bf16 ? choose_as(bf16()) : choose_as(float()); });
    for (int row = 0; row < rows->num_rows; row++)
      for (int t = rows->query_start_loc[row]; t < rows->query_start_loc[row + 1]; t++)
        if (rows->seq_lens[row] - (rows->query_start_loc[row + 1] - t) + 1 > its->top_k)
          std::copy_n(choice.of(t) + 1, its->top_k, places + size_t(t) * its->top_k);
  });
}

}  // extern "C"

// A decoder as a list of operations, made once from its description and executed once a step. Activations are fp32
// throughout; weights are fp32 or bf16 as stored, keys and values fp32 or bf16.
//
// Consecutive operations on single tokens are one phase of the team. Any other operation opens phases of its own.
#pragma once

#include "../operations/attending.h"
#include "../operations/choosing.h"
#include "../operations/embedding.h"
#include "../operations/heads.h"
#include "../operations/latents.h"
#include "../operations/mixing.h"
#include "../operations/norms.h"
#include "../operations/products.h"
#include "../operations/recurrent.h"
#include "../operations/reducing.h"
#include "../operations/tapping.h"
#include "../pass.h"

namespace penstock {

enum OperationKind {  // as OPERATIONS in operations/structs.py
  kEmbedding, kPositions, kNorm, kScaling, kHeads, kGating, kTapping, kAdding,  // on single tokens
  kKeepingLatents, kGatedNorm, kKeepingIndexKeys,
  kProduct, kAttending, kMixing, kAttendingLatents, kReducing,
  kConvolving, kMamba1Scanning, kMamba2Scanning, kDeltaScanning, kChoosing,
};

struct Operation {  // as _Operation in builder.py
  const void* what;  // the struct of its kind
  int32_t kind, size;  // size: floats of a token that it works on
};

struct Program {  // as ProgramStruct in program.py
  const Operation* operations;
  const int32_t* widths;  // floats a token of each slot but slot 0, in whole units
  Linear head;
  int32_t num_operations, num_slots, hidden_size, packed_width;
  float logit_scale, logit_softcap;
  const Adapters* adapters;  // null: no product has a site
};

inline bool is_of_tokens(const Operation& operation) { return operation.kind < kProduct; }

inline void run_of_token(const Pass& pass, const Operation& operation, int t) {
  switch (operation.kind) {
    case kEmbedding:
      return run(pass, *static_cast<const Embedding*>(operation.what), t);
    case kPositions:
      return run(pass, *static_cast<const Positions*>(operation.what), t);
    case kNorm:
      return run(pass, *static_cast<const NormOperation*>(operation.what), t);
    case kScaling:
      return run(pass, *static_cast<const Scaling*>(operation.what), t);
    case kHeads:
      return run(pass, *static_cast<const Heads*>(operation.what), t);
    case kGating:
      return run(pass, *static_cast<const Gating*>(operation.what), t);
    case kTapping:
      return run(pass, *static_cast<const Tapping*>(operation.what), t);
    case kAdding:
      return run(pass, *static_cast<const Adding*>(operation.what), t);
    case kGatedNorm:
      return run(pass, *static_cast<const GatedNorm*>(operation.what), t);
    case kKeepingIndexKeys:
      return run_keeping(pass, *static_cast<const Choosing*>(operation.what), t);
    default:
      return run_keeping(pass, *static_cast<const Latents*>(operation.what), t);
  }
}

inline void run_of_batch(const Pass& pass, const Operation& operation) {
  switch (operation.kind) {
    case kProduct:
      return run(pass, *static_cast<const Product*>(operation.what));
    case kAttending:
      return run(pass, *static_cast<const Attending*>(operation.what));
    case kMixing:
      return run(pass, *static_cast<const Mixing*>(operation.what));
    case kReducing:
      return run(pass, *static_cast<const Reducing*>(operation.what));
    case kConvolving:
      return run(pass, *static_cast<const Convolving*>(operation.what));
    case kMamba1Scanning:
      return run(pass, *static_cast<const Mamba1Scanning*>(operation.what));
    case kMamba2Scanning:
      return run(pass, *static_cast<const Mamba2Scanning*>(operation.what));
    case kDeltaScanning:
      return run(pass, *static_cast<const DeltaScanning*>(operation.what));
    case kChoosing:
      return run_choosing(pass, *static_cast<const Choosing*>(operation.what));
    default:
      return run_attending(pass, *static_cast<const Latents*>(operation.what));
  }
}

inline double num_multiplications(const Operation& operation, const Pass& pass) {
  switch (operation.kind) {
    case kProduct:
      return num_multiplications(*static_cast<const Product*>(operation.what), pass);
    case kAttending:
      return num_multiplications(*static_cast<const Attending*>(operation.what), pass);
    case kMixing:
      return num_multiplications(*static_cast<const Mixing*>(operation.what), pass);
    case kAttendingLatents:
      return num_multiplications(*static_cast<const Latents*>(operation.what), pass);
    case kConvolving:
      return num_multiplications(*static_cast<const Convolving*>(operation.what), pass);
    case kMamba1Scanning:
      return num_multiplications(*static_cast<const Mamba1Scanning*>(operation.what), pass);
    case kMamba2Scanning:
      return num_multiplications(*static_cast<const Mamba2Scanning*>(operation.what), pass);
    case kDeltaScanning:
      return num_multiplications(*static_cast<const DeltaScanning*>(operation.what), pass);
    case kChoosing:
      return num_multiplications(*static_cast<const Choosing*>(operation.what), pass);
    default:
      return 0;
  }
}

// With an odd number of inputs, the float after them is multiplied by zero, so it must be finite.
inline void pad_input(const Pass& pass, int slot, int num_inputs) {
  for (int t = 0; num_inputs % 2 && t < pass.batch.num_tokens; t++) pass.at(slot, t)[num_inputs] = 0.0f;
}
inline void pad_inputs(const Pass& pass, const Operation& operation) {
  if (operation.kind == kProduct) {
    const Product& product = *static_cast<const Product*>(operation.what);
    pad_input(pass, product.from, product.linear.num_inputs);
  } else if (operation.kind == kMixing) {
    const Mixing& mixing = *static_cast<const Mixing*>(operation.what);
    pad_input(pass, mixing.from, mixing.experts.hidden());
    pad_input(pass, mixing.judged, mixing.experts.hidden());
  }
}

// How many layers of the current step have written their keys and values, for the thread that hands over pages.
static int64_t* layer_counter = nullptr;

// Attention begins when all tokens have keys and values. Only the leader calls this.
inline void count_layer(const Operation& operation, int64_t& layers) {
  if (operation.kind == kAttending || operation.kind == kAttendingLatents)
    __atomic_store_n(layer_counter, ++layers, __ATOMIC_RELEASE);
}

static void forward(const Program& program, const Pool& pool, const Batch& batch) {
  const size_t num_tokens = batch.num_tokens;
  static Buffer buffer;
  size_t row_size = program.packed_width;
  for (int i = 1; i < program.num_slots; i++) row_size += program.widths[i];
  Pass pass{batch, pool, buffer.of(row_size * num_tokens), program.adapters};
  pass.find_adapted();
  pass.slots.push_back({batch.out, program.hidden_size});
  for (float* data = pass.packed + program.packed_width * num_tokens; int(pass.slots.size()) < program.num_slots;) {
    const int width = program.widths[pass.slots.size()];
    pass.slots.push_back({data, width});
    data += width * num_tokens;
  }
  const Operation* const end = program.operations + program.num_operations;
  double multiplications = 0;
  for (const Operation* operation = program.operations; operation < end; operation++) {
    pad_inputs(pass, *operation);
    multiplications += num_multiplications(*operation, pass);
  }
  int64_t layers = 0;
  team->run(multiplications, [&] {
    for (const Operation* operation = program.operations; operation < end;) {
      if (!is_of_tokens(*operation)) {
        run_of_batch(pass, *operation);
        if (layer_counter) count_layer(*operation, layers);
        operation++;
        continue;
      }
      const Operation* const first = operation;
      int size = 1;
      for (; operation < end && is_of_tokens(*operation); operation++) size = std::max(size, operation->size);
      team->each(batch.num_tokens, together(size), [&](int t) {
        for (const Operation* each = first; each < operation; each++) run_of_token(pass, *each, t);
      });
    }
  });
}

// x [num_tokens, H] -> out [num_tokens, V]
static void project(const Program& program, const float* x, int num_tokens, float* out) {
  const int hidden = program.head.num_inputs, vocab = program.head.num_outputs;
  const float* rows = x;
  const int stride = round_up(hidden, 2);  // the product reads inputs in pairs
  static Buffer buffer;
  const size_t width = packed_width(program.head);
  float* packed = buffer.of(num_tokens * (width + stride));
  if (stride != hidden) {
    float* padded = packed + num_tokens * width;
    for (int t = 0; t < num_tokens; t++) {
      std::copy_n(x + size_t(t) * hidden, hidden, padded + size_t(t) * stride);
      padded[size_t(t) * stride + hidden] = 0.0f;
    }
    rows = padded;
  }
  const float scale = program.logit_scale, cap = program.logit_softcap;
  team->run(num_multiplications(program.head, num_tokens), [&] {
    linear(*team, program.head, rows, stride, num_tokens, packed, [=](int t, int output, Floats sum) {
      float* at = out + size_t(t) * vocab + output;
      if (output >= vocab) return;
      sum *= scale;
      if (cap) sum = tanh16(sum / cap) * cap;
      if (output + kLanes <= vocab)
        store(at, sum);
      else
        for (int i = 0; i < vocab - output; i++) at[i] = sum[i];
    });
  });
}

}  // namespace penstock

// What short convolutions and linear attention read and write (kernels/linear_attention.py): slots without attention.
//
// Several instruction sets compile this header: see types.h.
//
// Does not depend on: Python, torch.
#pragma once

#include "types.h"

namespace retain {

// One cache of a layer in a step, in float32. A page of K is [S, k_dim] here, as one of V: only these operations read
// it, and a slot at a time. Slots of the trash page are not written.
struct SlotCache {
  Pool kv;
  PageTables tables;
  const int32_t* slots;  // [G, T]
  int64_t slot_head_stride, slot_token_stride;

  INLINE int32_t slot(int g, int t) const { return slots[g * slot_head_stride + t * slot_token_stride]; }
  INLINE bool is_written(int32_t slot) const { return slot >= kv.S; }
  INLINE float* key(int64_t slot) const {
    return static_cast<float*>(kv.key_page(slot / kv.S)) + slot % kv.S * kv.k_dim;
  }
  INLINE float* value(int64_t slot) const {
    return static_cast<float*>(kv.value_page(slot / kv.S)) + slot % kv.S * kv.v_dim;
  }
  // Marks a slot as written.
  INLINE void set_position(int32_t slot, int32_t position) const {
    kv.pos[slot] = position;
    for (int c = 0; c < kv.mass_columns; ++c) kv.mass_page(slot / kv.S)[c * kv.S + slot % kv.S] = 0;
  }
};

// Weights of a causal convolution over the latest W tokens.
struct Convolution {
  const float* weight;  // [W, C]
  const float* bias;    // [C] or null
  int channels, window;
};

constexpr int MAX_WINDOW = 64;     // of a convolution
constexpr int CHANNEL_BLOCK = 64;  // the channels that one thread takes, all in K or all in V of a head

struct ConvolutionArgs {
  SlotCache cache;
  Convolution convolution;
  const float* x;        // [T, C]
  float* y;              // [T, C], may be x
  const int32_t* pos;    // [T]
  const int32_t* found;  // [B, W - 1]: where in its table a request has an input, page by page; -1 before the text

  INLINE int blocks_of_key() const { return (cache.kv.k_dim + CHANNEL_BLOCK - 1) / CHANNEL_BLOCK; }
  INLINE int blocks_of_value() const { return (cache.kv.v_dim + CHANNEL_BLOCK - 1) / CHANNEL_BLOCK; }
};

// How a token changes a state. A gate row is [a | b] with the gated delta rule, and [a] in Mamba-2.
enum class UpdateRule { gated_delta, mamba2 };

// The sizes and the rule of a layer of linear attention. The log decay of a token is decay * softplus(a + time_bias).
struct LinearAttention {
  int num_key_heads, num_value_heads, k_dim, v_dim;
  const float *decay, *time_bias;  // [num_value_heads]
  UpdateRule rule;
  const float* skip;         // [num_value_heads], of Mamba-2 as what follows
  float min_step, max_step;  // bounds of softplus(a + time_bias)

  INLINE int gates_width() const { return rule == UpdateRule::mamba2 ? num_value_heads : 2 * num_value_heads; }
  INLINE int qkv_width() const { return 2 * num_key_heads * k_dim + num_value_heads * v_dim; }
};

struct LinearAttentionArgs {
  SlotCache tokens, states;
  LinearAttention params;
  const float *qkv, *gates;  // [T, qkv_width], [T, gates_width]
  float* out;                // [T, num_value_heads * v_dim]
  const int32_t* pos;        // [T]

  // The tokens between two states. A page of states has a row in K and one in V of each slot.
  INLINE int fold() const { return states.kv.S; }
  INLINE int num_parts() const { return (params.k_dim + 2 * fold() - 1) / (2 * fold()); }
};

constexpr int PRODUCT_TOKENS = 16;  // whose products with a state are computed at once

// Floats of scratch memory: products of tokens with the state, what the tokens of a page add to it, and a state.
INLINE int64_t linear_attention_scratch(const LinearAttentionArgs& args) {
  const int64_t rows = 2 * PRODUCT_TOKENS + args.fold() + args.params.k_dim;
  return round_up(rows * args.params.v_dim, 16);
}

}  // namespace retain

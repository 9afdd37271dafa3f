// A whole forward pass of the decoder skeleton: what model/decoder.py says in ops, in one call.
#pragma once

#include "attention.h"

namespace takt {

// Cosines and sines [positions, half] of a rotary embedding.
struct Rope {
  const float* cosine;
  const float* sine;
  int half;
};

// Norms without a weight are not there.
struct Layer {
  const Linear* qkv;
  const Linear* output;
  const Linear* gate_up;
  const Linear* down;
  Norm pre_attention, post_attention, pre_mlp, post_mlp, query, key;
  Attention attention;
  int rope;
  int norms_per_head;
};

struct Decoder {
  int is_bfloat16;
  int hidden;
  int intermediate;
  int num_layers;
  int num_ropes;
  int activation;
  float embedding_multiplier;
  float residual_multiplier;
  // Rows of token embeddings: packed like a linear, or row-major when `embedding_rows` is not null.
  const Linear* embedding;
  const void* embedding_rows;
  const Linear* lm_head;
  Norm norm;
  const Layer* layers;
  const Rope* ropes;
};

// Intermediate values, kept between steps.
struct Workspace {
  Scratch residual, normed, wide, attended, delta, partials;
};

template <class T>
class Forward {
  using E = typename T::Element;

 public:
  Forward(const Decoder& decoder, const Batch& batch, const Cache<T>& cache, Workspace& workspace)
      : decoder_(decoder), batch_(batch), cache_(cache), space_(workspace), tokens_(batch.num_tokens) {
    int wide = 2 * decoder.intermediate;
    int query = 0;
    for (int i = 0; i < decoder.num_layers; ++i) {
      wide = std::max(wide, decoder.layers[i].qkv->n);
      query = std::max(query, decoder.layers[i].attention.num_heads * decoder.layers[i].attention.head_dim);
    }
    const size_t rows = tokens_;
    residual_ = space_.residual.template get<E>(rows * decoder.hidden);
    normed_ = space_.normed.template get<E>(rows * std::max({decoder.hidden, query, decoder.intermediate}));
    wide_ = space_.wide.template get<E>(rows * wide);
    attended_ = space_.attended.template get<E>(rows * query);
    delta_ = space_.delta.template get<E>(rows * decoder.hidden);
  }

  // Hidden states [num_logits, hidden] of the chosen tokens behind the final norm, and their logits [num_logits, vocab]
  // unless that is null.
  void run(E* hidden, float* logits) {
    embed();
    bool pending = false;
    for (int i = 0; i < decoder_.num_layers; ++i) {
      const Layer& layer = decoder_.layers[i];
      if (!same_attention(i)) plan_.make(batch_, layer.attention, cache_.shape.part());
      const E* x = add_norm(pending, layer.pre_attention);
      product<T, T>(*layer.qkv, x, tokens_, wide_);
      rotary_and_cache(i, layer);
      paged_attention(cache_, i, batch_, layer.attention, plan_, space_.partials, normed_, attended_);
      product<T, T>(*layer.output, attended_, tokens_, delta_);
      leave(layer.post_attention);
      x = add_norm(true, layer.pre_mlp);
      product<T, T>(*layer.gate_up, x, tokens_, wide_);
      for_rows(tokens_, 4 * decoder_.intermediate, [&](int row) {
        activation_and_mul<T>(wide_ + static_cast<size_t>(row) * 2 * decoder_.intermediate, decoder_.activation,
                              decoder_.intermediate, normed_ + static_cast<size_t>(row) * decoder_.intermediate);
      });
      product<T, T>(*layer.down, normed_, tokens_, delta_);
      leave(layer.post_mlp);
      pending = true;
    }
    const size_t n = decoder_.hidden;
    for (int i = 0; i < batch_.num_logits; ++i)
      final_row(pending, static_cast<int>(batch_.logits_indices[i]), hidden + i * n);
    if (logits != nullptr) product<T, Float32>(*decoder_.lm_head, hidden, batch_.num_logits, logits);
  }

 private:
  bool same_attention(int i) const {
    if (i == 0) return false;
    const Attention &a = decoder_.layers[i].attention, &b = decoder_.layers[i - 1].attention;
    return a.window == b.window && a.num_heads == b.num_heads && a.num_kv_heads == b.num_kv_heads;
  }

  void embed() {
    const int hidden = decoder_.hidden;
    for_rows(tokens_, hidden * 4, [&](int row) {
      E* to = residual_ + static_cast<size_t>(row) * hidden;
      const int token = static_cast<int>(batch_.token_ids[row]);
      if (decoder_.embedding_rows != nullptr) {
        const E* from = static_cast<const E*>(decoder_.embedding_rows) + static_cast<size_t>(token) * hidden;
        std::copy(from, from + hidden, to);
      } else {
        const E* data = static_cast<const E*>(decoder_.embedding->data);
        for (int i = 0; i < hidden; ++i) to[i] = data[packed_index<T>(token, i, hidden)];
      }
      if (decoder_.embedding_multiplier != 1.0f) scale_by<T>(to, decoder_.embedding_multiplier, hidden);
    });
  }

  // Adds what is pending to the residual stream, and returns the norm of the sum, or the sum where there is no norm.
  const E* add_norm(bool pending, const Norm& norm) {
    if (!pending && norm.weight == nullptr) return residual_;
    const int hidden = decoder_.hidden;
    for_rows(tokens_, hidden * 2, [&](int row) {
      E* x = residual_ + static_cast<size_t>(row) * hidden;
      if (pending) add_to<T>(x, delta_ + static_cast<size_t>(row) * hidden, hidden);
      if (norm.weight != nullptr) rms_norm<T>(x, norm, hidden, normed_ + static_cast<size_t>(row) * hidden);
    });
    return norm.weight == nullptr ? residual_ : normed_;
  }

  // The end of attention or MLP, before the residual is added.
  void leave(const Norm& norm) {
    if (norm.weight == nullptr && decoder_.residual_multiplier == 1.0f) return;
    const int hidden = decoder_.hidden;
    for_rows(tokens_, hidden * 2, [&](int row) {
      E* x = delta_ + static_cast<size_t>(row) * hidden;
      if (norm.weight != nullptr) rms_norm<T>(x, norm, hidden, x);
      if (decoder_.residual_multiplier != 1.0f) scale_by<T>(x, decoder_.residual_multiplier, hidden);
    });
  }

  // Norms and rotates queries and keys in place, stores keys and values, and leaves the queries in normed_.
  void rotary_and_cache(int index, const Layer& layer) {
    const Attention& attention = layer.attention;
    const int dim = attention.head_dim, heads = attention.num_heads, kv_heads = attention.num_kv_heads;
    const size_t width = static_cast<size_t>(heads + 2 * kv_heads) * dim;
    const Rope& rope = decoder_.ropes[layer.rope];
    const int last_sequence = batch_.num_seqs;
    for_rows(tokens_, static_cast<int>(width) * 2, [&](int row) {
      E* query = wide_ + row * width;
      E *key = query + heads * dim, *value = key + kv_heads * dim;
      norm_heads(query, layer.query, heads, dim, layer.norms_per_head);
      norm_heads(key, layer.key, kv_heads, dim, layer.norms_per_head);
      const size_t position = batch_.positions[row];
      const float *cosine = rope.cosine + position * rope.half, *sine = rope.sine + position * rope.half;
      for (int head = 0; head < heads; ++head) rotate<T>(query + head * dim, cosine, sine, rope.half);
      for (int head = 0; head < kv_heads; ++head) rotate<T>(key + head * dim, cosine, sine, rope.half);
      std::copy(query, query + heads * dim, normed_ + static_cast<size_t>(row) * heads * dim);
      const bool is_last = std::binary_search(batch_.query_start + 1, batch_.query_start + last_sequence + 1, row + 1);
      for (int head = 0; head < kv_heads; ++head)
        write_cache(cache_, index, batch_.slots[row], head, key + head * dim, value + head * dim, is_last);
    });
  }

  static void norm_heads(E* x, const Norm& norm, int heads, int dim, int per_head) {
    if (norm.weight == nullptr) return;
    if (!per_head) return rms_norm<T>(x, norm, heads * dim, x);
    for (int head = 0; head < heads; ++head) rms_norm<T>(x + head * dim, norm, dim, x + head * dim);
  }

  void final_row(bool pending, int row, E* to) {
    const int n = decoder_.hidden;
    E* x = residual_ + static_cast<size_t>(row) * n;
    std::copy(x, x + n, to);
    if (pending) add_to<T>(to, delta_ + static_cast<size_t>(row) * n, n);
    rms_norm<T>(to, decoder_.norm, n, to);
  }

  const Decoder& decoder_;
  const Batch& batch_;
  const Cache<T>& cache_;
  Workspace& space_;
  const int tokens_;
  AttentionPlan plan_;
  E *residual_, *normed_, *wide_, *attended_, *delta_;
};

}  // namespace takt

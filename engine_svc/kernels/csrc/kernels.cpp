// The C interface of the kernels. Python calls it through ctypes, which lets go of the interpreter's lock meanwhile.
//
// Functions return 0, or -1 when memory is short; sizes and pointers are the caller's to get right.
#include "forward.h"

using namespace takt;

namespace {

template <class Body>
int guarded(Body&& body) {
  std::lock_guard<std::mutex> lock(pool().turn());
  try {
    body();
  } catch (const std::bad_alloc&) {
    return -1;
  }
  return 0;
}

size_t element_size(int is_bfloat16) { return is_bfloat16 ? sizeof(Bits16) : sizeof(float); }

size_t linear_bytes(const Linear& linear, int is_bfloat16) {
  return static_cast<size_t>(linear.panels()) * linear.k * kLanes * element_size(is_bfloat16);
}

template <class T>
Cache<T> cache_of(const CacheShape* shape, void* data) {
  return {*shape, static_cast<typename T::Element*>(data)};
}

template <class T>
void attend(const CacheShape* shape, void* data, int layer, const Batch* batch, const Attention* attention,
            const void* query, void* output) {
  AttentionPlan plan;
  plan.make(*batch, *attention, shape->part());
  Scratch partials;
  paged_attention(cache_of<T>(shape, data), layer, *batch, *attention, plan, partials,
                  static_cast<const typename T::Element*>(query), static_cast<typename T::Element*>(output));
}

template <class T>
void store_tokens(const CacheShape* shape, void* data, int layer, const Batch* batch, const void* key, const void* value) {
  const Cache<T> cache = cache_of<T>(shape, data);
  const size_t dim = shape->head_dim, row_size = shape->kv_heads * dim;
  const auto* keys = static_cast<const typename T::Element*>(key);
  const auto* values = static_cast<const typename T::Element*>(value);
  for (int row = 0; row < batch->num_tokens; ++row) {
    bool is_last = std::binary_search(batch->query_start + 1, batch->query_start + batch->num_seqs + 1, row + 1);
    for (int head = 0; head < shape->kv_heads; ++head)
      write_cache(cache, layer, batch->slots[row], head, keys + row * row_size + head * dim,
                  values + row * row_size + head * dim, is_last);
  }
}

template <class T>
void forward(const Decoder* decoder, const Batch* batch, const CacheShape* shape, void* data, void* hidden, float* logits,
             Workspace* workspace) {
  const Cache<T> cache = cache_of<T>(shape, data);
  Forward<T>(*decoder, *batch, cache, *workspace).run(static_cast<typename T::Element*>(hidden), logits);
}

}  // namespace

extern "C" {

int takt_abi_version() { return 1; }

void takt_start_threads(int threads) { pool().start(threads); }

int takt_linear_create(Linear* linear, int is_bfloat16) {
  linear->data = map_zeroed(linear_bytes(*linear, is_bfloat16));
  return linear->data == nullptr ? -1 : 0;
}

void takt_linear_free(void* data, size_t bytes) { unmap(data, bytes); }

size_t takt_linear_bytes(const Linear* linear, int is_bfloat16) { return linear_bytes(*linear, is_bfloat16); }

int takt_linear_pack(Linear* linear, int is_bfloat16, const void* source, int first, int rows) {
  return guarded([&] {
    if (is_bfloat16)
      pack<BFloat16>(*linear, static_cast<const Bits16*>(source), first, rows);
    else
      pack<Float32>(*linear, static_cast<const float*>(source), first, rows);
  });
}

int takt_linear(const Linear* linear, int is_bfloat16, const void* x, int rows, void* y) {
  return guarded([&] {
    if (is_bfloat16)
      product<BFloat16, BFloat16>(*linear, static_cast<const Bits16*>(x), rows, static_cast<Bits16*>(y));
    else
      product<Float32, Float32>(*linear, static_cast<const float*>(x), rows, static_cast<float*>(y));
  });
}

// Logits: the rows' products in float32 whatever the weights are.
int takt_logits(const Linear* linear, int is_bfloat16, const void* x, int rows, float* y) {
  return guarded([&] {
    if (is_bfloat16)
      product<BFloat16, Float32>(*linear, static_cast<const Bits16*>(x), rows, y);
    else
      product<Float32, Float32>(*linear, static_cast<const float*>(x), rows, y);
  });
}

// The first of the largest values of each row, and its index; NaN where a row holds one.
int takt_row_max(const float* x, int rows, int n, float* values, int64_t* indices) {
  return guarded([&] { for_rows(rows, n, [&](int row) { row_max(x + static_cast<size_t>(row) * n, n, values[row], indices[row]); }); });
}

void* takt_map(size_t bytes) { return map_zeroed(bytes); }

void takt_unmap(void* start, size_t bytes) { unmap(start, bytes); }

size_t takt_cache_elements(const CacheShape* shape) { return shape->total(); }

int takt_store_tokens(const CacheShape* shape, void* data, int is_bfloat16, int layer, const Batch* batch,
                      const void* key, const void* value) {
  return guarded([&] {
    if (is_bfloat16)
      store_tokens<BFloat16>(shape, data, layer, batch, key, value);
    else
      store_tokens<Float32>(shape, data, layer, batch, key, value);
  });
}

int takt_paged_attention(const CacheShape* shape, void* data, int is_bfloat16, int layer, const Batch* batch,
                         const Attention* attention, const void* query, void* output) {
  return guarded([&] {
    if (is_bfloat16)
      attend<BFloat16>(shape, data, layer, batch, attention, query, output);
    else
      attend<Float32>(shape, data, layer, batch, attention, query, output);
  });
}

int takt_rms_norm(int is_bfloat16, const void* x, const Norm* norm, int rows, int n, void* y) {
  return guarded([&] {
    for_rows(rows, n * 2, [&](int row) {
      const size_t at = static_cast<size_t>(row) * n;
      if (is_bfloat16)
        rms_norm<BFloat16>(static_cast<const Bits16*>(x) + at, *norm, n, static_cast<Bits16*>(y) + at);
      else
        rms_norm<Float32>(static_cast<const float*>(x) + at, *norm, n, static_cast<float*>(y) + at);
    });
  });
}

int takt_activation_and_mul(int is_bfloat16, const void* x, int activation, int rows, int n, void* y) {
  return guarded([&] {
    for_rows(rows, n * 4, [&](int row) {
      const size_t at = static_cast<size_t>(row) * n;
      if (is_bfloat16)
        activation_and_mul<BFloat16>(static_cast<const Bits16*>(x) + 2 * at, activation, n, static_cast<Bits16*>(y) + at);
      else
        activation_and_mul<Float32>(static_cast<const float*>(x) + 2 * at, activation, n, static_cast<float*>(y) + at);
    });
  });
}

Workspace* takt_workspace_create() { return new (std::nothrow) Workspace; }

void takt_workspace_free(Workspace* workspace) { delete workspace; }

int takt_forward(const Decoder* decoder, const Batch* batch, const CacheShape* shape, void* data, void* hidden,
                 float* logits, Workspace* workspace) {
  return guarded([&] {
    if (decoder->is_bfloat16)
      forward<BFloat16>(decoder, batch, shape, data, hidden, logits, workspace);
    else
      forward<Float32>(decoder, batch, shape, data, hidden, logits, workspace);
  });
}

}  // extern "C"

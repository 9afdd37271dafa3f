// Paged causal attention, and the KV cache that it reads.
//
// A block of a layer holds, for each KV head, the keys as panels of sixteen positions over the head's values, and the
// values as panels of sixteen of the head's values over the positions: both are panels of the one product in tile.h.
//
// Keys are reduced in parts of about kPart positions that begin at fixed absolute positions, and the parts are merged in
// ascending order. A query's result depends on its position and the keys alone: not on other queries, on the number of
// threads, or on whether it is computed in a prompt or by itself.
#pragma once

#include <limits>

#include "elementwise.h"

namespace takt {

constexpr int kPart = 256;
// Rows (queries times the heads that share keys) that are computed together.
constexpr int kRowsOfTile = 48;

struct CacheShape {
  int layers;
  int blocks;
  int block_size;
  int kv_heads;
  int head_dim;

  int padded_dim() const { return (head_dim + kLanes - 1) / kLanes * kLanes; }
  int padded_block() const { return (block_size + kLanes - 1) / kLanes * kLanes; }
  // Positions of a part: whole panels, or whole blocks where blocks are not whole panels.
  int part() const { return block_size % kLanes == 0 ? kPart : std::max(block_size, kPart / block_size * block_size); }
  size_t key_size() const { return static_cast<size_t>(padded_block()) * head_dim; }
  size_t value_size() const { return static_cast<size_t>(padded_block()) * padded_dim(); }
  size_t head_size() const { return key_size() + value_size(); }
  size_t layer_size() const { return static_cast<size_t>(blocks) * kv_heads * head_size(); }
  size_t total() const { return layers * layer_size(); }
};

template <class T>
struct Cache {
  CacheShape shape;
  typename T::Element* data;

  typename T::Element* keys(int layer, int64_t block, int head) const {
    return data + layer * shape.layer_size() + (block * shape.kv_heads + head) * shape.head_size();
  }
  typename T::Element* values(int layer, int64_t block, int head) const { return keys(layer, block, head) + shape.key_size(); }
};

// One step's sequences, as the model runner lays them out.
struct Batch {
  int num_tokens;
  int num_seqs;
  int max_blocks;
  int num_logits;
  const int64_t* token_ids;
  const int32_t* positions;
  const int64_t* slots;
  const int32_t* query_start;
  const int32_t* seq_lens;
  const int32_t* block_tables;
  const int64_t* logits_indices;
};

struct Attention {
  int num_heads;
  int num_kv_heads;
  int head_dim;
  int window;  // 0: none
  float scale;
  float soft_cap;  // 0: none

  int group() const { return num_heads / num_kv_heads; }
};

// Writes one token's key and value of one head. A value that is the first of a pair, and the last known of its sequence or
// of its block, clears its partner: what a stale block holds there, NaN perhaps, must not meet a weight, of zero or not.
template <class T>
TAKT_INLINE void write_cache(const Cache<T>& cache, int layer, int64_t slot, int head, const typename T::Element* key,
                             const typename T::Element* value, bool is_last) {
  const CacheShape& shape = cache.shape;
  int64_t block = slot / shape.block_size;
  int offset = static_cast<int>(slot % shape.block_size);
  auto* keys = cache.keys(layer, block, head);
  for (int i = 0; i < shape.head_dim; ++i) keys[packed_index<T>(offset, i, shape.head_dim)] = key[i];
  auto* values = cache.values(layer, block, head);
  bool clears = T::step == 2 && offset % 2 == 0 && (is_last || offset == shape.block_size - 1);
  for (int i = 0; i < shape.head_dim; ++i) {
    size_t index = packed_index<T>(i, offset, shape.padded_block());
    values[index] = value[i];
    if (clears) values[index + 1] = 0;
  }
}

// One thread's working memory for a tile.
struct TileMemory {
  Scratch queries, scores, weights, part, total, state;
};

// Rows of a tile over one part of the keys, and the running totals of all parts so far.
template <class T>
struct TileState {
  using E = typename T::Element;
  int rows;
  int dim;         // padded
  size_t stride;   // of scores and weights: a part, and room for the lanes of its last panel that are past it
  E* queries;      // [rows, head_dim]
  float* scores;   // [rows, stride]
  E* weights;      // [rows, stride]
  float* part;     // [rows, dim]
  float* total;    // [rows, dim]
  float* best;     // [rows], of the total
  float* weight;   // [rows], sum of the total's weights
  float* part_best;
  float* part_weight;

  TileState(TileMemory& memory, int rows, const CacheShape& shape)
      : rows(rows), dim(shape.padded_dim()), stride((shape.part() + kLanes - 1) / kLanes * kLanes + kLanes) {
    queries = memory.queries.get<E>(static_cast<size_t>(rows) * shape.head_dim);
    scores = memory.scores.get<float>(rows * stride);
    weights = memory.weights.get<E>(rows * stride);
    part = memory.part.get<float>(static_cast<size_t>(rows) * dim);
    total = memory.total.get<float>(static_cast<size_t>(rows) * dim);
    best = memory.state.get<float>(static_cast<size_t>(rows) * 4);
    weight = best + rows;
    part_best = weight + rows;
    part_weight = part_best + rows;
  }

  void begin() {
    std::fill(total, total + static_cast<size_t>(rows) * dim, 0.0f);
    std::fill(best, best + rows, -std::numeric_limits<float>::infinity());
    std::fill(weight, weight + rows, 0.0f);
  }
};

// Adds a part's result to a running total of the parts before it.
TAKT_INLINE void merge(float* total, float& best, float& weight, const float* part, float part_best, float part_weight,
                       int dim) {
  if (part_weight == 0.0f) return;
  float newest = best > part_best ? best : part_best;
  float keep = best == newest ? 1.0f : std::exp(best - newest);
  float take = part_best == newest ? 1.0f : std::exp(part_best - newest);
  for (int i = 0; i < dim; i += kLanes)
    store(total + i, fma(load(part + i), set1(take), mul(load(total + i), set1(keep))));
  weight = weight * keep + part_weight * take;
  best = newest;
}

// Which keys a tile's rows may see: row r stands at position first_position + r / group.
struct Sight {
  int first_position;
  int group;
  int window;

  int high(int row) const { return first_position + row / group + 1; }
  int low(int row) const { return window == 0 ? 0 : std::max(0, high(row) - window); }
};

// Scores of all rows against the positions [begin, end) of a part, scaled and capped.
template <class T>
void score_part(TileState<T>& tile, const Cache<T>& cache, int layer, int head, const int32_t* blocks, int begin, int end,
                const Attention& attention) {
  using E = typename T::Element;
  const int block_size = cache.shape.block_size, head_dim = cache.shape.head_dim;
  thread_local std::vector<int> starts;
  starts.clear();
  for (int position = begin; position < end; position += std::min(kLanes, block_size - position % block_size))
    starts.push_back(position);
  for_panel_groups<kPanels>(0, static_cast<int>(starts.size()), [&](auto group, int panel) {
    constexpr int C = decltype(group)::value;
    const E* w[C];
    for (int c = 0; c < C; ++c) {
      int position = starts[panel + c];
      w[c] = cache.keys(layer, blocks[position / block_size], head) +
             static_cast<size_t>(position % block_size / kLanes) * head_dim * kLanes;
    }
    for_row_tiles<C>(tile.rows, [&](auto rows, int row) {
      constexpr int R = decltype(rows)::value;
      V sums[R][C];
      clear(sums);
      accumulate(sums, tile.queries + static_cast<size_t>(row) * head_dim, head_dim, w, head_dim);
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) {
          V score = mul(sums[r][c], set1(attention.scale));
          if (attention.soft_cap != 0.0f)
            score = mul(tanh(div(score, set1(attention.soft_cap))), set1(attention.soft_cap));
          // Lanes past a block are written over by the next panel.
          store(tile.scores + (row + r) * tile.stride + (starts[panel + c] - begin), score);
        }
    });
  });
}

// Weights of one row: e^(score - best) where it may see, 0 elsewhere, up to the position `end`.
template <class T>
TAKT_INLINE void weigh_row(TileState<T>& tile, int row, int begin, int end, const Sight& sight) {
  float* scores = tile.scores + row * tile.stride;
  auto* weights = tile.weights + row * tile.stride;
  const int low = std::max(0, sight.low(row) - begin), high = std::min(end, sight.high(row)) - begin;
  const int filled = (end - begin + kLanes - 1) / kLanes * kLanes;
  tile.part_weight[row] = 0.0f;
  if (high <= low) {
    std::fill(weights, weights + filled, typename T::Element(0));
    return;
  }
  for (int i = 0; i < low; ++i) scores[i] = -std::numeric_limits<float>::infinity();
  for (int i = high; i < filled; ++i) scores[i] = -std::numeric_limits<float>::infinity();
  V most = load(scores);
  for (int i = kLanes; i < filled; i += kLanes) most = max(most, load(scores + i));
  const float best = largest(most);
  for (int i = 0; i < filled; i += kLanes) store(scores + i, exp(sub(load(scores + i), set1(best))));
  for (int i = 0; i < low; ++i) scores[i] = 0.0f;
  for (int i = high; i < filled; ++i) scores[i] = 0.0f;
  V total = zero();
  for (int i = 0; i < filled; i += kLanes) {
    V value = load(scores + i);
    total = add(total, value);
    T::write(weights + i, value);
  }
  tile.part_best[row] = best;
  tile.part_weight[row] = sum(total);
}

// part = weights * values over the positions [begin, end).
template <class T>
void sum_values(TileState<T>& tile, const Cache<T>& cache, int layer, int head, const int32_t* blocks, int begin, int end) {
  using E = typename T::Element;
  const int block_size = cache.shape.block_size, padded_block = cache.shape.padded_block();
  for_panel_groups<kPanels>(0, tile.dim / kLanes, [&](auto group, int panel) {
    constexpr int C = decltype(group)::value;
    for_row_tiles<C>(tile.rows, [&](auto rows, int row) {
      constexpr int R = decltype(rows)::value;
      V sums[R][C];
      clear(sums);
      for (int position = begin; position < end;) {
        int offset = position % block_size;
        int count = std::min(end - position, block_size - offset);
        const E* values = cache.values(layer, blocks[position / block_size], head);
        const E* w[C];
        for (int c = 0; c < C; ++c)
          w[c] = values + (static_cast<size_t>(panel + c) * padded_block + offset) * kLanes;
        int padded = (count + T::step - 1) / T::step * T::step;
        accumulate(sums, tile.weights + row * tile.stride + (position - begin), tile.stride, w, padded);
        position += count;
      }
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) store(tile.part + static_cast<size_t>(row + r) * tile.dim + (panel + c) * kLanes, sums[r][c]);
    });
  });
}

// A tile of queries of one sequence and one KV head against one part of the keys.
template <class T>
void attend_part(TileState<T>& tile, const Cache<T>& cache, int layer, int head, const int32_t* blocks, int part,
                 const Sight& sight, const Attention& attention) {
  const int begin = part * cache.shape.part(), end = std::min(begin + cache.shape.part(), sight.high(tile.rows - 1));
  score_part(tile, cache, layer, head, blocks, begin, end, attention);
  for (int row = 0; row < tile.rows; ++row) weigh_row(tile, row, begin, end, sight);
  sum_values(tile, cache, layer, head, blocks, begin, end);
}

template <class T>
void gather_queries(TileState<T>& tile, const typename T::Element* query, int token, int head, const Attention& attention) {
  const size_t row = static_cast<size_t>(attention.num_heads) * attention.head_dim, group = attention.group();
  const size_t of_token = group * attention.head_dim;
  for (int i = 0; i < tile.rows / static_cast<int>(group); ++i) {
    const auto* from = query + (token + i) * row + head * of_token;
    std::copy(from, from + of_token, tile.queries + i * of_token);
  }
}

template <class T>
void write_output(const float* total, const float* weight, int rows, int dim, int token, int head,
                  const Attention& attention, typename T::Element* output) {
  const int group = attention.group();
  for (int row = 0; row < rows; ++row) {
    float inverse = 1.0f / weight[row];
    auto* to = output + (static_cast<size_t>(token + row / group) * attention.num_heads + head * group + row % group) *
                            attention.head_dim;
    for (int i = 0; i < attention.head_dim; ++i) to[i] = T::write1(total[static_cast<size_t>(row) * dim + i] * inverse);
  }
}

// Tiles of one layer's attention: which queries, which head, and which parts of the keys.
struct TileOfWork {
  int sequence;
  int first;  // of the sequence's new tokens
  int count;
  int head;
  int first_part;
  int last_part;
  int partial;  // where its partial results go; -1: it covers all its parts
};

// Work on a layer: tiles of queries; where those are few and contexts long, parts of the keys too.
class AttentionPlan {
 public:
  std::vector<TileOfWork> tiles;
  int num_partials = 0;

  // `part` is that of the cache.
  void make(const Batch& batch, const Attention& attention, int part) {
    part_ = part;
    tiles.clear();
    num_partials = 0;
    const int queries = std::max(1, kRowsOfTile / attention.group());
    for (int head = 0; head < attention.num_kv_heads; ++head)
      for (int s = 0; s < batch.num_seqs; ++s) {
        int count = batch.query_start[s + 1] - batch.query_start[s];
        for (int first = 0; first < count; first += queries)
          add(batch, attention, s, first, std::min(queries, count - first), head);
      }
    if (static_cast<int>(tiles.size()) < pool().threads() * 4) split();
  }

 private:
  void add(const Batch& batch, const Attention& attention, int s, int first, int count, int head) {
    int length = batch.seq_lens[s], start = length - (batch.query_start[s + 1] - batch.query_start[s]) + first;
    int low = attention.window == 0 ? 0 : std::max(0, start + 1 - attention.window);
    tiles.push_back({s, first, count, head, low / part_, (start + count - 1) / part_ + 1, -1});
  }

  int part_ = kPart;

  void split() {
    std::vector<TileOfWork> all;
    for (const TileOfWork& tile : tiles) {
      if (tile.last_part - tile.first_part < 2) {
        all.push_back(tile);
        continue;
      }
      for (int part = tile.first_part; part < tile.last_part; ++part) {
        TileOfWork piece = tile;
        piece.first_part = part;
        piece.last_part = part + 1;
        piece.partial = num_partials++;
        all.push_back(piece);
      }
    }
    tiles.swap(all);
  }
};

// output [num_tokens, num_heads * head_dim] of queries [num_tokens, num_heads * head_dim], of which the last tokens of
// each sequence are the new ones, whose keys and values are in the cache already.
template <class T>
void paged_attention(const Cache<T>& cache, int layer, const Batch& batch, const Attention& attention,
                     const AttentionPlan& plan, Scratch& memory, const typename T::Element* query,
                     typename T::Element* output) {
  const int dim = cache.shape.padded_dim(), most_rows = std::max(kRowsOfTile, attention.group());
  const size_t of_partial = static_cast<size_t>(most_rows) * (dim + 2);
  float* partials = plan.num_partials == 0 ? nullptr : memory.get<float>(plan.num_partials * of_partial);
  const int parts = static_cast<int>(plan.tiles.size());
  auto sight_of = [&](const TileOfWork& work) {
    int start = batch.seq_lens[work.sequence] - (batch.query_start[work.sequence + 1] - batch.query_start[work.sequence]);
    return Sight{start + work.first, attention.group(), attention.window};
  };
  pool().run(parts, [&](int index) {
    const TileOfWork& work = plan.tiles[index];
    thread_local TileMemory own;
    TileState<T> tile(own, work.count * attention.group(), cache.shape);
    const int token = batch.query_start[work.sequence] + work.first;
    const int32_t* blocks = batch.block_tables + static_cast<size_t>(work.sequence) * batch.max_blocks;
    const Sight sight = sight_of(work);
    gather_queries(tile, query, token, work.head, attention);
    if (work.partial >= 0) {
      attend_part(tile, cache, layer, work.head, blocks, work.first_part, sight, attention);
      float* to = partials + work.partial * of_partial;
      std::copy(tile.part, tile.part + static_cast<size_t>(tile.rows) * dim, to);
      std::copy(tile.part_best, tile.part_best + tile.rows, to + static_cast<size_t>(most_rows) * dim);
      std::copy(tile.part_weight, tile.part_weight + tile.rows, to + static_cast<size_t>(most_rows) * (dim + 1));
      return;
    }
    tile.begin();
    for (int part = work.first_part; part < work.last_part; ++part) {
      attend_part(tile, cache, layer, work.head, blocks, part, sight, attention);
      for (int row = 0; row < tile.rows; ++row)
        merge(tile.total + static_cast<size_t>(row) * dim, tile.best[row], tile.weight[row],
              tile.part + static_cast<size_t>(row) * dim, tile.part_best[row], tile.part_weight[row], dim);
    }
    write_output<T>(tile.total, tile.weight, tile.rows, dim, token, work.head, attention, output);
  });
  if (plan.num_partials == 0) return;
  for (int index = 0; index < parts;) {
    const TileOfWork& work = plan.tiles[index];
    if (work.partial < 0) {
      ++index;
      continue;
    }
    thread_local TileMemory own;
    TileState<T> tile(own, work.count * attention.group(), cache.shape);
    tile.begin();
    do {
      const float* from = partials + plan.tiles[index].partial * of_partial;
      for (int row = 0; row < tile.rows; ++row)
        merge(tile.total + static_cast<size_t>(row) * dim, tile.best[row], tile.weight[row],
              from + static_cast<size_t>(row) * dim, from[static_cast<size_t>(most_rows) * dim + row],
              from[static_cast<size_t>(most_rows) * (dim + 1) + row], dim);
      ++index;
    } while (index < parts && plan.tiles[index].partial >= 0 && plan.tiles[index].first == work.first &&
             plan.tiles[index].sequence == work.sequence && plan.tiles[index].head == work.head);
    write_output<T>(tile.total, tile.weight, tile.rows, dim, batch.query_start[work.sequence] + work.first, work.head,
                    attention, output);
  }
}

}  // namespace takt

// Products with packed weights: y = x * W^T + bias.
#pragma once

#include <algorithm>

#include "memory.h"
#include "pool.h"
#include "tile.h"

namespace takt {

// Weights [n, k] in panels of sixteen outputs; outputs past n are zero. `bias` has room for whole panels, or is null.
struct Linear {
  int n;
  int k;
  void* data;
  float* bias;

  int panels() const { return (n + kLanes - 1) / kLanes; }

  template <class T>
  const typename T::Element* panel(int index) const {
    return static_cast<const typename T::Element*>(data) + static_cast<size_t>(index) * k * kLanes;
  }
};

// Where weight [row, i] of a panel set lies.
template <class T>
TAKT_INLINE size_t packed_index(int row, int i, int k) {
  size_t panel = static_cast<size_t>(row / kLanes) * k * kLanes;
  return panel + static_cast<size_t>(i / T::step) * kLanes * T::step + (row % kLanes) * T::step + i % T::step;
}

// Writes rows [first, first + rows) of the weights from row-major values.
template <class T>
void pack(Linear& linear, const typename T::Element* source, int first, int rows) {
  auto* data = static_cast<typename T::Element*>(linear.data);
  constexpr int kRowsAtOnce = 64;
  pool().run((rows + kRowsAtOnce - 1) / kRowsAtOnce, [&](int part) {
    int last = std::min(rows, (part + 1) * kRowsAtOnce);
    for (int row = part * kRowsAtOnce; row < last; ++row)
      for (int i = 0; i < linear.k; ++i)
        data[packed_index<T>(first + row, i, linear.k)] = source[static_cast<size_t>(row) * linear.k + i];
  });
}

template <class Out, int R, int C>
TAKT_INLINE void write_tile(const V (&sums)[R][C], const Linear& linear, int panel, typename Out::Element* y, size_t row) {
#pragma GCC unroll 4
  for (int c = 0; c < C; ++c) {
    int column = (panel + c) * kLanes;
    V bias = linear.bias == nullptr ? zero() : load(linear.bias + column);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      V value = linear.bias == nullptr ? sums[r][c] : add(sums[r][c], bias);
      typename Out::Element* target = y + r * row + column;
      if (column + kLanes <= linear.n) {
        Out::write(target, value);
      } else {
        typename Out::Element whole[kLanes];
        Out::write(whole, value);
        std::copy(whole, whole + linear.n - column, target);
      }
    }
  }
}

// Rows [0, rows) of x times panels [first, last).
template <class T, class Out, int Most>
void product_part(const Linear& linear, const typename T::Element* x, int rows, typename Out::Element* y, int first,
                  int last) {
  for_panel_groups<Most>(first, last, [&](auto group, int panel) {
    constexpr int C = decltype(group)::value;
    const typename T::Element* w[C];
    for (int c = 0; c < C; ++c) w[c] = linear.panel<T>(panel + c);
    for_row_tiles<C>(rows, [&](auto tile, int row) {
      constexpr int R = decltype(tile)::value;
      V sums[R][C];
      clear(sums);
      accumulate(sums, x + static_cast<size_t>(row) * linear.k, linear.k, w, linear.k);
      write_tile<Out>(sums, linear, panel, y + static_cast<size_t>(row) * linear.n, linear.n);
    });
  });
}

// y [rows, n] = x [rows, k] * W^T + bias.
template <class T, class Out>
void product(const Linear& linear, const typename T::Element* x, int rows, typename Out::Element* y) {
  constexpr int kRowsAtOnce = 96, kFewRows = max_rows(kFewRowsPanels);
  const int panels = linear.panels();
  const int row_parts = (rows + kRowsAtOnce - 1) / kRowsAtOnce;
  // Small enough to share evenly, large enough to be worth taking.
  const size_t work = static_cast<size_t>(panels) * kLanes * linear.k * std::max(1, rows / 8);
  const int most = std::max(1, std::min(pool().threads() * 8, static_cast<int>(std::min<size_t>(work / 16384, 1 << 16))));
  const int wanted = std::max(1, most / std::max(1, row_parts));
  constexpr int kGroup = kPanels * kFewRowsPanels;
  const int groups = (panels + kGroup - 1) / kGroup;
  const int column_parts = std::min(groups, wanted);
  pool().run(row_parts * column_parts, [&](int part) {
    int row = part / column_parts * kRowsAtOnce, column = part % column_parts;
    int first = groups * column / column_parts * kGroup;
    int last = std::min(panels, groups * (column + 1) / column_parts * kGroup);
    int count = std::min(kRowsAtOnce, rows - row);
    const auto* from = x + static_cast<size_t>(row) * linear.k;
    auto* to = y + static_cast<size_t>(row) * linear.n;
    if (count <= kFewRows)
      product_part<T, Out, kFewRowsPanels>(linear, from, count, to, first, last);
    else
      product_part<T, Out, kPanels>(linear, from, count, to, first, last);
  });
}

}  // namespace takt

// The one product that everything is made of: a few rows times a few panels of sixteen columns.
//
// A panel holds sixteen columns: for each step over k, `step` values of every column side by side. Each row's sum runs
// over k in ascending order in one accumulator, whatever the number of rows and panels: this is what makes a row's result
// the same in every batch.
#pragma once

#include <type_traits>

#include "vec.h"

namespace takt {

// Rows of a tile that keep all accumulators in registers.
constexpr int max_rows(int panels) {
#if defined(__AVX512F__)
  return panels <= 3 ? 8 : 6;
#else
  return panels == 1 ? 4 : 2;
#endif
}

// Panels of a tile with many rows, and with few.
#if defined(__AVX512F__)
constexpr int kPanels = 3, kFewRowsPanels = 4;
#else
constexpr int kPanels = 1, kFewRowsPanels = 2;
#endif

template <int R, int C>
TAKT_INLINE void clear(V (&sums)[R][C]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) sums[r][c] = zero();
}

// sums[r][c] += rows x[r] times panels w[c], over k values. `k` is a multiple of the type's step.
template <int R, int C>
TAKT_INLINE void accumulate(V (&sums)[R][C], const float* x, size_t row, const float* const (&w)[C], int k) {
  for (int i = 0; i < k; ++i) {
    V columns[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) columns[c] = load(w[c] + static_cast<size_t>(i) * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      V value = set1(x[r * row + i]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sums[r][c] = fma(value, columns[c], sums[r][c]);
    }
  }
}

template <int R, int C>
TAKT_INLINE void accumulate(V (&sums)[R][C], const Bits16* x, size_t row, const Bits16* const (&w)[C], int k) {
  for (int i = 0; i < k; i += 2) {
#if defined(__AVX512BF16__)
    __m512i columns[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) columns[c] = _mm512_loadu_si512(w[c] + static_cast<size_t>(i) * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      int pair;
      std::memcpy(&pair, x + r * row + i, 4);
      __m512i values = _mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c)
        sums[r][c].x = _mm512_dpbf16_ps(sums[r][c].x, (__m512bh)columns[c], (__m512bh)values);
    }
#else
    V first[C], second[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      first[c] = first_of_pairs(w[c] + static_cast<size_t>(i) * kLanes);
      second[c] = second_of_pairs(w[c] + static_cast<size_t>(i) * kLanes);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      V value = set1(widen(x[r * row + i]));
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sums[r][c] = fma(value, first[c], sums[r][c]);
      value = set1(widen(x[r * row + i + 1]));
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sums[r][c] = fma(value, second[c], sums[r][c]);
    }
#endif
  }
}

// Calls body<R>(first row) for tiles of at most max_rows(C) rows until all rows are covered.
template <int C, class Body>
TAKT_INLINE void for_row_tiles(int rows, Body&& body) {
  constexpr int kMost = max_rows(C);
  int row = 0;
  for (; row + kMost <= rows; row += kMost) body(std::integral_constant<int, kMost>{}, row);
#define TAKT_TILE(n)   \
  if constexpr (n < kMost) \
    if (rows - row == n) return body(std::integral_constant<int, n>{}, row)
  TAKT_TILE(1);
  TAKT_TILE(2);
  TAKT_TILE(3);
  TAKT_TILE(4);
  TAKT_TILE(5);
  TAKT_TILE(6);
  TAKT_TILE(7);
#undef TAKT_TILE
}

// Calls body<C>(first panel) for groups of at most Most panels until all panels are covered.
template <int Most, class Body>
TAKT_INLINE void for_panel_groups(int first, int last, Body&& body) {
  int panel = first;
  for (; panel + Most <= last; panel += Most) body(std::integral_constant<int, Most>{}, panel);
#define TAKT_GROUP(n) \
  if constexpr (n < Most) \
    if (last - panel == n) return body(std::integral_constant<int, n>{}, panel)
  TAKT_GROUP(1);
  TAKT_GROUP(2);
  TAKT_GROUP(3);
#undef TAKT_GROUP
}

}  // namespace takt

// Norms, activations, rotary embedding and the small steps between products. float32 within, rounded once at the end.
#pragma once

#include <limits>

#include "linear.h"

namespace takt {

struct Norm {
  const float* weight;
  float eps;
};

// y = x / rms(x) * weight over n values. n is a multiple of sixteen or the tail is done value by value.
template <class T>
TAKT_INLINE void rms_norm(const typename T::Element* x, const Norm& norm, int n, typename T::Element* y) {
  V squares = zero();
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    V value = T::read(x + i);
    squares = fma(value, value, squares);
  }
  float total = sum(squares);
  for (int tail = i; tail < n; ++tail) total += T::read1(x[tail]) * T::read1(x[tail]);
  const float scale = 1.0f / std::sqrt(total / static_cast<float>(n) + norm.eps);
  for (i = 0; i + kLanes <= n; i += kLanes) T::write(y + i, mul(mul(T::read(x + i), set1(scale)), load(norm.weight + i)));
  for (; i < n; ++i) y[i] = T::write1(T::read1(x[i]) * scale * norm.weight[i]);
}

// residual += x, rounded.
template <class T>
TAKT_INLINE void add_to(typename T::Element* residual, const typename T::Element* x, int n) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) T::write(residual + i, add(T::read(residual + i), T::read(x + i)));
  for (; i < n; ++i) residual[i] = T::write1(T::read1(residual[i]) + T::read1(x[i]));
}

template <class T>
TAKT_INLINE void scale_by(typename T::Element* x, float factor, int n) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) T::write(x + i, mul(T::read(x + i), set1(factor)));
  for (; i < n; ++i) x[i] = T::write1(T::read1(x[i]) * factor);
}

enum Activation { kSilu = 0, kGeluTanh = 1 };

TAKT_INLINE V activate(V x, int activation) {
  if (activation == kSilu) return div(x, add(set1(1.0f), exp(sub(zero(), x))));
  V cube = mul(mul(x, x), x);
  V inner = mul(set1(0.7978845608f), fma(set1(0.044715f), cube, x));
  return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh(inner)));
}

// y [n] = activation(gate_up[:n]) * gate_up[n:].
template <class T>
TAKT_INLINE void activation_and_mul(const typename T::Element* gate_up, int activation, int n, typename T::Element* y) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) T::write(y + i, mul(activate(T::read(gate_up + i), activation), T::read(gate_up + n + i)));
  for (; i < n; ++i) {
    V value = mul(activate(set1(T::read1(gate_up[i])), activation), set1(T::read1(gate_up[n + i])));
    float lanes[kLanes];
    store(lanes, value);
    y[i] = T::write1(lanes[0]);
  }
}

// Turns the first 2 * half values of a head in place; cosine and sine are of its position.
template <class T>
TAKT_INLINE void rotate(typename T::Element* x, const float* cosine, const float* sine, int half) {
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    V a = T::read(x + i), b = T::read(x + half + i), c = load(cosine + i), s = load(sine + i);
    T::write(x + i, sub(mul(a, c), mul(b, s)));
    T::write(x + half + i, add(mul(b, c), mul(a, s)));
  }
  for (; i < half; ++i) {
    float a = T::read1(x[i]), b = T::read1(x[half + i]);
    x[i] = T::write1(a * cosine[i] - b * sine[i]);
    x[half + i] = T::write1(b * cosine[i] + a * sine[i]);
  }
}

// The first of the largest of n values, and its index; NaN when there is one.
TAKT_INLINE void row_max(const float* x, int n, float& value, int64_t& index) {
  constexpr int kBlock = 64 * kLanes;
  float best = -std::numeric_limits<float>::infinity();
  int block = 0;
  for (int begin = 0; begin < n; begin += kBlock) {
    const int end = std::min(n, begin + kBlock);
    float most = x[begin];
    float nan_seen = 0.0f;
    for (int i = begin; i < end; ++i) {
      most = x[i] > most ? x[i] : most;
      nan_seen += x[i] == x[i] ? 0.0f : 1.0f;
    }
    if (nan_seen != 0.0f) {
      value = std::numeric_limits<float>::quiet_NaN();
      index = begin;
      return;
    }
    if (most > best) {
      best = most;
      block = begin;
    }
  }
  value = best;
  index = block;
  while (index + 1 < n && x[index] != best) ++index;
}

// Rows of work that one thread takes at once, for steps whose cost a row is about `values`.
inline int rows_at_once(int rows, int values) {
  int fair = std::max(1, rows / (pool().threads() * 4));
  return std::max(1, std::min(rows, std::max(fair, 16384 / std::max(1, values))));
}

// Calls body(row) for all rows.
template <class Body>
void for_rows(int rows, int values, Body&& body) {
  int at_once = rows_at_once(rows, values);
  pool().run((rows + at_once - 1) / at_once, [&](int part) {
    int last = std::min(rows, (part + 1) * at_once);
    for (int row = part * at_once; row < last; ++row) body(row);
  });
}

}  // namespace takt

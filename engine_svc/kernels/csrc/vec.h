// Sixteen floats at once, for every instruction set: AVX-512, AVX2 and plain C++.
//
// Every operation works lane by lane, so a lane's result never depends on its neighbours. bfloat16 values are handled as
// their 16 bits; sixteen pairs of them fill the room of sixteen floats, the first of a pair in the lower half.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#define TAKT_INLINE inline __attribute__((always_inline))

namespace takt {

constexpr int kLanes = 16;

using Bits16 = uint16_t;

TAKT_INLINE float widen(Bits16 bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// Rounds to nearest, ties to even; keeps NaN.
TAKT_INLINE Bits16 narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<Bits16>((bits >> 16) | 0x40);
  return static_cast<Bits16>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

#if defined(__AVX512F__)

struct V {
  __m512 x;
};

TAKT_INLINE V zero() { return {_mm512_setzero_ps()}; }
TAKT_INLINE V set1(float f) { return {_mm512_set1_ps(f)}; }
TAKT_INLINE V load(const float* p) { return {_mm512_loadu_ps(p)}; }
TAKT_INLINE void store(float* p, V v) { _mm512_storeu_ps(p, v.x); }
TAKT_INLINE V add(V a, V b) { return {_mm512_add_ps(a.x, b.x)}; }
TAKT_INLINE V sub(V a, V b) { return {_mm512_sub_ps(a.x, b.x)}; }
TAKT_INLINE V mul(V a, V b) { return {_mm512_mul_ps(a.x, b.x)}; }
TAKT_INLINE V div(V a, V b) { return {_mm512_div_ps(a.x, b.x)}; }
TAKT_INLINE V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
TAKT_INLINE V max(V a, V b) { return {_mm512_max_ps(a.x, b.x)}; }
TAKT_INLINE V min(V a, V b) { return {_mm512_min_ps(a.x, b.x)}; }
TAKT_INLINE V round_even(V a) { return {_mm512_roundscale_ps(a.x, 8)}; }
// a * 2^n for integral n in [-126, 127].
TAKT_INLINE V scale2(V a, V n) {
  __m512i exponent = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.x), _mm512_set1_epi32(127)), 23);
  return {_mm512_mul_ps(a.x, _mm512_castsi512_ps(exponent))};
}
TAKT_INLINE V load_wide(const Bits16* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
TAKT_INLINE void store_narrow(Bits16* p, V v) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v.x));
#else
  __m512i bits = _mm512_castps_si512(v.x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  __mmask16 nan = _mm512_cmp_ps_mask(v.x, v.x, _CMP_UNORD_Q);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, quiet)));
#endif
}
TAKT_INLINE V first_of_pairs(const Bits16* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
}
TAKT_INLINE V second_of_pairs(const Bits16* p) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}

#elif defined(__AVX2__) && defined(__FMA__)

struct V {
  __m256 a, b;
};

TAKT_INLINE V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
TAKT_INLINE V set1(float f) {
  __m256 x = _mm256_set1_ps(f);
  return {x, x};
}
TAKT_INLINE V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
TAKT_INLINE void store(float* p, V v) {
  _mm256_storeu_ps(p, v.a);
  _mm256_storeu_ps(p + 8, v.b);
}
TAKT_INLINE V add(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
TAKT_INLINE V sub(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
TAKT_INLINE V mul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
TAKT_INLINE V div(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
TAKT_INLINE V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
TAKT_INLINE V max(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
TAKT_INLINE V min(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
TAKT_INLINE V round_even(V x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
TAKT_INLINE __m256 power2(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
TAKT_INLINE V scale2(V x, V n) { return {_mm256_mul_ps(x.a, power2(n.a)), _mm256_mul_ps(x.b, power2(n.b))}; }
TAKT_INLINE __m256 widen8(const Bits16* p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
TAKT_INLINE V load_wide(const Bits16* p) { return {widen8(p), widen8(p + 8)}; }
TAKT_INLINE __m256i narrow8(__m256 x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i high = _mm256_srli_epi32(bits, 16);
  __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
}
TAKT_INLINE void store_narrow(Bits16* p, V v) {
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(narrow8(v.a), narrow8(v.b)), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
}
TAKT_INLINE V first_of_pairs(const Bits16* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(q), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(q + 1), 16))};
}
TAKT_INLINE V second_of_pairs(const Bits16* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(q), mask)),
          _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(q + 1), mask))};
}

#else

struct V {
  float f[kLanes];
};

#define TAKT_LANES(expression)             \
  V out;                                   \
  for (int i = 0; i < kLanes; ++i) out.f[i] = (expression); \
  return out

TAKT_INLINE V zero() { TAKT_LANES(0.0f); }
TAKT_INLINE V set1(float f) { TAKT_LANES(f); }
TAKT_INLINE V load(const float* p) { TAKT_LANES(p[i]); }
TAKT_INLINE void store(float* p, V v) { std::memcpy(p, v.f, sizeof v.f); }
TAKT_INLINE V add(V a, V b) { TAKT_LANES(a.f[i] + b.f[i]); }
TAKT_INLINE V sub(V a, V b) { TAKT_LANES(a.f[i] - b.f[i]); }
TAKT_INLINE V mul(V a, V b) { TAKT_LANES(a.f[i] * b.f[i]); }
TAKT_INLINE V div(V a, V b) { TAKT_LANES(a.f[i] / b.f[i]); }
TAKT_INLINE V fma(V a, V b, V c) { TAKT_LANES(a.f[i] * b.f[i] + c.f[i]); }
TAKT_INLINE V max(V a, V b) { TAKT_LANES(a.f[i] > b.f[i] ? a.f[i] : b.f[i]); }
TAKT_INLINE V min(V a, V b) { TAKT_LANES(a.f[i] < b.f[i] ? a.f[i] : b.f[i]); }
TAKT_INLINE V round_even(V a) { TAKT_LANES(std::nearbyintf(a.f[i])); }
TAKT_INLINE V scale2(V a, V n) { TAKT_LANES(std::ldexp(a.f[i], static_cast<int>(n.f[i]))); }
TAKT_INLINE V load_wide(const Bits16* p) { TAKT_LANES(widen(p[i])); }
TAKT_INLINE void store_narrow(Bits16* p, V v) {
  for (int i = 0; i < kLanes; ++i) p[i] = narrow(v.f[i]);
}
TAKT_INLINE V first_of_pairs(const Bits16* p) { TAKT_LANES(widen(p[2 * i])); }
TAKT_INLINE V second_of_pairs(const Bits16* p) { TAKT_LANES(widen(p[2 * i + 1])); }

#endif

// Lanes are summed in one fixed tree.
TAKT_INLINE float sum(V v) {
  float f[kLanes];
  store(f, v);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) f[i] += f[i + width];
  return f[0];
}

TAKT_INLINE float largest(V v) {
  float f[kLanes];
  store(f, v);
  float best = f[0];
  for (int i = 1; i < kLanes; ++i) best = f[i] > best ? f[i] : best;
  return best;
}

// e^x within a few units in the last place, for x in [-87, 88]; x beyond is taken to the nearer end. NaN stays NaN.
TAKT_INLINE V exp(V x) {
  x = min(set1(88.0f), max(set1(-87.0f), x));
  V n = round_even(mul(x, set1(1.44269504f)));
  V r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  V p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, set1(1.0f)));
  return scale2(p, n);
}

TAKT_INLINE V tanh(V x) {
  V e = exp(mul(x, set1(2.0f)));
  return sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f))));
}

// --- element types -----------------------------------------------------------------------------------------------------

// Values as they lie in memory. `step` is how many of a row's values a panel holds side by side for each column.
struct Float32 {
  using Element = float;
  static constexpr int step = 1;
  static TAKT_INLINE V read(const float* p) { return load(p); }
  static TAKT_INLINE void write(float* p, V v) { store(p, v); }
  static TAKT_INLINE float read1(float x) { return x; }
  static TAKT_INLINE float write1(float x) { return x; }
};

struct BFloat16 {
  using Element = Bits16;
  static constexpr int step = 2;
  static TAKT_INLINE V read(const Bits16* p) { return load_wide(p); }
  static TAKT_INLINE void write(Bits16* p, V v) { store_narrow(p, v); }
  static TAKT_INLINE float read1(Bits16 x) { return widen(x); }
  static TAKT_INLINE Bits16 write1(float x) { return narrow(x); }
};

}  // namespace takt

// Sixteen numbers at a time with AVX-512, and its products of pairs of bfloat16 and of four int8.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

struct Floats {
  __m512 of;
};

struct Words {  // Sixteen words of four bytes: a float, two bfloat16 or four int8 each.
  __m512i of;
};

inline Floats splat(float x) { return {_mm512_set1_ps(x)}; }
inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.of, b.of)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.of, b.of)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.of, b.of)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.of, b.of)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.of, b.of, c.of)}; }
inline Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.of, b.of)}; }
inline Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.of, b.of)}; }
inline Floats root(Floats x) { return {_mm512_sqrt_ps(x.of)}; }
inline float sum(Floats x) { return _mm512_reduce_add_ps(x.of); }
inline float lowest_lane(Floats x) { return _mm512_cvtss_f32(x.of); }
inline float highest(Floats x) { return _mm512_reduce_max_ps(x.of); }
inline Floats rounded(Floats x) { return {_mm512_roundscale_ps(x.of, 8)}; }
inline Floats magnitude(Floats x) { return {_mm512_abs_ps(x.of)}; }
// Of magnitudes, by their bits: those of NaN are the largest, and remain.
inline Floats larger(Floats a, Floats b) {
  __m512i most = _mm512_max_epi32(_mm512_castps_si512(a.of), _mm512_castps_si512(b.of));
  return {_mm512_castsi512_ps(most)};
}
inline float largest(Floats x) {
  int32_t bits = _mm512_reduce_max_epi32(_mm512_castps_si512(x.of));
  float most;
  memcpy(&most, &bits, sizeof most);
  return most;
}
// x * 2^n for whole n.
inline Floats scaled(Floats x, Floats n) { return {_mm512_scalef_ps(x.of, n.of)}; }

// The first `n` of sixteen.
inline __mmask16 first(int64_t n) { return n >= 16 ? 0xffff : (1u << n) - 1; }

inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Floats load(const Bfloat16* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline Floats load(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
inline Floats load(const Bfloat16* p, int64_t n) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
// The first `n` of x, the others zero.
inline Floats only(Floats x, int64_t n) { return {_mm512_maskz_mov_ps(first(n), x.of)}; }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x.of); }
inline void store(Bfloat16* p, Floats x) {
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x.of));
}
inline void store(float* p, Floats x, int64_t n) { _mm512_mask_storeu_ps(p, first(n), x.of); }
inline void store(Bfloat16* p, Floats x, int64_t n) {
  _mm256_mask_storeu_epi16(p, first(n), (__m256i)_mm512_cvtneps_pbh(x.of));
}

// The sum of each of sixteen vectors: pairs are added while they are interleaved, in place of the
// four steps of each vector's own sum.
inline Floats sums(const Floats (&x)[16]) {
  __m512 fours[4];
  for (int i = 0; i < 4; ++i) {
    __m512 a = x[4 * i].of, b = x[4 * i + 1].of, c = x[4 * i + 2].of, d = x[4 * i + 3].of;
    __m512d ab = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512d cd = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512 low = (__m512)_mm512_unpacklo_pd(ab, cd), high = (__m512)_mm512_unpackhi_pd(ab, cd);
    fours[i] = _mm512_add_ps(low, high);  // In each quarter: parts of the sums of a, b, c and d.
  }
  __m512 halves[2];
  for (int i = 0; i < 2; ++i) {
    __m512 a = fours[2 * i], b = fours[2 * i + 1];
    halves[i] =
        _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  }
  return {_mm512_add_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88),
                        _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd))};
}

// Lanes [begin, end) of x, `outside` in the others.
inline Floats within(Floats x, int64_t begin, int64_t end, float outside) {
  __mmask16 lanes = first(end > 0 ? end : 0) & ~first(begin > 0 ? begin : 0);
  return {_mm512_mask_mov_ps(_mm512_set1_ps(outside), lanes, x.of)};
}

// A square of sixteen by sixteen words: rows become columns, first in squares of four by four in
// the vectors' quarters, then of these squares.
template <typename Vector>
inline void turn(Vector (&x)[16]) {
  using Lanes = decltype(x->of);
  __m512 fours[16];  // At 4 q + j: in each quarter, row j of the square of four rows from 4 q on.
  for (int i = 0; i < 16; i += 4) {
    __m512 a = (__m512)x[i].of, b = (__m512)x[i + 1].of;
    __m512 c = (__m512)x[i + 2].of, d = (__m512)x[i + 3].of;
    __m512d ab = (__m512d)_mm512_unpacklo_ps(a, b), cd = (__m512d)_mm512_unpacklo_ps(c, d);
    __m512d high_ab = (__m512d)_mm512_unpackhi_ps(a, b);
    __m512d high_cd = (__m512d)_mm512_unpackhi_ps(c, d);
    fours[i] = (__m512)_mm512_unpacklo_pd(ab, cd);
    fours[i + 1] = (__m512)_mm512_unpackhi_pd(ab, cd);
    fours[i + 2] = (__m512)_mm512_unpacklo_pd(high_ab, high_cd);
    fours[i + 3] = (__m512)_mm512_unpackhi_pd(high_ab, high_cd);
  }
  for (int j = 0; j < 4; ++j) {
    __m512 a = fours[j], b = fours[4 + j], c = fours[8 + j], d = fours[12 + j];
    __m512 ab = _mm512_shuffle_f32x4(a, b, 0x44), cd = _mm512_shuffle_f32x4(c, d, 0x44);
    __m512 high_ab = _mm512_shuffle_f32x4(a, b, 0xee);
    __m512 high_cd = _mm512_shuffle_f32x4(c, d, 0xee);
    x[j].of = (Lanes)_mm512_shuffle_f32x4(ab, cd, 0x88);
    x[4 + j].of = (Lanes)_mm512_shuffle_f32x4(ab, cd, 0xdd);
    x[8 + j].of = (Lanes)_mm512_shuffle_f32x4(high_ab, high_cd, 0x88);
    x[12 + j].of = (Lanes)_mm512_shuffle_f32x4(high_ab, high_cd, 0xdd);
  }
}

inline Words words(const float* p) { return {_mm512_loadu_si512(p)}; }
inline Words words(const Bfloat16* p) { return {_mm512_loadu_si512(p)}; }
// The first `n` numbers, the others zero.
inline Words words(const float* p, int64_t n) { return {_mm512_maskz_loadu_epi32(first(n), p)}; }
inline Words words(const Bfloat16* p, int64_t n) {
  return {_mm512_maskz_loadu_epi16(n >= 32 ? ~0u : (1u << n) - 1, p)};
}
// Pairs of the first `n_low` and `n_high` of sixteen numbers, zero where there is none.
inline Words pairs(const Bfloat16* low, int64_t n_low, const Bfloat16* high, int64_t n_high) {
  __m512i in_low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n_low), low));
  __m512i in_high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n_high), high));
  return {_mm512_or_si512(in_low, _mm512_slli_epi32(in_high, 16))};
}
inline Words load_words(const uint32_t* p) { return {_mm512_load_si512(p)}; }
inline void store_words(uint32_t* p, Words x) { _mm512_store_si512(p, x.of); }
inline Words splat_word(uint32_t x) { return {_mm512_set1_epi32(x)}; }

inline Floats dot(Kind<float>, Floats sum, Words w, Words x) {
  return {_mm512_fmadd_ps(_mm512_castsi512_ps(w.of), _mm512_castsi512_ps(x.of), sum.of)};
}
inline Floats dot(Kind<Bfloat16>, Floats sum, Words w, Words x) {
  return {_mm512_dpbf16_ps(sum.of, (__m512bh)w.of, (__m512bh)x.of)};
}
// Four products of unsigned and signed bytes, added to a 32-bit integer.
inline Words dot_bytes(Words sum, Words unsigned_w, Words signed_x) {
  return {_mm512_dpbusd_epi32(sum.of, unsigned_w.of, signed_x.of)};
}
inline Words operator+(Words a, Words b) { return {_mm512_add_epi32(a.of, b.of)}; }
// Stores x as sixteen int8, rounded to even, and returns their sum.
inline int32_t store_bytes(int8_t* p, Floats x) {
  __m512i whole = _mm512_cvtps_epi32(x.of);
  _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(whole));
  return _mm512_reduce_add_epi32(whole);
}
inline Floats to_floats(Words x) { return {_mm512_cvtepi32_ps(x.of)}; }

}  // namespace

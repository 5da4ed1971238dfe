// A mixture of experts: the matrices of each expert that is chosen are read once, for all its rows.
//
//   slots (row, choice)   r0:e2 r0:e0 r1:e2 r1:e1
//   sorted by expert      r0:e0 | r1:e1 | r0:e2 r1:e2
//
// Matrices are panels as in linear.h. Of a gated expert a pair of panels is sixteen gates and their
// sixteen ups, so that a tile ends with act(gate) * up. A row's sums do not depend on the rows that
// are computed with it: words are added one after the other whatever the height of a tile, and
// experts in ascending order.
#pragma once

namespace {

template <typename T>
struct Experts {
  const uint32_t *up, *down;               // [experts] of panels
  int64_t experts, outer, inner, is_gated;  // is_gated: 0 or 1
  int64_t function;                        // of elementwise.h
  const T* x;                              // [rows, outer]
  int64_t rows;
  const int64_t* chosen;  // [rows, top_k]
  const float* shares;    // [rows, top_k]
  int64_t top_k;
  const T* residual;  // [rows, outer] or null
  T* y;               // [rows, outer]
  int64_t threads;
};

// Slots by expert: those of expert e are slots[starts[e]] .. slots[starts[e + 1] - 1], ascending.
struct Groups {
  int64_t experts;
  int64_t *starts, *slots;
};

inline void sort(const int64_t* chosen, int64_t count, const Groups& groups) {
  int64_t* starts = groups.starts;
  memset(starts, 0, (groups.experts + 2) * sizeof(int64_t));
  // Two places on, so that filling moves each start to where it belongs.
  for (int64_t slot = 0; slot < count; ++slot) ++starts[chosen[slot] + 2];
  for (int64_t e = 0; e < groups.experts; ++e) starts[e + 2] += starts[e + 1];
  for (int64_t slot = 0; slot < count; ++slot) groups.slots[starts[chosen[slot] + 1]++] = slot;
}

// Gives the sums of `rows` rows of a tile to `take`: of each row, those of two panels.
template <typename T, int ROWS = MOST_ROWS, typename Take>
inline void sums_of(int64_t rows, const uint32_t* pair, int64_t words, const uint32_t* x,
                    Take take) {
  if constexpr (ROWS > 0) {
    if (rows != ROWS) return sums_of<T, ROWS - 1>(rows, pair, words, x, take);
    Floats sums[ROWS][2];
    multiply<T, ROWS, 2, 1>(pair, words, x, 1, ROWS, sums);
    for (int m = 0; m < ROWS; ++m) take(m, sums[m][0], sums[m][1]);
  }
}

// Pairs of panels [begin, end) of `pairs`, of every expert that is chosen, times its rows.
//
// `row_of(i)` is where the i-th sorted slot's row lies; `take(i, pair, a, b)` gets its sums.
template <typename T, typename RowOf, typename Take>
void grouped(const Groups& groups, const uint32_t* panels, int64_t words, int64_t pairs,
             int64_t begin, int64_t end, RowOf row_of, Take take) {
  static thread_local Buffer buffer;
  int64_t tiles = BLOCK_WORDS / (words * MOST_ROWS);
  int64_t most = MOST_ROWS * (tiles > 0 ? tiles : 1), pair_words = 2 * words * LANES;
  uint32_t* block = buffer.of<uint32_t>(most * words);
  for (int64_t e = 0; e < groups.experts; ++e)
    for (int64_t first = groups.starts[e]; first < groups.starts[e + 1]; first += most) {
      int64_t left = groups.starts[e + 1] - first, here = left < most ? left : most;
      // Tiles of rows, word by word, as in linear.h.
      for (int64_t row = 0; row < here; ++row) {
        const uint32_t* from = row_of(first + row);
        int64_t in_tile = row % MOST_ROWS, start = row - in_tile;
        int64_t height = here - start < MOST_ROWS ? here - start : MOST_ROWS;
        uint32_t* to = block + start * words + in_tile;
        for (int64_t k = 0; k < words; ++k) to[k * height] = from[k];
      }
      for (int64_t pair = begin; pair < end; ++pair)
        for (int64_t row = 0; row < here; row += MOST_ROWS) {
          int64_t height = here - row < MOST_ROWS ? here - row : MOST_ROWS;
          sums_of<T>(height, panels + (e * pairs + pair) * pair_words, words, block + row * words,
                     [&](int64_t m, Floats a, Floats b) { take(first + row + m, pair, a, b); });
        }
    }
}

inline Floats activated(int64_t function, Floats x) {
  if (function == SILU) return silu(x);
  return function == GELU_TANH ? gelu_tanh(x) : relu_squared(x);
}

// Numbers [column, column + 16) of a row of `size`, where it has them.
template <typename T>
inline void store_part(T* row, int64_t column, int64_t size, Floats x) {
  if (column < size) store(row + column, x, size - column);
}

// Part `part` of it.threads: inner [slots, it.inner] of all sorted slots.
template <typename T>
void inner_part(const Experts<T>& it, const Groups& groups, T* inner, int64_t part) {
  int64_t wide = it.is_gated ? LANES : 2 * LANES, pairs = (it.inner + wide - 1) / wide;
  auto row_of = [&](int64_t i) {
    return (const uint32_t*)(it.x + groups.slots[i] / it.top_k * it.outer);
  };
  auto take = [&](int64_t i, int64_t pair, Floats a, Floats b) {
    T* row = inner + i * it.inner;
    a = activated(it.function, a);
    store_part(row, pair * wide, it.inner, it.is_gated ? a * b : a);
    if (!it.is_gated) store_part(row, pair * wide + LANES, it.inner, activated(it.function, b));
  };
  grouped<T>(groups, it.up, it.outer * sizeof(T) / 4, pairs, pairs * part / it.threads,
             pairs * (part + 1) / it.threads, row_of, take);
}

// Part `part` of it.threads: some columns of y. `sums` float [rows, it.outer].
template <typename T>
void outer_part(const Experts<T>& it, const Groups& groups, const T* inner, float* sums,
                int64_t part) {
  int64_t pairs = (it.outer + 2 * LANES - 1) / (2 * LANES);
  int64_t begin = pairs * part / it.threads, end = pairs * (part + 1) / it.threads;
  auto columns = [&](auto run) {
    for (int64_t row = 0; row < it.rows; ++row)
      for (int64_t i = begin * 2 * LANES; i < end * 2 * LANES && i < it.outer; i += LANES)
        run(row * it.outer + i, it.outer - i);
  };
  columns([&](int64_t at, int64_t left) {
    store(sums + at, it.residual ? load(it.residual + at, left) : splat(0.0f), left);
  });
  auto row_of = [&](int64_t i) { return (const uint32_t*)(inner + i * it.inner); };
  auto take = [&](int64_t i, int64_t pair, Floats a, Floats b) {
    Floats share = splat(it.shares[groups.slots[i]]);
    float* row = sums + groups.slots[i] / it.top_k * it.outer;
    Floats parts[2] = {a, b};
    for (int p = 0; p < 2; ++p) {
      int64_t column = (2 * pair + p) * LANES, left = it.outer - column;
      if (left > 0) store(row + column, fma(parts[p], share, load(row + column, left)), left);
    }
  };
  grouped<T>(groups, it.down, it.inner * sizeof(T) / 4, pairs, begin, end, row_of, take);
  columns([&](int64_t at, int64_t left) { store(it.y + at, load(sums + at, left), left); });
}

template <typename T>
void experts(const Experts<T>& it) {
  static thread_local Buffer for_groups, for_inner, for_sums;
  int64_t slots = it.rows * it.top_k;
  int64_t* starts = for_groups.of<int64_t>(it.experts + 2 + slots);
  Groups groups = {it.experts, starts, starts + it.experts + 2};
  sort(it.chosen, slots, groups);
  T* inner = for_inner.of<T>(slots * it.inner);
  float* sums = for_sums.of<float>(it.rows * it.outer);
  each(it.threads, it.threads, [&](int64_t part) { inner_part(it, groups, inner, part); });
  each(it.threads, it.threads, [&](int64_t part) { outer_part(it, groups, inner, sums, part); });
}

}  // namespace

KERNEL(experts_float32, Experts<float>) { experts(*it); }
KERNEL(experts_bfloat16, Experts<Bfloat16>) { experts(*it); }

// A mixture of experts: the matrices of each expert that is chosen are read once, for all its rows.
//
//   slots (row, choice)   r0:e2 r0:e0 r1:e2 r1:e1
//   sorted by expert      r0:e0 | r1:e1 | r0:e2 r1:e2
//
// Matrices are panels as in linear.h. Of a gated expert the panels of gates and of their ups take
// turns, so that a tile ends with act(gate) * up. A row's sums do not depend on the rows that
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

// Gives the sums of `rows` rows of a tile to `take`, row by row.
template <typename T, int ROWS = MOST_ROWS, typename Take>
inline void sums_of(int64_t rows, const uint32_t* panels, int64_t words, const uint32_t* x,
                    Take take) {
  if constexpr (ROWS > 0) {
    if (rows != ROWS) return sums_of<T, ROWS - 1>(rows, panels, words, x, take);
    Floats sums[ROWS][PANELS];
    multiply<T, ROWS>(panels, words, x, 1, ROWS, sums);
    for (int m = 0; m < ROWS; ++m) take(m, sums[m]);
  }
}

// Tiles [begin, end) of `tiles`, of every expert that is chosen, times its rows.
//
// `row_of(i)` is where the i-th sorted slot's row lies; `take(i, n, sums)` gets its sums of tile n.
template <typename T, typename RowOf, typename Take>
void grouped(const Groups& groups, const uint32_t* panels, int64_t words, int64_t tiles,
             int64_t begin, int64_t end, RowOf row_of, Take take) {
  static thread_local Buffer buffer;
  int64_t most = block_rows(words);
  uint32_t* block = buffer.of<uint32_t>(most * words);
  for (int64_t e = 0; e < groups.experts; ++e)
    for (int64_t first = groups.starts[e]; first < groups.starts[e + 1]; first += most) {
      int64_t left = groups.starts[e + 1] - first, here = left < most ? left : most;
      rearrange(here, words, [&](int64_t row) { return row_of(first + row); }, block);
      for (int64_t n = begin; n < end; ++n)
        for (int64_t row = 0; row < here; row += MOST_ROWS) {
          int64_t height = here - row < MOST_ROWS ? here - row : MOST_ROWS;
          sums_of<T>(height, panels + (e * tiles + n) * words * WIDTH, words, block + row * words,
                     [&](int64_t m, const Floats* sums) { take(first + row + m, n, sums); });
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
  int64_t width = it.is_gated ? WIDTH / 2 : WIDTH, tiles = (it.inner + width - 1) / width;
  auto row_of = [&](int64_t i) {
    return (const uint32_t*)(it.x + groups.slots[i] / it.top_k * it.outer);
  };
  auto take = [&](int64_t i, int64_t n, const Floats* sums) {
    T* row = inner + i * it.inner;
    for (int64_t p = 0, column = n * width; p < PANELS; ++p, column += LANES) {
      Floats own = activated(it.function, sums[p]);
      if (it.is_gated) own = own * sums[++p];
      store_part(row, column, it.inner, own);
    }
  };
  grouped<T>(groups, it.up, it.outer * sizeof(T) / 4, tiles, tiles * part / it.threads,
             tiles * (part + 1) / it.threads, row_of, take);
}

// Part `part` of it.threads: some columns of y. `sums` float [rows, it.outer].
template <typename T>
void outer_part(const Experts<T>& it, const Groups& groups, const T* inner, float* sums,
                int64_t part) {
  int64_t tiles = tiles_of(it.outer);
  int64_t begin = tiles * part / it.threads, end = tiles * (part + 1) / it.threads;
  auto columns = [&](auto run) {
    for (int64_t row = 0; row < it.rows; ++row)
      for (int64_t i = begin * WIDTH; i < end * WIDTH && i < it.outer; i += LANES)
        run(row * it.outer + i, it.outer - i);
  };
  columns([&](int64_t at, int64_t left) {
    store(sums + at, it.residual ? load(it.residual + at, left) : splat(0.0f), left);
  });
  auto row_of = [&](int64_t i) { return (const uint32_t*)(inner + i * it.inner); };
  auto take = [&](int64_t i, int64_t n, const Floats* parts) {
    Floats share = splat(it.shares[groups.slots[i]]);
    float* row = sums + groups.slots[i] / it.top_k * it.outer;
    for (int64_t p = 0, column = n * WIDTH; p < PANELS; ++p, column += LANES) {
      int64_t left = it.outer - column;
      if (left > 0) store(row + column, fma(parts[p], share, load(row + column, left)), left);
    }
  };
  grouped<T>(groups, it.down, it.inner * sizeof(T) / 4, tiles, begin, end, row_of, take);
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

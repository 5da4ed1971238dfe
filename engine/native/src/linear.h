// y = x W^T + bias + residual, for one packed copy of W that serves one row and thousands.
//
//   W [outputs, inputs]     panels of 16 outputs; in each, word after word of inputs:
//
//     panel 0   | inputs 0   of outputs 0 .. 15 | inputs 1   of outputs 0 .. 15 | ...
//     panel 1   | inputs 0   of outputs 16 .. 31 | ...
//
// A word is one float or two bfloat16. So one load gives sixteen outputs their next inputs, which
// are multiplied by one word of x, and a single row reads W as one int64_t stream.
#pragma once

namespace {

constexpr int MOST_ROWS = 12;  // With two panels: 24 of 32 registers are sums.
constexpr int64_t BLOCK_WORDS = 96 * 1024;  // Of x, rearranged: stays in a core's second-level cache.
constexpr int64_t AHEAD = 64 * LANES;  // Words; 4 KiB, about what memory delivers in its latency.

// Sums [ROWS][PANELS] of words [0, count), of panels that are `count` words apart.
//
// Word k of row m of x is at x[m * row_step + k * word_step]. There are UNROLL sums for each
// output, so that few rows do not wait for their own last product.
template <typename T, int ROWS, int PANELS, int UNROLL>
inline __attribute__((always_inline)) void multiply(const uint32_t* panel, int64_t count,
                                                    const uint32_t* x, int64_t row_step,
                                                    int64_t word_step, Floats (&sums)[ROWS][PANELS]) {
  Floats parts[UNROLL][ROWS][PANELS];
  for (auto& part : parts)
    for (auto& row : part)
      for (auto& sum : row) sum = splat(0.0f);
  auto step = [&](int64_t k, int part) __attribute__((always_inline)) {
    Words w[PANELS];
#pragma GCC unroll 16
    for (int p = 0; p < PANELS; ++p) {
      const uint32_t* at = panel + (p * count + k) * LANES;
      w[p] = load_words(at);
      if (ROWS < MOST_ROWS) __builtin_prefetch(at + AHEAD);
    }
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m) {
      Words from_x = splat_word(x[m * row_step + k * word_step]);
#pragma GCC unroll 16
      for (int p = 0; p < PANELS; ++p)
        parts[part][m][p] = dot(Kind<T>{}, parts[part][m][p], w[p], from_x);
    }
  };
  int64_t k = 0;
  for (; k + UNROLL <= count; k += UNROLL) {
#pragma GCC unroll 16
    for (int part = 0; part < UNROLL; ++part) step(k + part, part);
  }
  for (; k < count; ++k) step(k, 0);
  for (int m = 0; m < ROWS; ++m)
    for (int p = 0; p < PANELS; ++p) {
      sums[m][p] = parts[0][m][p];
      for (int part = 1; part < UNROLL; ++part) sums[m][p] = sums[m][p] + parts[part][m][p];
    }
}

// y [rows, outputs] = x [rows, 'words' words] W^T + bias + residual.
template <typename T>
struct Linear {
  const uint32_t* panels;
  const float* bias;  // [outputs rounded up to pairs of panels] or null
  int64_t outputs, words;
  const T* x;
  int64_t rows;
  const T* residual;  // [rows, outputs] or null
  T* y;
  int64_t threads;
};

// Rows [row, row + ROWS) and panels [panel, panel + PANELS) of y.
template <typename T, int ROWS, int PANELS, int UNROLL>
void tile(const Linear<T>& it, const uint32_t* x, int64_t row_step, int64_t word_step, int64_t row,
          int64_t panel) {
  Floats sums[ROWS][PANELS];
  multiply<T, ROWS, PANELS, UNROLL>(it.panels + panel * it.words * LANES, it.words, x, row_step,
                                    word_step, sums);
  for (int p = 0; p < PANELS; ++p) {
    int64_t column = (panel + p) * LANES, left = it.outputs - column;
    if (left <= 0) return;
    for (int m = 0; m < ROWS; ++m) {
      Floats sum = sums[m][p];
      int64_t at = (row + m) * it.outputs + column;
      if (it.bias) sum = sum + load(it.bias + column);
      if (it.residual) sum = sum + load(it.residual + at, left);
      store(it.y + at, sum, left);
    }
  }
}

// The tile of `rows` rows, 1 <= rows <= MOST_ROWS.
template <typename T, int ROWS = MOST_ROWS>
void tile_of(int64_t rows, const Linear<T>& it, const uint32_t* x, int64_t word_step, int64_t row,
             int64_t panel) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS)
      tile<T, ROWS, 2, 1>(it, x, 1, word_step, row, panel);
    else
      tile_of<T, ROWS - 1>(rows, it, x, word_step, row, panel);
  }
}

// Panels [begin, end), an even number of them, of few rows: x as it lies.
template <typename T>
void few_rows(const Linear<T>& it, int64_t begin, int64_t end) {
  const uint32_t* x = (const uint32_t*)it.x;
  for (int64_t panel = begin; panel < end; ++panel) {
    if (it.rows == 1) tile<T, 1, 1, 8>(it, x, it.words, 1, 0, panel);
    if (it.rows == 2) tile<T, 2, 1, 4>(it, x, it.words, 1, 0, panel);
    if (it.rows == 3) tile<T, 3, 1, 4>(it, x, it.words, 1, 0, panel);
  }
}

// Panels [begin, end), an even number of them, of many rows: blocks of x, rearranged word by word.
template <typename T>
void many_rows(const Linear<T>& it, int64_t begin, int64_t end) {
  static thread_local Buffer buffer;
  int64_t tiles = BLOCK_WORDS / (it.words * MOST_ROWS);
  int64_t most = MOST_ROWS * (tiles > 0 ? tiles : 1);
  uint32_t* block = buffer.of<uint32_t>(most * it.words);
  for (int64_t first = 0; first < it.rows; first += most) {
    int64_t here = it.rows - first < most ? it.rows - first : most;
    //   rows 0 .. 11    | word 0 of rows 0 .. 11 | word 1 of rows 0 .. 11 | ...
    //   rows 12 .. 23   | word 0 of rows 12 .. 23 | ...
    for (int64_t row = 0; row < here; ++row) {
      const uint32_t* from = (const uint32_t*)it.x + (first + row) * it.words;
      int64_t in_tile = row % MOST_ROWS, start = row - in_tile;
      int64_t height = here - start < MOST_ROWS ? here - start : MOST_ROWS;
      uint32_t* to = block + start * it.words + in_tile;
      for (int64_t k = 0; k < it.words; ++k) to[k * height] = from[k];
    }
    for (int64_t panel = begin; panel < end; panel += 2)
      for (int64_t row = 0; row < here; row += MOST_ROWS) {
        int64_t height = here - row < MOST_ROWS ? here - row : MOST_ROWS;
        tile_of<T>(height, it, block + row * it.words, height, first + row, panel);
      }
  }
}

template <typename T>
void linear(const Linear<T>& it) {
  int64_t pairs = (it.outputs + 2 * LANES - 1) / (2 * LANES);
  each(it.threads, it.threads, [&](int64_t part) {
    int64_t begin = 2 * (pairs * part / it.threads), end = 2 * (pairs * (part + 1) / it.threads);
    if (it.rows <= 3)
      few_rows(it, begin, end);
    else
      many_rows(it, begin, end);
  });
}

// Panels of W [outputs, words], the rest of the last pair zero.
struct Pack {
  const uint32_t* weight;
  int64_t outputs, words;
  uint32_t* panels;
};

inline void pack(const Pack& it) {
  int64_t panels = (it.outputs + 2 * LANES - 1) / (2 * LANES) * 2;
  for (int64_t panel = 0; panel < panels; ++panel) {
    uint32_t* to = it.panels + panel * it.words * LANES;
    // Sixteen rows are read side by side, so that every cache line is read once.
    for (int64_t k = 0; k < it.words; ++k)
      for (int64_t lane = 0; lane < LANES; ++lane) {
        int64_t output = panel * LANES + lane;
        to[k * LANES + lane] = output < it.outputs ? it.weight[output * it.words + k] : 0;
      }
  }
}

}  // namespace

KERNEL(pack, Pack) { pack(*it); }
KERNEL(linear_float32, Linear<float>) { linear(*it); }
KERNEL(linear_bfloat16, Linear<Bfloat16>) { linear(*it); }

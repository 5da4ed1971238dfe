// y = x W^T + bias + residual, for one packed copy of W that serves one row and thousands.
//
//   W [outputs, inputs]     panels of 16 outputs; in each, word after word of inputs:
//
//     panel 0   | inputs 0   of outputs 0 .. 15 | inputs 1   of outputs 0 .. 15 | ...
//     panel 1   | inputs 0   of outputs 16 .. 31 | ...
//
// A word is one float or two bfloat16. So one load gives sixteen outputs their next inputs, which
// are multiplied by one word of x. Four panels are read at once: a core fetches four streams from
// memory faster than one. A row's words are added one after the other whatever rows are computed
// with it: its result is the same, bit by bit, in a batch of any size.
#pragma once

namespace {

constexpr int PANELS = 4;                // Read at once.
constexpr int MOST_ROWS = 6;             // With four panels: 24 of 32 registers are sums.
constexpr int64_t WIDTH = PANELS * LANES;  // Outputs of a tile; W is filled up to whole ones.
constexpr int64_t BLOCK_WORDS = 96 * 1024;  // Of x, rearranged: stays in a second-level cache.

// Sums [ROWS][PANELS] of `words` words.
//
// Word k of row m of x is at x[m * row_step + k * word_step].
template <typename T, int ROWS>
inline __attribute__((always_inline)) void multiply(const uint32_t* panels, int64_t words,
                                                    const uint32_t* x, int64_t row_step,
                                                    int64_t word_step,
                                                    Floats (&sums)[ROWS][PANELS]) {
#pragma GCC unroll 16
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 16
    for (int p = 0; p < PANELS; ++p) sums[m][p] = splat(0.0f);
  for (int64_t k = 0; k < words; ++k) {
    Words w[PANELS];
#pragma GCC unroll 16
    for (int p = 0; p < PANELS; ++p) w[p] = load_words(panels + (p * words + k) * LANES);
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m) {
      Words from_x = splat_word(x[m * row_step + k * word_step]);
#pragma GCC unroll 16
      for (int p = 0; p < PANELS; ++p) sums[m][p] = dot(Kind<T>{}, sums[m][p], w[p], from_x);
    }
  }
}

// y [rows, outputs] = x [rows, 'words' words] W^T + bias + residual.
template <typename T>
struct Linear {
  const uint32_t* panels;
  const float* bias;  // [outputs, filled up] or null
  int64_t outputs, words;
  const T* x;
  int64_t rows;
  const T* residual;  // [rows, outputs] or null
  T* y;
  int64_t threads;
};

// Sums of ROWS rows from `row` on and of WIDTH outputs from `column` on, to where they belong.
template <typename T, int ROWS, typename Product>
inline void finish(const Product& it, Floats (&sums)[ROWS][PANELS], int64_t row, int64_t column) {
  for (int p = 0; p < PANELS; ++p, column += LANES) {
    int64_t left = it.outputs - column;
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

// The tile of `rows` rows, 1 <= rows <= MOST_ROWS, and of the WIDTH outputs of tile `n` of W.
template <typename T, int ROWS = MOST_ROWS>
void tile(int64_t rows, const Linear<T>& it, const uint32_t* x, int64_t row_step,
          int64_t word_step, int64_t row, int64_t n) {
  if constexpr (ROWS > 0) {
    if (rows != ROWS) return tile<T, ROWS - 1>(rows, it, x, row_step, word_step, row, n);
    Floats sums[ROWS][PANELS];
    multiply<T, ROWS>(it.panels + n * it.words * WIDTH, it.words, x, row_step, word_step, sums);
    finish<T, ROWS>(it, sums, row, n * WIDTH);
  }
}

// Rows [0, count) as tiles, word by word; row_of(i) is where row i lies.
//
//   rows 0 .. 5    | word 0 of rows 0 .. 5 | word 1 of rows 0 .. 5 | ...
//   rows 6 .. 11   | word 0 of rows 6 .. 11 | ...
template <typename RowOf>
inline void rearrange(int64_t count, int64_t words, RowOf row_of, uint32_t* block) {
  for (int64_t row = 0; row < count; ++row) {
    const uint32_t* from = row_of(row);
    int64_t in_tile = row % MOST_ROWS, start = row - in_tile;
    int64_t height = count - start < MOST_ROWS ? count - start : MOST_ROWS;
    uint32_t* to = block + start * words + in_tile;
    for (int64_t k = 0; k < words; ++k) to[k * height] = from[k];
  }
}

// Rows of one block of x.
inline int64_t block_rows(int64_t words) {
  int64_t tiles = BLOCK_WORDS / (words * MOST_ROWS);
  return MOST_ROWS * (tiles > 0 ? tiles : 1);
}

// Tiles [begin, end) of W.
template <typename T>
void some_outputs(const Linear<T>& it, int64_t begin, int64_t end) {
  const uint32_t* x = (const uint32_t*)it.x;
  if (it.rows <= MOST_ROWS) {  // One tile: x as it lies.
    for (int64_t n = begin; n < end; ++n) tile<T>(it.rows, it, x, it.words, 1, 0, n);
    return;
  }
  static thread_local Buffer buffer;
  int64_t most = block_rows(it.words);
  uint32_t* block = buffer.of<uint32_t>(most * it.words);
  for (int64_t first = 0; first < it.rows; first += most) {
    int64_t here = it.rows - first < most ? it.rows - first : most;
    auto row_of = [&](int64_t row) { return x + (first + row) * it.words; };
    rearrange(here, it.words, row_of, block);
    for (int64_t n = begin; n < end; ++n)
      for (int64_t row = 0; row < here; row += MOST_ROWS) {
        int64_t height = here - row < MOST_ROWS ? here - row : MOST_ROWS;
        tile<T>(height, it, block + row * it.words, 1, height, first + row, n);
      }
  }
}

inline int64_t tiles_of(int64_t outputs) { return (outputs + WIDTH - 1) / WIDTH; }

template <typename T>
void linear(const Linear<T>& it) {
  int64_t tiles = tiles_of(it.outputs);
  each(it.threads, it.threads, [&](int64_t part) {
    some_outputs(it, tiles * part / it.threads, tiles * (part + 1) / it.threads);
  });
}

// Panels of W [outputs, words], filled up with zeros.
struct Pack {
  const uint32_t* weight;
  int64_t outputs, words;
  uint32_t* panels;
};

inline void pack(const Pack& it) {
  for (int64_t panel = 0; panel < tiles_of(it.outputs) * PANELS; ++panel) {
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

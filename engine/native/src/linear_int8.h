// y = x W^T + bias + residual, of int8 by groups of 64 inputs with one float32 scale for each.
//
//   W [outputs, inputs]     panels of 16 outputs, each one stream of groups; a group is sixteen
//                           words of four int8, stored plus 128, and the scales:
//
//     panel 0   | word 0 of outputs 0 .. 15 | .. | word 15 of .. | scales of .. | next group ..
//     panel 1   | word 0 of outputs 16 .. 31 | ..
//
//   x [rows, inputs]        tiles of up to 6 rows, rounded to int8 group by group; after its
//                           sixteen words, -128 times their sum, and the scale:
//
//     rows 0 .. 5    | word 0 of rows 0 .. 5 | .. | word 15 of .. | sums of .. | scales of .. | ..
//
// The product of bytes takes W unsigned. Its sums begin at -128 times those of x, which is what the
// stored 128 add. They are exact, and a row's groups are added in one order whatever its tile.
#pragma once

namespace {

constexpr int64_t GROUP = 64;
constexpr int64_t GROUP_WORDS = GROUP / 4;
constexpr int64_t PANEL_STEP = (GROUP_WORDS + 1) * LANES;  // Words of a group of 16 outputs.
constexpr int64_t ROW_STEP = GROUP_WORDS + 2;              // Words of a group of one row.
constexpr float MOST = 127.0f;
constexpr float LEAST_SCALE = 0x1p-126f;  // Below, numbers lose digits: such a group is zero.

inline int64_t groups_of(int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }

struct Rounded {
  float scale;
  int32_t sum;
};

// The first `count` of a group, 1 <= count <= GROUP, as int8 times a scale; the others are zero.
// With NaN or infinity among them the scale is that, and so are all sums.
template <typename T>
inline Rounded round_group(const T* from, int64_t count, int8_t* to) {
  Floats parts[4], most = splat(0.0f);
  for (int64_t n = 0; n < 4; ++n) {
    int64_t left = count - n * LANES;
    parts[n] = left <= 0 ? splat(0.0f) : load(from + n * LANES, left);
    most = larger(most, magnitude(parts[n]));
  }
  float scale = largest(most) / MOST;
  if (scale < LEAST_SCALE) {
    memset(to, 0, GROUP);
    return {0.0f, 0};
  }
  int32_t sum = 0;
  for (int64_t n = 0; n < 4; ++n) sum += store_bytes(to + n * LANES, parts[n] / splat(scale));
  return {scale, sum};
}

// y [rows, outputs] = x [rows, inputs] W^T + bias + residual.
template <typename T>
struct LinearInt8 {
  const uint32_t* panels;
  const float* bias;  // [outputs, filled up] or null
  int64_t outputs, inputs;
  const T* x;
  int64_t rows;
  const T* residual;  // [rows, outputs] or null
  T* y;
  int64_t threads;
};

// The tile of `rows` rows, 1 <= rows <= MOST_ROWS, and of the WIDTH outputs of tile `n` of W.
template <typename T, int ROWS = MOST_ROWS>
void tile_int8(int64_t rows, const LinearInt8<T>& it, const uint32_t* x, int64_t row, int64_t n) {
  if constexpr (ROWS > 0) {
    if (rows != ROWS) return tile_int8<T, ROWS - 1>(rows, it, x, row, n);
    int64_t groups = groups_of(it.inputs);
    const uint32_t* w = it.panels + n * PANELS * groups * PANEL_STEP;
    Floats sums[ROWS][PANELS];
    for (auto& of_row : sums)
      for (auto& sum : of_row) sum = splat(0.0f);
    for (int64_t group = 0; group < groups; ++group, w += PANEL_STEP, x += ROWS * ROW_STEP) {
      Words dots[ROWS][PANELS];
#pragma GCC unroll 16
      for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 16
        for (int p = 0; p < PANELS; ++p) dots[m][p] = splat_word(x[GROUP_WORDS * ROWS + m]);
      // Without a loop, since compilers move sums from register to register at its end.
#pragma GCC unroll 16
      for (int k = 0; k < GROUP_WORDS; ++k) {
        Words own[PANELS];
#pragma GCC unroll 16
        for (int p = 0; p < PANELS; ++p)
          own[p] = load_words(w + p * groups * PANEL_STEP + k * LANES);
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; ++m) {
          Words from_x = splat_word(x[k * ROWS + m]);
#pragma GCC unroll 16
          for (int p = 0; p < PANELS; ++p) dots[m][p] = dot_bytes(dots[m][p], own[p], from_x);
        }
      }
      const float* of_x = (const float*)(x + (GROUP_WORDS + 1) * ROWS);
#pragma GCC unroll 16
      for (int p = 0; p < PANELS; ++p) {
        Floats of_w = load((const float*)(w + p * groups * PANEL_STEP + GROUP_WORDS * LANES));
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; ++m)
          sums[m][p] = fma(to_floats(dots[m][p]), of_w * splat(of_x[m]), sums[m][p]);
      }
    }
    finish<T, ROWS>(it, sums, row, n * WIDTH);
  }
}

// Rows [row, row + height) of x as one tile at `to`.
template <typename T>
void round_tile(const LinearInt8<T>& it, int64_t row, int64_t height, uint32_t* to) {
  alignas(64) uint32_t words[GROUP_WORDS];
  for (int64_t m = 0; m < height; ++m) {
    const T* from = it.x + (row + m) * it.inputs;
    uint32_t* at = to + m;
    for (int64_t start = 0; start < it.inputs; start += GROUP, at += ROW_STEP * height) {
      int64_t left = it.inputs - start;
      Rounded group = round_group(from + start, left < GROUP ? left : GROUP, (int8_t*)words);
      for (int64_t k = 0; k < GROUP_WORDS; ++k) at[k * height] = words[k];
      at[GROUP_WORDS * height] = -128 * group.sum;
      memcpy(at + (GROUP_WORDS + 1) * height, &group.scale, sizeof group.scale);
    }
  }
}

template <typename T>
void linear_int8(const LinearInt8<T>& it) {
  static thread_local Buffer buffer;
  int64_t words = groups_of(it.inputs) * ROW_STEP;
  uint32_t* x = buffer.of<uint32_t>(it.rows * words);
  each((it.rows + MOST_ROWS - 1) / MOST_ROWS, it.rows > MOST_ROWS ? it.threads : 1, [&](int64_t n) {
    int64_t row = n * MOST_ROWS, left = it.rows - row;
    round_tile(it, row, left < MOST_ROWS ? left : MOST_ROWS, x + row * words);
  });
  int64_t tiles = tiles_of(it.outputs), most = block_rows(words);
  each(it.threads, it.threads, [&](int64_t part) {
    int64_t begin = tiles * part / it.threads, end = tiles * (part + 1) / it.threads;
    // Blocks of x that stay in a core's second-level cache, under every panel.
    for (int64_t first = 0; first < it.rows; first += most) {
      int64_t last = first + most < it.rows ? first + most : it.rows;
      for (int64_t n = begin; n < end; ++n)
        for (int64_t row = first; row < last; row += MOST_ROWS) {
          int64_t height = last - row < MOST_ROWS ? last - row : MOST_ROWS;
          tile_int8<T>(height, it, x + row * words, row, n);
        }
    }
  });
}

// Panels of W [outputs, inputs], rounded, filled up with zeros.
template <typename T>
struct PackInt8 {
  const T* weight;
  int64_t outputs, inputs;
  uint32_t* panels;
  int64_t threads;
};

template <typename T>
void pack_int8(const PackInt8<T>& it) {
  int64_t groups = groups_of(it.inputs);
  each(tiles_of(it.outputs) * PANELS, it.threads, [&](int64_t panel) {
    for (int64_t group = 0; group < groups; ++group) {
      uint32_t* to = it.panels + (panel * groups + group) * PANEL_STEP;
      int64_t left = it.inputs - group * GROUP;
      for (int64_t lane = 0; lane < LANES; ++lane) {
        alignas(64) uint32_t words[GROUP_WORDS] = {};
        Rounded rounded = {0.0f, 0};
        int64_t output = panel * LANES + lane;
        if (output < it.outputs)
          rounded = round_group(it.weight + output * it.inputs + group * GROUP,
                                left < GROUP ? left : GROUP, (int8_t*)words);
        // A byte with its highest bit turned is the number plus 128.
        for (int64_t k = 0; k < GROUP_WORDS; ++k) to[k * LANES + lane] = words[k] ^ 0x80808080;
        memcpy(to + GROUP_WORDS * LANES + lane, &rounded.scale, sizeof rounded.scale);
      }
    }
  });
}

}  // namespace

KERNEL(pack_int8_float32, PackInt8<float>) { pack_int8(*it); }
KERNEL(pack_int8_bfloat16, PackInt8<Bfloat16>) { pack_int8(*it); }
KERNEL(linear_int8_float32, LinearInt8<float>) { linear_int8(*it); }
KERNEL(linear_int8_bfloat16, LinearInt8<Bfloat16>) { linear_int8(*it); }

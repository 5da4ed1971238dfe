// Attention of a segment of new tokens over the pages of its sequence, all written before.
//
// Rows are (token, query head) of one kv head, token by token; six of them are a tile in registers.
// A block of rows passes over the chunks of positions with a running softmax (arXiv 2205.14135):
//
//     positions      0         KEYS       2 KEYS
//     rows  0 .. 5   | x x x . .
//           6 .. 11  | x x x x x|x . .            x: read; a tile computes from its first row's
//          12 .. 17  | x x x x x|x x x .             first position to its last row's last one
//
// A chunk is packed once for a block, into strips of 64 columns that a tile multiplies like panels
// of a weight: K with positions as columns and words of `dim`, V with `dim` as columns and words of
// positions. Chunks begin at multiples of KEYS and each row adds them up in this order; what it
// does not read has the weight zero, which changes no bit. So a result depends on nothing but the
// sequence: not on where it was cut into segments, nor on its pages, the batch or the threads.
#pragma once

namespace {

constexpr int64_t KEYS = 128;
constexpr int64_t BLOCK_ROWS = 64 * MOST_ROWS;  // Packing costs some hundredths of their time.

template <typename T>
constexpr int64_t PER_WORD = 4 / sizeof(T);
template <typename T>
constexpr int64_t KEY_WORDS = KEYS / PER_WORD<T>;

inline int64_t whole(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

template <typename T>
struct Segment {
  const T* q;  // [tokens, heads, dim], tokens and heads some numbers apart
  int64_t q_row, q_head;
  const T *k_pages, *v_pages;
  int64_t tokens, heads, kv_heads, dim, block_size;
  const int64_t* table;  // Rows of pages.
  int64_t context;       // Positions before the segment.
  double scale;
  int64_t window;  // 0: all positions are read
  T* y;            // [tokens, heads, dim]
  int64_t threads;
};

// Some rows of one kv head, and the memory for them.
template <typename T>
struct Rows {
  int64_t kv_head, first, count;
  int64_t group;        // Query heads that share the kv head.
  int64_t deep, words;  // Words of a row of q, and of those that are not filled up.
  int64_t width;        // Numbers of a row of sums.
  uint32_t* q;          // [count, deep]
  float* sums;          // [count, width]
  Running* heads;       // [count]
  uint32_t* keys;       // Strips [deep, 64] of a chunk.
  uint32_t* values;     // Strips [KEY_WORDS, up to 64] of a chunk.

  int64_t token(int64_t row) const { return (first + row) / group; }
  int64_t head(int64_t row) const { return kv_head * group + (first + row) % group; }
};

// Where the positions from `start` on lie in the pages; -1 outside of [begin, end).
template <typename T>
void find(const Segment<T>& it, int64_t kv_head, int64_t start, int64_t begin, int64_t end,
          int64_t (&places)[KEYS]) {
  for (int64_t t = 0; t < KEYS; ++t) {
    int64_t at = start + t;
    places[t] = at < begin || at >= end ? -1 : place(it, it.table, kv_head, at);
  }
}

// Numbers of a row from number `i` on that are there; none of a position that is not read, where
// anything may lie: zero times NaN would be NaN.
inline int64_t left(int64_t place, int64_t i, int64_t dim) { return place < 0 ? 0 : dim - i; }

template <typename T>
void pack_keys(const Segment<T>& it, const int64_t* places, int64_t count, const Rows<T>& rows) {
  for (int64_t t = 0; t < count; t += LANES) {
    uint32_t* to = rows.keys + t / WIDTH * WIDTH * rows.deep + t % WIDTH;
    for (int64_t i = 0; i < it.dim; i += IN_WORDS<T>) {
      Words square[LANES];
      for (int lane = 0; lane < LANES; ++lane) {
        int64_t at = places[t + lane];
        square[lane] = words(it.k_pages + at + i, left(at, i, it.dim));
      }
      turn(square);
      for (int j = 0; j < LANES; ++j, to += WIDTH) store_words(to, square[j]);
    }
  }
}

// One word of positions, sixteen columns from number `i` on.
inline Words column_words(const float* v, const int64_t* places, int64_t i, int64_t dim) {
  return words(v + places[0] + i, left(places[0], i, dim));
}
inline Words column_words(const Bfloat16* v, const int64_t* places, int64_t i, int64_t dim) {
  return pairs(v + places[0] + i, left(places[0], i, dim),  //
               v + places[1] + i, left(places[1], i, dim));
}

template <typename T>
void pack_values(const Segment<T>& it, const int64_t* places, int64_t count, const Rows<T>& rows) {
  for (int64_t word = 0; word < count / PER_WORD<T>; ++word)
    for (int64_t i = 0; i < it.dim; i += LANES) {
      int64_t strip = i / WIDTH * WIDTH;
      int64_t columns = rows.width - strip < WIDTH ? rows.width - strip : WIDTH;
      uint32_t* to = rows.values + strip * KEY_WORDS<T> + word * columns + i - strip;
      store_words(to, column_words(it.v_pages, places + word * PER_WORD<T>, i, it.dim));
    }
}

// Sums [MOST_ROWS][N vectors] of x, rows `step` words apart, times a strip of N vectors.
template <typename T, int N>
inline __attribute__((always_inline)) void multiply_strip(const uint32_t* strip, int64_t words,
                                                          const uint32_t* x, int64_t step,
                                                          Floats (&sums)[MOST_ROWS][N]) {
#pragma GCC unroll 16
  for (int m = 0; m < MOST_ROWS; ++m)
#pragma GCC unroll 16
    for (int p = 0; p < N; ++p) sums[m][p] = splat(0.0f);
  for (int64_t k = 0; k < words; ++k) {
    Words w[N];
#pragma GCC unroll 16
    for (int p = 0; p < N; ++p) w[p] = load_words(strip + (k * N + p) * LANES);
#pragma GCC unroll 16
    for (int m = 0; m < MOST_ROWS; ++m) {
      Words from_x = splat_word(x[m * step + k]);
#pragma GCC unroll 16
      for (int p = 0; p < N; ++p) sums[m][p] = dot(Kind<T>{}, sums[m][p], w[p], from_x);
    }
  }
}

// sums = sums * kept + weights V: N vectors of a tile's rows, `width` numbers apart.
template <typename T, int N>
void add_strip(const uint32_t* strip, int64_t words, const T* weights, const Running* heads,
               float* sums, int64_t width) {
  Floats parts[MOST_ROWS][N];
  multiply_strip<T, N>(strip, words, (const uint32_t*)weights, KEY_WORDS<T>, parts);
#pragma GCC unroll 16
  for (int m = 0; m < MOST_ROWS; ++m)
#pragma GCC unroll 16
    for (int p = 0; p < N; ++p) {
      float* sum = sums + m * width + p * LANES;
      store(sum, fma(load(sum), splat(heads[m].kept), parts[m][p]));
    }
}

// Tile of six rows from `row` on, over the chunk from position `start` on.
template <typename T>
void attend_tile(const Segment<T>& it, const Rows<T>& rows, int64_t row, int64_t start) {
  int64_t begin[MOST_ROWS], end[MOST_ROWS];  // That each row reads, in the chunk.
  for (int64_t m = 0; m < MOST_ROWS; ++m) {
    // Rows that fill up the last tile are like its last one.
    int64_t own = row + m < rows.count ? row + m : rows.count - 1;
    int64_t length = it.context + rows.token(own) + 1;
    begin[m] = first_read(length, it.window) - start;
    end[m] = length - start;
  }
  int64_t from = begin[0] > 0 ? begin[0] / LANES * LANES : 0;
  int64_t to = end[MOST_ROWS - 1] < KEYS ? whole(end[MOST_ROWS - 1], LANES) : KEYS;
  if (from >= to) return;
  alignas(64) float scores[MOST_ROWS][KEYS];
  alignas(64) T weights[MOST_ROWS][KEYS];
  Running* heads = rows.heads + row;
  for (int64_t t = from / WIDTH * WIDTH; t < to; t += WIDTH) {
    Floats sums[MOST_ROWS][PANELS];
    multiply_strip<T, PANELS>(rows.keys + t * rows.deep, rows.words, rows.q + row * rows.deep,
                              rows.deep, sums);
    for (int m = 0; m < MOST_ROWS; ++m)
      for (int p = 0; p < PANELS; ++p)
        store(scores[m] + t + p * LANES, sums[m][p] * splat((float)it.scale));
  }
  for (int m = 0; m < MOST_ROWS; ++m) {
    if (begin[m] > from || end[m] < to)
      for (int64_t t = from; t < to; t += LANES)
        store(scores[m] + t, within(load(scores[m] + t), begin[m] - t, end[m] - t, -INFINITY));
    weigh(scores[m] + from, to - from, heads[m], weights[m] + from);
  }
  for (int64_t i = 0; i < rows.width; i += WIDTH) {
    float* sums = rows.sums + row * rows.width + i;
    auto add = [&](auto vectors) {
      constexpr int N = decltype(vectors)::COUNT;
      const uint32_t* strip = rows.values + i * KEY_WORDS<T> + from / PER_WORD<T> * N * LANES;
      add_strip<T, N>(strip, (to - from) / PER_WORD<T>, weights[0] + from, heads, sums, rows.width);
    };
    int64_t vectors = (rows.width - i) / LANES;
    if (vectors >= 4) add(Vectors<4>{});
    else if (vectors == 3) add(Vectors<3>{});
    else if (vectors == 2) add(Vectors<2>{});
    else add(Vectors<1>{});
  }
}

// Rows [first, first + count) of one kv head.
template <typename T>
void attend_rows(const Segment<T>& it, int64_t kv_head, int64_t first, int64_t count) {
  static thread_local Buffer buffer;
  int64_t height = whole(count, MOST_ROWS), words = (it.dim + PER_WORD<T> - 1) / PER_WORD<T>;
  int64_t deep = whole(words, LANES), width = whole(it.dim, LANES);
  uint32_t* q = buffer.of<uint32_t>(height * (deep + width + 3) + KEYS * deep +
                                    KEY_WORDS<T> * width);
  float* sums = (float*)(q + height * deep);
  uint32_t* keys = (uint32_t*)(sums + height * width);
  uint32_t* values = keys + KEYS * deep;
  Running* heads = (Running*)(values + KEY_WORDS<T> * width);
  Rows<T> rows{kv_head, first, count, it.heads / it.kv_heads, deep, words,
               width,   q,     sums,  heads,                  keys, values};
  memset(q, 0, height * (deep + width) * sizeof(float));
  for (int64_t row = 0; row < height; ++row) heads[row] = {-FLT_MAX, 0.0f, 0.0f};
  for (int64_t row = 0; row < count; ++row)
    memcpy(q + row * deep, it.q + rows.token(row) * it.q_row + rows.head(row) * it.q_head,
           it.dim * sizeof(T));
  int64_t end = it.context + rows.token(count - 1) + 1;
  int64_t begin = first_read(it.context + rows.token(0) + 1, it.window);
  for (int64_t start = begin / KEYS * KEYS; start < end; start += KEYS) {
    int64_t places[KEYS], filled = end - start < KEYS ? whole(end - start, WIDTH) : KEYS;
    find(it, kv_head, start, begin, end, places);
    pack_keys(it, places, filled, rows);
    pack_values(it, places, filled, rows);
    for (int64_t row = 0; row < count; row += MOST_ROWS) attend_tile(it, rows, row, start);
  }
  for (int64_t row = 0; row < count; ++row) {
    T* y = it.y + (rows.token(row) * it.heads + rows.head(row)) * it.dim;
    for (int64_t i = 0; i < it.dim; i += LANES)
      store(y + i, load(sums + row * width + i) / splat(heads[row].total), it.dim - i);
  }
}

template <typename T>
void attention_segment(const Segment<T>& it) {
  int64_t all = it.tokens * (it.heads / it.kv_heads), blocks = (all + BLOCK_ROWS - 1) / BLOCK_ROWS;
  int64_t positions = it.context + it.tokens;
  bool pays = it.threads > 1 && all * positions * it.dim > WORTH_THREADS;
  // The last rows of a segment read most: they are first. A thread that is done takes the next.
#pragma omp parallel for num_threads(it.threads) if (pays) schedule(dynamic)
  for (int64_t item = 0; item < blocks * it.kv_heads; ++item) {
    int64_t first = (blocks - 1 - item / it.kv_heads) * BLOCK_ROWS;
    attend_rows(it, item % it.kv_heads, first, all - first < BLOCK_ROWS ? all - first : BLOCK_ROWS);
  }
}

}  // namespace

KERNEL(attention_segment_float32, Segment<float>) { attention_segment(*it); }
KERNEL(attention_segment_bfloat16, Segment<Bfloat16>) { attention_segment(*it); }

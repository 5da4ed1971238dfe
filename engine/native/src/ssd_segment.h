// Segments of the state space duality; see ssd.h.
//
// A segment is bound by arithmetic. It moves COLUMNS of a head's turned state, h [size, dim], which
// stay in the cache, by a BLOCK of tokens at a time. Columns are along the lanes, so that no sum
// goes across them. With push = dt x, `all_t` the decays of the block's tokens up to t, and
// `rest_ts` those after s up to t:
//
//   first pass   y_t = all_t (c_t . h)
//   a triangle   y_t += sum over s <= t of (c_t . b_s rest_ts) push_s
//   second pass  h = all h + sum over s of b_s (rest_s push_s)
//
// That is 2.2 operations for each number and token, of which the recurrence takes 3. The products
// c_t . b_s are the same for all heads of a group, as are b and c in the order in which the passes
// read them. Decays are multiplied and never divided, so that no factor is above one, however
// strong they are. Neither threads nor a cut after a whole block change a bit.
#pragma once

namespace {

constexpr int64_t BLOCK = LANES;        // Tokens by which a segment's state moves at a time.
constexpr int64_t SPAN = 16 * BLOCK;    // Tokens whose b and c are prepared and then used.
constexpr int64_t COLUMNS = 2 * LANES;  // Of a turned state: with size = 128 half of a cache.
constexpr int64_t ROWS = 8;             // Of a product: what is summed in registers.

// `load(ONE + BLOCK - t)`: a one in lane t.
constexpr float ONE[2 * BLOCK] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};

// All tokens of a segment, or of a part of one.
template <typename T>
struct SSDSegment {
  SSD<T> of;
  int64_t rows;
  const float* from;  // The state before them, and where the one after them goes: perhaps the same.
  float* to;
};

// What all heads of a group share of a block of tokens. Those that it lacks are zero.
struct SSDBlock {
  float* b;         // [BLOCK, height]
  float* c;         // [height, BLOCK]
  float* products;  // [BLOCK, BLOCK]: at [s, t] c_t . b_s.

  SSDBlock(float* memory, int64_t height)
      : b(memory), c(b + BLOCK * height), products(c + BLOCK * height) {}
  static int64_t floats(int64_t height) { return BLOCK * (2 * height + BLOCK); }
};

// Sixteen rows, a stride apart, as columns; beyond `rows` of them and `left` columns are zeros.
template <typename T>
inline void load_turned(Floats (&x)[LANES], const T* from, int64_t stride, int64_t rows,
                        int64_t left) {
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i) x[i] = i < rows ? load(from + i * stride, left) : splat(0.0f);
  turn(x);
}

template <typename T>
void prepare_block(const SSD<T>& of, int64_t group, int64_t row, int64_t count, int64_t height,
                   const SSDBlock& block) {
  const T* b = of.b + row * of.b_stride + group * of.size;
  const T* c = of.c + row * of.c_stride + group * of.size;
  Floats products[BLOCK];
#pragma GCC unroll 16
  for (Floats& one : products) one = splat(0.0f);
  for (int64_t n = 0; n < height; n += LANES) {
    for (int64_t t = 0; t < BLOCK; ++t) {
      Floats own = t < count ? load(b + t * of.b_stride + n, of.size - n) : splat(0.0f);
      store(block.b + t * height + n, own);
    }
    Floats turned[LANES];
    load_turned(turned, c + n, of.c_stride, count, of.size - n);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) store(block.c + (n + i) * BLOCK, turned[i]);
    for (int64_t i = n; i < n + LANES; ++i) {
      Floats own = load(block.c + i * BLOCK);
#pragma GCC unroll 16
      for (int s = 0; s < BLOCK; ++s)
        products[s] = fma(own, splat(block.b[s * height + i]), products[s]);
    }
  }
#pragma GCC unroll 16
  for (int s = 0; s < BLOCK; ++s) store(block.products + s * BLOCK, products[s]);
}

// sums[i] += sum over k of factors[k, i] x[k], with x [count, COLUMNS] and factors a stride apart.
inline __attribute__((always_inline)) void add_product(Floats (&sums)[ROWS][2], int64_t count,
                                                       const float* factors, int64_t stride,
                                                       const float* x) {
  for (int64_t k = 0; k < count; ++k) {
    Floats left = load(x + k * COLUMNS), right = load(x + k * COLUMNS + LANES);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      Floats factor = splat(factors[k * stride + i]);
      sums[i][0] = fma(factor, left, sums[i][0]);
      sums[i][1] = fma(factor, right, sums[i][1]);
    }
  }
}

// COLUMNS of a head from `column` on, at a block of `count` tokens from `row` on.
struct SSDTokens {
  int64_t head, column, row, count;
  alignas(64) float all[BLOCK];
  float triangle[BLOCK * BLOCK];  // At [s, t] c_t . b_s rest_ts, zero with t < s.
  float pushes[BLOCK * COLUMNS];
  float kept[BLOCK * COLUMNS];  // push_s rest_s.

  template <typename T>
  const T* x(const SSD<T>& of, int64_t t) const {
    return of.x + (row + t) * of.x_stride + head * of.dim + column;
  }
  template <typename T>
  float* y(const SSD<T>& of, int64_t t) const {
    return of.y + ((row + t) * of.heads + head) * of.dim + column;
  }
};

// Fills what follows from a block's tokens; asks for y, and for x of the `next` tokens after it.
template <typename T>
inline void prepare_tokens(const SSD<T>& of, int64_t next, const SSDBlock& block,
                           SSDTokens& tokens) {
  float steps[BLOCK], decays[BLOCK], rests[BLOCK], after = 1.0f;
  time_steps(of, tokens.head, tokens.row, tokens.count, steps, decays);
  Floats rest = splat(0.0f);  // Lane t: the decays after s up to t.
  for (int64_t s = BLOCK - 1; s >= 0; --s) {
    rest = fma(rest, splat(s + 1 < BLOCK ? decays[s + 1] : 1.0f), load(ONE + BLOCK - s));
    store(tokens.triangle + s * BLOCK, rest * load(block.products + s * BLOCK));
    rests[s] = after;
    after *= decays[s];
  }
  store(tokens.all, rest * splat(decays[0]));
  int64_t left = of.dim - tokens.column;
  for (int64_t t = 0; t < tokens.count; ++t) {
    ask_for(tokens.y(of, t), min(left, COLUMNS));
    if (t < next) ask_for(tokens.x(of, t + BLOCK), min(left, COLUMNS));
    for (int64_t p = 0; p < COLUMNS; p += LANES) {
      Floats push = load(tokens.x(of, t) + p, left > p ? left - p : 0) * splat(steps[t]);
      store(tokens.pushes + t * COLUMNS + p, push);
      store(tokens.kept + t * COLUMNS + p, push * splat(rests[t]));
    }
  }
}

// The first pass over a state [height, COLUMNS], and the triangle.
template <typename T>
inline void read_state(const SSD<T>& of, const float* state, int64_t height, const SSDBlock& block,
                       const SSDTokens& tokens) {
  int64_t left = of.dim - tokens.column, others = left > LANES ? left - LANES : 0;
  Floats skip = splat(of.d ? of.d[tokens.head] : 0.0f);
  for (int64_t start = 0; start < tokens.count; start += ROWS) {
    Floats sums[ROWS][2];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) sums[i][0] = sums[i][1] = splat(0.0f);
    add_product(sums, height, block.c + start, BLOCK, state);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      Floats all = splat(tokens.all[start + i]);
      sums[i][0] = sums[i][0] * all;
      sums[i][1] = sums[i][1] * all;
    }
    int64_t past = min(start + ROWS, tokens.count);
    add_product(sums, past, tokens.triangle + start, BLOCK, tokens.pushes);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      if (start + i >= past) break;
      const T* x = tokens.x(of, start + i);
      float* y = tokens.y(of, start + i);
      store(y, fma(load(x, left), skip, sums[i][0]), left);
      store(y + LANES, fma(load(x + LANES, others), skip, sums[i][1]), others);
    }
  }
}

// The second pass.
inline void write_state(float* state, int64_t height, const SSDBlock& block,
                        const SSDTokens& tokens) {
  Floats all = splat(tokens.all[BLOCK - 1]);
  for (int64_t n = 0; n < height; n += ROWS, state += ROWS * COLUMNS) {
    Floats sums[ROWS][2];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      sums[i][0] = load(state + i * COLUMNS) * all;
      sums[i][1] = load(state + i * COLUMNS + LANES) * all;
    }
    add_product(sums, tokens.count, block.b + n, height, tokens.kept);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      store(state + i * COLUMNS, sums[i][0]);
      store(state + i * COLUMNS + LANES, sums[i][1]);
    }
  }
}

// COLUMNS of a head's state, of which there are `left`, to h [height, COLUMNS] and back.
inline void take_columns(float* h, const float* state, int64_t left, int64_t size) {
  for (int64_t p = 0; p < COLUMNS; p += LANES) {
    for (int64_t n = 0; n < size; n += LANES) {
      Floats x[LANES];
      load_turned(x, state + p * size + n, size, left - p, size - n);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) store(h + (n + i) * COLUMNS + p, x[i]);
    }
  }
}

inline void put_columns(const float* h, float* state, int64_t left, int64_t size) {
  for (int64_t p = 0; p < COLUMNS; p += LANES) {
    for (int64_t n = 0; n < size; n += LANES) {
      Floats x[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) x[i] = load(h + (n + i) * COLUMNS + p);
      turn(x);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i)
        if (i < left - p) store(state + (p + i) * size + n, x[i], size - n);
    }
  }
}

// Rows [row, end) of columns of a head, whose turned state moves on; `shared` are their blocks.
template <typename T>
void move_columns(const SSD<T>& of, int64_t head, int64_t column, int64_t row, int64_t end,
                  float* shared, int64_t height, float* state) {
  for (; row < end; row += BLOCK, shared += SSDBlock::floats(height)) {
    SSDBlock block(shared, height);
    SSDTokens tokens;
    tokens.head = head, tokens.column = column;
    tokens.row = row, tokens.count = min(end - row, BLOCK);
    prepare_tokens(of, min(end - row - BLOCK, BLOCK), block, tokens);
    read_state(of, state, height, block, tokens);
    write_state(state, height, block, tokens);
  }
}

// A thread has some columns of some heads, and itself prepares what these heads share.
template <typename T>
void ssd_segment(const SSDSegment<T>& it) {
  const SSD<T>& of = it.of;
  int64_t height = (of.size + LANES - 1) / LANES * LANES, memory = SSDBlock::floats(height);
  int64_t tiles = (of.dim + COLUMNS - 1) / COLUMNS, parts = of.heads * tiles;
  each(of.threads, of.threads, [&](int64_t thread) {
    static thread_local Buffer buffer;
    float* state = buffer.of<float>(height * COLUMNS + SPAN / BLOCK * memory);
    float* shared = state + height * COLUMNS;
    int64_t first = parts * thread / of.threads, last = parts * (thread + 1) / of.threads;
    // Without rows a state is copied.
    for (int64_t row = 0; row == 0 || row < it.rows; row += SPAN) {
      int64_t end = min(row + SPAN, it.rows), prepared = -1;
      for (int64_t part = first; part < last; ++part) {
        int64_t head = part / tiles, column = part % tiles * COLUMNS;
        int64_t group = head / (of.heads / of.groups);
        for (int64_t at = row; at < end && group != prepared; at += BLOCK)
          prepare_block(of, group, at, min(end - at, BLOCK), height,
                        SSDBlock(shared + (at - row) / BLOCK * memory, height));
        prepared = group;
        int64_t start = (head * of.dim + column) * of.size, left = of.dim - column;
        take_columns(state, (row ? it.to : it.from) + start, left, of.size);
        move_columns(of, head, column, row, end, shared, height, state);
        put_columns(state, it.to + start, left, of.size);
      }
    }
  });
}

}  // namespace

KERNEL(ssd_segment_float32, SSDSegment<float>) { ssd_segment(*it); }
KERNEL(ssd_segment_bfloat16, SSDSegment<Bfloat16>) { ssd_segment(*it); }

// State space duality (Mamba2): h = exp(dt a) h + dt x b^T, y = h c + d x, on states in place.
//
// A state is float [heads, dim, size]. A decode step is bound by memory: it passes over the state
// once, as it lies. A segment is bound by arithmetic, and moves COLUMNS of a head's turned state,
// h [size, dim], which stay in the cache, by a BLOCK of tokens at a time; `dim` is along the lanes,
// so that no sum goes across them. With push = dt x, `all_t` the decays of the block's tokens up to
// t, and `rest_st` those after s up to t:
//
//   first pass   y_t = all_t (c_t . h)
//   a triangle   y_t += sum over s <= t of (c_t . b_s rest_st) push_s
//   second pass  h = all h + sum over s of b_s (rest_s push_s)
//
// That is 2.2 operations for each number and token beside the recurrence's 3. The products c_t . b_s
// are the same for all heads of a group, as are b and c in the order in which the passes read them.
// Decays are multiplied and never divided, so that no factor is above one, however strong they are.
#pragma once

namespace {

constexpr int64_t BLOCK = LANES;        // Tokens by which a segment's state moves at a time.
constexpr int64_t SPAN = 16 * BLOCK;    // Tokens whose b and c are prepared and then used.
constexpr int64_t COLUMNS = 2 * LANES;  // Of a turned state: with size = 128 half of a cache.
constexpr int64_t ROWS = 8;             // Of a product: what is summed in registers.

// `load(ONE + BLOCK - t)`: a one in lane t.
constexpr float ONE[2 * BLOCK] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};

template <typename T>
struct SSD {
  const T* x;  // [rows, heads, dim]; here and below rows are a stride apart
  int64_t x_stride;
  const T* dt;  // [rows, heads], before softplus, or null: steps of one
  int64_t dt_stride;
  const T* b;  // [rows, groups, size]
  int64_t b_stride;
  const T* c;
  int64_t c_stride;
  int64_t heads, dim, groups, size;
  const float* a;        // [heads]
  const float* dt_bias;  // [heads] or null
  double low, high;      // Limits of dt.
  const float* d;        // [heads] or null
  float* y;              // [rows, heads, dim], without gaps
  int64_t threads;
};

// Of up to a block of tokens. Those that it lacks have steps of zero: no decay and no push.
template <typename T>
inline void time_steps(const SSD<T>& it, int64_t head, int64_t row, int64_t count, float* steps,
                       float* decays) {
  for (int64_t t = 0; t < count; ++t)
    steps[t] = it.dt ? wide(it.dt[(row + t) * it.dt_stride + head]) : 1.0f;
  Floats step = load(steps, count);
  if (it.dt) {
    step = softplus(step + splat(it.dt_bias ? it.dt_bias[head] : 0.0f));
    step = only(min(max(step, splat(float(it.low))), splat(float(it.high))), count);
  }
  store(steps, step);
  store(decays, exp(step * splat(it.a[head])));
}

// One token of every sequence.
template <typename T>
struct SSDStep {
  SSD<T> of;
  float* pool;
  int64_t unit_stride;
  const int64_t* units;  // [seqs]
  int64_t seqs;
};

// A row [size] of a head's state moves on; returns it times c. One row at a time: four side by side
// are four streams to memory, which took twice as long.
inline float move_row(float* row, int64_t size, Floats decay, float push, const float* b,
                      const float* c) {
  Floats read = splat(0.0f);
  auto move = [&](int64_t n, auto... left) __attribute__((always_inline)) {
    Floats h = fma(load(row + n, left...), decay, splat(push) * load(b + n));
    store(row + n, h, left...);
    read = fma(h, load(c + n), read);
  };
  int64_t n = 0;
  for (; n + LANES <= size; n += LANES) move(n);
  if (n < size) move(n, size - n);
  return sum(read);
}

template <typename T>
void ssd_step(const SSDStep<T>& it) {
  const SSD<T>& of = it.of;
  int64_t dim = of.dim, size = of.size, padded = (size + LANES - 1) / LANES * LANES;
  each_row(it.seqs * of.heads, dim * size, of.threads, [&](int64_t item) {
    static thread_local Buffer buffer;
    float* b = buffer.of<float>(2 * padded);
    float* c = b + padded;
    int64_t seq = item / of.heads, head = item % of.heads;
    int64_t group = head / (of.heads / of.groups);
    for (int64_t n = 0; n < size; n += LANES) {
      store(b + n, load(of.b + seq * of.b_stride + group * size + n, size - n));
      store(c + n, load(of.c + seq * of.c_stride + group * size + n, size - n));
    }
    float steps[BLOCK], decays[BLOCK];
    time_steps(of, head, seq, 1, steps, decays);
    const T* x = of.x + seq * of.x_stride + head * dim;
    float* state = it.pool + it.units[seq] * it.unit_stride + head * dim * size;
    float* y = of.y + item * dim;
    Floats decay = splat(decays[0]);
    float skip = of.d ? of.d[head] : 0.0f;
    for (int64_t p = 0; p < dim; ++p) {
      float in = wide(x[p]);
      y[p] = move_row(state + p * size, size, decay, steps[0] * in, b, c) + skip * in;
    }
  });
}

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

// Sixteen columns of rows that are a stride apart; there are `rows` of them, and `left` columns.
template <typename T>
inline void load_turned(Floats (&x)[LANES], const T* from, int64_t stride, int64_t rows,
                        int64_t left) {
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i) x[i] = i < rows ? load(from + i * stride, left) : splat(0.0f);
  turn(x);
}

template <typename T>
void prepare(const SSD<T>& of, int64_t group, int64_t row, int64_t count, int64_t height,
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

// COLUMNS of a head's state from `column` on through a block of `count` tokens from `row` on.
template <typename T>
void move_block(const SSD<T>& of, int64_t head, int64_t column, int64_t row, int64_t count, int64_t next,
                const SSDBlock& block, int64_t height, float* state) {
  float steps[BLOCK], decays[BLOCK], all[BLOCK], rests[BLOCK];
  alignas(64) float own[BLOCK * BLOCK], pushes[BLOCK * COLUMNS], kept[BLOCK * COLUMNS];
  time_steps(of, head, row, count, steps, decays);
  // Row s of the triangle: lane t has the decays after s up to t, and those before s nothing.
  Floats rest = splat(0.0f);
  float after = 1.0f;
  for (int64_t s = BLOCK - 1; s >= 0; --s) {
    rest = fma(rest, splat(s + 1 < BLOCK ? decays[s + 1] : 1.0f), load(ONE + BLOCK - s));
    store(own + s * BLOCK, rest * load(block.products + s * BLOCK));
    rests[s] = after;
    after *= decays[s];
  }
  store(all, rest * splat(decays[0]));
  const T* x = of.x + row * of.x_stride + head * of.dim + column;
  float* y = of.y + (row * of.heads + head) * of.dim + column;
  int64_t left = of.dim - column, others = left > LANES ? left - LANES : 0;
  for (int64_t t = 0; t < count; ++t) {
    ask_for(y + t * of.heads * of.dim, min(left, COLUMNS));
    if (t < next) ask_for(x + (BLOCK + t) * of.x_stride, min(left, COLUMNS));
    for (int64_t p = 0; p < COLUMNS; p += LANES) {
      Floats push = load(x + t * of.x_stride + p, p ? others : left) * splat(steps[t]);
      store(pushes + t * COLUMNS + p, push);
      store(kept + t * COLUMNS + p, push * splat(rests[t]));
    }
  }
  Floats skip = splat(of.d ? of.d[head] : 0.0f);
  for (int64_t start = 0; start < count; start += ROWS) {
    Floats sums[ROWS][2];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) sums[i][0] = sums[i][1] = splat(0.0f);
    add_product(sums, height, block.c + start, BLOCK, state);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      sums[i][0] = sums[i][0] * splat(all[start + i]);
      sums[i][1] = sums[i][1] * splat(all[start + i]);
    }
    add_product(sums, min(start + ROWS, count), own + start, BLOCK, pushes);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      int64_t t = start + i;
      if (t >= count) break;
      const T* in = x + t * of.x_stride;
      float* out = y + t * of.heads * of.dim;
      store(out, fma(load(in, left), skip, sums[i][0]), left);
      store(out + LANES, fma(load(in + LANES, others), skip, sums[i][1]), others);
    }
  }
  Floats decay = splat(after);
  for (int64_t n = 0; n < height; n += ROWS) {
    float* h = state + n * COLUMNS;
    Floats sums[ROWS][2];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      sums[i][0] = load(h + i * COLUMNS) * decay;
      sums[i][1] = load(h + i * COLUMNS + LANES) * decay;
    }
    add_product(sums, count, block.b + n, height, kept);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      store(h + i * COLUMNS, sums[i][0]);
      store(h + i * COLUMNS + LANES, sums[i][1]);
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

// Every thread has its own parts of heads, and prepares what they share.
template <typename T>
void ssd_segment(const SSDSegment<T>& it) {
  const SSD<T>& of = it.of;
  int64_t height = (of.size + LANES - 1) / LANES * LANES, memory = SSDBlock::floats(height);
  int64_t tiles = (of.dim + COLUMNS - 1) / COLUMNS, parts = of.heads * tiles;
  each(of.threads, of.threads, [&](int64_t thread) {
    static thread_local Buffer buffer;
    float* state = buffer.of<float>(height * COLUMNS + SPAN / BLOCK * memory);
    float* shared = state + height * COLUMNS;
    // Without rows a state is copied.
    for (int64_t row = 0; row == 0 || row < it.rows; row += SPAN) {
      int64_t end = min(row + SPAN, it.rows), prepared = -1;
      int64_t last = parts * (thread + 1) / of.threads;
      for (int64_t part = parts * thread / of.threads; part < last; ++part) {
        int64_t head = part / tiles, column = part % tiles * COLUMNS;
        int64_t group = head / (of.heads / of.groups);
        for (int64_t at = row; at < end && group != prepared; at += BLOCK)
          prepare(of, group, at, min(end - at, BLOCK), height,
                  SSDBlock(shared + (at - row) / BLOCK * memory, height));
        prepared = group;
        int64_t start = (head * of.dim + column) * of.size, left = of.dim - column;
        take_columns(state, (row ? it.to : it.from) + start, left, of.size);
        for (int64_t at = row; at < end; at += BLOCK)
          move_block(of, head, column, at, min(end - at, BLOCK), min(end - at - BLOCK, BLOCK),
                     SSDBlock(shared + (at - row) / BLOCK * memory, height), height, state);
        put_columns(state, it.to + start, left, of.size);
      }
    }
  });
}

}  // namespace

KERNEL(ssd_step_float32, SSDStep<float>) { ssd_step(*it); }
KERNEL(ssd_step_bfloat16, SSDStep<Bfloat16>) { ssd_step(*it); }
KERNEL(ssd_segment_float32, SSDSegment<float>) { ssd_segment(*it); }
KERNEL(ssd_segment_bfloat16, SSDSegment<Bfloat16>) { ssd_segment(*it); }

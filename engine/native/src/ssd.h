// State space duality (Mamba2): h = exp(dt a) h + dt x b^T, y = h c + d x, on states in place.
//
// A state is float [heads, dim, size]. A decode step is bound by memory: it passes over the state
// once, as it lies. A segment is bound by arithmetic, three operations for each number of the state
// and token, and so it keeps tiles of a state in registers for many tokens, with `dim` along the
// lanes, so that no sum goes across them:
//
//   head's state, turned    h [size, dim]     tile: 16 numbers of `size` x 16 of `dim`
//   for every token         y += c h          b and c of the tile's rows are broadcast
//
// That is the recurrence as it is written: where a segment is cut changes no bit.
#pragma once

namespace {

constexpr int64_t TOKENS = 64;  // For which a tile stays in registers.

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

// `steps` and `decays` of tokens [row, row + count), at most TOKENS; both are padded to lanes.
template <typename T>
void time_steps(const SSD<T>& it, int64_t head, int64_t row, int64_t count, float* steps,
                float* decays) {
  for (int64_t t = 0; t < count; ++t)
    steps[t] = it.dt ? wide(it.dt[(row + t) * it.dt_stride + head]) : 1.0f;
  for (int64_t t = 0; t < count; t += LANES) {
    Floats step = load(steps + t, count - t);
    if (it.dt) {
      step = softplus(step + splat(it.dt_bias ? it.dt_bias[head] : 0.0f));
      step = min(max(step, splat(float(it.low))), splat(float(it.high)));
    }
    store(steps + t, step);
    store(decays + t, exp(step * splat(it.a[head])));
  }
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
    float steps[LANES], decays[LANES];
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

// A tile of 16 rows of the state, `width` apart, through `count` tokens; b and c [count, 16].
inline void move_tile(float* state, int64_t width, int64_t count, const float* decays,
                      const float* pushes, const float* b, const float* c, float* y) {
  Floats h[LANES];
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i) h[i] = load(state + i * width);
  for (int64_t t = 0; t < count; ++t) {
    Floats decay = splat(decays[t]), push = load(pushes + t * width);
    Floats even = load(y + t * width), odd = splat(0.0f);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) {
      h[i] = fma(h[i], decay, push * splat(b[t * LANES + i]));
      Floats& read = i % 2 ? odd : even;
      read = fma(h[i], splat(c[t * LANES + i]), read);
    }
    store(y + t * width, even + odd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i) store(state + i * width, h[i]);
}

template <typename T>
void ssd_segment(const SSDSegment<T>& it) {
  const SSD<T>& of = it.of;
  int64_t dim = of.dim, size = of.size;
  int64_t width = (dim + LANES - 1) / LANES * LANES, height = (size + LANES - 1) / LANES * LANES;
  each(of.heads, of.threads, [&](int64_t head) {
    static thread_local Buffer buffer;
    float* state = buffer.of<float>(height * width + 2 * TOKENS * (width + height));
    float *pushes = state + height * width, *y = pushes + TOKENS * width;
    float *b = y + TOKENS * width, *c = b + TOKENS * height;
    float steps[TOKENS], decays[TOKENS];
    int64_t group = head / (of.heads / of.groups), start = head * dim * size;
    memset(state, 0, height * width * sizeof(float));
    for (int64_t p = 0; p < dim; ++p)
      for (int64_t n = 0; n < size; ++n) state[n * width + p] = it.from[start + p * size + n];
    Floats skip = splat(of.d ? of.d[head] : 0.0f);
    for (int64_t row = 0; row < it.rows; row += TOKENS) {
      int64_t count = it.rows - row < TOKENS ? it.rows - row : TOKENS;
      time_steps(of, head, row, count, steps, decays);
      for (int64_t t = 0; t < count; ++t) {
        const T* x = of.x + (row + t) * of.x_stride + head * dim;
        for (int64_t p = 0; p < dim; p += LANES) {
          Floats part = load(x + p, dim - p);
          store(pushes + t * width + p, part * splat(steps[t]));
          store(y + t * width + p, part * skip);
        }
        const T* from_b = of.b + (row + t) * of.b_stride + group * size;
        const T* from_c = of.c + (row + t) * of.c_stride + group * size;
        for (int64_t n = 0; n < size; n += LANES) {
          store(b + n * TOKENS + t * LANES, load(from_b + n, size - n));
          store(c + n * TOKENS + t * LANES, load(from_c + n, size - n));
        }
      }
      for (int64_t n = 0; n < size; n += LANES)
        for (int64_t p = 0; p < dim; p += LANES)
          move_tile(state + n * width + p, width, count, decays, pushes + p, b + n * TOKENS,
                    c + n * TOKENS, y + p);
      for (int64_t t = 0; t < count; ++t)
        memcpy(of.y + ((row + t) * of.heads + head) * dim, y + t * width, dim * sizeof(float));
    }
    for (int64_t p = 0; p < dim; ++p)
      for (int64_t n = 0; n < size; ++n) it.to[start + p * size + n] = state[n * width + p];
  });
}

}  // namespace

KERNEL(ssd_step_float32, SSDStep<float>) { ssd_step(*it); }
KERNEL(ssd_step_bfloat16, SSDStep<Bfloat16>) { ssd_step(*it); }
KERNEL(ssd_segment_float32, SSDSegment<float>) { ssd_segment(*it); }
KERNEL(ssd_segment_bfloat16, SSDSegment<Bfloat16>) { ssd_segment(*it); }

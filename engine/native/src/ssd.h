// State space duality (Mamba2): h = exp(dt a) h + dt x b^T, y = h c + d x, on states in place.
//
// A state is float [heads, dim, size]. A decode step is bound by memory: it passes over the state
// once, as it lies. Segments are in ssd_segment.h.
#pragma once

namespace {

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

// Of `count` tokens, at most LANES. Those that lack have steps of zero: no decay and no push.
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

}  // namespace

KERNEL(ssd_step_float32, SSDStep<float>) { ssd_step(*it); }
KERNEL(ssd_step_bfloat16, SSDStep<Bfloat16>) { ssd_step(*it); }

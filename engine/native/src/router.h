// The experts of each row: scores of all of them, the best few, and their shares.
#pragma once

namespace {

template <typename T>
struct Route {
  const uint32_t* panels;   // Of the float32 matrix [experts, inputs], as in linear.h.
  const float* correction;  // [experts] or null
  int64_t experts, inputs, top_k, groups, top_groups;
  int64_t is_softmax, renormalise;  // 0 or 1
  double floor, scale;
  const T* x;  // [rows, inputs]
  int64_t rows;
  int64_t* chosen;  // [rows, top_k]
  float* shares;    // [rows, top_k]
};

constexpr float CLOSED = -INFINITY;  // The score of what may not be chosen.

// The best of `count` scores, the first of equal ones; in range whatever they are, NaN too.
inline int64_t best(const float* scores, int64_t count) {
  int64_t found = 0;
  for (int64_t i = 1; i < count; ++i)
    if (scores[i] > scores[found]) found = i;
  return found;
}

// logits [experts] to scores, in place.
inline void score(float* logits, int64_t experts, bool is_softmax) {
  if (!is_softmax) {
    for (int64_t i = 0; i < experts; i += LANES)
      store(logits + i, sigmoid(load(logits + i, experts - i)), experts - i);
    return;
  }
  float most = logits[best(logits, experts)];
  Floats total = splat(0.0f);
  for (int64_t i = 0; i < experts; i += LANES) {
    store(logits + i, exp(load(logits + i, experts - i) - splat(most)), experts - i);
    total = total + load(logits + i, experts - i);
  }
  Floats all = splat(sum(total));
  for (int64_t i = 0; i < experts; i += LANES)
    store(logits + i, load(logits + i, experts - i) / all, experts - i);
}

// Closes all experts but those of the `top_groups` groups with the largest sums of two scores.
inline void close_groups(float* open, int64_t experts, int64_t groups, int64_t top_groups,
                         float* sums) {
  int64_t size = experts / groups;
  for (int64_t group = 0; group < groups; ++group) {
    const float* own = open + group * size;
    int64_t first = best(own, size), second = first ? 0 : 1;
    for (int64_t i = 0; i < size; ++i)
      if (i != first && own[i] > own[second]) second = i;
    sums[group] = own[first] + own[second];
  }
  for (int64_t left = groups - top_groups; left > 0; --left) {
    int64_t worst = -1;
    for (int64_t group = 0; group < groups; ++group)
      if (sums[group] != INFINITY && (worst < 0 || sums[group] < sums[worst])) worst = group;
    if (worst < 0) return;  // All sums are infinite: as good as any.
    for (int64_t i = 0; i < size; ++i) open[worst * size + i] = CLOSED;
    sums[worst] = INFINITY;  // It is closed: not to be found again.
  }
}

template <typename T>
void route(const Route<T>& it) {
  static thread_local Buffer buffer;
  int64_t tiles = tiles_of(it.experts), width = tiles * WIDTH;
  float* x = buffer.of<float>(it.inputs + LANES + 2 * width + it.groups);
  float *scores = x + it.inputs + LANES, *open = scores + width, *sums = open + width;
  for (int64_t row = 0; row < it.rows; ++row) {
    for (int64_t i = 0; i < it.inputs; i += LANES)
      store(x + i, load(it.x + row * it.inputs + i, it.inputs - i));
    for (int64_t n = 0; n < tiles; ++n) {
      Floats logits[1][PANELS];
      multiply<float, 1>(it.panels + n * it.inputs * WIDTH, it.inputs, (const uint32_t*)x, 0, 1,
                         logits);
      for (int64_t p = 0; p < PANELS; ++p) store(scores + n * WIDTH + p * LANES, logits[0][p]);
    }
    score(scores, it.experts, it.is_softmax);
    for (int64_t i = 0; i < it.experts; ++i)
      open[i] = scores[i] + (it.correction ? it.correction[i] : 0.0f);
    if (it.groups > 1) close_groups(open, it.experts, it.groups, it.top_groups, sums);
    int64_t* chosen = it.chosen + row * it.top_k;
    float* shares = it.shares + row * it.top_k;
    float total = (float)it.floor;
    for (int64_t n = 0; n < it.top_k; ++n) {
      chosen[n] = best(open, it.experts);
      open[chosen[n]] = CLOSED;
      shares[n] = scores[chosen[n]];
      total += shares[n];
    }
    float by = (float)it.scale / (it.renormalise ? total : 1.0f);
    for (int64_t n = 0; n < it.top_k; ++n) shares[n] *= by;
  }
}

}  // namespace

KERNEL(route_float32, Route<float>) { route(*it); }
KERNEL(route_bfloat16, Route<Bfloat16>) { route(*it); }

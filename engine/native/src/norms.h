// Root-mean-square norms, alone and with a gate: a row is read once and written once.
#pragma once

namespace {

// The sum of squares of x [size]. Four sums: one would wait for itself at every step.
template <typename T>
inline float squares(const T* x, int64_t size) {
  constexpr int64_t PARTS = 4;
  Floats parts[PARTS];
  for (auto& part : parts) part = splat(0.0f);
  int64_t i = 0;
  for (; i + PARTS * LANES <= size; i += PARTS * LANES) {
#pragma GCC unroll 4
    for (int64_t p = 0; p < PARTS; ++p) {
      Floats own = load(x + i + p * LANES);
      parts[p] = fma(own, own, parts[p]);
    }
  }
  for (; i < size; i += LANES) {
    Floats own = load(x + i, size - i);
    parts[0] = fma(own, own, parts[0]);
  }
  return sum((parts[0] + parts[1]) + (parts[2] + parts[3]));
}

inline Floats inverse_root(float squares, int64_t size, double eps) {
  return splat(1.0f / std::sqrt(squares / size + (float)eps));
}

// y = x / sqrt(mean(x^2) + eps) * weight + residual, by group: x [rows, groups, size] with rows
// apart, y and residual contiguous; weight [groups, size], or [size] with a distance of 0.
struct Norm {
  const float* weight;
  int64_t weight_stride;
  int64_t size;
  double eps;
  const void* x;
  int64_t x_is_float, x_stride, rows, groups;
  const void* residual;  // of y's type, or null
  void* y;
  int64_t y_is_float, threads;
};

template <typename From, typename To>
void norm(const Norm& it) {
  const int64_t channels = it.groups * it.size;
  each_row(it.rows, channels, it.threads, [&](int64_t row) {
    for (int64_t group = 0; group < it.groups; ++group) {
      const int64_t at = row * channels + group * it.size;
      const From* x = (const From*)it.x + row * it.x_stride + group * it.size;
      const float* weight = it.weight + group * it.weight_stride;
      const To* residual = it.residual ? (const To*)it.residual + at : nullptr;
      Floats scale = inverse_root(squares(x, it.size), it.size, it.eps);
      for (int64_t i = 0; i < it.size; i += LANES) {
        int64_t left = it.size - i;
        Floats y = load(x + i, left) * scale * load(weight + i, left);
        if (residual) y = y + load(residual + i, left);
        store((To*)it.y + at + i, y, left);
      }
    }
  });
}

template <typename T>
void norm_of(const Norm& it) {
  if (it.x_is_float && it.y_is_float) return norm<float, float>(it);
  if (it.x_is_float) return norm<float, T>(it);
  if (it.y_is_float) return norm<T, float>(it);
  norm<T, T>(it);
}

// As `Gating` in model_configs/recurrent.py, in its order.
enum Gating : int64_t { GATE_THEN_NORM, NORM_THEN_GATE, NORM_THEN_SIGMOID, GATE_ONLY };

// y float [rows, groups, size] and gate [rows, groups, size], its rows apart -> result.
template <typename T>
struct GatedNorm {
  const float* weight;  // [groups, size], or [size] with a distance of 0
  int64_t weight_stride;
  double eps;
  int64_t gating;
  const float* y;
  const T* gate;
  int64_t gate_stride, rows, groups, size;
  T* result;
  int64_t threads;
};

template <typename T>
void gated_norm(const GatedNorm<T>& it) {
  const int64_t size = it.size, channels = it.groups * size;
  each_row(it.rows, channels, it.threads, [&](int64_t row) {
    for (int64_t group = 0; group < it.groups; ++group) {
      static thread_local Buffer buffer;
      const float* y = it.y + row * channels + group * size;
      const T* gate = it.gate + row * it.gate_stride + group * size;
      const float* weight = it.weight + group * it.weight_stride;
      T* result = it.result + row * channels + group * size;
      if (it.gating == GATE_ONLY) {
        for (int64_t i = 0; i < size; i += LANES) {
          int64_t left = size - i;
          store(result + i, load(y + i, left) * silu(load(gate + i, left)), left);
        }
        continue;
      }
      if (it.gating == GATE_THEN_NORM) {
        // The norm needs all of the gated row, before any of it can be written.
        float* gated = buffer.of<float>(size);
        for (int64_t i = 0; i < size; i += LANES) {
          int64_t left = size - i;
          store(gated + i, load(y + i, left) * silu(load(gate + i, left)), left);
        }
        y = gated;
      }
      Floats scale = inverse_root(squares(y, size), size, it.eps);
      for (int64_t i = 0; i < size; i += LANES) {
        int64_t left = size - i;
        Floats normed = load(y + i, left) * scale * load(weight + i, left);
        if (it.gating == NORM_THEN_GATE) normed = normed * silu(load(gate + i, left));
        if (it.gating == NORM_THEN_SIGMOID) normed = times_sigmoid(normed, load(gate + i, left));
        store(result + i, normed, left);
      }
    }
  });
}

}  // namespace

KERNEL(norm_float32, Norm) { norm<float, float>(*it); }
KERNEL(norm_bfloat16, Norm) { norm_of<Bfloat16>(*it); }
KERNEL(gated_norm_float32, GatedNorm<float>) { gated_norm(*it); }
KERNEL(gated_norm_bfloat16, GatedNorm<Bfloat16>) { gated_norm(*it); }

// Norms and activations: a row is read once and written once.
#pragma once

namespace {

// The sum of squares of x [size].
template <typename T>
inline float squares(const T* x, long size) {
  Floats total = splat(0.0f);
  for (long i = 0; i < size; i += LANES) {
    Floats part = load(x + i, size - i);
    total = fma(part, part, total);
  }
  return sum(total);
}

// y = x / sqrt(mean(x^2) + eps) * weight: x [rows, groups, size], weight [groups, size].
template <typename From, typename To>
void rms_norm(const From* x, long x_stride, const float* weight, float eps, long rows, long groups,
              long size, To* y) {
  for (long row = 0; row < rows; ++row)
    for (long group = 0; group < groups; ++group) {
      const From* from = x + row * x_stride + group * size;
      To* to = y + (row * groups + group) * size;
      Floats scale = splat(1.0f / std::sqrt(squares(from, size) / size + eps));
      for (long i = 0; i < size; i += LANES) {
        long left = size - i;
        Floats own = load(weight + group * size + i, left);
        store(to + i, load(from + i, left) * scale * own, left);
      }
    }
}

}  // namespace

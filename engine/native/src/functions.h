// Functions of sixteen numbers, on top of an instruction set's own.
#pragma once

namespace {

// e^x to two units in the last place: 2^n times a polynomial of what is left, |rest| <= ln(2) / 2.
inline Floats exp(Floats x) {
  x = min(max(x, splat(-87.3f)), splat(88.7f));
  Floats n = rounded(x * splat(1.44269504f));
  Floats rest = fma(n, splat(-0.693359375f), x);
  rest = fma(n, splat(2.12194440e-4f), rest);
  Floats y = splat(1.9875691500e-4f);
  y = fma(y, rest, splat(1.3981999507e-3f));
  y = fma(y, rest, splat(8.3334519073e-3f));
  y = fma(y, rest, splat(4.1665795894e-2f));
  y = fma(y, rest, splat(1.6666665459e-1f));
  y = fma(y, rest, splat(5.0000001201e-1f));
  return scaled(fma(y * rest, rest, rest + splat(1.0f)), n);
}

inline Floats sigmoid(Floats x) { return splat(1.0f) / (splat(1.0f) + exp(splat(0.0f) - x)); }

inline Floats silu(Floats x) { return x * sigmoid(x); }

// tanh(x) = 1 - 2 / (e^2x + 1)
inline Floats tanh(Floats x) {
  return splat(1.0f) - splat(2.0f) / (exp(x + x) + splat(1.0f));
}

// The usual approximation: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
inline Floats gelu_tanh(Floats x) {
  Floats inner = splat(0.79788456f) * fma(splat(0.044715f) * x, x * x, x);
  return splat(0.5f) * x * (splat(1.0f) + tanh(inner));
}

}  // namespace

// Functions of sixteen numbers, on top of an instruction set's own. A NaN stays a NaN: `min` and
// `max` return their second operand where one of the two is none, so x is always the second.
#pragma once

namespace {

// e^x to two units in the last place: 2^n times a polynomial of what is left, |rest| <= ln(2) / 2.
inline Floats exp(Floats x) {
  // Beyond these it is zero and infinity; `scaled` rounds to them, and to denormals before.
  x = min(splat(89.0f), max(splat(-105.0f), x));
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

// log(1 + e^x) = max(x, 0) + log(1 + z) with z = e^-|x|; the logarithm is 2 artanh(z / (2 + z)):
// a series in (z / (2 + z))^2 <= 1/9, exact to float32 however small z is.
inline Floats softplus(Floats x) {
  Floats z = exp(splat(0.0f) - magnitude(x)), s = z / (splat(2.0f) + z), square = s * s;
  Floats y = splat(2.0f / 15.0f);
  y = fma(y, square, splat(2.0f / 13.0f));
  y = fma(y, square, splat(2.0f / 11.0f));
  y = fma(y, square, splat(2.0f / 9.0f));
  y = fma(y, square, splat(2.0f / 7.0f));
  y = fma(y, square, splat(2.0f / 5.0f));
  y = fma(y, square, splat(2.0f / 3.0f));
  y = fma(y, square, splat(2.0f));
  return fma(y, s, max(x, splat(0.0f)));
}

// x * sigmoid(y); with y = x that is SiLU. Zero from y = -89 on, as in torch: e^-y is infinite.
inline Floats times_sigmoid(Floats x, Floats y) {
  return x / (splat(1.0f) + exp(splat(0.0f) - y));
}

inline Floats sigmoid(Floats x) { return times_sigmoid(splat(1.0f), x); }

inline Floats silu(Floats x) { return times_sigmoid(x, x); }

// The usual approximation x/2 (1 + tanh(z)), z = sqrt(2/pi) (x + 0.044715 x^3); and as a sigmoid
// it is x sigmoid(2 z), which loses nothing to cancellation.
inline Floats gelu_tanh(Floats x) {
  Floats z = splat(0.79788456f) * fma(splat(0.044715f) * x, x * x, x);
  return times_sigmoid(x, z + z);
}

inline Floats relu_squared(Floats x) {
  Floats positive = max(splat(0.0f), x);
  return positive * positive;
}

}  // namespace

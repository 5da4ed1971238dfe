// Activations and gates, rotary embedding and rows of a table: a number is read and written once.
#pragma once

namespace {

// As FUNCTIONS in ops/activation/native.py.
enum Function : int64_t { SILU, GELU_TANH, RELU_SQUARED, SIGMOID, IDENTITY };

// y [rows, size] = function(gate) * x + residual; rows of gate and x lie apart. Without x (null) it
// is function(gate) alone; a gate that is one number for a row has steps of 0.
template <typename T>
struct Gate {
  int64_t function;
  const T* gate;
  int64_t gate_stride, gate_step;
  const T* x;
  int64_t x_stride;
  const T* residual;  // or null
  int64_t rows, size;
  T* y;
  int64_t threads;
};

template <typename T, typename F>
void gate(const Gate<T>& it, F function) {
  each_row(it.rows, it.size, it.threads, [&](int64_t row) {
    const T *gate = it.gate + row * it.gate_stride, *x = it.x + row * it.x_stride;
    T* y = it.y + row * it.size;
    const Floats one = splat(wide(gate[0]));
    for (int64_t i = 0; i < it.size; i += LANES) {
      int64_t left = it.size - i;
      Floats own = function(it.gate_step ? load(gate + i, left) : one);
      if (it.x) own = own * load(x + i, left);
      if (it.residual) own = own + load(it.residual + row * it.size + i, left);
      store(y + i, own, left);
    }
  });
}

template <typename T>
void gate_of(const Gate<T>& it) {
  if (it.function == SILU) gate(it, [](Floats x) { return silu(x); });
  if (it.function == GELU_TANH) gate(it, [](Floats x) { return gelu_tanh(x); });
  if (it.function == RELU_SQUARED) gate(it, [](Floats x) { return relu_squared(x); });
  if (it.function == SIGMOID) gate(it, [](Floats x) { return sigmoid(x); });
  if (it.function == IDENTITY) gate(it, [](Floats x) { return x; });
}

// (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) of the first 2 * half channels of each head, in
// place. x [rows, heads, size], rows apart; tables [rows, 2 * half], rows apart: each half has its
// own cosines and sines, and the sines of the first half come negated.
template <typename T>
struct Rotate {
  T* x;
  int64_t x_stride, rows, heads, size, half;
  const void *cosines, *sines;
  int64_t table_is_float, table_stride, threads;
};

template <typename T, typename Table>
void rotate(const Rotate<T>& it) {
  each_row(it.rows, it.heads * it.half, it.threads, [&](int64_t row) {
    const Table* cosine = (const Table*)it.cosines + row * it.table_stride;
    const Table* sine = (const Table*)it.sines + row * it.table_stride;
    for (int64_t head = 0; head < it.heads; ++head) {
      T *first = it.x + row * it.x_stride + head * it.size, *second = first + it.half;
      for (int64_t i = 0; i < it.half; i += LANES) {
        int64_t left = it.half - i, j = it.half + i;
        Floats a = load(first + i, left), b = load(second + i, left);
        store(first + i, fma(b, load(sine + i, left), a * load(cosine + i, left)), left);
        store(second + i, fma(a, load(sine + j, left), b * load(cosine + j, left)), left);
      }
    }
  });
}

// y [count, size] = table [.., size] at `rows`, times `scale`.
struct Lookup {
  const void* table;
  int64_t table_is_float, size;
  const int64_t* rows;
  int64_t count;
  double scale;
  void* y;
  int64_t y_is_float;
};

template <typename From, typename To>
void lookup(const Lookup& it) {
  const Floats scale = splat((float)it.scale);
  for (int64_t row = 0; row < it.count; ++row) {
    const From* from = (const From*)it.table + it.rows[row] * it.size;
    To* to = (To*)it.y + row * it.size;
    for (int64_t i = 0; i < it.size; i += LANES) {
      int64_t left = it.size - i;
      store(to + i, load(from + i, left) * scale, left);
    }
  }
}

template <typename T>
void lookup_of(const Lookup& it) {
  if (it.table_is_float && it.y_is_float) return lookup<float, float>(it);
  if (it.y_is_float) return lookup<T, float>(it);
  lookup<T, T>(it);
}

}  // namespace

KERNEL(gate_float32, Gate<float>) { gate_of(*it); }
KERNEL(gate_bfloat16, Gate<Bfloat16>) { gate_of(*it); }
KERNEL(rotate_float32, Rotate<float>) { rotate<float, float>(*it); }
KERNEL(rotate_bfloat16, Rotate<Bfloat16>) {
  it->table_is_float ? rotate<Bfloat16, float>(*it) : rotate<Bfloat16, Bfloat16>(*it);
}
KERNEL(lookup_float32, Lookup) { lookup<float, float>(*it); }
KERNEL(lookup_bfloat16, Lookup) { lookup_of<Bfloat16>(*it); }

// Depthwise causal convolution and SiLU, on states where they lie.
//
// A state: the last `taps` - 1 inputs [taps - 1, channels], oldest first. Row t of a segment reads
//
//   | state 0 .. taps - 2 | x 0 .. x t |     the last `taps` of these
#pragma once

namespace {

template <typename T>
struct Taps {
  const T* weight;  // [taps, channels]
  const T* bias;    // [channels] or null
  int64_t taps, channels;
  int64_t silu;  // 1: the sums pass SiLU.
  int64_t threads;
};

// Channels [c, c + left), at most sixteen; the input of a tap starts at input(tap).
template <typename T, typename Input>
inline __attribute__((always_inline)) Floats convolved(const Taps<T>& by, int64_t c, int64_t left,
                                                       Input input) {
  Floats sum = by.bias ? load(by.bias + c, left) : splat(0.0f);
  for (int64_t tap = 0; tap < by.taps; ++tap)
    sum = fma(load(input(tap) + c, left), load(by.weight + tap * by.channels + c, left), sum);
  return by.silu ? silu(sum) : sum;
}

// One token of every sequence.
template <typename T>
struct ConvStep {
  Taps<T> by;
  const T* x;  // [seqs, channels]
  int64_t x_stride;
  T* pool;
  int64_t unit_stride;
  const int64_t* units;  // [seqs]
  int64_t seqs;
  T* y;  // [seqs, channels]
};

template <typename T>
void conv_step(const ConvStep<T>& it) {
  int64_t channels = it.by.channels, kept = it.by.taps - 1;
  each_row(it.seqs, channels, it.by.threads, [&](int64_t seq) {
    const T* x = it.x + seq * it.x_stride;
    T* state = it.pool + it.units[seq] * it.unit_stride;
    auto input = [&](int64_t tap) { return tap < kept ? state + tap * channels : x; };
    for (int64_t c = 0; c < channels; c += LANES) {
      int64_t left = channels - c;
      Floats y = convolved(it.by, c, left, input);
      // The oldest input goes: each place takes the next one's, the last takes x.
      for (int64_t tap = 0; tap < kept; ++tap)
        store(state + tap * channels + c, load(input(tap + 1) + c, left), left);
      store(it.y + seq * channels + c, y, left);
    }
  });
}

// All tokens of one segment; its state is left as it is.
template <typename T>
struct ConvSegment {
  Taps<T> by;
  const T* x;  // [rows, channels]
  int64_t x_stride, rows;
  const T* state;
  T* y;  // [rows, channels]
};

template <typename T>
void conv_segment(const ConvSegment<T>& it) {
  int64_t channels = it.by.channels, kept = it.by.taps - 1;
  each_row(it.rows, channels, it.by.threads, [&](int64_t row) {
    auto input = [&](int64_t tap) {
      int64_t from = row - kept + tap;
      return from < 0 ? it.state + (from + kept) * channels : it.x + from * it.x_stride;
    };
    for (int64_t c = 0; c < channels; c += LANES) {
      int64_t left = channels - c;
      store(it.y + row * channels + c, convolved(it.by, c, left, input), left);
    }
  });
}

// The state after `rows` tokens of a segment, written to another place or over the segment's own.
template <typename T>
struct ConvState {
  const T* x;
  int64_t x_stride, rows;
  const T* state;
  int64_t kept, channels;
  T* to;
};

template <typename T>
void conv_state(const ConvState<T>& it) {
  // Oldest first: what is read lies at or after the place that is written.
  for (int64_t place = 0; place < it.kept; ++place) {
    int64_t from = it.rows - it.kept + place;
    const T* input =
        from < 0 ? it.state + (from + it.kept) * it.channels : it.x + from * it.x_stride;
    memmove(it.to + place * it.channels, input, it.channels * sizeof(T));
  }
}

}  // namespace

KERNEL(conv_step_float32, ConvStep<float>) { conv_step(*it); }
KERNEL(conv_step_bfloat16, ConvStep<Bfloat16>) { conv_step(*it); }
KERNEL(conv_segment_float32, ConvSegment<float>) { conv_segment(*it); }
KERNEL(conv_segment_bfloat16, ConvSegment<Bfloat16>) { conv_segment(*it); }
KERNEL(conv_state_float32, ConvState<float>) { conv_state(*it); }
KERNEL(conv_state_bfloat16, ConvState<Bfloat16>) { conv_state(*it); }

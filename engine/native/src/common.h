// Types of numbers, memory that is kept, and how a kernel is called.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

// A kernel takes one struct of eight-byte fields, as `struct.pack` in kernels.py writes them. All
// kernels have this one type, so that a list of calls can be kept and run again.
// Its size is exported beside it: a library of other sources than kernels.py must not be called.
#define EXPORTED __attribute__((visibility("default")))
#define KERNEL(name, Arguments)                                                    \
  extern "C" { EXPORTED int64_t tandem_##name##_bytes = sizeof(Arguments); }        \
  extern "C" EXPORTED void tandem_##name(const Arguments* it)

namespace {

struct Bfloat16 {
  uint16_t bits;
};

template <typename T>
struct Kind {};  // Chooses an overload by the type of a matrix's numbers.

constexpr int64_t LANES = 16;

template <int N>
struct Vectors {  // A number of vectors, as a type.
  static constexpr int COUNT = N;
};

inline float wide(float x) { return x; }
inline float wide(Bfloat16 x) {
  uint32_t bits = uint32_t{x.bits} << 16;
  float y;
  memcpy(&y, &bits, sizeof y);
  return y;
}

inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

// Asks for the cache lines of `count` numbers: rows are too far apart for the processor to guess.
template <typename T>
inline void ask_for(const T* from, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / int64_t{sizeof(T)}) __builtin_prefetch(from + i);
}

// Memory that grows and is kept: fresh memory costs a page fault for each 4 KiB.
struct Buffer {
  void* start = nullptr;
  int64_t bytes = 0;
  ~Buffer() { free(start); }
  template <typename T>
  T* of(int64_t count) {
    int64_t wanted = (count * int64_t{sizeof(T)} + 63) / 64 * 64;
    if (wanted > bytes) {
      free(start);
      bytes = wanted;
      start = aligned_alloc(64, bytes);
      if (!start) abort();
    }
    return (T*)start;
  }
};

}  // namespace

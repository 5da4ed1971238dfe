// Work on several threads, where there is enough of it for a second one.
#pragma once

namespace {

// Fewer numbers than these are done before another thread has woken up.
constexpr int64_t WORTH_THREADS = 64 * 1024;

// body(i) for i in [0, count).
template <typename F>
inline void each(int64_t count, int64_t threads, F body) {
  // An OpenMP region of one thread would cost a microsecond: more than a decode step's rows.
  if (threads == 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < count; ++i) body(i);
}

// body(row) for each of `rows` rows of `size` numbers.
template <typename F>
inline void each_row(int64_t rows, int64_t size, int64_t threads, F body) {
  each(rows, rows * size > WORTH_THREADS ? threads : 1, body);
}

}  // namespace

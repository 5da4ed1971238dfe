// Attention of one new token of each sequence over its pages, in one pass with a running softmax.
//
//   pages   [rows, kv_heads, block_size, dim], a sequence's by its row of the block tables
//   chunk   CHUNK positions of one kv head: scores of all its query heads, then their values
//
// The chunks begin where the sequence (or its window) does, so that a result depends on nothing
// but the sequence: not on its pages' places and size, nor on the batch, nor on the threads.
#pragma once

namespace {

constexpr int64_t CHUNK = 64;               // Positions; their scores are four vectors.

template <typename T>
constexpr int64_t IN_WORDS = 64 / sizeof(T);  // Numbers in sixteen words.

// All rows' K and V are written, then the first `decodes` rows attend.
template <typename T>
struct Attention {
  const T* q;  // [rows, heads, dim], rows and heads some numbers apart
  int64_t q_row, q_head;
  const T* k;  // [rows, kv_heads, dim], so too
  int64_t k_row, k_head;
  const T* v;  // null: K is V too
  int64_t v_row, v_head;
  T *k_pages, *v_pages;
  int64_t rows, decodes, heads, kv_heads, dim, block_size;
  const int64_t* slots;   // [rows, kv_heads], where K and V are written
  const int64_t* tables;  // [decodes, ...], rows of pages
  int64_t table_row;
  const int64_t* positions;  // [decodes], of the new token
  double scale;
  int64_t window;  // 0: all positions are read
  T* y;            // [rows, heads, dim]
  int64_t threads;
};

template <typename T>
void write(const Attention<T>& it, const T* from, int64_t row_step, int64_t head_step, T* pages) {
  for (int64_t row = 0; row < it.rows; ++row)
    for (int64_t head = 0; head < it.kv_heads; ++head)
      memcpy(pages + it.slots[row * it.kv_heads + head] * it.dim,
             from + row * row_step + head * head_step, it.dim * sizeof(T));
}

// Of what the last of `length` positions reads.
inline int64_t first_read(int64_t length, int64_t window) {
  return window && length > window ? length - window : 0;
}

// Where a position of a sequence lies in the pages.
template <typename Task>
inline int64_t place(const Task& it, const int64_t* table, int64_t kv_head, int64_t at) {
  int64_t page = table[at / it.block_size] * it.kv_heads + kv_head;
  return (page * it.block_size + at % it.block_size) * it.dim;
}

// q k^T of sixteen keys.
template <typename T>
inline Floats products(const T* q, const T* keys, const int64_t* places, int64_t dim) {
  Floats parts[LANES];
  for (auto& part : parts) part = splat(0.0f);
  int64_t i = 0;
  for (; i + IN_WORDS<T> <= dim; i += IN_WORDS<T>) {
    Words own = words(q + i);
#pragma GCC unroll 16
    for (int t = 0; t < LANES; ++t)
      parts[t] = dot(Kind<T>{}, parts[t], words(keys + places[t] + i), own);
  }
  if (i < dim) {
    Words own = words(q + i, dim - i);
#pragma GCC unroll 16
    for (int t = 0; t < LANES; ++t)
      parts[t] = dot(Kind<T>{}, parts[t], words(keys + places[t] + i, dim - i), own);
  }
  return sums(parts);
}

// The softmax of one query head over all chunks so far.
struct Running {
  float highest, total;
  float kept;  // What the sums so far are multiplied by, as the highest score has risen.
};

// Weights of `count` scores, perhaps in their place; of filled up ones too, which count nothing.
template <typename T>
inline void weigh(const float* scores, int64_t count, Running& head, T* weights) {
  Floats most = splat(head.highest), total = splat(0.0f);
  for (int64_t t = 0; t < count; t += LANES) most = max(most, load(scores + t));
  float highest_now = highest(most);
  for (int64_t t = 0; t < count; t += LANES) {
    Floats weight = exp(load(scores + t) - splat(highest_now));
    store(weights + t, weight);
    total = total + within(weight, 0, count - t, 0.0f);
  }
  head.kept = lowest_lane(exp(splat(head.highest - highest_now)));
  head.total = head.total * head.kept + sum(total);
  head.highest = highest_now;
}

// sums [HEADS, dim] = sums * kept + weights [HEADS, count] values; VECTORS vectors from number `i`.
template <typename T, int HEADS, int VECTORS>
inline void add_part(const T* values, const int64_t* places, int64_t count, const float* weights,
                     const Running* heads, float* sums, int64_t width, int64_t i, int64_t left) {
  Floats parts[HEADS][VECTORS];
  for (int h = 0; h < HEADS; ++h)
    for (int d = 0; d < VECTORS; ++d)
      parts[h][d] = load(sums + h * width + i + d * LANES) * splat(heads[h].kept);
  for (int64_t t = 0; t < count; ++t) {
    const T* row = values + places[t] + i;
    Floats value[VECTORS];
    for (int d = 0; d < VECTORS; ++d)
      value[d] = VECTORS > 1 ? load(row + d * LANES) : load(row, left);
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; ++h)
#pragma GCC unroll 4
      for (int d = 0; d < VECTORS; ++d)
        parts[h][d] = fma(splat(weights[h * CHUNK + t]), value[d], parts[h][d]);
  }
  for (int h = 0; h < HEADS; ++h)
    for (int d = 0; d < VECTORS; ++d) store(sums + h * width + i + d * LANES, parts[h][d]);
}

// `count` values of a chunk to the sums of `group` heads, as many as four at a time.
template <typename T, int HEADS = 4>
void add_values(const T* values, const int64_t* places, int64_t count, const float* weights,
                const Running* heads, int64_t group, float* sums, int64_t width, int64_t dim) {
  int64_t h = 0;
  for (; h + HEADS <= group; h += HEADS) {
    int64_t i = 0;
    auto add = [&](auto vectors) __attribute__((always_inline)) {
      add_part<T, HEADS, decltype(vectors)::COUNT>(values, places, count, weights + h * CHUNK,
                                                   heads + h, sums + h * width, width, i, dim - i);
    };
    for (; i + 4 * LANES <= dim; i += 4 * LANES) add(Vectors<4>{});
    for (; i < dim; i += LANES) add(Vectors<1>{});
  }
  if constexpr (HEADS > 1)
    if (h < group)
      add_values<T, HEADS - 1>(values, places, count, weights + h * CHUNK, heads + h, group - h,
                               sums + h * width, width, dim);
}

// One sequence's query heads that share a kv head.
template <typename T>
void attend(const Attention<T>& it, int64_t seq, int64_t kv_head) {
  static thread_local Buffer buffer;
  int64_t group = it.heads / it.kv_heads, width = (it.dim + LANES - 1) / LANES * LANES;
  float* sums = buffer.of<float>(group * (width + CHUNK + 3));
  float* weights = sums + group * width;
  Running* heads = (Running*)(weights + group * CHUNK);
  memset(sums, 0, group * width * sizeof(float));
  for (int64_t h = 0; h < group; ++h) heads[h] = {-INFINITY, 0.0f, 0.0f};
  const T* q = it.q + seq * it.q_row + kv_head * group * it.q_head;
  const int64_t* table = it.tables + seq * it.table_row;
  int64_t end = it.positions[seq] + 1;
  for (int64_t start = first_read(end, it.window); start < end; start += CHUNK) {
    int64_t count = end - start < CHUNK ? end - start : CHUNK;
    // Sixteen keys at a time: where fewer are left the last one again, which raises no maximum.
    int64_t places[CHUNK];
    for (int64_t t = 0; t < (count + LANES - 1) / LANES * LANES; ++t) {
      places[t] = place(it, table, kv_head, start + (t < count ? t : count - 1));
    }
    for (int64_t h = 0; h < group; ++h) {
      float* own = weights + h * CHUNK;
      for (int64_t t = 0; t < count; t += LANES)
        store(own + t, products(q + h * it.q_head, it.k_pages, places + t, it.dim) *
                           splat((float)it.scale));
      weigh(own, count, heads[h], own);
    }
    add_values<T>(it.v_pages, places, count, weights, heads, group, sums, width, it.dim);
  }
  T* y = it.y + (seq * it.heads + kv_head * group) * it.dim;
  for (int64_t h = 0; h < group; ++h)
    for (int64_t i = 0; i < it.dim; i += LANES)
      store(y + h * it.dim + i, load(sums + h * width + i) / splat(heads[h].total), it.dim - i);
}

template <typename T>
void attention(const Attention<T>& it) {
  write(it, it.k, it.k_row, it.k_head, it.k_pages);
  if (it.v) write(it, it.v, it.v_row, it.v_head, it.v_pages);
  int64_t positions = 0;
  for (int64_t seq = 0; seq < it.decodes; ++seq) {
    int64_t length = it.positions[seq] + 1;
    positions += length - first_read(length, it.window);
  }
  bool pays = it.threads > 1 && positions * it.kv_heads * it.dim > WORTH_THREADS;
  // Lengths differ: a thread that is done takes the next.
#pragma omp parallel for num_threads(it.threads) if (pays) schedule(dynamic)
  for (int64_t item = 0; item < it.decodes * it.kv_heads; ++item)
    attend(it, item / it.kv_heads, item % it.kv_heads);
}

}  // namespace

KERNEL(attention_float32, Attention<float>) { attention(*it); }
KERNEL(attention_bfloat16, Attention<Bfloat16>) { attention(*it); }

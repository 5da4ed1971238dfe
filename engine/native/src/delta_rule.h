// The gated delta rule: S = decay S, then S += k delta^T with delta = beta (v - k S); o = q S.
//
// A state is float [heads, dk, dv]. A decode step is bound by memory and reads it once: what the
// second pass changes is in the cache from the first, and o = (q decay) S + (q . k) delta needs no
// third. A segment is bound by arithmetic, and moves tiles of a state, which stay in the cache, by
// RANK tokens at a time. With `all_j` the decays of the group's tokens up to j, and `rest_lj` those
// after l up to j:
//
//   first pass   seen_j = (k_j all_j) S        kept_j = (q_j all_j) S
//   a triangle   delta_j = beta_j (v_j - seen_j - sum over l < j of (k_j . k_l rest_lj) delta_l)
//                o_j = kept_j + sum over l <= j of (q_j . k_l rest_lj) delta_l
//   second pass  S = all S + sum over l of (k_l rest_l) delta_l^T
//
// That is 3 operations for each number and token, and one for each number and group, beside the
// recurrence's 4 with a store for each token. Decays are multiplied and never divided, so that no
// factor is above one, however strong they are. The triangle is the same for all columns of S.
#pragma once

namespace {

constexpr float NORM_EPS = 1e-6f;  // Under the root of a query's or key's length, as in naive.py.
constexpr int64_t RANK = 4;  // Tokens by which a segment's state moves at a time.
constexpr int64_t TURN = 8;  // Groups of RANK by which one tile moves before the next one does.
constexpr int64_t TILE = 2 * LANES;  // Columns of a state: with dk = 128 half of the first cache.

template <typename T>
struct DeltaRule {
  const T* q;  // [rows, key_heads, dk]; here and below rows are a stride apart
  int64_t q_stride;
  const T* k;
  int64_t k_stride;
  const T* v;  // [rows, heads, dv]
  int64_t v_stride;
  const T* a;  // [rows, heads * decays]: before softplus
  int64_t a_stride;
  const T* b;  // [rows, heads]: before the sigmoid
  int64_t b_stride;
  int64_t key_heads, heads, dk, dv;
  int64_t decays;        // Of a head: 1 or dk.
  const float* rate;     // [heads], negative
  const float* dt_bias;  // [heads * decays]
  double beta_scale;
  float* o;  // [rows, heads, dv], without gaps
  int64_t threads;

  const T* query(int64_t row, int64_t head) const {
    return q + row * q_stride + head / (heads / key_heads) * dk;
  }
  const T* key(int64_t row, int64_t head) const {
    return k + row * k_stride + head / (heads / key_heads) * dk;
  }
  const T* value(int64_t row, int64_t head) const { return v + row * v_stride + head * dv; }

  // Of rows [i, i + LANES) of a head's state; of all rows with i = 0 where decays are by head.
  Floats decay(int64_t row, int64_t head, int64_t i) const {
    const T* from = a + row * a_stride + head * decays + i;
    const float* bias = dt_bias + head * decays + i;
    Floats step = decays == 1 ? splat(wide(*from) + *bias)
                              : load(from, decays - i) + load(bias, decays - i);
    return exp(softplus(step) * splat(rate[head]));
  }
  float beta(int64_t row, int64_t head) const {
    return float(beta_scale) / (1.0f + expf(-wide(b[row * b_stride + head])));
  }
};

// One token of every sequence.
template <typename T>
struct DeltaStep {
  DeltaRule<T> of;
  float* pool;
  int64_t unit_stride;
  const int64_t* units;  // [seqs]
  int64_t seqs;
};

// What a head's rows of the state are multiplied by, [dk] each.
struct DeltaRows {
  const float *decay, *key, *seen, *kept;  // `seen` is key * decay, `kept` query * decay.
};

// Columns [0, COUNT * 16) of a state whose rows are dv apart, or `left` columns with COUNT = 1.
template <int COUNT, typename T, typename... Left>
inline __attribute__((always_inline)) void move_columns(float* state, int64_t dk, int64_t dv,
                                                        const DeltaRows& by, const T* v, float beta,
                                                        float overlap, float* o, Left... left) {
  Floats seen[COUNT], kept[COUNT], delta[COUNT];
  for (int j = 0; j < COUNT; ++j) seen[j] = kept[j] = splat(0.0f);
  for (int64_t i = 0; i < dk; ++i) {
    Floats to_seen = splat(by.seen[i]), to_kept = splat(by.kept[i]);
#pragma GCC unroll 8
    for (int j = 0; j < COUNT; ++j) {
      Floats row = load(state + i * dv + j * LANES, left...);
      seen[j] = fma(row, to_seen, seen[j]);
      kept[j] = fma(row, to_kept, kept[j]);
    }
  }
  for (int j = 0; j < COUNT; ++j) {
    delta[j] = (load(v + j * LANES, left...) - seen[j]) * splat(beta);
    store(o + j * LANES, fma(delta[j], splat(overlap), kept[j]), left...);
  }
  for (int64_t i = 0; i < dk; ++i) {
    Floats decay = splat(by.decay[i]), key = splat(by.key[i]);
#pragma GCC unroll 8
    for (int j = 0; j < COUNT; ++j) {
      float* at = state + i * dv + j * LANES;
      store(at, fma(load(at, left...), decay, delta[j] * key), left...);
    }
  }
}

template <typename T>
void delta_step(const DeltaStep<T>& it) {
  const DeltaRule<T>& of = it.of;
  int64_t dk = of.dk, dv = of.dv, padded = (dk + LANES - 1) / LANES * LANES;
  each_row(it.seqs * of.heads, dk * dv, of.threads, [&](int64_t item) {
    static thread_local Buffer buffer;
    float* decay = buffer.of<float>(4 * padded);
    float *key = decay + padded, *seen = key + padded, *kept = seen + padded;
    int64_t seq = item / of.heads, head = item % of.heads;
    const T *q = of.query(seq, head), *k = of.key(seq, head);
    Floats same = splat(0.0f);
    if (of.decays == 1) same = of.decay(seq, head, 0);
    Floats q_square = splat(0.0f), k_square = q_square, product = q_square;
    for (int64_t i = 0; i < dk; i += LANES) {
      int64_t left = dk - i;
      Floats query = load(q + i, left), own = load(k + i, left);
      q_square = fma(query, query, q_square);
      k_square = fma(own, own, k_square);
      product = fma(query, own, product);
      store(decay + i, of.decays == 1 ? same : of.decay(seq, head, i));
    }
    float q_scale = 1.0f / sqrtf((sum(q_square) + NORM_EPS) * dk);
    float k_scale = 1.0f / sqrtf(sum(k_square) + NORM_EPS);
    for (int64_t i = 0; i < dk; i += LANES) {
      Floats here = load(decay + i), own = load(k + i, dk - i) * splat(k_scale);
      store(key + i, own);
      store(seen + i, own * here);
      store(kept + i, load(q + i, dk - i) * splat(q_scale) * here);
    }
    float overlap = sum(product) * q_scale * k_scale, beta = of.beta(seq, head);
    float* state = it.pool + it.units[seq] * it.unit_stride + head * dk * dv;
    const T* v = of.value(seq, head);
    float* o = of.o + item * dv;
    DeltaRows by{decay, key, seen, kept};
    int64_t j = 0;
    for (; j + 8 * LANES <= dv; j += 8 * LANES)
      move_columns<8>(state + j, dk, dv, by, v + j, beta, overlap, o + j);
    for (; j + LANES <= dv; j += LANES)
      move_columns<1>(state + j, dk, dv, by, v + j, beta, overlap, o + j);
    if (j < dv) move_columns<1>(state + j, dk, dv, by, v + j, beta, overlap, o + j, dv - j);
  });
}

// All tokens of a segment, or of a part of one.
template <typename T>
struct DeltaSegment {
  DeltaRule<T> of;
  int64_t rows;
  const float* from;  // The state before them, and where the one after them goes: perhaps the same.
  float* to;
};

// A group of up to RANK tokens of one head. Tokens that it lacks are like its last one, but they
// decay and write nothing.
struct DeltaGroup {
  int64_t row, count;
  const float *decays, *betas;       // [RANK], the former by head
  const float *seen, *kept, *write;  // [RANK, height]: k_j all_j, q_j all_j and k_j rest_j
  const float* decay;                // [height]: of all tokens
  float by_key[RANK][RANK];          // k_j . k_l rest_lj with l < j
  float by_query[RANK][RANK];        // q_j . k_l rest_lj with l <= j

  int64_t row_of(int64_t j) const { return row + (j < count ? j : count - 1); }
};

// Decays by head and betas of `count` tokens from `row` on, at most TURN * RANK.
template <typename T>
void token_rates(const DeltaRule<T>& of, int64_t head, int64_t row, int64_t count, float* decays,
                 float* betas) {
  for (int64_t t = 0; t < count; ++t) {
    decays[t] = wide(of.a[(row + t) * of.a_stride + head * of.decays]);
    betas[t] = wide(of.b[(row + t) * of.b_stride + head]);
  }
  for (int64_t t = 0; t < count; t += LANES) {
    Floats step = softplus(load(decays + t, count - t) + splat(of.dt_bias[head * of.decays]));
    store(decays + t, exp(step * splat(of.rate[head])));
    store(betas + t, sigmoid(load(betas + t, count - t)) * splat(float(of.beta_scale)));
  }
  for (int64_t t = count; t % RANK; ++t) decays[t] = 1.0f, betas[t] = 0.0f;  // Lacking ones.
}

// One over the lengths of a group's keys and, with the root of dk, of its queries.
template <typename T>
inline void unit_scales(const DeltaRule<T>& of, const T* const (&k)[RANK],
                        const T* const (&q)[RANK], float (&scales)[LANES]) {
  Floats squares[LANES];
#pragma GCC unroll 16
  for (Floats& one : squares) one = splat(0.0f);
  for (int64_t i = 0; i < of.dk; i += LANES) {
#pragma GCC unroll 4
    for (int j = 0; j < RANK; ++j) {
      Floats key = load(k[j] + i, of.dk - i), query = load(q[j] + i, of.dk - i);
      squares[j] = fma(key, key, squares[j]);
      squares[RANK + j] = fma(query, query, squares[RANK + j]);
    }
  }
  store(scales, splat(1.0f) / root(sums(squares) + splat(NORM_EPS)));
  for (int64_t j = 0; j < RANK; ++j) scales[RANK + j] /= sqrtf(of.dk);
}

// Fills a group whose row and count are known; its vectors go to `memory`, 13 of `height` floats.
template <typename T>
void prepare(const DeltaRule<T>& of, int64_t head, int64_t height, float* memory,
             DeltaGroup& group) {
  float *seen = memory, *kept = seen + RANK * height, *write = kept + RANK * height;
  float* decay = write + RANK * height;
  group.seen = seen, group.kept = kept, group.write = write, group.decay = decay;
  const T *k[RANK], *q[RANK];
  for (int64_t j = 0; j < RANK; ++j)
    k[j] = of.key(group.row_of(j), head), q[j] = of.query(group.row_of(j), head);
  float scales[LANES];
  unit_scales(of, k, q, scales);
  // Of token j with each one before it, by key, and up to it, by query: 1 + 3 + 5 + 7 = LANES.
  Floats products[LANES];
#pragma GCC unroll 16
  for (Floats& one : products) one = splat(0.0f);
  for (int64_t i = 0; i < of.dk; i += LANES) {
    int64_t left = of.dk - i;
    Floats writes[RANK], all = splat(1.0f);
    int pair = 0;
#pragma GCC unroll 4
    for (int j = 0; j < RANK; ++j) {
      Floats here = splat(group.decays[j]);
      if (of.decays > 1 && j < group.count) here = of.decay(group.row + j, head, i);
      Floats key = load(k[j] + i, left) * splat(scales[j]);
      Floats query = load(q[j] + i, left) * splat(scales[RANK + j]);
      all = all * here;
      store(seen + j * height + i, key * all);
      store(kept + j * height + i, query * all);
#pragma GCC unroll 4
      for (int l = 0; l < j; ++l) {
        writes[l] = writes[l] * here;
        products[pair] = fma(key, writes[l], products[pair]), ++pair;
      }
      writes[j] = key;
#pragma GCC unroll 4
      for (int l = 0; l <= j; ++l)
        products[pair] = fma(query, writes[l], products[pair]), ++pair;
    }
#pragma GCC unroll 4
    for (int j = 0; j < RANK; ++j) store(write + j * height + i, writes[j]);
    store(decay + i, all);
  }
  float pairs[LANES];
  store(pairs, sums(products));
  const float* next = pairs;
  for (int64_t j = 0; j < RANK; ++j) {
    for (int64_t l = 0; l < j; ++l) group.by_key[j][l] = *next++;
    for (int64_t l = 0; l <= j; ++l) group.by_query[j][l] = *next++;
  }
}

// A tile [dk, TILE] of a head's state, columns from `column` on, through a group of tokens.
template <typename T>
inline void move_tile(float* tile, const DeltaRule<T>& of, int64_t head, int64_t column,
                      int64_t height, const DeltaGroup& group) {
  for (int64_t j = 0; j < RANK; ++j)
    ask_for(of.value(group.row_of(j), head) + column, min(of.dv - column, TILE));
  Floats seen[RANK][2], kept[RANK][2];
#pragma GCC unroll 4
  for (int j = 0; j < RANK; ++j)
    seen[j][0] = seen[j][1] = kept[j][0] = kept[j][1] = splat(0.0f);
  for (int64_t i = 0; i < of.dk; ++i) {
    Floats here[2] = {load(tile + i * TILE), load(tile + i * TILE + LANES)};
#pragma GCC unroll 4
    for (int j = 0; j < RANK; ++j) {
      Floats key = splat(group.seen[j * height + i]), query = splat(group.kept[j * height + i]);
#pragma GCC unroll 2
      for (int c = 0; c < 2; ++c) {
        seen[j][c] = fma(here[c], key, seen[j][c]);
        kept[j][c] = fma(here[c], query, kept[j][c]);
      }
    }
  }
  Floats delta[RANK][2];
#pragma GCC unroll 2
  for (int c = 0; c < 2; ++c) {
    int64_t first = column + c * LANES, left = of.dv > first ? of.dv - first : 0;
#pragma GCC unroll 4
    for (int j = 0; j < RANK; ++j) {
      Floats other = seen[j][c], o = kept[j][c];
#pragma GCC unroll 4
      for (int l = 0; l < j; ++l) {
        other = fma(splat(group.by_key[j][l]), delta[l][c], other);
        o = fma(splat(group.by_query[j][l]), delta[l][c], o);
      }
      const T* v = of.value(group.row_of(j), head) + first;
      delta[j][c] = (load(v, left) - other) * splat(group.betas[j]);
      o = fma(splat(group.by_query[j][j]), delta[j][c], o);
      float* to = of.o + (group.row_of(j) * of.heads + head) * of.dv + first;
      if (j < group.count) store(to, o, left);
    }
  }
  for (int64_t i = 0; i < of.dk; ++i) {
    float* at = tile + i * TILE;
    Floats decay = splat(group.decay[i]), first = load(at) * decay, then = load(at + LANES) * decay;
#pragma GCC unroll 4
    for (int j = 0; j < RANK; ++j) {
      Floats write = splat(group.write[j * height + i]);
      first = fma(write, delta[j][0], first);
      then = fma(write, delta[j][1], then);
    }
    store(at, first);
    store(at + LANES, then);
  }
}

// body(tile [dk, TILE], row of the state, numbers of it) for each row of each tile of a state.
template <typename F>
inline void each_tile_row(float* tiles, int64_t dk, int64_t dv, F body) {
  for (int64_t column = 0; column < dv; column += TILE)
    for (int64_t i = 0; i < dk; ++i)
      for (int64_t c = 0; c < TILE && column + c < dv; c += LANES)
        body(tiles + column * dk + i * TILE + c, i * dv + column + c, dv - column - c);
}

template <typename T>
void delta_segment(const DeltaSegment<T>& it) {
  const DeltaRule<T>& of = it.of;
  int64_t dk = of.dk, dv = of.dv, height = (dk + LANES - 1) / LANES * LANES;
  int64_t width = (dv + TILE - 1) / TILE * TILE, memory = (3 * RANK + 1) * height;
  each(of.heads, of.threads, [&](int64_t head) {
    static thread_local Buffer buffer;
    float* tiles = buffer.of<float>(dk * width + TURN * memory);
    float* vectors = tiles + dk * width;
    const float* from = it.from + head * dk * dv;
    float* to = it.to + head * dk * dv;
    memset(tiles, 0, dk * width * sizeof(float));
    each_tile_row(tiles, dk, dv, [&](float* tile, int64_t at, int64_t left) {
      store(tile, load(from + at, left));
    });
    for (int64_t row = 0; row < it.rows; row += TURN * RANK) {
      DeltaGroup groups[TURN];
      float decays[TURN * RANK], betas[TURN * RANK];
      int64_t rows = min(it.rows - row, TURN * RANK), count = 0;
      token_rates(of, head, row, rows, decays, betas);
      for (int64_t t = 0; t < rows; t += RANK, ++count) {
        DeltaGroup& group = groups[count];
        group.row = row + t, group.count = min(rows - t, RANK);
        group.decays = decays + t, group.betas = betas + t;
        int64_t next = group.row + RANK;
        for (int64_t one = next; one < min(next + RANK, it.rows); ++one)
          ask_for(of.key(one, head), dk), ask_for(of.query(one, head), dk);
        prepare(of, head, height, vectors + count * memory, group);
      }
      for (int64_t column = 0; column < dv; column += TILE)
        for (int64_t g = 0; g < count; ++g)
          move_tile(tiles + column * dk, of, head, column, height, groups[g]);
    }
    each_tile_row(tiles, dk, dv, [&](float* tile, int64_t at, int64_t left) {
      store(to + at, load(tile), left);
    });
  });
}

}  // namespace

KERNEL(delta_step_float32, DeltaStep<float>) { delta_step(*it); }
KERNEL(delta_step_bfloat16, DeltaStep<Bfloat16>) { delta_step(*it); }
KERNEL(delta_segment_float32, DeltaSegment<float>) { delta_segment(*it); }
KERNEL(delta_segment_bfloat16, DeltaSegment<Bfloat16>) { delta_segment(*it); }

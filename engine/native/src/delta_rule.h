// The gated delta rule: S = decay S, then S += k delta^T with delta = beta (v - k S); o = q S.
//
// A state is float [heads, dk, dv] and is read from memory once: what the second pass changes is in
// the cache from the first, and o = (q decay) S + (q . k) delta needs no third.
#pragma once

namespace {

constexpr float NORM_EPS = 1e-6f;  // Under the root of a query's or key's length, as in naive.py.

// One token of every sequence. Of q, k, v, a and b the sequences' rows are a stride apart.
template <typename T>
struct DeltaStep {
  const T* q;  // [seqs, key_heads, dk]
  int64_t q_stride;
  const T* k;
  int64_t k_stride;
  const T* v;  // [seqs, heads, dv]
  int64_t v_stride;
  const T* a;  // [seqs, heads * decays]: before softplus
  int64_t a_stride;
  const T* b;  // [seqs, heads]: before the sigmoid
  int64_t b_stride;
  int64_t key_heads, heads, dk, dv;
  int64_t decays;        // Of a head: 1 or dk.
  const float* rate;     // [heads], negative
  const float* dt_bias;  // [heads * decays]
  double beta_scale;
  float* pool;
  int64_t unit_stride;
  const int64_t* units;  // [seqs]
  int64_t seqs;
  float* o;  // [seqs, heads, dv]
  int64_t threads;
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
  int64_t dk = it.dk, dv = it.dv, padded = (dk + LANES - 1) / LANES * LANES;
  bool worth = it.threads > 1 && it.seqs * it.heads * dk * dv > 1 << 16;
#pragma omp parallel for num_threads(it.threads) if (worth) schedule(static)
  for (int64_t item = 0; item < it.seqs * it.heads; ++item) {
    static thread_local Buffer buffer;
    float* decay = buffer.of<float>(4 * padded);
    float *key = decay + padded, *seen = key + padded, *kept = seen + padded;
    int64_t seq = item / it.heads, head = item % it.heads;
    int64_t key_head = head / (it.heads / it.key_heads);
    const T* q = it.q + seq * it.q_stride + key_head * dk;
    const T* k = it.k + seq * it.k_stride + key_head * dk;
    const T* a = it.a + seq * it.a_stride + head * it.decays;
    const float* dt_bias = it.dt_bias + head * it.decays;
    Floats rate = splat(it.rate[head]);
    auto decay_of = [&](Floats from, Floats bias) { return exp(softplus(from + bias) * rate); };
    Floats same = splat(0.0f);
    if (it.decays == 1) same = decay_of(splat(wide(*a)), splat(*dt_bias));
    Floats q_square = splat(0.0f), k_square = q_square, product = q_square;
    for (int64_t i = 0; i < dk; i += LANES) {
      int64_t left = dk - i;
      Floats query = load(q + i, left), own = load(k + i, left);
      q_square = fma(query, query, q_square);
      k_square = fma(own, own, k_square);
      product = fma(query, own, product);
      Floats here = same;
      if (it.decays > 1) here = decay_of(load(a + i, left), load(dt_bias + i, left));
      store(decay + i, here);
    }
    float q_scale = 1.0f / sqrtf((sum(q_square) + NORM_EPS) * dk);
    float k_scale = 1.0f / sqrtf(sum(k_square) + NORM_EPS);
    for (int64_t i = 0; i < dk; i += LANES) {
      Floats here = load(decay + i), own = load(k + i, dk - i) * splat(k_scale);
      store(key + i, own);
      store(seen + i, own * here);
      store(kept + i, load(q + i, dk - i) * splat(q_scale) * here);
    }
    float overlap = sum(product) * q_scale * k_scale;
    float logit = wide(it.b[seq * it.b_stride + head]);
    float beta = float(it.beta_scale) / (1.0f + expf(-logit));
    float* state = it.pool + it.units[seq] * it.unit_stride + head * dk * dv;
    const T* v = it.v + seq * it.v_stride + head * dv;
    float* o = it.o + item * dv;
    DeltaRows by{decay, key, seen, kept};
    int64_t j = 0;
    for (; j + 8 * LANES <= dv; j += 8 * LANES)
      move_columns<8>(state + j, dk, dv, by, v + j, beta, overlap, o + j);
    for (; j + LANES <= dv; j += LANES)
      move_columns<1>(state + j, dk, dv, by, v + j, beta, overlap, o + j);
    if (j < dv) move_columns<1>(state + j, dk, dv, by, v + j, beta, overlap, o + j, dv - j);
  }
}

}  // namespace

KERNEL(delta_step_float32, DeltaStep<float>) { delta_step(*it); }
KERNEL(delta_step_bfloat16, DeltaStep<Bfloat16>) { delta_step(*it); }

// One token of every sequence through a recurrent layer; states move on where they lie.
//
// `units` [seqs]: the places of the states in a pool, `unit_stride` numbers apart.
#pragma once

namespace {

// Depthwise causal convolution. x, y [seqs, channels]; a state is the last `taps` - 1 inputs
// [taps - 1, channels]; weight float [taps, channels], bias float [channels] or null.
template <typename T>
void conv_step(const T* x, long x_stride, T* pool, long unit_stride, const int64_t* units,
               long seqs, long channels, long taps, const float* weight, const float* bias,
               long with_silu, T* y, long threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (long seq = 0; seq < seqs; ++seq) {
    T* state = pool + units[seq] * unit_stride;
    for (long c = 0; c < channels; c += LANES) {
      long left = channels - c;
      Floats sum = bias ? load(bias + c, left) : splat(0.0f);
      for (long tap = 0; tap + 1 < taps; ++tap) {
        T* at = state + tap * channels + c;
        sum = fma(load(at, left), load(weight + tap * channels + c, left), sum);
        // The oldest input goes: each place takes the next one, and the last takes x.
        if (tap) store(at - channels, load(at, left), left);
      }
      Floats now = load(x + seq * x_stride + c, left);
      sum = fma(now, load(weight + (taps - 1) * channels + c, left), sum);
      if (taps > 1) store(state + (taps - 2) * channels + c, now, left);
      store(y + seq * channels + c, with_silu ? silu(sum) : sum, left);
    }
  }
}

// State space duality: h = exp(dt a) h + dt x b^T, y = h c + d x.
//
// x [seqs, heads, dim], dt [seqs, heads], b and c [seqs, groups, size], a state [heads, dim, size];
// y float [seqs, heads, dim].
template <typename T>
void ssd_step(const T* x, long x_stride, const float* dt, long dt_stride, const float* a,
              const T* b, const T* c, long bc_stride, float* pool, long unit_stride,
              const int64_t* units, long seqs, long heads, long dim, long groups, long size,
              float* y, long threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (long item = 0; item < seqs * heads; ++item) {
    long seq = item / heads, head = item % heads, group = head / (heads / groups);
    const T* from_b = b + seq * bc_stride + group * size;
    const T* from_c = c + seq * bc_stride + group * size;
    float step = dt[seq * dt_stride + head];
    Floats decay = splat(std::exp(step * a[head]));
    float* state = pool + units[seq] * unit_stride + head * dim * size;
    for (long p = 0; p < dim; ++p) {
      float* row = state + p * size;
      Floats push = splat(step * wide(x[seq * x_stride + head * dim + p])), read = splat(0.0f);
      for (long n = 0; n < size; n += LANES) {
        long left = size - n;
        Floats h = fma(load(row + n, left), decay, push * load(from_b + n, left));
        store(row + n, h, left);
        read = fma(h, load(from_c + n, left), read);
      }
      y[item * dim + p] = sum(read);
    }
  }
}

// The gated delta rule: S = decay S, then S += k delta^T with delta = beta (v - k S); o = q S.
//
// q, k [seqs, key_heads, dk], normed here; v [seqs, heads, dv]; the logarithm g of the decay is
// [seqs, heads], or [seqs, heads, dk] where `by_channel`; beta [seqs, heads]. A state is
// [heads, dk, dv]; o float [seqs, heads, dv]. The state is read from memory once: what the second
// pass changes is in the cache from the first, and o = (q decay) S + (q . k) delta needs no third.
template <typename T>
void delta_step(const T* q, const T* k, const T* v, long qkv_stride, const float* g,
                const float* beta, bool by_channel, float eps, float* pool, long unit_stride,
                const int64_t* units, long seqs, long key_heads, long heads, long dk, long dv,
                float* o, long threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (long item = 0; item < seqs * heads; ++item) {
    static thread_local Buffer buffer;
    long seq = item / heads, head = item % heads, key_head = head / (heads / key_heads);
    float* state = pool + units[seq] * unit_stride + head * dk * dv;
    float* key = (float*)buffer.of(3 * dk + 2 * (dv + LANES));
    float *query = key + dk, *decay = query + dk, *delta = decay + dk, *read = delta + dv + LANES;
    const T* from_q = q + seq * qkv_stride + key_head * dk;
    const T* from_k = k + seq * qkv_stride + key_head * dk;
    float q_norm = eps, k_norm = eps, overlap = 0.0f;
    for (long i = 0; i < dk; ++i) {
      query[i] = wide(from_q[i]), key[i] = wide(from_k[i]);
      q_norm += query[i] * query[i], k_norm += key[i] * key[i], overlap += query[i] * key[i];
      decay[i] = std::exp(by_channel ? g[item * dk + i] : g[item]);
    }
    float q_scale = 1.0f / std::sqrt(q_norm * dk), k_scale = 1.0f / std::sqrt(k_norm);
    overlap *= q_scale * k_scale;
    for (long i = 0; i < dk; ++i) query[i] *= q_scale * decay[i], key[i] *= k_scale;
    for (long j = 0; j < dv; j += LANES) {
      long left = dv - j;
      Floats seen = splat(0.0f), kept = splat(0.0f);
      for (long i = 0; i < dk; ++i) {
        Floats row = load(state + i * dv + j, left);
        seen = fma(row, splat(key[i] * decay[i]), seen);
        kept = fma(row, splat(query[i]), kept);
      }
      Floats change = (load(v + seq * qkv_stride + head * dv + j, left) - seen) * splat(beta[item]);
      store(delta + j, change, left);
      store(o + item * dv + j, fma(change, splat(overlap), kept), left);
    }
    for (long i = 0; i < dk; ++i)
      for (long j = 0; j < dv; j += LANES) {
        long left = dv - j;
        float* at = state + i * dv + j;
        store(at, fma(load(at, left), splat(decay[i]), load(delta + j, left) * splat(key[i])), left);
      }
    (void)read;
  }
}

}  // namespace

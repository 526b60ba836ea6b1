// Merge attention over disjoint sets of keys into attention over their union.
//
// What       lse = log sum_p exp(lse_p); out = sum_p exp(lse_p - lse) out_p, with sinks added to the denominator of `out` only.
// Layout     outs [parts, rows, heads, head_dim], lses [parts, rows, heads] float32, by strides; out, lse contiguous.
// Threads    A warp is one (row, head); its lanes stride over head_dim, parts are added in index order. With head_dim 128 lane 5
//            has entries 5, 37, 69 and 101; 10 rows of 32 heads are 320 warps, 80 blocks of 4. No shared memory.
// Not here   The merge of a decode's own partials: its last block does that.
#include "softmax_state.cuh"
#include "types.cuh"

struct Params {
  const kQueryType* outs;
  const float* lses;
  const float* sinks;                              // [heads] or null
  kQueryType* out;                                 // [rows, heads, head_dim]
  float* lse;                                      // [rows, heads]
  long long out_part, out_row, out_head, out_dim;  // strides in elements
  long long lse_part, lse_row, lse_head;
  long long num_states;  // rows * heads
  int parts, heads, head_dim, padding;
};
static_assert(sizeof(Params) == kParamsBytes, "the host packs another struct");

extern "C" __global__ void merge(const Params p) {
  const long long index = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (index >= p.num_states) return;
  const long long row = index / p.heads;
  const int head = int(index - row * p.heads), lane = threadIdx.x % 32;
  const float* lses = p.lses + row * p.lse_row + head * p.lse_head;
  const kQueryType* outs = p.outs + row * p.out_row + head * p.out_head;

  SoftmaxState state = {negative_infinity(), 0.0f};
  for (int i = 0; i < p.parts; ++i) state.max = fmaxf(state.max, lses[i * p.lse_part]);
  const float base = anchor(state.max);
  for (int i = 0; i < p.parts; ++i) state.sum += exp_above(lses[i * p.lse_part], base);
  const float keep = p.sinks ? state.normalizer(p.sinks[head]) : state.normalizer();
  for (int d = lane; d < p.head_dim; d += 32) {
    float sum = 0.0f;
    for (int i = 0; i < p.parts; ++i) {
      const float weight = exp_above(lses[i * p.lse_part], base);
      if (weight > 0.0f) sum = fmaf(to_float(outs[i * p.out_part + d * p.out_dim]), weight, sum);
    }
    p.out[index * p.head_dim + d] = from_float<kQueryType>(sum * keep);
  }
  if (lane == 0) p.lse[index] = state.lse();
}

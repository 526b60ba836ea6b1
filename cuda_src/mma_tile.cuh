// One warp's attention of up to 8 * kRowTiles packed rows over one tile of kTokens keys in shared memory, on tensor cores.
//
// What       S^T = K Q^T, online softmax, O^T += V^T P^T. Keys are the M of mma.m16n8k16 and packed rows its N: 8 rows cost half of
//            what 16 cost, and a lane holds the same two rows of a row tile in S^T and in O^T, so rescaling needs no exchange.
// Lanes      Lane t, g = t / 4, c = t % 4. Keys g and g + 8 of each 16, rows 2c and 2c + 1 of each 8 (S^T, states and O^T): lane 6
//            has keys 1 and 9, rows 4 and 5.
//            O^T tile m holds entries 16 m + g and 16 m + g + 8 of head_dim for 16-bit pages, 16 m + 2 g and the next for fp8 (one
//            ldmatrix of 16-bit units brings a pair of codes).
// Shared     Tiles as in tile_copy.cuh. Sums are left as rows of head_dim + 4 floats: with head_dim 128 lane (g, c) stores at float
//            2 c * 132 + g, which is bank 8 c + g; with fp8 it is bank 8 c + 2 g, two lanes to a bank, once an item.
// Not here   Where tiles come from, and how warps share them: decode_mma.cu, prefill.cu.
#pragma once
#include "mma_operands.cuh"

constexpr int kGroups = kTokens / 16;  // of keys

// --------------------------------------------------------------------------------------------------------------- products

using Scores = float[kGroups][kRowTiles][4];
using Sums = float[kSteps][kRowTiles][4];

// What this lane's rows, 2c and 2c + 1 of each row tile, have seen so far. Where a logit is nothing but a score times a scale, it
// is left as the score: probabilities are 2^(score * scale - base), one multiply-add, which rounds once, where the scale would
// round by the size of the logit. Any base near the largest logit is right as long as all sums are over the same, so it may be
// rounded, but only where that moves it by little: beyond kMostRounded the largest score is subtracted first, and the base is 0.
constexpr bool kScoresAsLogits = !kSoftcap && !kAlibi;
constexpr float kMostRounded = 1 << 20;  // 2^-5 off at most
struct RowState {
  float scale[kRowTiles][2];  // of scores; with kScoresAsLogits to units of base 2
  float max[kRowTiles][2];    // of logits, or of the scores in their place; the same in all lanes of a row
  float sum[kRowTiles][2];    // of this lane's keys only
  float base[kRowTiles][2];   // of probabilities: the largest logit; 0 where it may not be rounded
  int exact;                  // whether there is no such base

  // The largest logit. A product on its own, not fused: it must be the same number wherever it is taken.
  __device__ __forceinline__ float logit(int t, int h, float top) const {
    return kScoresAsLogits ? __fmul_rn(top, scale[t][h]) : top;
  }
  static __device__ __forceinline__ bool rounded(float logit) { return !kScoresAsLogits || fabsf(logit) <= kMostRounded; }
  __device__ __forceinline__ float probability(int t, int h, float logit) const {
    return kScoresAsLogits ? exp2_approx(fmaf(logit, scale[t][h], -base[t][h])) : exp_above(logit, base[t][h]);
  }
  // What sums over the largest logit so far shrink by when it becomes `top`, -inf where there is none.
  __device__ __forceinline__ float shrink(int t, int h, float top) const {
    if (!kScoresAsLogits) return exp_above(max[t][h], anchor(top));
    const float before = logit(t, h, max[t][h]), after = logit(t, h, top);
    const float score = (rounded(before) ? 0.0f : max[t][h]) - (rounded(after) ? 0.0f : anchor(top));
    return exp2_approx(fmaf(score, scale[t][h], (rounded(before) ? before : 0.0f) - (rounded(after) ? after : 0.0f)));
  }
};

// Where this lane's row of an ldmatrix over 16 keys and one or two units lies. Matrices of K, in the order of the operand's
// registers: (keys 0-7, unit 0), (8-15, 0), (0-7, 1), (8-15, 1). Of V, which is transposed: (0-7, 0), (0-7, 1), (8-15, 0), (8-15,
// 1), but for fp8, where operands are formed anyway, as of K.
struct TileLane {
  int k, v;  // from the beginning of the K tile

  __device__ __forceinline__ void open() {
    const int lane = threadIdx.x % 32;
    k = lane % 16 * kRowBytes + lane / 16 * 16;
    v = kTileBytes + (kFp8 ? k : (lane / 16 * 8 + lane % 8) * kRowBytes + lane / 8 % 2 * 16);
  }
};

// S^T = K Q^T. `from`: the tile + TileLane::k.
__device__ __forceinline__ void scores(SharedAddress from, const Query& query, Scores& s) {
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) s[i][t][0] = s[i][t][1] = s[i][t][2] = s[i][t][3] = 0.0f;
  }
#pragma unroll
  for (int u = 0; u < kUnits; u += 2) {
    const bool both = u + 1 < kUnits;
    unsigned q[2][kRowTiles][2];
    query.get(kFp8 ? u : u / 2, q[0]);
    if (kFp8 && both) query.get(u + 1, q[1]);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      unsigned k[4];
      if (both) {
        ldmatrix_x4(k, from + i * 16 * kRowBytes + u * 16);
      } else {
        unsigned half[2];
        ldmatrix_x2(half, from + i * 16 * kRowBytes + u * 16);
        k[0] = half[0], k[1] = half[1];
      }
      if constexpr (kFp8) {
#pragma unroll
        for (int h = 0; h < (both ? 2 : 1); ++h) {
          unsigned a[4];
          convert_codes(k[2 * h], a[0], a[2]);
          convert_codes(k[2 * h + 1], a[1], a[3]);
#pragma unroll
          for (int t = 0; t < kRowTiles; ++t) multiply(s[i][t], a, q[h][t][0], q[h][t][1]);
        }
      } else {
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) {
          if (both) {
            multiply(s[i][t], k, q[0][t][0], q[0][t][1]);
          } else {
            multiply<true>(s[i][t], k, q[0][t][0], 0);
          }
        }
      }
    }
  }
}

// Logits, or scores in their place: scale, soft cap, bias, and -inf where a row may not see a key. `mapped`: tokens that have
// memory.
__device__ __forceinline__ void to_logits(const Params& p, const Row* rows, int start, bool clean, Mask mapped,
                                          const RowState& state, Scores& s) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      Row row = {};
      if (kAlibi || !clean) row = rows[t * 8 + lane % 4 * 2 + h];
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          const int key = i * 16 + v * 8 + lane / 4, token = start + key;
          float x = kScoresAsLogits ? s[i][t][2 * v + h] : s[i][t][2 * v + h] * state.scale[t][h];
          if (kSoftcap) x = p.softcap * tanhf(x / p.softcap);
          if (kAlibi) x = fmaf(row.slope, float(token - row.position), x);
          if (!clean) x = mapped >> key & 1 && token >= row.lo && token < row.hi ? x : negative_infinity();
          s[i][t][2 * v + h] = x;
        }
      }
    }
  }
}

// A tile with a logit above what its row has seen, or of a row whose base may not be rounded: what was summed shrinks to the new
// maximum.
__device__ __forceinline__ void rebase(Scores& s, RowState& state, Sums& sums) {
  state.exact = 1;
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
    float shrink[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = state.max[t][h];
#pragma unroll
      for (int i = 0; i < kGroups; ++i) top = fmaxf(top, fmaxf(s[i][t][h], s[i][t][2 + h]));
#pragma unroll
      for (int flip = 4; flip < 32; flip *= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, flip));
      shrink[h] = state.shrink(t, h, top);
      state.max[t][h] = top;
      state.sum[t][h] *= shrink[h];
      state.base[t][h] = kScoresAsLogits ? state.logit(t, h, top) : anchor(top);
      if (!RowState::rounded(state.base[t][h])) {
        state.base[t][h] = 0.0f, state.exact = 0;
#pragma unroll
        for (int i = 0; i < kGroups; ++i) s[i][t][h] -= anchor(top), s[i][t][2 + h] -= anchor(top);
      }
    }
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
#pragma unroll
      for (int v = 0; v < 4; ++v) sums[m][t][v] *= shrink[v % 2];
    }
  }
}

// The online softmax: logits become probabilities, as B operands of P^T. Lanes compare what they have with the rows' maxima, and
// only where one is higher do they look for the highest together.
__device__ __forceinline__ void soften(Scores& s, RowState& state, Sums& sums, unsigned (&b)[kGroups][kRowTiles][2]) {
  bool usual = state.exact != 0;
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x = fmaxf(s[0][t][h], s[0][t][2 + h]);
#pragma unroll
      for (int i = 1; i < kGroups; ++i) x = fmaxf(x, fmaxf(s[i][t][h], s[i][t][2 + h]));
      usual &= x <= state.max[t][h];
    }
  }
  if (!__all_sync(kAllLanes, usual)) rebase(s, state, sums);
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        s[i][t][v] = state.probability(t, v % 2, s[i][t][v]);
        state.sum[t][v % 2] += s[i][t][v];
      }
      b[i][t][0] = movmatrix_trans(pack(s[i][t][0], s[i][t][1]));
      b[i][t][1] = movmatrix_trans(pack(s[i][t][2], s[i][t][3]));
    }
  }
}

// O^T += V^T P^T. `from`: the tile + TileLane::v; `last`: the V tile + TileLane::k, for a last single unit.
__device__ __forceinline__ void accumulate(SharedAddress from, SharedAddress last, const unsigned (&b)[kGroups][kRowTiles][2],
                                           Sums& sums) {
#pragma unroll
  for (int u = 0; u < kUnits; u += 2) {
    const bool both = u + 1 < kUnits;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      unsigned v[4] = {0, 0, 0, 0};
      if (both) {
        ldmatrix_x4_trans(v, from + i * 16 * kRowBytes + u * 16);
      } else {
        unsigned half[2];
        ldmatrix_x2_trans(half, last + i * 16 * kRowBytes + u * 16);
        v[0] = half[0], v[kFp8 ? 1 : 2] = half[1];
      }
      if constexpr (kFp8) {
#pragma unroll
        for (int h = 0; h < (both ? 2 : 1); ++h) {
          unsigned a[4];
          split_codes(v[2 * h], a[0], a[1]);
          split_codes(v[2 * h + 1], a[2], a[3]);
#pragma unroll
          for (int t = 0; t < kRowTiles; ++t) multiply(sums[u + h][t], a, b[i][t][0], b[i][t][1]);
        }
      } else {
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) multiply(sums[u / 2][t], v, b[i][t][0], b[i][t][1]);
      }
    }
  }
}

// One tile of a warp's rows: K at `tile`, V after it. `clean`: every row sees every key.
__device__ __forceinline__ void attend_tile(const Params& p, SharedAddress tile, const TileLane& lane, const Query& query,
                                            const Row* rows, int start, bool clean, Mask mapped, RowState& state, Sums& sums) {
  Scores s;
  unsigned probabilities[kGroups][kRowTiles][2];
  scores(tile + lane.k, query, s);
  if (clean) {
    to_logits(p, rows, start, true, mapped, state, s);
  } else {
    to_logits(p, rows, start, false, mapped, state, s);
  }
  soften(s, state, sums, probabilities);
  accumulate(tile + lane.v, tile + kTileBytes + lane.k, probabilities, sums);
}

// ------------------------------------------------------------------------------------------------------- a warp's results

__device__ __forceinline__ void reset(const float* scales, RowState& state, Sums& sums) {
  const int lane = threadIdx.x % 32;
  state.exact = 1;
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      state.scale[t][h] = scales[t * 8 + lane % 4 * 2 + h] * (kScoresAsLogits ? kLog2e : 1.0f);
      state.max[t][h] = negative_infinity();
      state.sum[t][h] = state.base[t][h] = 0.0f;
    }
#pragma unroll
    for (int m = 0; m < kSteps; ++m) sums[m][t][0] = sums[m][t][1] = sums[m][t][2] = sums[m][t][3] = 0.0f;
  }
}

constexpr int kSumFloats = kHeadDim + 4;  // of a row of sums in shared memory: rows 2c of a store begin 8 banks apart

// States and sums of this warp's rows to shared memory, `states` and `out` at the first of them.
__device__ __forceinline__ void leave(RowState& state, const Sums& sums, SoftmaxState* states, float* out) {
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int flip = 4; flip < 32; flip *= 2) state.sum[t][h] += __shfl_xor_sync(kAllLanes, state.sum[t][h], flip);
      const int row = t * 8 + c * 2 + h;
      if (g == 0) states[row] = {state.logit(t, h, state.max[t][h]) * (kScoresAsLogits ? kLn2 : 1.0f), state.sum[t][h]};
#pragma unroll
      for (int m = 0; m < kSteps; ++m) {
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          const int d = m * 16 + (kFp8 ? 2 * g + v : g + 8 * v);
          if (m * 16 + 16 <= kHeadDim || d < kHeadDim) out[row * kSumFloats + d] = sums[m][t][2 * v + h];
        }
      }
    }
  }
}

// One warp's attention of up to kWarpRows packed rows over one tile of kTokens keys in shared memory, on tensor cores.
//
// What       8 rows: S^T = K Q^T, online softmax, O^T += V^T P^T. Keys are the M of mma.m16n8k16 and packed rows its N: 8 rows cost
//            half of what 16 cost. 16 rows: S = Q K^T and O += P V with rows as the M, so that probabilities are operands where
//            they are formed. Either way a lane holds the same two rows in scores and in sums, so rescaling needs no exchange, and
//            products and sums of a row are formed in the same order: its bits do not depend on the number of rows.
// Lanes      As in mma_softmax.cuh.
// Shared     Tiles as in tile_copy.cuh. Sums are left as rows of head_dim + 4 floats: with head_dim 128 and 8 rows lane (g, c)
//            stores at float 2 c * 132 + g, which is bank 8 c + g; with fp8 it is bank 8 c + 2 g, and with 16 rows 4 g + 2 c, two
//            lanes to a bank, once an item.
// Not here   Where tiles come from, and how warps share them: decode_mma.cu, prefill.cu.
#pragma once
#include "mma_softmax.cuh"

// --------------------------------------------------------------------------------------------------------------- products

// Where this lane's row of an ldmatrix over 16 keys and one or two units lies. Matrices in the order of the operand's registers:
// of what has keys as its M, and of what has them as its k and N for head_dim, (keys 0-7, unit 0), (8-15, 0), (0-7, 1), (8-15, 1),
// else (0-7, 0), (0-7, 1), (8-15, 0), (8-15, 1). For fp8, where operands are formed anyway, as the first.
struct TileLane {
  int k;  // from the beginning of the K tile
  int v;  // of V, from that of K

  __device__ __forceinline__ void open() {
    const int lane = threadIdx.x % 32;
    const int keys_first = lane % 16 * kRowBytes + lane / 16 * 16;
    const int units_first = (lane / 16 * 8 + lane % 8) * kRowBytes + lane / 8 % 2 * 16;
    k = kFp8 || !kRowsFirst ? keys_first : units_first;
    v = kTileBytes + (kFp8 ? 0 : kRowsFirst ? keys_first - units_first : units_first - keys_first);
  }
};

// S = Q K^T or its transpose. `from`: the tile + TileLane::k; `last`: the same with keys first, for a last single unit.
__device__ __forceinline__ void scores(SharedAddress from, SharedAddress last, const Query& query, Scores& s) {
#pragma unroll
  for (int i = 0; i < kGroups * kPer16; ++i) s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.0f;
#pragma unroll
  for (int u = 0; u < kUnits; u += 2) {
    const bool both = u + 1 < kUnits;
    RowOperand q[2];
    query.get(kFp8 ? u : u / 2, q[0]);
    if (kFp8 && both) query.get(u + 1, q[1]);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      unsigned k[4], half[2];
      const int offset = i * 16 * kRowBytes + u * 16;
      if (both) {
        ldmatrix_x4(k, from + offset);
      } else {
        ldmatrix_x2(half, last + offset);
        k[0] = half[0], k[1] = half[1];
      }
      if constexpr (kFp8) {
#pragma unroll
        for (int h = 0; h < (both ? 2 : 1); ++h) {
          unsigned x[4];
#pragma unroll
          for (int eight = 0; eight < 2; ++eight) convert_codes(k[2 * h + eight], x[operand_at(eight, 0)], x[operand_at(eight, 1)]);
          multiply(s + i * kPer16, q[h], x);
        }
      } else if (both) {
        multiply(s + i * kPer16, q[0], k);
      } else {
        multiply_8(s + i * kPer16, q[0], half);
      }
    }
  }
}

// Logits, or scores in their place: scale, soft cap, bias.
__device__ __forceinline__ void to_logits(const Params& p, const Row* rows, int start, const RowState& state, Scores& s) {
  if constexpr (!kScoresAsLogits) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      Row row = {};
      if (kAlibi) row = rows[row_of(h)];
#pragma unroll
      for (int i = 0; i < kGroups * kPer16; ++i) {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          if (row_half(v) != h) continue;
          float x = s[i][v] * state.scale[h];
          if (kSoftcap) x = p.softcap * tanhf(x / p.softcap);
          if (kAlibi) x = fmaf(row.slope, float(start + key_of(i, v) - row.position), x);
          s[i][v] = x;
        }
      }
    }
  }
}

// -inf where a row may not see a key. `mapped`: tokens that have memory.
__device__ __forceinline__ void mask(const Row* rows, int start, Mask mapped, Scores& s) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const Row row = rows[row_of(h)];
#pragma unroll
    for (int i = 0; i < kGroups * kPer16; ++i) {
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        const int key = key_of(i, v), token = start + key;
        if (row_half(v) == h && !(mapped >> key & 1 && token >= row.lo && token < row.hi)) s[i][v] = negative_infinity();
      }
    }
  }
}

// O += P V or its transpose. `from`: the tile + TileLane::v; `last`: the same with keys first, for a last single unit.
__device__ __forceinline__ void accumulate(SharedAddress from, SharedAddress last, const RowOperand (&p)[kGroups], Sums& sums) {
#pragma unroll
  for (int u = 0; u < kUnits; u += 2) {
    const bool both = u + 1 < kUnits;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      unsigned v[4] = {0, 0, 0, 0};
      const int offset = i * 16 * kRowBytes + u * 16;
      if (both) {
        ldmatrix_x4_trans(v, from + offset);
      } else {
        unsigned half[2];
        ldmatrix_x2_trans(half, last + offset);
        v[kFp8 ? 0 : operand_at(0, 0)] = half[0], v[kFp8 ? 1 : operand_at(0, 1)] = half[1];
      }
      if constexpr (kFp8) {
#pragma unroll
        for (int h = 0; h < (both ? 2 : 1); ++h) {
          unsigned x[4];
#pragma unroll
          for (int keys = 0; keys < 2; ++keys) split_codes(v[2 * h + keys], x[operand_at(0, keys)], x[operand_at(1, keys)]);
          multiply(sums + (u + h) * kPer16, p[i], x);
        }
      } else if (both) {
        multiply(sums + u / 2 * kPer16, p[i], v);
      } else {
        multiply<true>(sums + u / 2 * kPer16, p[i], v);
      }
    }
  }
}

// One tile of a warp's rows. `keys`: the tile + TileLane::k; `rows`: bounds of the warp's rows; `start`: the tile's first token.
// What rows may not see is masked by `hide`, or by `hide_late` where RowState::doubt has said that there may be such.
template <class Hide, class HideLate>
__device__ __forceinline__ void attend_tile(const Params& p, SharedAddress keys, const TileLane& lane, const Query& query,
                                            const Row* rows, int start, const Hide& hide, const HideLate& hide_late,
                                            RowState& state, Sums& sums) {
  const SharedAddress keys_first = kFp8 || !kRowsFirst ? keys : keys + lane.v - kTileBytes;
  Scores s;
  RowOperand probabilities[kGroups];
  scores(keys, keys_first, query, s);
  to_logits(p, rows, start, state, s);
  hide(s);
  soften(s, state, sums, probabilities, hide_late);
  accumulate(keys + lane.v, keys_first + kTileBytes, probabilities, sums);
}

// ------------------------------------------------------------------------------------------------------- a warp's results

__device__ __forceinline__ void reset(const float* scales, RowState& state, Sums& sums) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    state.scale[h] = scales[row_of(h)] * (kScoresAsLogits ? kLog2e : 1.0f);
    state.max[h] = state.base[h] = negative_infinity();
  }
#pragma unroll
  for (int i = 0; i < kRowSums; ++i) state.sum[i] = 0.0f;
#pragma unroll
  for (int m = 0; m < kSumTiles; ++m) sums[m][0] = sums[m][1] = sums[m][2] = sums[m][3] = 0.0f;
}

constexpr int kSumFloats = kHeadDim + 4;  // of a row of sums in shared memory: rows 2c of a store begin 8 banks apart

// States and sums of this warp's rows to shared memory, `states` and `out` at the first of them.
__device__ __forceinline__ void leave(const RowState& state, const Sums& sums, SoftmaxState* states, float* out) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = state.sum[h * (kRowSums / 2)];
    if constexpr (kRowsFirst) sum += state.sum[h * 2 + 1];
#pragma unroll
    for (int flip = kKeyBits & -kKeyBits; flip & kKeyBits; flip *= 2) sum += __shfl_xor_sync(kAllLanes, sum, flip);
    const int row = row_of(h);
    if ((threadIdx.x & kKeyBits) == 0) states[row] = {state.logit(h, state.max[h]) * (kScoresAsLogits ? kLn2 : 1.0f), sum};
#pragma unroll
    for (int m = 0; m < kSumTiles; ++m) {
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        const int d = entry_of(m, v);
        if (row_half(v) == h && (kHeadDim % 16 == 0 || d < kHeadDim)) out[row * kSumFloats + d] = sums[m][v];
      }
    }
  }
}

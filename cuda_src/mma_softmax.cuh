// The online softmax of one warp's rows over one tile, in the accumulators of the matrix instructions.
//
// What       Scores become probabilities, as 16-bit operands of the products with values, and their sums; what was summed so far
//            shrinks where a row's logits outgrow it.
// Lanes      Lane t, g = t / 4, c = t % 4. With 8 rows the accumulators are of S^T and O^T, and a lane has keys g and g + 8 of each
//            16, rows 2c and 2c + 1: lane 6 has keys 1 and 9, rows 4 and 5. With 16 rows they are of S and O, and a lane has keys
//            2c and 2c + 1 of each 8, rows g and g + 8: lane 6 has keys 4 and 5, rows 1 and 9.
//            Of 16 entries of head_dim 8 rows have g and g + 8 for 16-bit pages, 2 g and the next for fp8 (one ldmatrix of 16-bit
//            units brings a pair of codes); 16 rows have 2c and 2c + 1 of each 8, or for fp8 of the even and of the odd entries.
// Not here   Products (mma_tile.cuh), and how the states of warps are merged (work.cuh).
#pragma once
#include "mma_operands.cuh"

constexpr int kGroups = kTokens / 16;  // of keys
constexpr int kSumTiles = !kRowsFirst ? kSteps : kFp8 ? 2 * kSteps : kHeadDim / 8;

// ------------------------------------------------------------------------------------- which rows, keys and entries a lane has

using Scores = float[kGroups * kPer16][4];
using Sums = float[kSumTiles][4];

// Of an accumulator's four values v: the first or second row of the lane, and the key in the tile.
__device__ __forceinline__ constexpr int row_half(int v) { return kRowsFirst ? v / 2 : v % 2; }
__device__ __forceinline__ int row_of(int half) {
  const int lane = threadIdx.x % 32;
  return kRowsFirst ? lane / 4 + 8 * half : lane % 4 * 2 + half;
}
__device__ __forceinline__ int key_of(int tile, int v) {
  const int lane = threadIdx.x % 32;
  return kRowsFirst ? tile * 8 + lane % 4 * 2 + v % 2 : tile * 16 + v / 2 * 8 + lane / 4;
}
__device__ __forceinline__ int entry_of(int tile, int v) {
  const int lane = threadIdx.x % 32, g = lane / 4, column = lane % 4 * 2 + v % 2;
  if (kRowsFirst) return kFp8 ? tile / 2 * 16 + column * 2 + tile % 2 : tile * 8 + column;
  return tile * 16 + (kFp8 ? 2 * g + v / 2 : g + 8 * (v / 2));
}
// Bits of a lane's number that tell its keys; the others tell its rows.
constexpr int kKeyBits = kRowsFirst ? 3 : 28;
// A row's probabilities are summed by the remainder of the key's number by 8, of which a lane has one or two.
constexpr int kRowSums = kRowsFirst ? 4 : 2;
__device__ __forceinline__ constexpr int sum_of(int v) { return kRowsFirst ? v : v % 2; }

// ----------------------------------------------------------------------------------------------------------------- states

// What this lane's two rows have seen so far. Where a logit is nothing but a score times a scale, it is left as the score:
// probabilities are 2^(score * scale - base), one multiply-add, which rounds once, where the scale would round by the size of the
// logit. Any base near the largest logit is right as long as all sums are over the same, so it may be rounded, but only where that
// moves it by little: beyond kMostRounded the largest score is subtracted first, and the base is 0.
//
// Nor need it follow the largest logit at once: probabilities below 2 are as good as those up to 1. What makes one of 2 or more, or
// no number, sends the tile through `rebase`, and a base of -inf makes infinities of all: that is how a tile with keys that rows
// may not see, of which lanes learn when it is fetched, is told from others at no cost to them.
constexpr bool kScoresAsLogits = !kSoftcap && !kAlibi;
constexpr float kMostRounded = kScoresAsLogits ? 1 << 20 : 3.4e38f;  // 2^-5 off at most
constexpr unsigned kTwoOrMore = 0x40004000;                          // the bit that halves, bf16 or not, have from 2 on
struct RowState {
  float scale[2];       // of scores; with kScoresAsLogits to units of base 2
  float max[2];         // the logit that probabilities are over, or the score in its place; the same in all lanes of a row
  float sum[kRowSums];  // of this lane's keys only
  float base[2];        // of probabilities; -inf: nothing is seen so far, it may not be rounded, or the next tile is to be doubted

  // The logit of a score. A product on its own, not fused: it must be the same number wherever it is taken.
  __device__ __forceinline__ float logit(int h, float score) const { return kScoresAsLogits ? __fmul_rn(score, scale[h]) : score; }
  static __device__ __forceinline__ bool rounded(float logit) { return fabsf(logit) <= kMostRounded; }
  __device__ __forceinline__ float probability(int h, float logit, float base) const {
    return kScoresAsLogits ? exp2_approx(fmaf(logit, scale[h], -base)) : exp_above(logit, base);
  }
  // The base that goes with `max`.
  __device__ __forceinline__ float settled(int h) const {
    const float top = logit(h, max[h]);
    return rounded(top) ? top : negative_infinity();
  }
  // Sends the next tile through `rebase`, which settles the base anew.
  __device__ __forceinline__ void doubt() { base[0] = base[1] = negative_infinity(); }
  // What sums over `max` shrink by when it becomes `top`, -inf where there is none.
  __device__ __forceinline__ float shrink(int h, float top) const {
    if (!kScoresAsLogits) return exp_above(max[h], anchor(top));
    const float before = logit(h, max[h]), after = logit(h, top);
    const float score = (rounded(before) ? 0.0f : max[h]) - (rounded(after) ? 0.0f : anchor(top));
    return exp2_approx(fmaf(score, scale[h], (rounded(before) ? before : 0.0f) - (rounded(after) ? after : 0.0f)));
  }
};

// ---------------------------------------------------------------------------------------------------------------- softmax

// Probabilities over `base`, as the rows' operands but not yet transposed, and their sums. Returns their bits together.
__device__ __forceinline__ unsigned weigh(const Scores& s, const RowState& state, const float (&base)[2], float (&sum)[kRowSums],
                                          RowOperand (&p)[kGroups]) {
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < kGroups * kPer16; ++i) {
    float x[4];
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      x[v] = state.probability(row_half(v), s[i][v], base[row_half(v)]);
      sum[sum_of(v)] = i == 0 && v == sum_of(v) ? x[v] : sum[sum_of(v)] + x[v];
    }
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      unsigned& packed = p[i / kPer16][i % kPer16 * 2 + pair];
      packed = pack(x[2 * pair], x[2 * pair + 1]);
      bits |= packed;
    }
  }
  return bits;
}

// A tile with a probability of 2 or more over some row's base: where it is a row's largest, what the row has summed shrinks to the
// tile's maximum. Other rows stay as they are, so that a row's bits do not depend on its neighbours.
__device__ __forceinline__ void rebase(Scores& s, RowState& state, Sums& sums, float (&base)[2]) {
  float shrink[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float top = negative_infinity();
#pragma unroll
    for (int i = 0; i < kGroups * kPer16; ++i) {
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        if (row_half(v) == h) top = fmaxf(top, s[i][v]);
      }
    }
#pragma unroll
    for (int flip = kKeyBits & -kKeyBits; flip & kKeyBits; flip *= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, flip));
    state.base[h] = base[h] = state.settled(h), shrink[h] = 1.0f;
    if (pack(state.probability(h, top, base[h]), 0.0f) & kTwoOrMore) {
      top = fmaxf(top, state.max[h]);
      shrink[h] = state.shrink(h, top);
      state.max[h] = top;
      const float logit = state.logit(h, top);
      const bool rounded = RowState::rounded(logit);
      base[h] = rounded ? logit : 0.0f, state.base[h] = rounded ? logit : negative_infinity();
#pragma unroll
      for (int i = 0; i < kGroups * kPer16; ++i) {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          if (row_half(v) == h && !rounded) s[i][v] -= anchor(top);
        }
      }
    }
  }
#pragma unroll
  for (int v = 0; v < 4; ++v) {
    if (v == sum_of(v)) state.sum[v] *= shrink[row_half(v)];
#pragma unroll
    for (int m = 0; m < kSumTiles; ++m) sums[m][v] *= shrink[row_half(v)];
  }
}

// The online softmax: logits become probabilities, as operands of P. Lanes look at what they have, and only where a probability is
// too large do they look for the largest logit together. In a tile that is doubted hide(s) masks logits before that, and returns
// whether the next is to be doubted too.
template <class Hide>
__device__ __forceinline__ void soften(Scores& s, RowState& state, Sums& sums, RowOperand (&p)[kGroups], const Hide& hide) {
  float sum[kRowSums];
  const unsigned bits = weigh(s, state, state.base, sum, p);
  if (__any_sync(kAllLanes, bits & kTwoOrMore)) {
    float base[2];
    const bool doubt = hide(s);
    rebase(s, state, sums, base);
    weigh(s, state, base, sum, p);
    if (doubt) state.doubt();
  }
#pragma unroll
  for (int i = 0; i < kRowSums; ++i) state.sum[i] += sum[i];
  if constexpr (!kRowsFirst) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) p[i][0] = movmatrix_trans(p[i][0]), p[i][1] = movmatrix_trans(p[i][1]);
  }
}

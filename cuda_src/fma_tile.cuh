// One warp's attention of kRows packed rows over one tile of kTokens keys in shared memory, on CUDA cores.
//
// What       S = Q K^T, online softmax, O += P V, in float32.
// Lanes      S: kParts lanes share a pair of tokens, half a tile apart, each with every kParts-th unit of head_dim. They exchange
//            sums until each has one token and kMyRows rows, whose softmax it does. O: a lane has four entries of head_dim at a
//            time, of every kTokenSplits-th token; the probabilities come from shared memory.
//            In tiles of 16 tokens lanes 3, 11, 19 and 27 score tokens 3 and 11 with a quarter of the units each; of 8 rows lane 3
//            ends with token 3 and rows 0 to 3, lane 27 with token 11 and rows 4 to 7. With head_dim 128 lane 3 sums entries 12
//            to 15 of O, with head_dim 64 those of even tokens, and lane 19 of odd ones.
// Shared     Rows of K and V are padded to an odd number of 16-byte units, so that 8 lanes reading 8 rows touch all banks: 528
//            bytes with head_dim 128 and float32 pages. Probabilities are [kTokens][kRowFloats], of 8 rows 12 floats.
// Bits       A row's sums are taken in the same order whatever kRows is, and are multiplied by 1 when only the largest logit of
//            another row changes, so a row's neighbours do not change its bits.
// Not here   Where tiles come from, and how warps share them: decode.cu.
#pragma once
#include "work.cuh"

constexpr int kSize = sizeof(kCacheType);
constexpr int kHeadBytes = kHeadDim * kSize;
constexpr int kRowBytes = ((kHeadBytes + 15) / 16 | 1) * 16;  // of a tile in shared memory
constexpr int kTileBytes = kTokens * kRowBytes;
constexpr unsigned kAllLanes = 0xffffffffu;

// Scores: a lane reads kUnit bytes of K at once, of its own token and of its partner's.
constexpr int kUnit = kHeadBytes % 16 == 0 ? 16 : 8;
constexpr int kUnits = kHeadBytes / kUnit;
constexpr int kUnitElems = kUnit / kSize;
constexpr int kParts = 64 / kTokens;
constexpr int kMyRows = kRows * kTokens > 32 ? kRows * kTokens / 32 : 1;  // whose softmax a lane does
constexpr int kRowSplits = kRows / kMyRows;
constexpr int kRowFloats = kRows <= 2 ? kRows : (kRows / 4 | 1) * 4;  // probabilities of one token

// Sums: a lane has four entries of head_dim at a time, of every kTokenSplits-th token.
__device__ constexpr int sum_lanes() {
  int lanes = 32;
  while (lanes / 2 * 4 >= kHeadDim) lanes /= 2;
  return lanes;
}
constexpr int kSumLanes = sum_lanes(), kTokenSplits = 32 / kSumLanes;
constexpr int kSumPieces = (kHeadDim + 4 * kSumLanes - 1) / (4 * kSumLanes);
constexpr int kSums = 4 * kSumPieces;  // entries of a lane

// One warp's pass over its tiles: the running state of every row.
struct WarpState {
  SoftmaxState row[kMyRows];  // of rows first_row() on; max: the same in all lanes of a row; sum: of this lane's tokens
  float acc[kRows][kSums];    // of this lane's entries of head_dim and its tokens
};

// The first of the rows whose softmax this lane does; the lanes of a token do all rows between them.
__device__ __forceinline__ int first_row() { return threadIdx.x % 32 / (32 / kRowSplits) * kMyRows; }

// S = Q K^T: the scores of this lane's token and rows. `q`: [kRows][head_dim]. Lanes that share a token share its head_dim too. A
// lane sums its part for its own token and for its partner's, half a tile away, so that what it reads of Q serves two; then halves
// are exchanged, of rows while there are several, at last of tokens. s[t][r] is of row r ^ first_row(), so what a lane keeps is in
// the same place in all.
__device__ __forceinline__ void scores(const unsigned char* k_tile, const float* q, float (&mine)[kMyRows]) {
  const int lane = threadIdx.x % 32, part = lane / (kTokens / 2), token = lane % kTokens;
  const unsigned char* own = k_tile + token * kRowBytes;
  const unsigned char* other = k_tile + (token ^ kTokens / 2) * kRowBytes;
  const float* q_rows[kRowSplits];
#pragma unroll
  for (int j = 0; j < kRowSplits; ++j) q_rows[j] = q + (j * kMyRows ^ first_row()) * kHeadDim;
  float s[2][kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) s[0][r] = s[1][r] = 0.0f;
#pragma unroll(kRows > 8 ? 2 : 4)
  for (int i = 0; i < (kUnits + kParts - 1) / kParts; ++i) {
    const int u = i * kParts + part;
    if (kUnits % kParts && u >= kUnits) break;
    float k[2][kUnitElems];
    load_shared_floats<kCacheType, kUnitElems>(own + u * kUnit, k[0]);
    load_shared_floats<kCacheType, kUnitElems>(other + u * kUnit, k[1]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int e = 0; e < kUnitElems; e += 4) {
        const float4 x = *reinterpret_cast<const float4*>(q_rows[r / kMyRows] + r % kMyRows * kHeadDim + u * kUnitElems + e);
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          s[t][r] = fmaf(x.x, k[t][e], s[t][r]);
          s[t][r] = fmaf(x.y, k[t][e + 1], s[t][r]);
          s[t][r] = fmaf(x.z, k[t][e + 2], s[t][r]);
          s[t][r] = fmaf(x.w, k[t][e + 3], s[t][r]);
        }
      }
    }
  }
#pragma unroll
  for (int flip = 16; flip >= kTokens; flip /= 2) {
    const int half = kRows * flip / 32;  // 0: one row is left, and both lanes keep it
#pragma unroll
    for (int r = 0; r < (kRows + 1) / 2; ++r) {
      if (r >= half && r > 0) continue;
      s[0][r] += __shfl_xor_sync(kAllLanes, s[0][r + half], flip);
      s[1][r] += __shfl_xor_sync(kAllLanes, s[1][r + half], flip);
    }
  }
#pragma unroll
  for (int r = 0; r < kMyRows; ++r) mine[r] = s[0][r] + __shfl_xor_sync(kAllLanes, s[1][r], kTokens / 2);
}

// Logits from scores, masks, and the online softmax of this lane's rows; leaves its probabilities in shared memory. `kClean`:
// every row sees every token of the tile.
template <bool kClean>
__device__ __forceinline__ void soften(const Params& p, const Row* rows, float scale, int token, bool mapped, float (&x)[kMyRows],
                                       WarpState& state, float* probabilities) {
  const int lane = threadIdx.x % 32;
  bool usual = true;
#pragma unroll
  for (int r = 0; r < kMyRows; ++r) {
    x[r] *= scale;
    if (kSoftcap) x[r] = p.softcap * tanhf(x[r] / p.softcap);
    if (kAlibi || !kClean) {
      const Row row = rows[first_row() + r];
      if (kAlibi) x[r] = fmaf(row.slope, float(token - row.position), x[r]);
      if (!kClean) x[r] = mapped && token >= row.lo && token < row.hi ? x[r] : negative_infinity();
    }
    usual &= x[r] <= state.row[r].max;
  }
  if (!__all_sync(kAllLanes, usual)) {  // some row's largest logit is new; to the others it is multiplications by 1
    float shrink[kMyRows];
#pragma unroll
    for (int r = 0; r < kMyRows; ++r) {
      float top = x[r];
#pragma unroll
      for (int flip = kTokens / 2; flip > 0; flip /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, flip));
      SoftmaxState& running = state.row[r];
      top = fmaxf(running.max, top);
      shrink[r] = exp_above(running.max, anchor(top));
      running.max = top;
      running.sum *= shrink[r];
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float factor = shrink[r % kMyRows];
      if (kRowSplits > 1) factor = __shfl_sync(kAllLanes, factor, r / kMyRows * (32 / kRowSplits));
#pragma unroll
      for (int e = 0; e < kSums; ++e) state.acc[r][e] *= factor;
    }
  }
  Vec<float, kMyRows> probability;
#pragma unroll
  for (int r = 0; r < kMyRows; ++r) {
    const float top = state.row[r].max;  // of a clean tile finite
    probability.at[r] = exp_above(x[r], kClean ? top : anchor(top));
    state.row[r].sum += probability.at[r];
  }
  if (lane % (32 / kRowSplits) < kTokens) store_vec(probabilities + lane % kTokens * kRowFloats + first_row(), probability);
}

// The first entry of head_dim of this lane's piece; lanes past the end repeat the last one and are not stored.
__device__ __forceinline__ int entry(int piece) {
  return min((piece * kSumLanes + int(threadIdx.x % kSumLanes)) * 4, kHeadDim - 4);
}

// O += P V
__device__ __forceinline__ void accumulate(const unsigned char* v_tile, const float* probabilities, WarpState& state) {
  const int split = threadIdx.x % 32 / kSumLanes;
  v_tile += split * kRowBytes, probabilities += split * kRowFloats;
#pragma unroll 4
  for (int t = 0; t < kTokens; t += kTokenSplits) {
    float v[kSumPieces][4];
#pragma unroll
    for (int i = 0; i < kSumPieces; ++i) load_shared_floats<kCacheType, 4>(v_tile + t * kRowBytes + entry(i) * kSize, v[i]);
    const Vec<float, kRows> probability = load_vec<kRows>(probabilities + t * kRowFloats);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int e = 0; e < kSums; ++e) state.acc[r][e] = fmaf(probability.at[r], v[e / 4][e % 4], state.acc[r][e]);
    }
  }
}

// ------------------------------------------------------------------------------------------------------- a warp's results

__device__ __forceinline__ void reset(WarpState& state) {
#pragma unroll
  for (int r = 0; r < kMyRows; ++r) state.row[r] = {negative_infinity(), 0.0f};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int e = 0; e < kSums; ++e) state.acc[r][e] = 0.0f;
  }
}

// States and sums of this warp's rows to shared memory: `sums` [kRows][head_dim].
__device__ __forceinline__ void leave(WarpState& state, SoftmaxState* states, float* sums) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < kMyRows; ++r) {
#pragma unroll
    for (int flip = kTokens / 2; flip > 0; flip /= 2) state.row[r].sum += __shfl_xor_sync(kAllLanes, state.row[r].sum, flip);
    if (lane % (32 / kRowSplits) == 0) states[first_row() + r] = state.row[r];
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int e = 0; e < kSums; ++e) {
#pragma unroll
      for (int flip = kSumLanes; flip < 32; flip *= 2) state.acc[r][e] += __shfl_xor_sync(kAllLanes, state.acc[r][e], flip);
      if (lane < kSumLanes && (e / 4 * kSumLanes + lane) * 4 < kHeadDim)
        sums[r * kHeadDim + entry(e / 4) + e % 4] = state.acc[r][e];
    }
  }
}

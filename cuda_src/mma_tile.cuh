// One warp's attention of up to 8 * kRowTiles packed rows over one tile of kTokens keys in shared memory, on tensor cores.
//
// What       S^T = K Q^T, online softmax, O^T += V^T P^T. Keys are the M of mma.m16n8k16 and packed rows its N: 8 rows cost half of
//            what 16 cost, and a lane holds the same two rows of a row tile in S^T and in O^T, so rescaling needs no exchange.
// Types      16-bit pages are multiplied as they are. fp8 pages become halves, queries too: bf16 queries times a power of two per
//            row, which the softmax scale takes back. Probabilities are halves, bf16 for bf16 pages. Accumulators float32.
// Lanes      Lane t, g = t / 4, c = t % 4. Keys g and g + 8 of each 16, rows 2c and 2c + 1 of each 8 (S^T, states and O^T).
//            O^T tile m holds entries 16 m + g and 16 m + g + 8 of head_dim for 16-bit pages, 16 m + 2 g and the next for fp8 (one
//            ldmatrix of 16-bit units brings a pair of codes). Order inside head_dim is free in Q K^T: there a lane takes the four
//            codes of its register, and queries are stored in that order (query_position).
// Shared     Rows of K, V and Q padded to an odd number of 16-byte units: the 8 rows of an ldmatrix touch all 32 banks. With
//            head_dim 128 and 16-bit pages a row is 17 units, 272 bytes.
// Not here   Where tiles come from, and how warps share them: decode_mma.cu, prefill.cu.
#pragma once
#include "work.cuh"

constexpr bool kFp8 = sizeof(kCacheType) == 1;
constexpr bool kBfloat16 = is_same_type<kCacheType, __nv_bfloat16>;
constexpr bool kScaledQuery = kFp8 && is_same_type<kQueryType, __nv_bfloat16>;
#if __CUDA_ARCH__ >= 890
constexpr bool kByteTrick = false;
#else
constexpr bool kByteTrick = is_same_type<kCacheType, fp8_e4m3>;
#endif
constexpr float kCodeFactor = kByteTrick ? 256.0f : 1.0f;  // of an fp8 value over what is multiplied in its place

constexpr int kHeadBytes = kHeadDim * int(sizeof(kCacheType));
constexpr int kUnits = (kHeadBytes + 15) / 16;  // 16-byte units of a row
constexpr int kRowBytes = (kUnits | 1) * 16;
constexpr int kTileBytes = kTokens * kRowBytes;
constexpr int kSteps = (kHeadDim + 15) / 16;  // of 16 entries of head_dim, the last perhaps 8
constexpr int kQueryRowBytes = (2 * kSteps | 1) * 16;
constexpr int kGroups = kTokens / 16;  // of keys
constexpr bool kQueryInRegisters = kRowTiles * kHeadDim <= 256;
constexpr unsigned kAllLanes = 0xffffffffu;
static_assert(kHeadBytes % kVec == 0, "a row is whole pieces");

template <bool kWide>
struct MaskOf {
  using type = unsigned;
};
template <>
struct MaskOf<true> {
  using type = unsigned long long;
};
using Mask = MaskOf<(kTokens > 32)>::type;  // a bit a token of a tile
constexpr Mask kFull = ~Mask(0) >> (8 * sizeof(Mask) - kTokens);

// ------------------------------------------------------------------------------------------------ 16-bit and fp8 operands

template <bool kHalfStep = false>
__device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  if constexpr (kBfloat16) {
    if constexpr (kHalfStep) {
      mma_m16n8k8_bf16(d, a[0], a[1], b0);
    } else {
      mma_m16n8k16_bf16(d, a, b0, b1);
    }
  } else {
    if constexpr (kHalfStep) {
      mma_m16n8k8_f16(d, a[0], a[1], b0);
    } else {
      mma_m16n8k16_f16(d, a, b0, b1);
    }
  }
}

__device__ __forceinline__ unsigned pack(float low, float high) {
  if constexpr (kBfloat16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
  }
}

// Four codes as halves, times 1 / kCodeFactor: bytes 0 and 2, bytes 1 and 3.
__device__ __forceinline__ void split_codes(unsigned codes, unsigned& even, unsigned& odd) {
  if constexpr (is_same_type<kCacheType, fp8_e5m2>) {
    even = __byte_perm(codes, 0, 0x2404);
    odd = codes & 0xff00ff00u;
  } else if constexpr (kByteTrick) {
    // Exponent and mantissa moved to a half's place: biases 7 and 15 make that 2^-8 of the value.
    even = (codes << 8 & 0x80008000u) | (codes << 7 & 0x3f803f80u);
    odd = (codes & 0x80008000u) | (codes >> 1 & 0x3f803f80u);
  } else {
#if __CUDA_ARCH__ >= 890
    unsigned short low, high;
    split_halves(__byte_perm(codes, 0, 0x3120), low, high);
    even = e4m3x2_to_half2(low), odd = e4m3x2_to_half2(high);
#endif
  }
}

// The same for keys, where the order inside head_dim is free: any two pairs.
constexpr bool kNeighbours = kFp8 && !kByteTrick && !is_same_type<kCacheType, fp8_e5m2>;  // bytes 0 and 1, bytes 2 and 3
__device__ __forceinline__ void convert_codes(unsigned codes, unsigned& first, unsigned& second) {
#if __CUDA_ARCH__ >= 890
  if constexpr (kNeighbours) {
    unsigned short low, high;
    split_halves(codes, low, high);
    first = e4m3x2_to_half2(low), second = e4m3x2_to_half2(high);
    return;
  }
#endif
  split_codes(codes, first, second);
}

// Where entry d of head_dim stands in a query row: with fp8, as convert_codes pairs the codes of a register.
__device__ __forceinline__ int query_position(int d) {
  if constexpr (!kFp8) return d;
  const int code = d % 4, pair = kNeighbours ? code / 2 : code % 2, high = kNeighbours ? code % 2 : code / 2;
  return d / 16 * 16 + d % 16 / 4 * 2 + pair * 8 + high;
}

// ------------------------------------------------------------------------------------------------------------------ tiles

struct alignas(16) TokenRows {  // where a token's key and value begin
  const unsigned char *k, *v;
};

// One tile, K and after it V, of the tokens that `rows` tells of, by kCopiers threads; zeros where `mapped` has no bit.
// A power of two of lanes takes a row, some perhaps idle, so that each keeps its place in rows and addresses advance by constants.
template <int kCopiers, bool kAll>
__device__ __forceinline__ void copy_tile(unsigned char* tile, const TokenRows* rows, Mask mapped) {
  constexpr int kPieces = kHeadBytes / kVec;
  constexpr int kLanes = kPieces > 16 ? 32 : kPieces > 8 ? 16 : kPieces > 4 ? 8 : kPieces > 2 ? 4 : kPieces;
  constexpr int kPerLane = (kPieces + kLanes - 1) / kLanes;
  constexpr int kAtOnce = kCopiers / kLanes, kRounds = (kTokens + kAtOnce - 1) / kAtOnce, kBatch = kRounds < 8 ? kRounds : 8;
  // Where 8 lanes write several rows at once, rows kLanes apart: the rest of an odd stride then keeps them on different banks.
  constexpr int kTogether = kVec == 16 && kLanes < 8 ? 8 / kLanes : 1;
  const int nth = threadIdx.x % kCopiers / kLanes, lane = threadIdx.x % kLanes;
  const int first_token = kTogether == 1 ? nth : nth / 8 * 8 + nth % kTogether * kLanes + nth / kTogether % kLanes;
  unsigned char* to = tile + first_token * kRowBytes + lane * kVec;
  const SharedAddress address = shared_address(to);
#pragma unroll
  for (int first = 0; first < kRounds; first += kBatch) {
    TokenRows from[kBatch];  // all before the first copy: a load from shared memory between copies waits for them
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int token = (first + j) * kAtOnce + first_token;
      if (first + j < kRounds) from[j] = load_as<TokenRows>(rows + (kTokens % kAtOnce == 0 ? token : min(token, kTokens - 1)));
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int token = (first + j) * kAtOnce + first_token;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int piece = i * kLanes + lane, offset = (first + j) * kAtOnce * kRowBytes + i * kLanes * kVec;
        const bool real = (kPerLane * kLanes == kPieces || piece < kPieces) && (kTokens % kAtOnce == 0 || token < kTokens);
        if (first + j < kRounds && real) {
          const bool valid = kAll || mapped >> token & 1;
          copy_piece<kVec>(address + offset, to + offset, from[j].k + piece * kVec, valid);
          copy_piece<kVec>(address + kTileBytes + offset, to + kTileBytes + offset, from[j].v + piece * kVec, valid);
        }
      }
    }
  }
}

// fp8 rows of head_dim 8 more than a multiple of 16 end inside a unit; what no copy writes must be zeros. For a ring of tiles, by
// the block's threads.
template <int kRingTiles>
__device__ __forceinline__ void clear_row_ends(unsigned char* ring) {
  if constexpr (kHeadBytes % 16 != 0) {
    for (int row = threadIdx.x; row < kRingTiles * 2 * kTokens; row += kThreads) {
      store_as(ring + row * kRowBytes + kHeadBytes, make_uint2(0, 0));
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------- queries

// Rows first, first + kStep, ... of the tile's queries to shared memory, kCount rows a warp, rows and entries past the end as
// zeros; their softmax scales to `scales`.
template <int kCount, int kStep>
__device__ __forceinline__ void load_queries(const Params& p, const Task& task, unsigned char* queries, float* scales, int first) {
  constexpr int kEntries = (kSteps * 16 + 31) / 32, kBatch = kCount < 8 ? kCount : 8;  // of a lane; rows in flight
  const int lane = threadIdx.x % 32;
  const float scale = p.scale * p.k_scale[task.head] * kCodeFactor;
#pragma unroll 1
  for (int done = 0; done < kCount; done += kBatch) {
    kQueryType entries[kBatch][kEntries];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int r = first + (done + b) * kStep;
      const bool real = r < task.num_rows;
      const kQueryType* q = p.q + row_offset(p, task, real ? r : 0, p.q_token, p.q_head);
#pragma unroll
      for (int i = 0; i < kEntries; ++i) {
        const int d = i * 32 + lane;
        entries[b][i] = real && d < kHeadDim ? load_as<kQueryType>(q + d) : from_float<kQueryType>(0.0f);
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int r = first + (done + b) * kStep;
      float back = 1.0f, forth = 1.0f;
      if constexpr (kScaledQuery) {
        // The largest entry becomes 1 to 2; what is lost at the small end is below 2^-25 of the largest.
        float top = 0.0f;
#pragma unroll
        for (int i = 0; i < kEntries; ++i) top = fmaxf(top, fabsf(to_float(entries[b][i])));
#pragma unroll
        for (int flip = 16; flip > 0; flip /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, flip));
        const int exponent = max(min(int(__float_as_uint(top) >> 23), 253), 1);
        forth = __uint_as_float(unsigned(254 - exponent) << 23);
        back = __uint_as_float(unsigned(exponent) << 23);
      }
#pragma unroll
      for (int i = 0; i < kEntries; ++i) {
        const int d = i * 32 + lane;
        unsigned char* to = queries + r * kQueryRowBytes + query_position(d) * 2;
        if (kSteps % 2 == 0 || d < kSteps * 16) {
          if constexpr (kScaledQuery) {
            store_as(to, __float2half_rn(to_float(entries[b][i]) * forth));
          } else {
            store_as(to, entries[b][i]);
          }
        }
      }
      if (lane == 0) scales[r] = scale * back;
    }
  }
}

struct Query {  // B operands of Q^T: k = entries 2c, 2c + 1 (and + 8) of a step, column = row g
  SharedAddress lane_row;
  unsigned registers[kQueryInRegisters ? kSteps : 1][kRowTiles][2];

  // `rows`: this warp's first row.
  __device__ __forceinline__ void open(const unsigned char* rows) {
    const int lane = threadIdx.x % 32;
    lane_row = shared_address(rows) + (lane / 16 * 8 + lane % 8) * kQueryRowBytes + lane / 8 % 2 * 16;
    if constexpr (kQueryInRegisters) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load(step, registers[step]);
    }
  }
  __device__ __forceinline__ void load(int step, unsigned (&b)[kRowTiles][2]) const {
    static_assert(kRowTiles <= 2, "more row tiles need more ldmatrix");
    if constexpr (kRowTiles == 1) {
      ldmatrix_x2(b[0], lane_row + step * 32);
    } else {
      unsigned x[4];
      ldmatrix_x4(x, lane_row + step * 32);
      b[0][0] = x[0], b[0][1] = x[1], b[1][0] = x[2], b[1][1] = x[3];
    }
  }
  __device__ __forceinline__ void get(int step, unsigned (&b)[kRowTiles][2]) const {
    if constexpr (kQueryInRegisters) {
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) b[t][0] = registers[step][t][0], b[t][1] = registers[step][t][1];
    } else {
      load(step, b);
    }
  }
};

// --------------------------------------------------------------------------------------------------------------- products

using Scores = float[kGroups][kRowTiles][4];
using Sums = float[kSteps][kRowTiles][4];

// What this lane's rows, 2c and 2c + 1 of each row tile, have seen so far.
struct RowState {
  float scale[kRowTiles][2];
  float max[kRowTiles][2];  // natural logits; the same in all lanes of a row
  float sum[kRowTiles][2];  // of this lane's keys only
};

// Where this lane's row of an ldmatrix over 16 keys and one or two units lies. Matrices of K, in the order of the operand's
// registers: (keys 0-7, unit 0), (8-15, 0), (0-7, 1), (8-15, 1). Of V, which is transposed: (0-7, 0), (0-7, 1), (8-15, 0), (8-15,
// 1).
__device__ __forceinline__ int k_offset() {
  const int lane = threadIdx.x % 32;
  return lane % 16 * kRowBytes + lane / 16 * 16;
}
__device__ __forceinline__ int v_offset() {
  const int lane = threadIdx.x % 32;
  return (lane / 16 * 8 + lane % 8) * kRowBytes + lane / 8 % 2 * 16;
}

// S^T = K Q^T. `from`: the K tile + k_offset().
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

// Logits from scores: scale, soft cap, bias, and -inf where a row may not see a key. `mapped`: tokens that have memory.
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
          float x = s[i][t][2 * v + h] * state.scale[t][h];
          if (kSoftcap) x = p.softcap * tanhf(x / p.softcap);
          if (kAlibi) x = fmaf(row.slope, float(token - row.position), x);
          if (!clean) x = mapped >> key & 1 && token >= row.lo && token < row.hi ? x : negative_infinity();
          s[i][t][2 * v + h] = x;
        }
      }
    }
  }
}

// The online softmax: logits become probabilities, as B operands of P^T; what was summed before shrinks.
__device__ __forceinline__ void soften(Scores& s, RowState& state, Sums& sums, unsigned (&b)[kGroups][kRowTiles][2]) {
  float top[kRowTiles][2];
  bool rises = false;
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x = fmaxf(s[0][t][h], s[0][t][2 + h]);
#pragma unroll
      for (int i = 1; i < kGroups; ++i) x = fmaxf(x, fmaxf(s[i][t][h], s[i][t][2 + h]));
#pragma unroll
      for (int flip = 4; flip < 32; flip *= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, flip));
      top[t][h] = fmaxf(state.max[t][h], x);
      rises |= top[t][h] > state.max[t][h];
    }
  }
  if (__any_sync(kAllLanes, rises)) {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      float shrink[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        shrink[h] = exp_above(state.max[t][h], anchor(top[t][h]));
        state.max[t][h] = top[t][h];
        state.sum[t][h] *= shrink[h];
      }
#pragma unroll
      for (int m = 0; m < kSteps; ++m) {
#pragma unroll
        for (int v = 0; v < 4; ++v) sums[m][t][v] *= shrink[v % 2];
      }
    }
  }
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
    const float base[2] = {anchor(state.max[t][0]), anchor(state.max[t][1])};
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        s[i][t][v] = exp_above(s[i][t][v], base[v % 2]);
        state.sum[t][v % 2] += s[i][t][v];
      }
      b[i][t][0] = movmatrix_trans(pack(s[i][t][0], s[i][t][1]));
      b[i][t][1] = movmatrix_trans(pack(s[i][t][2], s[i][t][3]));
    }
  }
}

// O^T += V^T P^T. `from`: the V tile + v_offset(); `last`: + k_offset(), for a last single unit.
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
        v[0] = half[0], v[2] = half[1];
      }
      if constexpr (kFp8) {
#pragma unroll
        for (int h = 0; h < (both ? 2 : 1); ++h) {
          unsigned a[4];
          split_codes(v[h], a[0], a[1]);
          split_codes(v[h + 2], a[2], a[3]);
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
__device__ __forceinline__ void attend_tile(const Params& p, SharedAddress tile, const Query& query, const Row* rows, int start,
                                            bool clean, Mask mapped, RowState& state, Sums& sums) {
  Scores s;
  unsigned probabilities[kGroups][kRowTiles][2];
  const int k_lane = k_offset();
  scores(tile + k_lane, query, s);
  if (clean) {
    to_logits(p, rows, start, true, mapped, state, s);
  } else {
    to_logits(p, rows, start, false, mapped, state, s);
  }
  soften(s, state, sums, probabilities);
  accumulate(tile + kTileBytes + v_offset(), tile + kTileBytes + k_lane, probabilities, sums);
}

// ------------------------------------------------------------------------------------------------------- a warp's results

__device__ __forceinline__ void reset(const float* scales, RowState& state, Sums& sums) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      state.scale[t][h] = scales[t * 8 + lane % 4 * 2 + h];
      state.max[t][h] = negative_infinity();
      state.sum[t][h] = 0.0f;
    }
#pragma unroll
    for (int m = 0; m < kSteps; ++m) sums[m][t][0] = sums[m][t][1] = sums[m][t][2] = sums[m][t][3] = 0.0f;
  }
}

constexpr int kSumFloats = kHeadDim + 4;  // of a row of sums in shared memory: the 32 lanes of a store touch all banks

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
      if (g == 0) states[row] = {state.max[t][h], state.sum[t][h]};
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

// What the matrix instructions multiply: 16-bit operands, fp8 codes as halves, queries.
//
// Types      16-bit pages are multiplied as they are. fp8 pages become halves, queries too: bf16 queries times a power of two per
//            row, which the softmax scale takes back. Probabilities are halves, bf16 for bf16 pages. Accumulators float32.
// Lanes      Lane t, g = t / 4, c = t % 4. Order inside head_dim is free in Q K^T: with fp8 a lane takes the four codes of its
//            register, and queries are stored in that order (query_position): by the bit trick entries 0, 2, 1, 3 of head_dim
//            stand at positions 0, 1, 8, 9 of their 16.
// Shared     Queries [rows] of head_dim halves, a multiple of 16, padded to an odd number of 16-byte units: 272 bytes for 128.
#pragma once
#include "tile_copy.cuh"

constexpr bool kFp8 = sizeof(kCacheType) == 1;
constexpr bool kBfloat16 = is_same_type<kCacheType, __nv_bfloat16>;
constexpr bool kScaledQuery = kFp8 && is_same_type<kQueryType, __nv_bfloat16>;
#if __CUDA_ARCH__ >= 890
constexpr bool kByteTrick = false;
#else
constexpr bool kByteTrick = is_same_type<kCacheType, fp8_e4m3>;
#endif
constexpr float kCodeFactor = kByteTrick ? 256.0f : 1.0f;  // of an fp8 value over what is multiplied in its place
constexpr float kSmallestScale = 1.2e-38f;                 // just not subnormal: 0 would make NaN of an empty state's -inf
constexpr int kSteps = (kHeadDim + 15) / 16;               // of 16 entries of head_dim, the last perhaps 8
constexpr int kQueryRowBytes = (2 * kSteps | 1) * 16;
constexpr bool kQueryInRegisters = kWarpRows * kHeadDim <= 2048;
constexpr bool kRowsFirst = kWarpRows == 16;  // the M of m16n8k16 is packed rows, else keys and entries of head_dim
constexpr int kPer16 = kRowsFirst ? 2 : 1;    // accumulators of 16 keys or entries of head_dim
static_assert(kWarpRows == 8 || kWarpRows == 16, "the rows of a warp are the N or the M of m16n8k16");

// ------------------------------------------------------------------------------------------------ 16-bit and fp8 operands

using RowOperand = unsigned[kPer16 * 2];  // 16 entries of head_dim of the queries, or probabilities of 16 keys

// Where 8 keys or 8 entries of head_dim (0, 1) of 8 summands (0, 1) stand in the operand of 16 by 16.
__device__ __forceinline__ constexpr int operand_at(int eight, int summands) {
  return kRowsFirst ? eight * 2 + summands : eight + summands * 2;
}

// d += the rows times 16 keys or entries of head_dim: `rows` is the A or the B operand, x the other. kOnly8: without the second
// 8 of them, where d has an accumulator of their own.
template <bool kOnly8 = false, int kWords>
__device__ __forceinline__ void multiply(float (*d)[4], const unsigned (&rows)[kWords], const unsigned (&x)[4]) {
  if constexpr (kWords == 4) {
#pragma unroll
    for (int n = 0; n < (kOnly8 ? 1 : 2); ++n) {
      if constexpr (kBfloat16) {
        mma_m16n8k16_bf16(d[n], rows, x[2 * n], x[2 * n + 1]);
      } else {
        mma_m16n8k16_f16(d[n], rows, x[2 * n], x[2 * n + 1]);
      }
    }
  } else if constexpr (kBfloat16) {
    mma_m16n8k16_bf16(d[0], x, rows[0], rows[1]);
  } else {
    mma_m16n8k16_f16(d[0], x, rows[0], rows[1]);
  }
}

// The same over 8 summands: x holds those of keys 0 to 7 and 8 to 15.
__device__ __forceinline__ void multiply_8(float (*d)[4], const RowOperand& rows, const unsigned (&x)[2]) {
  if constexpr (kRowsFirst) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if constexpr (kBfloat16) {
        mma_m16n8k8_bf16(d[n], rows[0], rows[1], x[n]);
      } else {
        mma_m16n8k8_f16(d[n], rows[0], rows[1], x[n]);
      }
    }
  } else if constexpr (kBfloat16) {
    mma_m16n8k8_bf16(d[0], x[0], x[1], rows[0]);
  } else {
    mma_m16n8k8_f16(d[0], x[0], x[1], rows[0]);
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
    // Exponent and mantissa moved to a half's place: biases 7 and 15 make that 2^-8 of the value. Turned by one bit the codes of
    // odd bytes lie right, and those of even bytes a byte too low, with the lowest bit in the byte before. A bitwise choice leaves
    // what lies right and takes signs and zeros elsewhere: 5 instructions for 4 codes.
    const unsigned turned = codes >> 1 | codes << 31, signs = codes & 0x80808080u;
    even = __byte_perm(bitwise_choice(0x803f803fu, turned, signs), 0, 0x2103);
    odd = bitwise_choice(0x3f803f80u, turned, signs);
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

// ---------------------------------------------------------------------------------------------------------------- queries

// Rows first, first + kStep, ... of the tile's queries to shared memory, kCount rows a warp, rows and entries past the end as
// zeros; their softmax scales to `scales`.
template <int kCount, int kStep>
__device__ __forceinline__ void load_queries(const Params& p, const Task& task, unsigned char* queries, float* scales, int first) {
  constexpr int kEntries = (kSteps * 16 + 31) / 32, kBatch = kCount < 8 ? kCount : 8;  // of a lane; rows in flight
  const int lane = threadIdx.x % 32;
  // A negative scale is its magnitude with negated queries, so that the largest score is that of the largest logit; a scale of 0 is
  // queries of 0.
  const float scale = fabsf(p.scale) * p.k_scale[task.head] * kCodeFactor;
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
        // The largest entry becomes 1 to 2; what is lost at the small end is below 2^-25 of the largest. Entries from 2^112 on stay
        // larger, up to 2^16, so that no factor overflows.
        float top = 0.0f;
#pragma unroll
        for (int i = 0; i < kEntries; ++i) top = fmaxf(top, fabsf(to_float(entries[b][i])));
#pragma unroll
        for (int flip = 16; flip > 0; flip /= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, flip));
        const int exponent = max(min(int(__float_as_uint(top) >> 23), 127 + 112), 1);
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
      if (lane == 0) scales[r] = fmaxf(scale * back, kSmallestScale);
    }
  }
  if (p.scale <= 0.0f) {
    constexpr int kWords = kSteps * 8;  // of a row
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < kCount * kWords; i += 32) {
      unsigned char* at = queries + (first + i / kWords * kStep) * kQueryRowBytes + i % kWords * 4;
      store_as(at, p.scale < 0.0f ? load_as<unsigned>(at) ^ 0x80008000u : 0u);
    }
  }
}

struct Query {  // operands of Q: a step's entries 2c, 2c + 1 (and + 8) of row g, and of row g + 8 where there are 16
  SharedAddress lane_row;
  RowOperand registers[kQueryInRegisters ? kSteps : 1];

  // `rows`: this warp's first row.
  __device__ __forceinline__ void open(const unsigned char* rows) {
    const int lane = threadIdx.x % 32;
    lane_row = shared_address(rows) + lane % kWarpRows * kQueryRowBytes + lane / kWarpRows % 2 * 16;
    if constexpr (kQueryInRegisters) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load(step, registers[step]);
    }
  }
  template <int kWords>
  __device__ __forceinline__ void load(int step, unsigned (&q)[kWords]) const {
    if constexpr (kWords == 4) {
      ldmatrix_x4(q, lane_row + step * 32);
    } else {
      ldmatrix_x2(q, lane_row + step * 32);
    }
  }
  __device__ __forceinline__ void get(int step, RowOperand& q) const {
    if constexpr (kQueryInRegisters) {
#pragma unroll
      for (int i = 0; i < kPer16 * 2; ++i) q[i] = registers[step][i];
    } else {
      load(step, q);
    }
  }
};

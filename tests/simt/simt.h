// What a CUDA source sees when g++ compiles it for the executor: CUDA's names, bound to functions of runtime.cpp.
//
// Included before the source (precompiled). NVIDIA's own headers give the vector and 16-bit types, in host mode; threads,
// blocks, warp operations, atomics and the wrappers of ptx.cuh are declared here. Every function that threads must reach
// together takes the caller's file and line as defaulted arguments, so that a report can name them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#define SIMT_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define SIMT_INLINE inline __attribute__((always_inline))

// ---------------------------------------------------------------------------------------------- runtime.cpp

struct SimtThread {  // the running thread
  uint3 index;
  unsigned linear, lane, warp;
};

enum SimtWarpKind { kSyncWarp, kShuffle, kVote, kLoadMatrix, kMma };
enum SimtSpace { kGlobal, kShared, kAny };
enum SimtAccess { kRead = 0, kWrite = 1 };

#pragma GCC visibility push(default)
extern "C" {
extern SimtThread* simt_thread;
extern uint3 simt_block_index;
extern dim3 simt_block_dim, simt_grid_dim;
extern unsigned char smem[];

void simt_fail(const char* file, int line, const char* format, ...) __attribute__((noreturn, format(printf, 3, 4)));
int simt_barrier(int predicate, int reduction, const char* file, int line);  // 0 none, 1 or, 2 and, 3 count
void simt_warp(int kind, unsigned mask, unsigned detail, void* argument, const char* file, int line);
void simt_fence();
void simt_atomic_begin(const void* address, unsigned bytes, const char* file, int line);
void simt_atomic_end(const void* address, int acquires, int releases);
void simt_async_copy(void* to, const void* from, unsigned bytes, unsigned valid, const char* file, int line);
void simt_async_commit();
void simt_async_wait(int groups_left);
float simt_approximate(double exact, double relative_error, unsigned input_bits);
void simt_access(const void* address, unsigned bytes, int space, const char* file, int line);
}
#pragma GCC visibility pop

// ------------------------------------------------------------------------------------------ built-in variables

#define threadIdx (simt_thread->index)
#define blockIdx (simt_block_index)
#define blockDim (simt_block_dim)
#define gridDim (simt_grid_dim)
constexpr int warpSize = 32;

// ------------------------------------------------------------------------------------- barriers, warp operations

SIMT_INLINE void __syncthreads(SIMT_SITE) { simt_barrier(0, 0, file, line); }
SIMT_INLINE int __syncthreads_or(int predicate, SIMT_SITE) { return simt_barrier(predicate, 1, file, line); }
SIMT_INLINE int __syncthreads_and(int predicate, SIMT_SITE) { return simt_barrier(predicate, 2, file, line); }
SIMT_INLINE int __syncthreads_count(int predicate, SIMT_SITE) { return simt_barrier(predicate, 3, file, line); }
SIMT_INLINE void __syncwarp(unsigned mask = 0xffffffffu, SIMT_SITE) { simt_warp(kSyncWarp, mask, 0, nullptr, file, line); }

struct SimtShuffle {  // one lane's side of a shuffle: the value it offers, the lane it reads
  unsigned long long value;
  unsigned source;
};

template <class T>
SIMT_INLINE T simt_shuffle(unsigned mask, T value, unsigned source, unsigned detail, const char* file, int line) {
  static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
  SimtShuffle shuffle = {0, source};
  __builtin_memcpy(&shuffle.value, &value, sizeof(T));
  simt_warp(kShuffle, mask, detail, &shuffle, file, line);
  __builtin_memcpy(&value, &shuffle.value, sizeof(T));
  return value;
}
template <class T>
SIMT_INLINE T __shfl_sync(unsigned mask, T value, int source, int width = 32, SIMT_SITE) {
  unsigned lane = simt_thread->lane, base = lane & ~(width - 1);
  return simt_shuffle(mask, value, base + (unsigned(source) & (width - 1)), width, file, line);
}
template <class T>
SIMT_INLINE T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32, SIMT_SITE) {
  unsigned lane = simt_thread->lane, end = (lane & ~(width - 1)) + width, source = lane ^ unsigned(flip);
  return simt_shuffle(mask, value, source < end ? source : lane, 64 + width, file, line);
}
template <class T>
SIMT_INLINE T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_SITE) {
  unsigned lane = simt_thread->lane, end = (lane & ~(width - 1)) + width, source = lane + delta;
  return simt_shuffle(mask, value, source < end ? source : lane, 128 + width, file, line);
}
template <class T>
SIMT_INLINE T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_SITE) {
  int lane = simt_thread->lane, base = lane & ~(width - 1), source = lane - int(delta);
  return simt_shuffle(mask, value, unsigned(source >= base ? source : lane), 192 + width, file, line);
}

struct SimtVote {
  int predicate;
  unsigned ballot;
};
SIMT_INLINE unsigned simt_ballot(unsigned mask, int predicate, unsigned detail, const char* file, int line) {
  SimtVote vote = {predicate, 0};
  simt_warp(kVote, mask, detail, &vote, file, line);
  return vote.ballot;
}
SIMT_INLINE unsigned __ballot_sync(unsigned mask, int predicate, SIMT_SITE) { return simt_ballot(mask, predicate, 0, file, line); }
SIMT_INLINE int __any_sync(unsigned mask, int predicate, SIMT_SITE) { return simt_ballot(mask, predicate, 1, file, line) != 0; }
SIMT_INLINE int __all_sync(unsigned mask, int predicate, SIMT_SITE) { return simt_ballot(mask, predicate, 2, file, line) == mask; }

// ------------------------------------------------------------------------- atomics (integers only), fences, loads

template <bool kAcquire, bool kRelease, class T, class F>
SIMT_INLINE T simt_atomic(T* address, F update, const char* file, int line) {
  simt_atomic_begin(address, sizeof(T), file, line);
  T old = __atomic_load_n(address, __ATOMIC_RELAXED), next = update(old);
  __atomic_store_n(address, next, __ATOMIC_RELAXED);
  simt_atomic_end(address, kAcquire, kRelease);
  return old;
}
#define SIMT_ATOMIC(T)                                                                                 \
  SIMT_INLINE T atomicAdd(T* p, T v, SIMT_SITE) {                                                      \
    return simt_atomic<false, false>(                                                                  \
        p,                                                                                             \
        [=](T old) {                                                                                   \
          T sum;                                                                                       \
          __builtin_add_overflow(old, v, &sum);                                                        \
          return sum;                                                                                  \
        },                                                                                             \
        file, line);                                                                                   \
  }                                                                                                    \
  SIMT_INLINE T atomicSub(T* p, T v, SIMT_SITE) {                                                      \
    return simt_atomic<false, false>(                                                                  \
        p,                                                                                             \
        [=](T old) {                                                                                   \
          T sum;                                                                                       \
          __builtin_sub_overflow(old, v, &sum);                                                        \
          return sum;                                                                                  \
        },                                                                                             \
        file, line);                                                                                   \
  }                                                                                                    \
  SIMT_INLINE T atomicMax(T* p, T v, SIMT_SITE) {                                                      \
    return simt_atomic<false, false>(p, [=](T old) { return old > v ? old : v; }, file, line);         \
  }                                                                                                    \
  SIMT_INLINE T atomicMin(T* p, T v, SIMT_SITE) {                                                      \
    return simt_atomic<false, false>(p, [=](T old) { return old < v ? old : v; }, file, line);         \
  }                                                                                                    \
  SIMT_INLINE T atomicOr(T* p, T v, SIMT_SITE) {                                                       \
    return simt_atomic<false, false>(p, [=](T old) { return old | v; }, file, line);                   \
  }                                                                                                    \
  SIMT_INLINE T atomicAnd(T* p, T v, SIMT_SITE) {                                                      \
    return simt_atomic<false, false>(p, [=](T old) { return old & v; }, file, line);                   \
  }                                                                                                    \
  SIMT_INLINE T atomicExch(T* p, T v, SIMT_SITE) {                                                     \
    return simt_atomic<false, false>(p, [=](T) { return v; }, file, line);                             \
  }                                                                                                    \
  SIMT_INLINE T atomicCAS(T* p, T expected, T v, SIMT_SITE) {                                          \
    return simt_atomic<false, false>(p, [=](T old) { return old == expected ? v : old; }, file, line); \
  }
SIMT_ATOMIC(int)
SIMT_ATOMIC(unsigned)
SIMT_ATOMIC(unsigned long long)
#undef SIMT_ATOMIC
SIMT_INLINE unsigned atomicInc(unsigned* p, unsigned limit, SIMT_SITE) {
  return simt_atomic<false, false>(p, [=](unsigned old) { return old >= limit ? 0u : old + 1; }, file, line);
}
SIMT_INLINE unsigned atomicDec(unsigned* p, unsigned limit, SIMT_SITE) {
  return simt_atomic<false, false>(p, [=](unsigned old) { return old == 0 || old > limit ? limit : old - 1; }, file, line);
}

SIMT_INLINE void __threadfence() { simt_fence(); }
SIMT_INLINE void __threadfence_block() { simt_fence(); }
SIMT_INLINE void __threadfence_system() { simt_fence(); }
template <class T>
SIMT_INLINE T __ldg(const T* address, SIMT_SITE) {
  simt_access(address, sizeof(T), kGlobal, file, line);
  return *address;
}

// -------------------------------------------------------------------------------------------- arithmetic

#define SIMT_MIN_MAX(T)                                           \
  SIMT_INLINE constexpr T min(T a, T b) { return b < a ? b : a; } \
  SIMT_INLINE constexpr T max(T a, T b) { return a < b ? b : a; }
SIMT_MIN_MAX(int)
SIMT_MIN_MAX(unsigned)
SIMT_MIN_MAX(long)
SIMT_MIN_MAX(unsigned long)
SIMT_MIN_MAX(long long)
SIMT_MIN_MAX(unsigned long long)
#undef SIMT_MIN_MAX
SIMT_INLINE float min(float a, float b) { return fminf(a, b); }
SIMT_INLINE float max(float a, float b) { return fmaxf(a, b); }
SIMT_INLINE constexpr unsigned min(int a, unsigned b) { return min(unsigned(a), b); }
SIMT_INLINE constexpr unsigned min(unsigned a, int b) { return min(a, unsigned(b)); }
SIMT_INLINE constexpr unsigned max(int a, unsigned b) { return max(unsigned(a), b); }
SIMT_INLINE constexpr unsigned max(unsigned a, int b) { return max(a, unsigned(b)); }

template <class To, class From>
SIMT_INLINE To simt_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "equal sizes");
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}
SIMT_INLINE int __float_as_int(float x) { return simt_bits<int>(x); }
SIMT_INLINE unsigned __float_as_uint(float x) { return simt_bits<unsigned>(x); }
SIMT_INLINE float __int_as_float(int x) { return simt_bits<float>(x); }
SIMT_INLINE float __uint_as_float(unsigned x) { return simt_bits<float>(x); }
SIMT_INLINE long long __double_as_longlong(double x) { return simt_bits<long long>(x); }
SIMT_INLINE double __longlong_as_double(long long x) { return simt_bits<double>(x); }
SIMT_INLINE int __popc(unsigned x) { return __builtin_popcount(x); }
SIMT_INLINE int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
SIMT_INLINE int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
SIMT_INLINE int __ffs(int x) { return __builtin_ffs(x); }
SIMT_INLINE unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
SIMT_INLINE unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}
SIMT_INLINE unsigned __funnelshift_l(unsigned low, unsigned high, unsigned n) {
  return unsigned((((unsigned long long)high << 32 | low) << (n & 31)) >> 32);
}
SIMT_INLINE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) {
  return unsigned(((unsigned long long)high << 32 | low) >> (n & 31));
}
SIMT_INLINE unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  unsigned long long bytes = (unsigned long long)b << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    unsigned pick = selector >> (4 * i), byte = unsigned(bytes >> (8 * (pick & 7))) & 0xff;
    if (pick & 8) byte = byte & 0x80 ? 0xff : 0;  // bit 3 of a selector copies the sign
    result |= byte << (8 * i);
  }
  return result;
}
SIMT_INLINE float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
SIMT_INLINE float __fadd_rn(float a, float b) {
  volatile float sum = a + b;
  return sum;
}
SIMT_INLINE float __fsub_rn(float a, float b) {
  volatile float difference = a - b;
  return difference;
}
SIMT_INLINE float __fmul_rn(float a, float b) {
  volatile float product = a * b;
  return product;
}
SIMT_INLINE float __fdiv_rn(float a, float b) { return a / b; }
SIMT_INLINE float __frcp_rn(float a) { return 1.0f / a; }
SIMT_INLINE float __fsqrt_rn(float a) { return sqrtf(a); }
SIMT_INLINE float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
SIMT_INLINE int __float2int_rn(float x) { return int(rintf(x)); }
SIMT_INLINE int __float2int_rd(float x) { return int(floorf(x)); }
SIMT_INLINE int __float2int_rz(float x) { return int(x); }
SIMT_INLINE float __int2float_rn(int x) { return float(x); }
SIMT_INLINE void __trap(SIMT_SITE) { simt_fail(file, line, "__trap() was reached"); }

// Host mode of NVIDIA's headers has no fused multiply-add for the 16-bit types.
SIMT_INLINE __half __hfma(__half a, __half b, __half c) {
  return __double2half(fma(double(__half2float(a)), double(__half2float(b)), double(__half2float(c))));
}
SIMT_INLINE __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return __halves2half2(__hfma(__low2half(a), __low2half(b), __low2half(c)),
                        __hfma(__high2half(a), __high2half(b), __high2half(c)));
}
SIMT_INLINE __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
  return __double2bfloat16(fma(double(__bfloat162float(a)), double(__bfloat162float(b)), double(__bfloat162float(c))));
}
SIMT_INLINE __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  return __halves2bfloat162(__hfma(__low2bfloat16(a), __low2bfloat16(b), __low2bfloat16(c)),
                            __hfma(__high2bfloat16(a), __high2bfloat16(b), __high2bfloat16(c)));
}

// ------------------------------------------------------------------------------------- the names of ptx.cuh

#include "simt_ptx.h"

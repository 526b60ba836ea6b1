// Element types: fp8 as one-byte structs, conversions to and from float32, vectors of elements.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "ptx.cuh"

struct fp8_e4m3 {  // 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinity, NaN is 0x7f
  unsigned char bits;
};
struct fp8_e5m2 {  // the high byte of a half
  unsigned char bits;
};

template <class A, class B>
constexpr bool is_same_type = false;
template <class A>
constexpr bool is_same_type<A, A> = true;

// ------------------------------------------------------------------------------------------------------ to float32

// Two fp8 values (low byte, high byte) as two halves (low, high). Exact; the NaN codes of e4m3 give NaN from sm_89 on, 480 before.
template <class T>
__device__ __forceinline__ __half2 fp8x2_to_half2(unsigned short pair) {
  unsigned halves;
  if constexpr (is_same_type<T, fp8_e5m2>) {
    halves = __byte_perm(pair, 0, 0x1404);
  } else {
#if __CUDA_ARCH__ >= 890
    halves = e4m3x2_to_half2(pair);
#else
    // Exponent and mantissa moved to a half's place: 2^-8 of the value, as the biases are 7 and 15.
    const unsigned spread = __byte_perm(pair, 0, 0x1404);
    halves = (spread & 0x80008000u) | (spread & 0x7f007f00u) >> 1;
    return __hmul2(*reinterpret_cast<__half2*>(&halves), __float2half2_rn(256.0f));
#endif
  }
  return *reinterpret_cast<__half2*>(&halves);
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(fp8_e4m3 x) { return __low2float(fp8x2_to_half2<fp8_e4m3>(x.bits)); }
__device__ __forceinline__ float to_float(fp8_e5m2 x) { return __low2float(fp8x2_to_half2<fp8_e5m2>(x.bits)); }

// ---------------------------------------------------------------------------------------------------- from float32

// Round to nearest, ties to even. fp8 saturates at the largest finite value, infinities too; NaN stays NaN.
template <class T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (is_same_type<T, float>) {
    return x;
  } else if constexpr (is_same_type<T, __half>) {
    return __float2half_rn(x);
  } else if constexpr (is_same_type<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else if constexpr (is_same_type<T, fp8_e4m3>) {
    return {__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3)};
  } else {
    static_assert(is_same_type<T, fp8_e5m2>, "unknown element type");
    return {__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2)};
  }
}

// ---------------------------------------------------------------------------------------------------------- vectors

// The widest access that divides kBytes.
template <int kBytes>
struct Access {
  using type = unsigned char;
};
template <>
struct Access<2> {
  using type = unsigned short;
};
template <>
struct Access<4> {
  using type = unsigned;
};
template <>
struct Access<8> {
  using type = uint2;
};
template <>
struct Access<16> {
  using type = uint4;
};

template <int kBytes>
constexpr int access_bytes = kBytes % 16 == 0  ? 16
                             : kBytes % 8 == 0 ? 8
                             : kBytes % 4 == 0 ? 4
                             : kBytes % 2 == 0 ? 2
                                               : 1;

template <class T, int kCount>
struct alignas(access_bytes<kCount * sizeof(T)>) Vec {
  T at[kCount];
};

// kCount elements from, or to, an address aligned to access_bytes of the whole, in accesses of that many bytes.
template <int kCount, class T>
__device__ __forceinline__ Vec<T, kCount> load_vec(const T* p) {
  constexpr int kBytes = kCount * sizeof(T), kStep = access_bytes<kBytes>;
  using Piece = typename Access<kStep>::type;
  Vec<T, kCount> result;
#pragma unroll
  for (int i = 0; i < kBytes / kStep; ++i) {
    reinterpret_cast<Piece*>(&result)[i] = load_as<Piece>(reinterpret_cast<const Piece*>(p) + i);
  }
  return result;
}
template <class T, int kCount>
__device__ __forceinline__ void store_vec(T* p, const Vec<T, kCount>& value) {
  constexpr int kBytes = kCount * sizeof(T), kStep = access_bytes<kBytes>;
  using Piece = typename Access<kStep>::type;
#pragma unroll
  for (int i = 0; i < kBytes / kStep; ++i) {
    store_as(reinterpret_cast<Piece*>(p) + i, reinterpret_cast<const Piece*>(&value)[i]);
  }
}

// kCount elements as float32. 16-bit values are taken in pairs, one register each.
template <class T, int kCount>
__device__ __forceinline__ void to_floats(const Vec<T, kCount>& x, float (&f)[kCount]) {
  if constexpr (is_same_type<T, fp8_e4m3> || is_same_type<T, fp8_e5m2>) {
    static_assert(kCount % 2 == 0, "fp8 values are converted in pairs");
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const float2 pair = __half22float2(fp8x2_to_half2<T>((unsigned short)(x.at[i].bits | x.at[i + 1].bits << 8)));
      f[i] = pair.x;
      f[i + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) f[i] = to_float(x.at[i]);
  }
}

template <class T, int kCount>
__device__ __forceinline__ void load_shared_floats(const unsigned char* p, float (&f)[kCount]) {
  to_floats(load_vec<kCount>(reinterpret_cast<const T*>(p)), f);
}

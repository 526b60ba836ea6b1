// The executor's side of cuda_src/ptx.cuh: the same names and arguments, with the PTX manual's meaning.
#pragma once

using SharedAddress = unsigned char*;
SIMT_INLINE SharedAddress shared_address(const void* p) { return static_cast<unsigned char*>(const_cast<void*>(p)); }

SIMT_INLINE void cp_async_16(void* to, const void* from, bool valid = true, SIMT_SITE) {
  simt_async_copy(to, from, 16, valid ? 16 : 0, file, line);
}
SIMT_INLINE void cp_async_8(void* to, const void* from, bool valid = true, SIMT_SITE) {
  simt_async_copy(to, from, 8, valid ? 8 : 0, file, line);
}
SIMT_INLINE void cp_async_4(void* to, const void* from, bool valid = true, SIMT_SITE) {
  simt_async_copy(to, from, 4, valid ? 4 : 0, file, line);
}
SIMT_INLINE void cp_async_commit() { simt_async_commit(); }
template <int kGroupsLeft>
SIMT_INLINE void cp_async_wait() {
  simt_async_wait(kGroupsLeft);
}

struct SimtLoadMatrix {
  const void* row;
  unsigned registers[4];
};
template <int kCount, bool kTransposed>
SIMT_INLINE void simt_load_matrix(unsigned* r, const void* row, const char* file, int line) {
  SimtLoadMatrix load = {row, {}};
  simt_warp(kLoadMatrix, 0xffffffffu, kCount | kTransposed << 3, &load, file, line);
  for (int j = 0; j < kCount; ++j) r[j] = load.registers[j];
}
SIMT_INLINE void ldmatrix_x1(unsigned (&r)[1], const void* row, SIMT_SITE) { simt_load_matrix<1, false>(r, row, file, line); }
SIMT_INLINE void ldmatrix_x2(unsigned (&r)[2], const void* row, SIMT_SITE) { simt_load_matrix<2, false>(r, row, file, line); }
SIMT_INLINE void ldmatrix_x4(unsigned (&r)[4], const void* row, SIMT_SITE) { simt_load_matrix<4, false>(r, row, file, line); }
SIMT_INLINE void ldmatrix_x1_trans(unsigned (&r)[1], const void* row, SIMT_SITE) { simt_load_matrix<1, true>(r, row, file, line); }
SIMT_INLINE void ldmatrix_x2_trans(unsigned (&r)[2], const void* row, SIMT_SITE) { simt_load_matrix<2, true>(r, row, file, line); }
SIMT_INLINE void ldmatrix_x4_trans(unsigned (&r)[4], const void* row, SIMT_SITE) { simt_load_matrix<4, true>(r, row, file, line); }

// Lane t = 4 g + c gets column g of rows 2 c (low half) and 2 c + 1 (high half).
SIMT_INLINE unsigned movmatrix_trans(unsigned x, SIMT_SITE) {
  unsigned g = simt_thread->lane / 4, c = simt_thread->lane % 4, shift = g % 2 * 16;
  unsigned low = simt_shuffle(0xffffffffu, x, 8 * c + g / 2, 32, file, line) >> shift & 0xffff;
  unsigned high = simt_shuffle(0xffffffffu, x, 8 * c + 4 + g / 2, 32, file, line) >> shift & 0xffff;
  return low | high << 16;
}

struct SimtMma {
  const unsigned *a, *b;
  float* d;
};
enum { kMmaBfloat16 = 64 };  // beside the depth (8 or 16) in the detail of a kMma operation
SIMT_INLINE void simt_mma(unsigned detail, float* d, const unsigned* a, const unsigned* b, const char* file, int line) {
  SimtMma mma = {a, b, d};
  simt_warp(kMma, 0xffffffffu, detail, &mma, file, line);
}
SIMT_INLINE void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, SIMT_SITE) {
  unsigned b[2] = {b0, b1};
  simt_mma(16, d, a, b, file, line);
}
SIMT_INLINE void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, SIMT_SITE) {
  unsigned b[2] = {b0, b1};
  simt_mma(16 | kMmaBfloat16, d, a, b, file, line);
}
SIMT_INLINE void mma_m16n8k8_f16(float (&d)[4], unsigned a0, unsigned a1, unsigned b0, SIMT_SITE) {
  unsigned a[2] = {a0, a1};
  simt_mma(8, d, a, &b0, file, line);
}
SIMT_INLINE void mma_m16n8k8_bf16(float (&d)[4], unsigned a0, unsigned a1, unsigned b0, SIMT_SITE) {
  unsigned a[2] = {a0, a1};
  simt_mma(8 | kMmaBfloat16, d, a, &b0, file, line);
}

// Documented error of ex2.approx.ftz.f32: 2^-22 relative; of rcp.approx.ftz.f32: 2^-23 relative.
SIMT_INLINE float exp2_approx(float x) { return simt_approximate(exp2(double(x)), 0x1p-22, __float_as_uint(x)); }
SIMT_INLINE float rcp_approx(float x) { return simt_approximate(1.0 / double(x), 0x1p-23, __float_as_uint(x)); }

template <class T>
SIMT_INLINE T simt_load(const void* address, int space, const char* file, int line) {
  simt_access(address, sizeof(T), space, file, line);
  return *static_cast<const T*>(address);
}
template <class T>
SIMT_INLINE void simt_store(void* address, T value, int space, const char* file, int line) {
  simt_access(address, sizeof(T), space, file, line);
  *static_cast<T*>(address) = value;
}
SIMT_INLINE uint4 load_global_16(const void* p, SIMT_SITE) { return simt_load<uint4>(p, kGlobal, file, line); }
SIMT_INLINE uint2 load_global_8(const void* p, SIMT_SITE) { return simt_load<uint2>(p, kGlobal, file, line); }
SIMT_INLINE unsigned load_global_4(const void* p, SIMT_SITE) { return simt_load<unsigned>(p, kGlobal, file, line); }
SIMT_INLINE unsigned short load_global_2(const void* p, SIMT_SITE) { return simt_load<unsigned short>(p, kGlobal, file, line); }
SIMT_INLINE unsigned char load_global_1(const void* p, SIMT_SITE) { return simt_load<unsigned char>(p, kGlobal, file, line); }

template <class T>
SIMT_INLINE T load_as(const void* p, SIMT_SITE) {
  return simt_load<T>(p, kAny, file, line);
}
template <class T>
SIMT_INLINE void store_as(void* p, T value, SIMT_SITE) {
  simt_store<T>(p, value, kAny, file, line);
}

SIMT_INLINE unsigned atomic_add_acq_rel(unsigned* p, unsigned v, SIMT_SITE) {
  return simt_atomic<true, true>(p, [=](unsigned old) { return old + v; }, file, line);
}
SIMT_INLINE unsigned e4m3x2_to_half2(unsigned short pair) {
  __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3);
  return unsigned(h.x) | unsigned(h.y) << 16;
}
SIMT_INLINE unsigned bitwise_choice(unsigned mask, unsigned one, unsigned zero) { return (mask & one) | (~mask & zero); }
SIMT_INLINE unsigned long long wide_product(unsigned a, unsigned b) { return (unsigned long long)a * b; }
SIMT_INLINE unsigned long long formed_here(unsigned long long x) { return x; }
SIMT_INLINE void split_halves(unsigned x, unsigned short& low, unsigned short& high) {
  low = (unsigned short)x;
  high = (unsigned short)(x >> 16);
}

// Instructions that CUDA C++ has no name for. The only file with inline PTX, one instruction a function.
//
// The CPU executor of the tests has functions of the same names (tests/simt/simt_ptx.h), so nothing here may compute: an
// instruction that is wrong here is seen only by the tests of its text. Names ending in _16, _8, ... move so many bytes and want
// addresses aligned to as many. `asm volatile` where order matters, a memory clobber where memory written through pointers is
// read or memory is written behind the compiler's back.
#pragma once

#ifndef CUPAGED_SIMT

// ------------------------------------------------------------------------------------------------ asynchronous copies

// An address inside shared memory, 32 bits wide. A kernel that forms it once and adds constants gets them as immediates.
using SharedAddress = unsigned;
__device__ __forceinline__ SharedAddress shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

// Global to shared memory; zeros when not `valid` (the source is then not read, but must still be an address).
// .cg goes past L1; it exists for 16 bytes only.
#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ void cp_async_16(SharedAddress to, const void* from, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void cp_async_8(SharedAddress to, const void* from, bool valid = true) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)), "r"(valid ? 8 : 0)
               : "memory");
}
__device__ __forceinline__ void cp_async_4(SharedAddress to, const void* from, bool valid = true) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)), "r"(valid ? 4 : 0)
               : "memory");
}
#endif
__device__ __forceinline__ void cp_async_16(void* to, const void* from, bool valid = true) {
#if __CUDA_ARCH__ >= 800
  cp_async_16(shared_address(to), from, valid);
#else
  *static_cast<uint4*>(to) = valid ? *static_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
#endif
}
__device__ __forceinline__ void cp_async_8(void* to, const void* from, bool valid = true) {
#if __CUDA_ARCH__ >= 800
  cp_async_8(shared_address(to), from, valid);
#else
  *static_cast<uint2*>(to) = valid ? *static_cast<const uint2*>(from) : make_uint2(0, 0);
#endif
}
__device__ __forceinline__ void cp_async_4(void* to, const void* from, bool valid = true) {
#if __CUDA_ARCH__ >= 800
  cp_async_4(shared_address(to), from, valid);
#else
  *static_cast<unsigned*>(to) = valid ? *static_cast<const unsigned*>(from) : 0;
#endif
}
// Closes this thread's group of copies.
__device__ __forceinline__ void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Until all of this thread's groups but the newest kGroupsLeft have landed. Other threads see them after a barrier.
template <int kGroupsLeft>
__device__ __forceinline__ void cp_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroupsLeft) : "memory");
#endif
}

// -------------------------------------------------------------------------------------------- matrices (PTX ISA, 9.7.14)

// 8x8 matrices of 16-bit elements. Lane 8 m + r gives the address of row r of matrix m, aligned to 16 bytes (lanes past the last
// matrix give any address). Register j of lane t: matrix j, row t / 4, elements 2 (t % 4) and the next. _trans: rows 2 (t % 4)
// and the next of column t / 4.
__device__ __forceinline__ void ldmatrix_x1(unsigned (&r)[1], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(row) : "memory");
}
__device__ __forceinline__ void ldmatrix_x1(unsigned (&r)[1], const void* row) { ldmatrix_x1(r, shared_address(row)); }
__device__ __forceinline__ void ldmatrix_x2(unsigned (&r)[2], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(row) : "memory");
}
__device__ __forceinline__ void ldmatrix_x2(unsigned (&r)[2], const void* row) { ldmatrix_x2(r, shared_address(row)); }
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* row) { ldmatrix_x4(r, shared_address(row)); }
__device__ __forceinline__ void ldmatrix_x1_trans(unsigned (&r)[1], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(row) : "memory");
}
__device__ __forceinline__ void ldmatrix_x1_trans(unsigned (&r)[1], const void* row) { ldmatrix_x1_trans(r, shared_address(row)); }
__device__ __forceinline__ void ldmatrix_x2_trans(unsigned (&r)[2], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(row) : "memory");
}
__device__ __forceinline__ void ldmatrix_x2_trans(unsigned (&r)[2], const void* row) { ldmatrix_x2_trans(r, shared_address(row)); }
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], const void* row) { ldmatrix_x4_trans(r, shared_address(row)); }

// An 8x8 matrix of 16-bit elements held one row to four lanes, as ldmatrix leaves it, transposed in place.
__device__ __forceinline__ unsigned movmatrix_trans(unsigned x) {
  unsigned y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

#if __CUDA_ARCH__ >= 800
// D += A B, float32 accumulators. Lane t, g = t / 4, c = t % 4; a register holds the element named and, in its high half, the next:
//   a[0]: row g, k = 2c   a[1]: row g + 8, k = 2c   a[2], a[3]: the same at k = 2c + 8
//   b0: k = 2c, column g (and k + 1 in the high half)   b1: the same at k = 2c + 8
//   d[0], d[1]: row g, columns 2c and 2c + 1   d[2], d[3]: row g + 8
__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The same without k = 8 ... 15: a0 is row g, a1 row g + 8.
__device__ __forceinline__ void mma_m16n8k8_f16(float (&d)[4], unsigned a0, unsigned a1, unsigned b0) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(b0));
}
__device__ __forceinline__ void mma_m16n8k8_bf16(float (&d)[4], unsigned a0, unsigned a1, unsigned b0) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(b0));
}
#endif

// ------------------------------------------------------------------------------------------------------ arithmetic

// 2^x, relative error at most 2^-22; exactly 0 for -inf and 1 for 0. Subnormal results are 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 / x, relative error at most 2^-23. Subnormal results are 0.
__device__ __forceinline__ float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// a * b in 64 bits. The assembler joins it with an addition that follows into one instruction; mad.wide it takes apart.
__device__ __forceinline__ unsigned long long wide_product(unsigned a, unsigned b) {
  unsigned long long product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
}
// x, formed here: the compiler does not put off its last step to where x is used, in the next round of a loop perhaps.
__device__ __forceinline__ unsigned long long formed_here(unsigned long long x) {
  unsigned long long y;
  asm volatile("mov.b64 %0, %1;" : "=l"(y) : "l"(x));
  return y;
}
// The low and the high half of a register, which many instructions can name without moving them.
__device__ __forceinline__ void split_halves(unsigned x, unsigned short& low, unsigned short& high) {
  asm("mov.b32 {%0, %1}, %2;" : "=h"(low), "=h"(high) : "r"(x));
}
// The bits of `one` where `mask` has a 1, those of `zero` elsewhere.
__device__ __forceinline__ unsigned bitwise_choice(unsigned mask, unsigned one, unsigned zero) {
  unsigned y;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(y) : "r"(mask), "r"(one), "r"(zero));
  return y;
}
#if __CUDA_ARCH__ >= 890
// Two e4m3 values to two halves: the low byte to the low half. Exact.
__device__ __forceinline__ unsigned e4m3x2_to_half2(unsigned short pair) {
  unsigned halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
  return halves;
}
#endif

// ---------------------------------------------------------------------------------------------------- memory accesses

// Global memory that nobody writes while the kernel runs: through the read-only path.
__device__ __forceinline__ uint4 load_global_16(const void* p) {
  uint4 x;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(__cvta_generic_to_global(p)));
  return x;
}
__device__ __forceinline__ uint2 load_global_8(const void* p) {
  uint2 x;
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(__cvta_generic_to_global(p)));
  return x;
}
__device__ __forceinline__ unsigned load_global_4(const void* p) {
  unsigned x;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(x) : "l"(__cvta_generic_to_global(p)));
  return x;
}
__device__ __forceinline__ unsigned short load_global_2(const void* p) {
  unsigned short x;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(x) : "l"(__cvta_generic_to_global(p)));
  return x;
}
__device__ __forceinline__ unsigned char load_global_1(const void* p) {
  unsigned short x;
  asm volatile("ld.global.nc.u8 %0, [%1];" : "=h"(x) : "l"(__cvta_generic_to_global(p)));
  return (unsigned char)x;
}

// Accesses whose width is the type's; C++ has names for these, the executor wants to see them.
template <class T>
__device__ __forceinline__ T load_as(const void* p) {
  return *static_cast<const T*>(p);
}
template <class T>
__device__ __forceinline__ void store_as(void* p, T value) {
  *static_cast<T*>(p) = value;
}

// ------------------------------------------------------------------------------------------------ between blocks

// Adds, returns the value before. This thread's writes, and those it knows of by a barrier, come before it; what the threads of
// earlier additions wrote is visible after it.
__device__ __forceinline__ unsigned atomic_add_acq_rel(unsigned* p, unsigned value) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(p)), "r"(value)
               : "memory");
  return before;
}

#endif  // CUPAGED_SIMT

// Where a token's key and value lie: pages of one layer behind a block table, any strides, any block size.
//
// Layouts are strides and nothing else. All offsets are 64-bit bytes, formed once per token by the lane that fetched the page id.
#pragma once
#include "ptx.cuh"

// p + index * bytes.
template <class T>
__device__ __forceinline__ const T* element(const T* p, unsigned index, unsigned bytes) {
  return reinterpret_cast<const T*>(reinterpret_cast<unsigned long long>(p) + wide_product(index, bytes));
}

struct PagedKV {
  const unsigned char* k;  // [num_blocks, num_kv_heads, block_size, head_dim], head_dim contiguous
  const unsigned char* v;
  long long k_block, k_head, k_slot;  // strides in bytes
  long long v_block, v_head, v_slot;
  const int* block_tables;  // [num_seqs, max_blocks]
  long long table_row;      // stride in entries
  int max_blocks;
  int num_blocks;
  int block_size;
  unsigned magic;  // ceil(2^shift / block_size): token / block_size = token * magic >> shift for every token below 2^31
  int shift;
  int padding;

  __device__ __forceinline__ int block_of(int token) const { return int((unsigned long long)unsigned(token) * magic >> shift); }

  __device__ __forceinline__ const int* table(int sequence) const { return block_tables + sequence * table_row; }

  // The physical block of an entry of a table; negative where it is unmapped. Only entries below seq_len may be asked for.
  __device__ __forceinline__ int page_of(const int* entry) const {
    const int id = load_global_4(entry);
#if kDebug
    return id >= num_blocks ? -1 : id;
#else
    return id;
#endif
  }
  __device__ __forceinline__ int page_at(const int* table, unsigned column) const {
#if kDebug
    if (column >= unsigned(max_blocks)) return -1;
#endif
    return page_of(element(table, column, 4));
  }
  __device__ __forceinline__ int page(int sequence, int token) const { return page_at(table(sequence), block_of(token)); }
};

// kBytes from global to shared memory, asynchronously from 4 bytes on; zeros when not `valid`. Both sides aligned to kBytes. The
// destination comes as a shared address, which is the cheaper one, and as a pointer. For sm_80 and newer.
template <int kBytes>
__device__ __forceinline__ void copy_piece(SharedAddress to, unsigned char* pointer, const unsigned char* from, bool valid) {
  if constexpr (kBytes == 16) {
    cp_async_16(to, from, valid);
  } else if constexpr (kBytes == 8) {
    cp_async_8(to, from, valid);
  } else if constexpr (kBytes == 4) {
    cp_async_4(to, from, valid);
  } else if constexpr (kBytes == 2) {
    *reinterpret_cast<unsigned short*>(pointer) = valid ? load_global_2(from) : (unsigned short)0;
  } else {
    *pointer = valid ? load_global_1(from) : (unsigned char)0;
  }
}

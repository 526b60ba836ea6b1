// Scatter new keys and values into the paged cache.
//
// What       page[slot] = row / scale for every token whose slot is not negative; same dtype, or quantised to fp8 (saturating, NaN
//            stays NaN).
// Layout     k, v [num_tokens, num_kv_heads, head_dim] by strides, head_dim contiguous (views of a fused QKV are fine); pages by
//            strides too. Head_dim lies in chunks of kKChunk (K) and kVChunk (V) contiguous elements: one chunk for HND and NHD,
//            16 bytes for classic K, a single element for classic V.
// Threads    threadIdx.y is a token of the block, threadIdx.x strides over the kVec-element pieces of all its heads: neighbours
//            read and write neighbouring bytes. 8 heads of 128 in 16 bits are 128 pieces of 8 elements, so a block of 128 x 2
//            threads writes 2 tokens, and thread (19, 0) entries 24 to 31 of head 1. No shared memory.
// Not here   Checks of slots (the host made them), except against the pool's size when kDebug.
#include "ptx.cuh"
#include "types.cuh"

struct Side {  // K or V
  const kInputType* rows;
  kCacheType* pages;
  const float* scale;                  // [num_kv_heads]
  long long row_token, row_head;       // strides in elements
  long long block, head, slot, chunk;  // strides in elements
};

struct Params {
  Side k, v;
  const kSlotType* slot_mapping;    // [num_slots], negative: skip
  long long num_slots, pool_slots;  // pool_slots = num_blocks * block_size
  int num_heads, block_size;
};
static_assert(sizeof(Params) == kParamsBytes, "the host packs another struct");

constexpr int kRowVecs = kHeadDim / kVec;

// A value as it is stored.
template <class To, class From>
__device__ __forceinline__ To encode(From x, float scale) {
  if constexpr (is_same_type<To, From>) {
    if (scale == 1.0f) return x;  // every bit stays, NaN's too
  }
  return from_float<To>(__fdiv_rn(to_float(x), scale));
}

template <int kChunk>
__device__ __forceinline__ void store(const Side& side, long long token, long long block, int offset, int head, int d) {
  const kInputType* from = side.rows + token * side.row_token + head * side.row_head + d;
  kCacheType* page = side.pages + block * side.block + head * side.head + offset * side.slot;
  const float scale = side.scale[head];
  Vec<kInputType, kVec> row = load_vec<kVec>(from);
  Vec<kCacheType, kVec> stored;
#pragma unroll
  for (int i = 0; i < kVec; ++i) stored.at[i] = encode<kCacheType>(row.at[i], scale);
  if constexpr (kChunk % kVec == 0) {
    store_vec(page + d / kChunk * side.chunk + d % kChunk, stored);
  } else {
    static_assert(kChunk == 1, "a chunk holds whole pieces or is one element");
#pragma unroll
    for (int i = 0; i < kVec; ++i) page[(d + i) * side.chunk] = stored.at[i];
  }
}

extern "C" __global__ void write_kv(const Params p) {
  const long long token = (long long)blockIdx.x * blockDim.y + threadIdx.y;
  if (token >= p.num_slots) return;
  const long long slot = p.slot_mapping[token];
  if (slot < 0) return;
#if kDebug
  if (slot >= p.pool_slots) return;
#endif
  const bool narrow = slot >> 32 == 0;  // a 32-bit division is much cheaper
  const long long block = narrow ? (long long)((unsigned)slot / (unsigned)p.block_size) : slot / p.block_size;
  const int offset = int(slot - block * p.block_size);
  for (int i = threadIdx.x; i < p.num_heads * kRowVecs; i += blockDim.x) {
    const int head = i / kRowVecs, d = i % kRowVecs * kVec;
    store<kKChunk>(p.k, token, block, offset, head, d);
    store<kVChunk>(p.v, token, block, offset, head, d);
  }
}

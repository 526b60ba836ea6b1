// Copy whole blocks, all layers in one launch: copy-on-write inside a pool, or a swap between a pool and pinned host memory.
//
// What       dst[to] = src[from] for every pair; no block is both source and destination, and no destination repeats.
// Layout     Axis 0 of both pools is the block id, with a stride of its own. Inside a block the host has merged the axes into a
//            contiguous run of `run` pieces of kVec bytes under up to kOuterAxes strided ones; a page-major pool is one run.
// Threads    blockIdx.y is a pair; a thread moves kPerThread pieces, one stride of the block's threads apart, all loaded before the
//            first is stored. The pairs travel in the parameters, so nothing has to be copied to the device or kept alive. A page
//            of 32 layers, 8 KV heads, 16 tokens and head_dim 128 in 16 bits is 2 MiB, 131,072 pieces of 16 bytes: 128 blocks of
//            256 threads a pair. No shared memory.
// Not here   Overlap between a source and a destination.
#include "ptx.cuh"
#include "types.cuh"

constexpr int kOuterAxes = 3;
constexpr int kMaxPairs = 448;  // the parameters stay below 4 KiB
constexpr int kPerThread = 4;

struct Params {
  const unsigned char* src;
  unsigned char* dst;
  long long src_block, dst_block;                            // strides in bytes
  long long src_stride[kOuterAxes], dst_stride[kOuterAxes];  // of the outer axes, fastest first
  unsigned size[kOuterAxes];
  unsigned run;     // pieces of kVec bytes
  unsigned pieces;  // run * product of sizes
  int padding;
  int pairs[kMaxPairs][2];
};
static_assert(sizeof(Params) == kParamsBytes && sizeof(Params) <= 4096, "the host packs another struct");

extern "C" __global__ void copy_blocks(const Params p) {
  const unsigned char* src = p.src + p.pairs[blockIdx.y][0] * p.src_block;
  unsigned char* dst = p.dst + p.pairs[blockIdx.y][1] * p.dst_block;
  const long long first = (long long)blockIdx.x * blockDim.x * kPerThread + threadIdx.x;
  Vec<unsigned char, kVec> moved[kPerThread];
  long long to[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const long long piece = first + i * blockDim.x;
    if (piece >= p.pieces) break;
    unsigned outer = unsigned(piece) / p.run;
    long long from = (unsigned(piece) - outer * p.run) * (long long)kVec;
    to[i] = from;
#pragma unroll
    for (int axis = 0; axis < kOuterAxes; ++axis) {
      const unsigned rest = outer / p.size[axis], index = outer - rest * p.size[axis];
      from += index * p.src_stride[axis];
      to[i] += index * p.dst_stride[axis];
      outer = rest;
    }
    moved[i] = load_vec<kVec>(src + from);
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (first + i * blockDim.x < p.pieces) store_vec(dst + to[i], moved[i]);
  }
}

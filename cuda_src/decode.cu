// Paged attention on CUDA cores: any group size, any number of query rows, any block size, head_dim a multiple of 8.
//
// What       out = softmax(scale Q K^T) V over a paged cache, with every mask and option of the numerics contract.
// Layout     q, out [num_tokens, num_heads, head_dim]; pages by strides (paged_kv.cuh); partial results float32.
// Work       Units, items and the grid as in work.cuh; the keys and values of an item are read once for all its rows.
// Threads    A warp owns every kWarps-th tile of kTokens tokens, counted from token 0, with its own softmax states, its own buffers
//            and its own cp.async groups, so warps never wait for one another inside an item. The lane that fetched a token's page
//            id leaves the addresses of its rows in shared memory for the lanes that copy. The arithmetic of a tile is
//            fma_tile.cuh's. At the end the warps' states are merged in warp order. With head_dim 128 and float32 pages 8 lanes
//            copy a row, 4 pieces of 16 bytes each, and a warp 4 rows at a time.
// Shared     q as float32 [kRows][head_dim] | row bounds | addresses of K and of V rows [kWarps][kTokens] | states | per warp: K
//            tile, V tile, probabilities. With head_dim 128, 16 rows, 4 warps and tiles of 16 tokens: 8192 + 256 + 1024 + 512 + 16
//            = 10,000, at 10,112 the tiles. Of float32 pages, with cp.async: 4 * (2 * 16 * 528 + 16 * 80) = 72,704 bytes; of 16-bit
//            pages on sm_75: 4 * (2 * 16 * 272 + 16 * 80) = 39,936.
// Not here   Tensor cores, and sharing a tile between more than kRows packed rows (decode_mma.cu, prefill.cu).
#include "fma_tile.cuh"

// Copies: a power of two of lanes takes a row, at most a line of global memory and at least a sector of it at once.
constexpr int kPieces = kHeadBytes / kVec;  // of a row
__device__ constexpr int copy_lanes() {
  int lanes = kVec < 4 ? 32 : 128 / kVec;
  while (kPieces % lanes && lanes * kVec > 32 && lanes * kTokens > 32) lanes /= 2;
  return lanes;
}
constexpr int kCopyLanes = copy_lanes(), kRowsAtOnce = 32 / kCopyLanes;
constexpr int kPerLane = (kPieces + kCopyLanes - 1) / kCopyLanes;
constexpr bool kAsync = __CUDA_ARCH__ >= 800 && kVec >= 4;  // otherwise pieces pass through registers
__device__ constexpr int copy_batch() {                     // of rows a lane, whose copies are issued in one go
  int batch = kTokens / kRowsAtOnce;
  while (batch > 1 && batch * kPerLane > (kAsync ? 16 : 4)) batch /= 2;
  return batch;
}
constexpr int kBatch = copy_batch();

constexpr int kStageBytes = 2 * kTileBytes > kRows * kHeadDim * 4 ? 2 * kTileBytes : kRows * kHeadDim * 4;
constexpr int kWarpBytes = kStageBytes + (kTokens * kRowFloats * 4 + 15) / 16 * 16;

struct Shared {
  float q[kRows * kHeadDim];
  Row rows[kRows];
  const unsigned char* k_rows[kWarps * kTokens];  // where the keys of each warp's next tile lie
  const unsigned char* v_rows[kWarps * kTokens];
  SoftmaxState states[kWarps * kRows];
  int last_of_unit[4];
};
constexpr int kStageOffset = (sizeof(Shared) + 127) / 128 * 128;
static_assert(kStageOffset + kWarps * kWarpBytes == kSharedBytes, "the host asks for another size");

__device__ __forceinline__ Shared& shared() { return *reinterpret_cast<Shared*>(smem); }

template <int kBytes>
__device__ __forceinline__ typename Access<kBytes>::type load_global(const unsigned char* from) {
  if constexpr (kBytes == 16) {
    return load_global_16(from);
  } else if constexpr (kBytes == 8) {
    return load_global_8(from);
  } else if constexpr (kBytes == 4) {
    return load_global_4(from);
  } else if constexpr (kBytes == 2) {
    return load_global_2(from);
  } else {
    return load_global_1(from);
  }
}

// The rows of one tile, K or V, from where they lie; zeros where `mask` has no bit.
template <bool kAll>
__device__ __forceinline__ void copy_rows(unsigned char* tile, const unsigned char* const* rows, unsigned mask) {
  // Where 8 lanes write several rows at once, rows kCopyLanes apart: the rest of an odd stride keeps them on different banks.
  constexpr int kTogether = kVec == 16 && kCopyLanes < 8 ? 8 / kCopyLanes : 1;
  const int nth = threadIdx.x % 32 / kCopyLanes, lane = threadIdx.x % kCopyLanes;
  const int first = kTogether == 1 ? nth : nth / 8 * 8 + nth % kTogether * kCopyLanes + nth / kTogether % kCopyLanes;
  unsigned char* to = tile + first * kRowBytes + lane * kVec;
  const SharedAddress address = shared_address(to);
  rows += first, mask >>= first;
#pragma unroll 1
  for (int begin = 0; begin < kTokens; begin += kBatch * kRowsAtOnce) {
    const unsigned char* from[kBatch];  // all before the first copy: a load from shared memory between copies waits for them
    Access<kVec>::type piece[kBatch][kPerLane];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) from[j] = rows[begin + j * kRowsAtOnce] + lane * kVec;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int t = begin + j * kRowsAtOnce;
      const bool valid = kAll || mask >> t & 1;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int at = i * kCopyLanes * kVec;
        if (kPieces % kCopyLanes && i * kCopyLanes + lane >= kPieces) break;
        if constexpr (kAsync) {
          const int offset = j * kRowsAtOnce * kRowBytes + at;
          copy_piece<kVec>(address + begin * kRowBytes + offset, to + begin * kRowBytes + offset, from[j] + at, valid);
        } else {
          piece[j][i] = {};
          if (valid) piece[j][i] = load_global<kVec>(from[j] + at);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (kAsync || (kPieces % kCopyLanes && i * kCopyLanes + lane >= kPieces)) break;
        store_as(to + (begin + j * kRowsAtOnce) * kRowBytes + i * kCopyLanes * kVec, piece[j][i]);
      }
    }
  }
}
__device__ __forceinline__ void load_tile(unsigned char* tile, const unsigned char* const* rows, unsigned mask) {
  if (mask == kAllLanes) {
    copy_rows<true>(tile, rows, mask);
  } else {
    copy_rows<false>(tile, rows, mask);
  }
}

// A warp's share of the keys [first, last) of one unit.
__device__ __forceinline__ void attend(const Params& p, const Task& task, WarpState& state) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned char* k_tile = smem + kStageOffset + warp * kWarpBytes;
  unsigned char* v_tile = k_tile + kTileBytes;
  float* probabilities = reinterpret_cast<float*>(k_tile + kStageBytes);
  const unsigned char* k_base = p.kv.k + task.head * p.kv.k_head;
  const unsigned char* v_base = p.kv.v + task.head * p.kv.v_head;
  const unsigned char** k_rows = shared().k_rows + warp * kTokens;
  const unsigned char** v_rows = shared().v_rows + warp * kTokens;
  const float scale = p.scale * p.k_scale[task.head];

  // Tiles are counted from token 0 and dealt to warps by number, so a row's sums do not depend on where an item begins.
  int tile = task.first / kTokens;
  tile += (warp - tile) & (kWarps - 1);
  const int end = (task.last + kTokens - 1) / kTokens;
  const int mine = lane % kTokens;

  auto page_of = [&](int t) {
    const int token = t * kTokens + mine;
    return t < end && token >= task.first && token < task.last ? p.kv.page(task.sequence, token) : -1;
  };
  unsigned mask;
  auto load_k = [&](int t, int page) {
    mask = __ballot_sync(kAllLanes, page >= 0);
    if (t < end) {
      const int token = t * kTokens + mine;
      const unsigned slot = token - p.kv.block_of(token) * p.kv.block_size;
      const unsigned block = max(page, 0);  // an address even where nothing is read
      if (lane < kTokens) {
        k_rows[lane] = k_base + block * p.kv.k_block + slot * p.kv.k_slot;
        v_rows[lane] = v_base + block * p.kv.v_block + slot * p.kv.v_slot;
      }
      __syncwarp();
      load_tile(k_tile, k_rows, mask);
    }
    cp_async_commit();
  };
  auto load_v = [&](int t) {
    if (t < end) load_tile(v_tile, v_rows, mask);
    cp_async_commit();
  };

  load_k(tile, page_of(tile));
  load_v(tile);
  int next_page = page_of(tile + kWarps);
  for (; tile < end; tile += kWarps) {
    const unsigned mapped = mask;
    const int page = next_page, start = tile * kTokens;
    next_page = page_of(tile + 2 * kWarps);  // fetched one stage before its data
    float x[kMyRows];
    cp_async_wait<1>();
    __syncwarp();
    scores(k_tile, shared().q, x);
    load_k(tile + kWarps, page);
    if (mapped == kAllLanes && start >= task.clean_lo && start + kTokens <= task.clean_hi) {
      soften<true>(p, shared().rows, scale, start + mine, true, x, state, probabilities);
    } else {
      soften<false>(p, shared().rows, scale, start + mine, mapped >> lane & 1, x, state, probabilities);
    }
    cp_async_wait<1>();
    __syncwarp();
    accumulate(v_tile, probabilities, state);
    __syncwarp();
    load_v(tile + kWarps);
  }
  cp_async_wait<0>();
}

// One item: all warps over its keys; each leaves its states, and its sums where its tiles were.
__device__ __forceinline__ void run(const Params& p, const Item& item, const Unit& unit) {
  const int warp = threadIdx.x / 32;
  const Task task = make_task(p, blockIdx.y, item, unit);

  // The previous item may still read its states and sums, which nobody writes before the barrier below.
  for (int i = threadIdx.x; i < kRows * kHeadDim; i += kThreads) {
    const bool real = i / kHeadDim < task.num_rows;
    const kQueryType* q = p.q + row_offset(p, task, real ? i / kHeadDim : 0, p.q_token, p.q_head);
    shared().q[i] = real ? to_float(q[i % kHeadDim]) : 0.0f;
  }
  load_rows(p, task, shared().rows);
  __syncthreads();

  WarpState state;
  reset(state);
  if (task.first < task.last) attend(p, task, state);

  float* sums = reinterpret_cast<float*>(smem + kStageOffset + warp * kWarpBytes);
  leave(state, shared().states + warp * kRows, sums);
  finish_task<kWarps>(p, task, item, unit, shared().states, reinterpret_cast<float*>(smem + kStageOffset), kWarpBytes / 4, kHeadDim,
                      1.0f, shared().last_of_unit);
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks) decode(const Params p) {
  clear_padding(p, blockIdx.y);
  for_each_item(p, [&](const Item& item, const Unit& unit) { run(p, item, unit); });
}

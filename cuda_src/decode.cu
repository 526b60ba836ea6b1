// Paged attention on CUDA cores: any group size, any number of query rows, any block size, head_dim a multiple of 8.
//
// What       out = softmax(scale Q K^T) V over a paged cache, with every mask and option of the numerics contract.
// Layout     q, out [num_tokens, num_heads, head_dim]; pages by strides (paged_kv.cuh); partial results float32.
// Work       Units, items and the grid as in work.cuh; the keys and values of an item are read once for all its rows.
// Threads    A warp owns every kWarps-th tile of kTokens tokens, counted from token 0, with its own softmax states, its own buffers
//            and its own cp.async groups, so warps never wait for one another inside an item. S = Q K^T: a lane is a token (kParts
//            lanes share one, each with every kParts-th unit of head_dim). O += P V: a lane is kPieces * kElems entries of
//            head_dim, and the probabilities come from shared memory. At the end the warps' states are merged in warp order.
//            In tiles of 16 tokens lanes 3 and 19 score token 3, with even and with odd units; with head_dim 128 lane 3 sums
//            entries 12 to 15 of O.
// Shared     q as float32 [kRows][head_dim] | row bounds | states | per warp: K tile, V tile (rows padded to an odd number of
//            16-byte units, so that 8 lanes reading 8 rows touch all banks), probabilities [kTokens][kRows]. With head_dim 128,
//            16 rows and 4 warps: 8192 + 256 + 512 + 16 = 8976, at 9088 the tiles. Of float32 pages, with cp.async, 16 tokens:
//            4 * (2 * 16 * 528 + 16 * 80) = 72,704 bytes; of 16-bit pages on sm_75 16 too: 4 * (2 * 16 * 272 + 16 * 80) = 39,936.
// Not here   Tensor cores, and sharing a tile between more than kRows packed rows (decode_mma.cu, prefill.cu).
#include "work.cuh"

constexpr int kSize = sizeof(kCacheType);
constexpr int kHeadBytes = kHeadDim * kSize;
constexpr int kUnit = kHeadBytes % 16 == 0 ? 16 : 8;  // bytes of K that a lane reads at once
constexpr int kUnits = kHeadBytes / kUnit;
constexpr int kUnitElems = kUnit / kSize;
constexpr int kParts = 32 / kTokens;
constexpr int kRowBytes = ((kHeadBytes + 15) / 16 | 1) * 16;  // of a tile in shared memory
constexpr int kElems = kHeadDim >= 128 ? 4 : 2;               // of V that a lane reads at once
constexpr int kPieces = (kHeadDim + 32 * kElems - 1) / (32 * kElems);
constexpr int kRowFloats = kRows <= 2 ? kRows : (kRows / 4 | 1) * 4;  // probabilities of one token
constexpr int kTileBytes = kTokens * kRowBytes;
constexpr int kStageBytes = 2 * kTileBytes > kRows * kHeadDim * 4 ? 2 * kTileBytes : kRows * kHeadDim * 4;
constexpr int kWarpBytes = kStageBytes + (kTokens * kRowFloats * 4 + 15) / 16 * 16;

struct Shared {
  float q[kRows * kHeadDim];
  Row rows[kRows];
  SoftmaxState states[kWarps * kRows];
  int last_of_unit[4];
};
constexpr int kStageOffset = (sizeof(Shared) + 127) / 128 * 128;
static_assert(kStageOffset + kWarps * kWarpBytes == kSharedBytes, "the host asks for another size");

__device__ __forceinline__ Shared& shared() { return *reinterpret_cast<Shared*>(smem); }

// One warp's pass over its tiles: the running state of every row.
struct WarpState {
  SoftmaxState row[kRows];             // max: the same in all lanes; sum: of this lane's tokens
  float acc[kRows][kPieces * kElems];  // of this lane's entries of head_dim
};

// The rows of one tile, K or V: token t's row from base + offset(t), in kVec-byte accesses, zeros where `mask` has no bit.
__device__ __forceinline__ void load_tile(unsigned char* tile, const unsigned char* base, long long offset, unsigned mask) {
  constexpr int kChunks = kHeadBytes / kVec;
  constexpr int kUnroll = kVec < 8 || __CUDA_ARCH__ < 800 ? 4 : 16;  // without cp.async what is in flight takes registers
  const int lane = threadIdx.x % 32;
#pragma unroll kUnroll
  for (int i = 0; i < (kTokens * kChunks + 31) / 32; ++i) {
    const int index = i * 32 + lane;
    const int token = index / kChunks, chunk = index % kChunks;
    const long long from = __shfl_sync(0xffffffffu, offset, token);
    if (kTokens * kChunks % 32 == 0 || token < kTokens) {
      const bool valid = mask >> token & 1;
      copy_to_shared<kVec>(tile + token * kRowBytes + chunk * kVec, base + (valid ? from : 0) + chunk * kVec, valid);
    }
  }
}

// S = Q K^T: this lane's token against every row.
__device__ __forceinline__ void scores(const unsigned char* k_tile, float (&s)[kRows]) {
  const int lane = threadIdx.x % 32, part = lane / kTokens;
  const unsigned char* row = k_tile + lane % kTokens * kRowBytes;
#pragma unroll
  for (int r = 0; r < kRows; ++r) s[r] = 0.0f;
#pragma unroll 4
  for (int i = 0; i < (kUnits + kParts - 1) / kParts; ++i) {
    const int u = i * kParts + part;
    if (kUnits % kParts && u >= kUnits) break;
    float k[kUnitElems];
    load_shared_floats<kCacheType, kUnitElems>(row + u * kUnit, k);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float* q = shared().q + r * kHeadDim + u * kUnitElems;
#pragma unroll
      for (int e = 0; e < kUnitElems; e += 4) {
        const float4 x = *reinterpret_cast<const float4*>(q + e);
        s[r] = fmaf(x.x, k[e], s[r]);
        s[r] = fmaf(x.y, k[e + 1], s[r]);
        s[r] = fmaf(x.z, k[e + 2], s[r]);
        s[r] = fmaf(x.w, k[e + 3], s[r]);
      }
    }
  }
#pragma unroll
  for (int flip = kTokens; flip < 32; flip *= 2) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) s[r] += __shfl_xor_sync(0xffffffffu, s[r], flip);
  }
}

// Logits from scores, masks, and the online softmax; leaves this lane's probabilities in shared memory.
__device__ __forceinline__ void soften(const Params& p, float scale, int token, bool clean, bool mapped, float (&s)[kRows],
                                       WarpState& state, float* probabilities) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float x = s[r] * scale;
    if (kSoftcap) x = p.softcap * tanhf(x / p.softcap);
    if (kAlibi || !clean) {
      const Row row = shared().rows[r];
      if (kAlibi) x = fmaf(row.slope, float(token - row.position), x);
      if (!clean) x = mapped && token >= row.lo && token < row.hi ? x : negative_infinity();
    }
    float top = x;
#pragma unroll
    for (int flip = kTokens / 2; flip > 0; flip /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, flip));
    SoftmaxState& running = state.row[r];
    top = fmaxf(running.max, top);
    const float base = anchor(top), shrink = exp_above(running.max, base), probability = exp_above(x, base);
    running.max = top;
    running.sum = fmaf(running.sum, shrink, probability);
#pragma unroll
    for (int e = 0; e < kPieces * kElems; ++e) state.acc[r][e] *= shrink;
    s[r] = probability;
  }
  if (lane < kTokens) {
#pragma unroll
    for (int r = 0; r < kRows; r += kRows < 4 ? 1 : 4) {
      float* to = probabilities + lane * kRowFloats + r;
      if constexpr (kRows < 4) {
        *to = s[r];
      } else {
        *reinterpret_cast<float4*>(to) = make_float4(s[r], s[r + 1], s[r + 2], s[r + 3]);
      }
    }
  }
}

// The first entry of head_dim of this lane's piece; lanes past the end repeat the last one and are not stored.
__device__ __forceinline__ int entry(int piece) { return min((piece * 32 + int(threadIdx.x % 32)) * kElems, kHeadDim - kElems); }

// O += P V
__device__ __forceinline__ void accumulate(const unsigned char* v_tile, const float* probabilities, WarpState& state) {
#pragma unroll 4
  for (int t = 0; t < kTokens; ++t) {
    float v[kPieces][kElems], p[kRows];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) load_shared_floats<kCacheType, kElems>(v_tile + t * kRowBytes + entry(i) * kSize, v[i]);
    const float* from = probabilities + t * kRowFloats;
#pragma unroll
    for (int r = 0; r < kRows; r += kRows < 4 ? 1 : 4) {
      if constexpr (kRows < 4) {
        p[r] = from[r];
      } else {
        const float4 x = *reinterpret_cast<const float4*>(from + r);
        p[r] = x.x, p[r + 1] = x.y, p[r + 2] = x.z, p[r + 3] = x.w;
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int e = 0; e < kPieces * kElems; ++e) {
        state.acc[r][e] = fmaf(p[r], v[e / kElems][e % kElems], state.acc[r][e]);
      }
    }
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
  long long v_offset;
  unsigned mask;
  auto load_k = [&](int t, int page) {
    const long long slot = (long long)(t * kTokens + mine) - (long long)p.kv.block_of(t * kTokens + mine) * p.kv.block_size;
    v_offset = page * p.kv.v_block + slot * p.kv.v_slot;
    mask = __ballot_sync(0xffffffffu, page >= 0);
    if (t < end) load_tile(k_tile, k_base, page * p.kv.k_block + slot * p.kv.k_slot, mask);
    cp_async_commit();
  };
  auto load_v = [&](int t) {
    if (t < end) load_tile(v_tile, v_base, v_offset, mask);
    cp_async_commit();
  };

  load_k(tile, page_of(tile));
  load_v(tile);
  int next_page = page_of(tile + kWarps);
  for (; tile < end; tile += kWarps) {
    const unsigned mapped = mask;
    const int page = next_page, start = tile * kTokens;
    next_page = page_of(tile + 2 * kWarps);  // fetched one stage before its data
    float s[kRows];
    cp_async_wait<1>();
    __syncwarp();
    scores(k_tile, s);
    __syncwarp();
    load_k(tile + kWarps, page);
    const bool clean = mapped == 0xffffffffu && start >= task.clean_lo && start + kTokens <= task.clean_hi;
    soften(p, scale, start + mine, clean, mapped >> lane & 1, s, state, probabilities);
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
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Task task = make_task(p, blockIdx.y, item, unit);

  __syncthreads();  // the previous item's shared memory is no longer read
  for (int i = threadIdx.x; i < kRows * kHeadDim; i += kThreads) {
    const bool real = i / kHeadDim < task.num_rows;
    const kQueryType* q = p.q + row_offset(p, task, real ? i / kHeadDim : 0, p.q_token, p.q_head);
    shared().q[i] = real ? to_float(q[i % kHeadDim]) : 0.0f;
  }
  load_rows(p, task, shared().rows);
  __syncthreads();

  WarpState state;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    state.row[r] = {negative_infinity(), 0.0f};
#pragma unroll
    for (int e = 0; e < kPieces * kElems; ++e) state.acc[r][e] = 0.0f;
  }
  if (task.first < task.last) attend(p, task, state);

  float* sums = reinterpret_cast<float*>(smem + kStageOffset + warp * kWarpBytes);
  __syncwarp();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int flip = kTokens / 2; flip > 0; flip /= 2) state.row[r].sum += __shfl_xor_sync(0xffffffffu, state.row[r].sum, flip);
    if (lane == 0) shared().states[warp * kRows + r] = state.row[r];
#pragma unroll
    for (int e = 0; e < kPieces * kElems; ++e) {
      if ((e / kElems * 32 + lane) * kElems < kHeadDim) sums[r * kHeadDim + entry(e / kElems) + e % kElems] = state.acc[r][e];
    }
  }
  finish_task<kWarps>(p, task, item, unit, shared().states, reinterpret_cast<float*>(smem + kStageOffset), kWarpBytes / 4, kHeadDim,
                      1.0f, shared().last_of_unit);
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks) decode(const Params p) {
  clear_padding(p, blockIdx.y);
  for_each_item(p, [&](const Item& item, const Unit& unit) { run(p, item, unit); });
}

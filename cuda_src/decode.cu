// Paged attention on CUDA cores: any group size, any number of query rows, any block size, head_dim a multiple of 8.
//
// What       out = softmax(scale Q K^T) V over a paged cache, with every mask and option of the numerics contract.
// Layout     q, out [num_tokens, num_heads, head_dim]; pages by strides (paged_kv.cuh); partial results float32.
// Work       The query heads of one KV head times the query rows of one sequence are its packed rows (row r, head g of the group at
//            r * group + g). A unit is up to kRows packed rows of one sequence. Its keys are cut into items of tokens; blockIdx.y
//            is the KV head, and blockIdx.x either walks the items of its share of a plan (kPlanned) or is one (unit, split) whose
//            range follows from the lengths in device memory. Keys and values of an item are read once for all its rows.
// Threads    A warp owns every kWarps-th tile of kTokens tokens, counted from token 0, with its own softmax state, its own buffers
// and
//            its own cp.async groups, so warps never wait for one another inside an item. S = Q K^T: a lane is a token (kParts
//            lanes share one, each with every kParts-th unit of head_dim). O += P V: a lane is kPieces * kElems entries of
//            head_dim, and the probabilities come from shared memory. At the end the warps' states are merged in warp order, and
//            the last block of a unit, by ticket, merges the partials in index order.
// Shared     q as float32 [kRows][head_dim] | row bounds | states | per warp: K tile, V tile (rows padded to an odd number of
//            16-byte units, so that 8 lanes reading 8 rows touch all banks), probabilities [kTokens][kRows]. With head_dim 128,
//            16-bit pages, 16 rows and 4 warps: 8192 + 256 + 512 + 4 * (2 * 16 * 272 + 16 * 80) = 48,896 bytes.
// Not here   Tensor cores, and sharing a tile between more than kRows packed rows: those belong to a prefill kernel.
#include "paged_kv.cuh"
#include "ptx.cuh"
#include "softmax_state.cuh"
#include "types.cuh"

struct Item {
  int unit, first, last, partial;  // tokens [first, last); partial < 0: the item is the whole unit
};
struct Unit {
  int sequence, row, first_partial, num_partials;  // first packed row
};

struct Params {
  PagedKV kv;
  const kQueryType* q;
  kQueryType* out;
  float* lse;                                                 // null: not asked for
  long long q_token, q_head, out_token, out_head, lse_token;  // strides in elements
  const float* alibi_slopes;                                  // [num_heads], null without kAlibi
  const float* sinks;                                         // [num_heads] or null
  const float* k_scale;                                       // [num_kv_heads]
  const float* v_scale;                                       // [num_kv_heads]
  const int* seq_lens;                                        // [num_seqs]
  const int* query_start_loc;                                 // [num_seqs + 1]
  const int* share_start;                                     // [gridDim.x + 1], items of each share of the plan
  const Item* items;
  const Unit* units;
  float* partials;                                // [num_partials, num_kv_heads, kRows, head_dim]
  SoftmaxState* partial_states;                   // [num_partials, num_kv_heads, kRows]
  unsigned* tickets;                              // [num_units, num_kv_heads], 0 between launches
  int num_seqs, num_tokens, group, num_kv_heads;  // num_tokens: rows of out
  int causal, window, chunk, splits;              // window, chunk: 0 = none; splits: without a plan
  float scale, softcap;
};
static_assert(sizeof(Params) == kParamsBytes, "the host packs another struct");

extern __shared__ __align__(128) unsigned char smem[];

constexpr int kThreads = kWarps * 32;
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
// Blocks that a multiprocessor shall hold: as many as registers allow without spilling. The host counts on it.
constexpr int kMinBlocks = kRows * (kPieces * kElems + 2) <= 32 ? 3 : 2;
constexpr int kTileBytes = kTokens * kRowBytes;
constexpr int kStageBytes = 2 * kTileBytes > kRows * kHeadDim * 4 ? 2 * kTileBytes : kRows * kHeadDim * 4;
constexpr int kWarpBytes = kStageBytes + (kTokens * kRowFloats * 4 + 15) / 16 * 16;

struct Row {  // what a packed row may see, and where it stands
  int lo, hi, position;
  float slope;
};
struct Shared {
  float q[kRows * kHeadDim];
  Row rows[kRows];
  SoftmaxState states[kWarps * kRows];
  int last_block[4];
};
constexpr int kStageOffset = (sizeof(Shared) + 127) / 128 * 128;
static_assert(kStageOffset + kWarps * kWarpBytes == kSharedBytes, "the host asks for another size");

__device__ __forceinline__ Shared& shared() { return *reinterpret_cast<Shared*>(smem); }

// Keys [lo, hi) that query row r of a sequence may see.
__device__ __forceinline__ Row row_bounds(const Params& p, int seq_len, int position) {
  Row row = {0, p.causal ? position + 1 : seq_len, position, 0.0f};
  if (position < 0) {
    row.hi = 0;
    return row;
  }
  if (p.window) row.lo = max(row.lo, position - p.window + 1);
  if (p.chunk) {
    const int start = position / p.chunk * p.chunk;
    row.lo = max(row.lo, start);
    row.hi = min((long long)row.hi, (long long)start + p.chunk);
  }
  return row;
}

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
__device__ __forceinline__ void attend(const Params& p, int sequence, int head, int first, int last, int clean_lo, int clean_hi,
                                       WarpState& state) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned char* k_tile = smem + kStageOffset + warp * kWarpBytes;
  unsigned char* v_tile = k_tile + kTileBytes;
  float* probabilities = reinterpret_cast<float*>(k_tile + kStageBytes);
  const unsigned char* k_base = p.kv.k + head * p.kv.k_head;
  const unsigned char* v_base = p.kv.v + head * p.kv.v_head;
  const float scale = p.scale * p.k_scale[head];

  // Tiles are counted from token 0 and dealt to warps by number, so a row's sums do not depend on where an item begins.
  int tile = first / kTokens;
  tile += (warp - tile) & (kWarps - 1);
  const int end = (last + kTokens - 1) / kTokens;
  const int mine = lane % kTokens;

  auto page_of = [&](int t) {
    const int token = t * kTokens + mine;
    return t < end && token >= first && token < last ? p.kv.page(sequence, token) : -1;
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
    const bool clean = mapped == 0xffffffffu && start >= clean_lo && start + kTokens <= clean_hi;
    soften(p, scale, start + mine, clean, mapped >> lane & 1, s, state, probabilities);
    cp_async_wait<1>();
    __syncwarp();
    accumulate(v_tile, probabilities, state);
    __syncwarp();
    load_v(tile + kWarps);
  }
  cp_async_wait<0>();
}

// Write one finished row: `acc` of this lane's entries lane, lane + 32, ... over the state of all its keys.
__device__ __forceinline__ void finish_row(const Params& p, int head, int row, int token, const SoftmaxState& state,
                                           const float* acc) {
  const int q_head = head * p.group + row % p.group;
  const float keep = (p.sinks ? state.normalizer(p.sinks[q_head]) : state.normalizer()) * p.v_scale[head];
  kQueryType* out = p.out + (token + row / p.group) * p.out_token + q_head * p.out_head;
#pragma unroll
  for (int i = 0; i < (kHeadDim + 31) / 32; ++i) {
    const int d = i * 32 + int(threadIdx.x % 32);
    if (d < kHeadDim) out[d] = from_float<kQueryType>(acc[i] * keep);
  }
  if (p.lse && threadIdx.x % 32 == 0) p.lse[(token + row / p.group) * p.lse_token + q_head] = state.lse();
}

// The partials [first, first + count) of one row, merged in index order.
__device__ __forceinline__ SoftmaxState merge_partials(const Params& p, int head, int row, int first, int count, float* acc) {
  const int lane = threadIdx.x % 32;
  const long long stride = (long long)p.num_kv_heads * kRows, begin = ((long long)first * p.num_kv_heads + head) * kRows + row;
  SoftmaxState merged = {negative_infinity(), 0.0f};
  for (int i = lane; i < count; i += 32) merged.max = fmaxf(merged.max, p.partial_states[begin + i * stride].max);
#pragma unroll
  for (int flip = 16; flip > 0; flip /= 2) merged.max = fmaxf(merged.max, __shfl_xor_sync(0xffffffffu, merged.max, flip));
  const float base = anchor(merged.max);
#pragma unroll
  for (int i = 0; i < (kHeadDim + 31) / 32; ++i) acc[i] = 0.0f;
#pragma unroll 2
  for (int i = 0; i < count; ++i) {
    const SoftmaxState state = p.partial_states[begin + i * stride];
    const float weight = exp_above(state.max, base);
    merged.sum = fmaf(state.sum, weight, merged.sum);
    if (state.empty()) continue;  // its sums were not written
    const float* from = p.partials + (begin + i * stride) * kHeadDim;
#pragma unroll
    for (int j = 0; j < (kHeadDim + 31) / 32; ++j) {
      const int d = j * 32 + lane;
      if (d < kHeadDim) acc[j] = fmaf(from[d], weight, acc[j]);
    }
  }
  return merged;
}

// One item: all warps over its keys, their merge, and either the finished rows or a partial and perhaps the merge of all partials.
__device__ __forceinline__ void run(const Params& p, int head, const Item& item, const Unit& unit) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int token = p.query_start_loc[unit.sequence];
  const int num_queries = p.query_start_loc[unit.sequence + 1] - token;
  int seq_len = p.seq_lens[unit.sequence];
#if kDebug
  seq_len = max(0, min(seq_len, p.kv.max_blocks * p.kv.block_size));
#endif
  const int num_rows = min(kRows, num_queries * p.group - unit.row);
  const int before = seq_len - num_queries;  // position of query row 0
  const Row low = row_bounds(p, seq_len, before + unit.row / p.group);
  const Row high = row_bounds(p, seq_len, before + (unit.row + num_rows - 1) / p.group);

  __syncthreads();  // the previous item's shared memory is no longer read
  for (int i = threadIdx.x; i < kRows * kHeadDim; i += kThreads) {
    const int row = unit.row + i / kHeadDim;
    const bool real = i / kHeadDim < num_rows;
    const kQueryType* q = p.q + (token + row / p.group) * p.q_token + (head * p.group + row % p.group) * p.q_head;
    shared().q[i] = real ? to_float(q[i % kHeadDim]) : 0.0f;
  }
  if (threadIdx.x < kRows) {
    const int row = unit.row + min(int(threadIdx.x), num_rows - 1);
    Row bounds = row_bounds(p, seq_len, before + row / p.group);
    if (kAlibi) bounds.slope = p.alibi_slopes[head * p.group + row % p.group];
    shared().rows[threadIdx.x] = bounds;
  }
  __syncthreads();

  WarpState state;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    state.row[r] = {negative_infinity(), 0.0f};
#pragma unroll
    for (int e = 0; e < kPieces * kElems; ++e) state.acc[r][e] = 0.0f;
  }
  const int first = max(item.first, low.lo), last = min(item.last, high.hi);
  if (first < last) attend(p, unit.sequence, head, first, last, high.lo, low.hi, state);

  // Every warp leaves its state where its tiles were.
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
  __syncthreads();

  for (int r = warp; r < num_rows; r += kWarps) {
    SoftmaxState merged = {negative_infinity(), 0.0f};
    float acc[(kHeadDim + 31) / 32] = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) merged.max = fmaxf(merged.max, shared().states[w * kRows + r].max);
    const float base = anchor(merged.max);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const SoftmaxState& part = shared().states[w * kRows + r];
      const float weight = exp_above(part.max, base);
      const float* from = reinterpret_cast<const float*>(smem + kStageOffset + w * kWarpBytes) + r * kHeadDim;
      merged.sum = fmaf(part.sum, weight, merged.sum);
#pragma unroll
      for (int i = 0; i < (kHeadDim + 31) / 32; ++i) {
        if (i * 32 + lane < kHeadDim) acc[i] = fmaf(from[i * 32 + lane], weight, acc[i]);
      }
    }
    if (item.partial < 0) {
      finish_row(p, head, unit.row + r, token, merged, acc);
    } else {
      const long long at = ((long long)item.partial * p.num_kv_heads + head) * kRows + r;
      if (lane == 0) p.partial_states[at] = merged;
      if (!merged.empty()) {
#pragma unroll
        for (int i = 0; i < (kHeadDim + 31) / 32; ++i) {
          if (i * 32 + lane < kHeadDim) p.partials[at * kHeadDim + i * 32 + lane] = acc[i];
        }
      }
    }
  }
  if (item.partial < 0) return;

  // The last block to arrive sees every partial: all threads' stores, a barrier, then the ticket that releases and acquires.
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned* ticket = p.tickets + (long long)item.unit * p.num_kv_heads + head;
    const bool last_block = atomic_add_acq_rel(ticket, 1u) == unsigned(unit.num_partials - 1);
    if (last_block) *ticket = 0;  // for the next launch
    shared().last_block[0] = last_block;
  }
  __syncthreads();
  if (!shared().last_block[0]) return;
  for (int r = warp; r < num_rows; r += kWarps) {
    float acc[(kHeadDim + 31) / 32];
    const SoftmaxState merged = merge_partials(p, head, r, unit.first_partial, unit.num_partials, acc);
    finish_row(p, head, unit.row + r, token, merged, acc);
  }
}

// Rows of `out` past the last sequence's are padding: empty.
__device__ __forceinline__ void clear_padding(const Params& p, int head) {
  const int width = p.group * kHeadDim;
  for (int token = p.query_start_loc[p.num_seqs] + blockIdx.x; token < p.num_tokens; token += gridDim.x) {
    for (int i = threadIdx.x; i < width; i += kThreads) {
      const int q_head = head * p.group + i / kHeadDim;
      p.out[token * p.out_token + q_head * p.out_head + i % kHeadDim] = from_float<kQueryType>(0.0f);
      if (p.lse && i % kHeadDim == 0) p.lse[token * p.lse_token + q_head] = negative_infinity();
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks) decode(const Params p) {
  const int head = blockIdx.y;
  clear_padding(p, head);
#if kPlanned
  for (int i = p.share_start[blockIdx.x]; i < p.share_start[blockIdx.x + 1]; ++i) {
    const Item item = p.items[i];
    run(p, head, item, p.units[item.unit]);
  }
#else
  // Unit numbers rise with the sequence: sequence s owns those from query_start_loc[s] * group / kRows + s on, perhaps more than it
  // has.
  const int unit = blockIdx.x / p.splits, split = blockIdx.x % p.splits;
  int sequence = 0;
  for (int above = p.num_seqs; above - sequence > 1;) {
    const int middle = (sequence + above) / 2;
    const long long begin = (long long)p.query_start_loc[middle] * p.group / kRows + middle;
    (begin <= unit ? sequence : above) = middle;
  }
  const int start = p.query_start_loc[sequence], num_queries = p.query_start_loc[sequence + 1] - start;
  const long long row = (unit - ((long long)start * p.group / kRows + sequence)) * kRows;
  if (row >= (long long)num_queries * p.group) return;
  const int seq_len = p.seq_lens[sequence];
  // The split's edges: in tiles, from the first key that any row of the sequence may see. plan.py cuts the same way.
  const int base = row_bounds(p, seq_len, max(seq_len - num_queries, 0)).lo / kTokens;
  const int tiles = max((seq_len + kTokens - 1) / kTokens - base, 0);
  const int per_split = (tiles + p.splits - 1) / p.splits;
  const long long begin = (long long)(base + (long long)split * per_split) * kTokens;
  const Item item = {unit, int(min(begin, (long long)seq_len)),
                     int(min(begin + (long long)per_split * kTokens, (long long)seq_len)),
                     p.splits > 1 ? unit * p.splits + split : -1};
  run(p, head, item, Unit{sequence, int(row), unit * p.splits, p.splits});
#endif
}

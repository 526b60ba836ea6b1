// The original paged attention kernels: one thread block a query head, kept as the baseline of the fast ones.
//
// What       out = softmax(scale q K^T + alibi) V for one query a sequence, optionally block-sparse. classic_attention is the
//            single pass (kPartition 0), or one partition of kPartition tokens whose float32 result classic_reduce merges.
// Layout     q, out [num_seqs, num_heads, head_dim]; K [num_blocks, num_kv_heads, head_dim / x, block_size, x] with x = 16 bytes of
//            elements; V [num_blocks, num_kv_heads, head_dim, block_size]; partials [num_seqs, num_heads, max_partitions,
//            head_dim].
// Threads    blockIdx.x counts heads of one sequence after those of another, blockIdx.z partitions: x may go to 2^31, y only to
//            65,535. 4 warps take blocks of tokens in turn. Logits: kGroup lanes share a token, so a warp reads kGroup runs of 32 /
//            kGroup neighbouring 16-byte units of K. Values: kLanes lanes share a row of V, each with kVecTokens neighbouring
//            tokens; sums over lanes by shuffles, over warps through shared memory. With 32 heads block 70 is head 6 of sequence
//            2; with blocks of 16 tokens in 16 bits lanes 6 and 7 score token 3, and sum tokens 0 to 7 and 8 to 15 of rows 3, 19,
//            ... of V.
// Shared     q [head_dim] | sums of warps [4, head_dim] | 8 floats | logits of all tokens of the pass: 4 bytes a token, which
//            bounds the context of a single pass. With head_dim 128: 512 + 2048 + 32 bytes, and 57,464 tokens in 227 KiB.
// Not here   Sharing of K and V between the query heads of a KV head (every head reads them again), windows, several query rows.
// Source     Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (SOSP 2023),
//            section 5.1.
#include "ptx.cuh"
#include "softmax_state.cuh"
#include "types.cuh"

struct Params {
  const kQueryType* q;
  const unsigned char* k_cache;
  const unsigned char* v_cache;
  kQueryType* out;
  float* partials;    // of kPartition tokens each
  float* max_logits;  // [num_seqs, num_heads, max_partitions]
  float* exp_sums;
  const int* block_tables;
  const int* seq_lens;
  const float* alibi_slopes;  // or null
  const float* k_scale;       // [num_kv_heads]
  const float* v_scale;
  long long q_seq, q_head, out_seq, out_head;  // strides in elements
  long long k_block, k_head, v_block, v_head;  // strides in bytes, multiples of 16
  long long table_row;
  int num_heads, group, max_partitions, num_blocks, max_blocks;
  int local_blocks, vert_stride, sparse_block, head_step, first_head;  // block-sparse: see `attends`; vert_stride 0: dense
  float scale;
  int max_seq_len;  // what shared memory and partials have room for
};
static_assert(sizeof(Params) == kParamsBytes, "the host packs another struct");

extern __shared__ __align__(128) unsigned char smem[];

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kSize = sizeof(kCacheType);
constexpr int kX = 16 / kSize;
constexpr int kUnits = kHeadDim / kX;                                          // 16-byte units of one key
constexpr int kGroup = kBlockSize >= 32 ? 1 : 32 / kBlockSize;                 // lanes that share a token
constexpr int kVecTokens = kX < kBlockSize ? kX : kBlockSize;                  // tokens of V in one load
constexpr int kVecs = kBlockSize / kVecTokens;                                 // loads of one row of V
constexpr int kLanes = kVecs < 2 ? kVecs : 2;                                  // lanes that share a row of V: a sector of 32 bytes
constexpr int kRows = kHeadDim * kLanes / 32 + (kHeadDim * kLanes % 32 != 0);  // rows of V per lane

// Whether a block-sparse head looks at the keys of block `column`: those of the last local_blocks sparse blocks, and every
// vert_stride-th one, starting at an offset of the head's own.
__device__ __forceinline__ bool attends(const Params& p, int head, int seq_len, int column) {
  if (p.vert_stride == 0) return true;
  const int mine = (seq_len - 1) / p.sparse_block, theirs = column * kBlockSize / p.sparse_block;
  const int offset =
      p.head_step >= 0 ? (p.first_head + head) * p.head_step + 1 : (p.first_head + head) / p.group * -p.head_step + 1;
  return theirs > mine - p.local_blocks || (theirs + offset) % p.vert_stride == 0;
}

__device__ __forceinline__ int length_of(const Params& p, int sequence) {
#if kDebug
  return max(0, min(p.seq_lens[sequence], min(p.max_seq_len, p.max_blocks * kBlockSize)));
#else
  return p.seq_lens[sequence];
#endif
}

__device__ __forceinline__ int page_of(const Params& p, int sequence, int column) {
#if kDebug
  if (column >= p.max_blocks) return -1;
  const int id = p.block_tables[sequence * p.table_row + column];
  return id >= p.num_blocks ? -1 : id;
#else
  return p.block_tables[sequence * p.table_row + column];
#endif
}

// The largest of a value over the thread block, or its sum, by way of 4 floats in shared memory.
template <bool kMax>
__device__ __forceinline__ float over_block(float x, float* scratch) {
#pragma unroll
  for (int flip = 16; flip > 0; flip /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, x, flip);
    x = kMax ? fmaxf(x, other) : x + other;
  }
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  x = scratch[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) x = kMax ? fmaxf(x, scratch[w]) : x + scratch[w];
  return x;
}

// Logits of blocks [first, end) into shared memory, -inf where nothing is visible. Returns this thread's largest.
__device__ __forceinline__ float compute_logits(const Params& p, int head, int sequence, int seq_len, int first, int end,
                                                const float* q, float* logits) {
  const int lane = threadIdx.x % 32, part = lane % kGroup;
  const float scale = p.scale * p.k_scale[head / p.group];
  const float slope = p.alibi_slopes ? p.alibi_slopes[head] : 0.0f;
  float top = negative_infinity();
  for (int column = first + threadIdx.x / 32; column < end; column += kWarps) {
    const int page = attends(p, head, seq_len, column) ? page_of(p, sequence, column) : -1;
#pragma unroll
    for (int offset = lane / kGroup; offset < kBlockSize; offset += 32 / kGroup) {
      const int token = column * kBlockSize + offset;
      const bool visible = page >= 0 && token < seq_len;
      float sum = 0.0f;
      if (visible) {
        const unsigned char* k = p.k_cache + page * p.k_block + head / p.group * p.k_head + offset * 16;
#pragma unroll 4
        for (int u = part; u < kUnits; u += kGroup) {
          float key[kX];
          to_floats(load_vec<kX>(reinterpret_cast<const kCacheType*>(k + u * (kBlockSize * 16))), key);
#pragma unroll
          for (int e = 0; e < kX; ++e) sum = fmaf(q[u * kX + e], key[e], sum);
        }
      }
#pragma unroll
      for (int flip = kGroup / 2; flip > 0; flip /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, flip);
      const float logit = visible ? fmaf(slope, float(token - seq_len + 1), sum * scale) : negative_infinity();
      if (part == 0) logits[token - first * kBlockSize] = logit;
      top = fmaxf(top, logit);
    }
  }
  return top;
}

// This lane's rows of P V over this warp's blocks; `probabilities` are those of tokens from block `first` on.
__device__ __forceinline__ void sum_values(const Params& p, int head, int sequence, int seq_len, int first, int end,
                                           const float* probabilities, float (&acc)[kRows]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < kRows; ++r) acc[r] = 0.0f;
  for (int column = first + threadIdx.x / 32; column < end; column += kWarps) {
    const int page = attends(p, head, seq_len, column) ? page_of(p, sequence, column) : -1;
    if (page < 0) continue;
    const unsigned char* v = p.v_cache + page * p.v_block + head / p.group * p.v_head;
#pragma unroll 1
    for (int vec = lane % kLanes; vec < kVecs; vec += kLanes) {
      const int token = column * kBlockSize + vec * kVecTokens;
      float weight[kVecTokens];
#pragma unroll
      for (int t = 0; t < kVecTokens; ++t) weight[t] = probabilities[token - first * kBlockSize + t];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int row = min(r * (32 / kLanes) + lane / kLanes, kHeadDim - 1);  // lanes past the end repeat the last row
        float value[kVecTokens];
        to_floats(load_vec<kVecTokens>(reinterpret_cast<const kCacheType*>(v + (row * kBlockSize + vec * kVecTokens) * kSize)),
                  value);
#pragma unroll
        for (int t = 0; t < kVecTokens; ++t) {
          // a slot past the length may hold NaN, which a weight of 0 does not hide
          acc[r] = fmaf(weight[t], token + t < seq_len ? value[t] : 0.0f, acc[r]);
        }
        if (r % 8 == 7) __syncwarp();  // at most 8 loads in flight, so that their registers are there
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int flip = kLanes / 2; flip > 0; flip /= 2) acc[r] += __shfl_xor_sync(0xffffffffu, acc[r], flip);
  }
}

// Three blocks on a multiprocessor; wide rows of fp8, 16 tokens a load, need more registers than that leaves.
extern "C" __global__ void __launch_bounds__(kThreads, kX == 16 && kHeadDim > 128 ? 2 : 3) classic_attention(const Params p) {
  const int sequence = blockIdx.x / p.num_heads, head = blockIdx.x % p.num_heads, partition = blockIdx.z, lane = threadIdx.x % 32;
  const int seq_len = length_of(p, sequence);
  const int first = kPartition / kBlockSize * partition;
  const int num_blocks = (seq_len + kBlockSize - 1) / kBlockSize;
  const int end = kPartition ? min(num_blocks, first + kPartition / kBlockSize) : num_blocks;
  if (kPartition && first >= end) return;

  float* q = reinterpret_cast<float*>(smem);
  float* sums = q + kHeadDim;
  float* scratch = sums + kWarps * kHeadDim;
  float* logits = scratch + 2 * kWarps;
  for (int d = threadIdx.x; d < kHeadDim; d += kThreads) q[d] = to_float(p.q[sequence * p.q_seq + head * p.q_head + d]);
  __syncthreads();

  // S = q K^T
  SoftmaxState state;
  state.max = over_block<true>(compute_logits(p, head, sequence, seq_len, first, end, q, logits), scratch);
  // P = exp(S - max)
  const float base = anchor(state.max);
  float sum = 0.0f;
  for (int i = threadIdx.x; i < (end - first) * kBlockSize; i += kThreads) {
    logits[i] = exp_above(logits[i], base);
    sum += logits[i];
  }
  state.sum = over_block<false>(sum, scratch + kWarps);  // its barrier also publishes the probabilities
  // O = P V
  float acc[kRows];
  sum_values(p, head, sequence, seq_len, first, end, logits, acc);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = r * (32 / kLanes) + lane / kLanes;
    if (lane % kLanes == 0 && row < kHeadDim) sums[threadIdx.x / 32 * kHeadDim + row] = acc[r];
  }
  __syncthreads();

  const long long at = ((long long)sequence * p.num_heads + head) * p.max_partitions + partition;
  const float keep = state.normalizer() * p.v_scale[head / p.group];
  for (int d = threadIdx.x; d < kHeadDim; d += kThreads) {
    float total = sums[d];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) total += sums[w * kHeadDim + d];
    if (kPartition) {
      p.partials[at * kHeadDim + d] = total * keep;
    } else {
      p.out[sequence * p.out_seq + head * p.out_head + d] = from_float<kQueryType>(total * keep);
    }
  }
  if (kPartition && threadIdx.x == 0) {
    p.max_logits[at] = state.max;
    p.exp_sums[at] = state.sum;
  }
}

// Merges the partitions of one head of one sequence in index order; blockIdx.x as above, a thread is an entry of head_dim.
extern "C" __global__ void __launch_bounds__(kThreads) classic_reduce(const Params p) {
  const int sequence = blockIdx.x / p.num_heads, head = blockIdx.x % p.num_heads;
  const int count = kPartition ? (length_of(p, sequence) + kPartition - 1) / (kPartition ? kPartition : 1) : 0;
  const long long begin = ((long long)sequence * p.num_heads + head) * p.max_partitions;
  SoftmaxState state = {negative_infinity(), 0.0f};
  for (int i = 0; i < count; ++i) state.max = fmaxf(state.max, p.max_logits[begin + i]);
  const float base = anchor(state.max);
  for (int i = 0; i < count; ++i) state.sum = fmaf(p.exp_sums[begin + i], exp_above(p.max_logits[begin + i], base), state.sum);
  const float keep = state.normalizer();
  for (int d = threadIdx.x; d < kHeadDim; d += kThreads) {
    float total = 0.0f;
    for (int i = 0; i < count; ++i) {
      const float weight = p.exp_sums[begin + i] * exp_above(p.max_logits[begin + i], base);
      total = fmaf(p.partials[(begin + i) * kHeadDim + d], weight, total);
    }
    p.out[sequence * p.out_seq + head * p.out_head + d] = from_float<kQueryType>(total * keep);
  }
}

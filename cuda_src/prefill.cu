// Paged attention of many rows on tensor cores: prefill, append, long verify steps, very large groups.
//
// What       out = softmax(scale Q K^T) V over a paged cache of 16-bit or fp8 pages, with every mask and option of the numerics
//            contract. A tile of keys and values moves once from global to shared memory for all kRows packed rows of a unit.
// Layout     q, out [num_tokens, num_heads, head_dim]; pages by strides (paged_kv.cuh); work items and partials as in work.cuh,
//            so a long prefix before few rows is cut over many blocks like a decode.
// Threads    A warp owns kWarpRows packed rows and sees every tile; the arithmetic of a tile is mma_tile.cuh's (after
//            FlashAttention-2: Dao 2023, section 3.2, where warps split rows and not keys). The first kTokens threads fetch the
//            page ids of a tile, a round before all threads copy it and kStages rounds before its turn. A warp skips tiles that
//            none of its rows sees; blocks skip those that no row of the unit sees, as the item's range ends there. With 64 rows
//            and 4 query heads to a KV head warp 1 has packed rows 16 to 31: query rows 4 to 7 of the unit.
// Shared     token addresses of two tiles | queries [kRows], unless registers hold them | row bounds | softmax scales | states
//            [kRows] | masks | kStages x (K tile, V tile). With head_dim 128, 16-bit pages, 64 rows, 64 tokens and 2 stages: 2048
//            + 16 + 64 * 28 + 48 + 16 = 3920, at 3968 the tiles, 2 * 2 * 64 * 272 = 69,632 bytes: two blocks fit an A100's SM.
// Not here   Few rows, where warps should split keys (decode_mma.cu), float32 and sm_75 (decode.cu).
#include "mma_tile.cuh"

constexpr int kMasks = 4;  // of the tiles kStages rounds ahead; a power of two above kStages
struct Shared {
  TokenRows token_rows[2][kTokens];
  unsigned char queries[kQueryInRegisters ? 16 : kRows * kQueryRowBytes];
  Row rows[kRows];
  float scales[kRows];
  SoftmaxState states[kRows];
  unsigned mapped[kMasks][(kTokens + 31) / 32 + 1];
  int last_of_unit[4];
};
constexpr int kStageOffset = (sizeof(Shared) + 127) / 128 * 128;
constexpr int kRingBytes = kStages * 2 * kTileBytes;
constexpr int kLeftBytes = kRows * kSumFloats * 4;                           // sums are left where the tiles were
constexpr int kQueryBytes = kQueryInRegisters ? kRows * kQueryRowBytes : 0;  // on their way to registers queries lie there too
constexpr int kLeastBytes = kLeftBytes > kQueryBytes ? kLeftBytes : kQueryBytes;
constexpr int kStageBytes = kRingBytes > kLeastBytes ? kRingBytes : kLeastBytes;
static_assert(kRows == kWarps * kWarpRows, "every row has a warp");
static_assert(kStages < kMasks && kTokens <= kThreads, "masks and page ids of a tile");
static_assert(kStageOffset + kStageBytes == kSharedBytes, "the host asks for another size");

__device__ __forceinline__ Shared& shared() { return *reinterpret_cast<Shared*>(smem); }

__device__ __forceinline__ Mask mapped_of(int tile) {
  const unsigned* words = shared().mapped[tile & kMasks - 1];
  Mask mapped = words[0];
  if constexpr (kTokens > 32) mapped |= Mask(words[1]) << 32;
  return mapped;
}

// All the task's keys for this warp's rows. Every thread of the block takes part.
__device__ __forceinline__ void attend(const Params& p, const Task& task, const Query& query, RowState& state, Sums& sums) {
  const int thread = threadIdx.x, warp = thread / 32;
  unsigned char* ring = smem + kStageOffset;
  const SharedAddress ring_address = shared_address(ring);
  const unsigned char* k_base = p.kv.k + task.head * p.kv.k_head;
  const unsigned char* v_base = p.kv.v + task.head * p.kv.v_head;
  const Row* rows = shared().rows + warp * kWarpRows;
  const int num_rows = min(kWarpRows, task.num_rows - warp * kWarpRows);  // may be negative
  const Row low = rows[0], high = rows[max(num_rows, 1) - 1];
  const int begin = task.first / kTokens, end = (task.last + kTokens - 1) / kTokens;

  auto page_of = [&](int t) {
    const int token = t * kTokens + thread;
    return thread < kTokens && token >= task.first && token < task.last ? p.kv.page(task.sequence, token) : -1;
  };
  auto place = [&](int t, int page) {  // where the tokens of a tile lie, for all threads after the next barrier
    if (thread / 32 < (kTokens + 31) / 32) {
      const unsigned mapped = __ballot_sync(kAllLanes, page >= 0);
      if (thread % 32 == 0) shared().mapped[t & kMasks - 1][thread / 32] = mapped;
    }
    if (thread < kTokens) {
      const int token = t * kTokens + thread;
      const unsigned slot = token - p.kv.block_of(token) * p.kv.block_size;
      const unsigned block = max(page, 0);  // an address even where nothing is read
      const TokenRows place = {k_base + block * p.kv.k_block + slot * p.kv.k_slot,
                               v_base + block * p.kv.v_block + slot * p.kv.v_slot};
      store_as(&shared().token_rows[t & 1][thread], place);
    }
  };

  Copier<kThreads> copier;
  TileLane tile_lane;
  copier.open(p.kv), tile_lane.open();
  int stage = 1, page = page_of(begin);
  place(begin, page);
  page = page_of(begin + 1);
  for (int t = begin - (kStages - 1); t < end; ++t) {
    const int ahead = t + kStages - 1;
    cp_async_wait<kStages - 2>();
    __syncthreads();  // tile t and the places of tile `ahead` are there; tile t - 1 is no longer read
    if (ahead < end) {
      unsigned char* to = ring + (stage == 0 ? kStages - 1 : stage - 1) * 2 * kTileBytes + copier.to;
      const TokenRows* from = shared().token_rows[ahead & 1] + copier.token;
      const Mask mapped = mapped_of(ahead);
      if (mapped == kFull) {
        copier.copy<true>(p.kv, to, from, mapped);
      } else {
        copier.copy<false>(p.kv, to, from, mapped);
      }
    }
    cp_async_commit();
    place(ahead + 1, page);
    page = page_of(ahead + 2);
    const int start = t * kTokens;
    if (t >= begin && num_rows > 0 && start < high.hi && start + kTokens > low.lo) {
      const bool clean = mapped_of(t) == kFull && start >= high.lo && start + kTokens <= low.hi;
      auto hide = [&](Scores& s) {
        if (!clean) mask(rows, start, mapped_of(t), s);
      };
      attend_tile(
          p, ring_address + stage * 2 * kTileBytes + tile_lane.k, tile_lane, query, rows, start, hide,
          [](Scores&) { return false; }, state, sums);
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  cp_async_wait<0>();
}

__device__ __forceinline__ void run(const Params& p, int head, const Item& item, const Unit& unit) {
  const int warp = threadIdx.x / 32;
  const Task task = make_task(p, head, item, unit);
  __syncthreads();  // the previous item's shared memory is no longer read
  unsigned char* queries = (kQueryInRegisters ? smem + kStageOffset : shared().queries) + warp * kWarpRows * kQueryRowBytes;
  load_queries<kWarpRows, 1>(p, task, queries - warp * kWarpRows * kQueryRowBytes, shared().scales, warp * kWarpRows);
  load_rows(p, task, shared().rows);
  __syncthreads();

  Query query;
  RowState state;
  Sums sums;
  query.open(queries);
  reset(shared().scales + warp * kWarpRows, state, sums);
  if (kQueryInRegisters) __syncthreads();
  clear_row_ends<kStages>(smem + kStageOffset);
  if (task.first < task.last) attend(p, task, query, state, sums);

  float* left = reinterpret_cast<float*>(smem + kStageOffset);
  __syncthreads();  // tiles are no longer read
  leave(state, sums, shared().states + warp * kWarpRows, left + warp * kWarpRows * kSumFloats);
  finish_task<1>(p, task, item, unit, shared().states, left, 0, kSumFloats, kCodeFactor, shared().last_of_unit);
}

// Threads that a multiprocessor's registers are for: narrow rows leave room for a third block of four warps, but from sm_100 on
// only at the price of instructions.
constexpr int kResidentThreads = kHeadDim <= 64 && kScoresAsLogits && __CUDA_ARCH__ < 1000 ? 384 : 256;
extern "C" __global__ void __launch_bounds__(kThreads, kResidentThreads / kThreads) prefill(const Params p) {
  const int head = blockIdx.y;
  clear_padding(p, head);
  for_each_item(p, [&](const Item& item, const Unit& unit) { run(p, head, item, unit); });
}

// Paged attention of few rows on tensor cores: decode, verify, any group size, any block size, head_dim a multiple of 8 up to 256.
//
// What       out = softmax(scale Q K^T) V over a paged cache of 16-bit or fp8 pages, with every mask and option of the numerics
//            contract. Made for memory: keys and values of an item move once from global to shared memory, for all its rows.
// Layout     q, out [num_tokens, num_heads, head_dim]; pages by strides (paged_kv.cuh); work items and partials as in work.cuh.
// Threads    A warp owns every kWarps-th tile of kTokens tokens, counted from token 0, with its own ring of kStages tiles, its own
//            cp.async groups and its own softmax states, so warps never wait for one another inside an item. Page ids are fetched
//            one tile before its copies (tile_pages.cuh); the arithmetic of a tile is mma_tile.cuh's. At the end the warps' states
//            are merged in warp order. With head_dim 128 and 16-bit pages 4 lanes copy a row of 256 bytes in four steps, so a warp
//            8 rows of K and 8 of V at a time: lane 9 tokens 1, 9, 17 and 25 of a tile of 32.
// Shared     addresses of runs [kWarps][kTokens] | queries [kRows] | row bounds | softmax scales | states [kWarps][kRows] | masks
//            [kWarps][kStages] | per warp kStages x (K tile, V tile). With head_dim 128, 16-bit pages, 8 rows, 32 tokens, 2 stages
//            and 2 warps: 1024 + 8 * 272 + 8 * 20 + 16 * 8 + 16 + 16 = 3520, at 3584 the tiles, 2 * 2 * 2 * 32 * 272 = 69,632
//            bytes; 32 KiB of keys and values are then in flight per block, 96 KiB on a multiprocessor with 228 KiB.
// Not here   More than 16 packed rows (prefill.cu), float32 and sm_75 (decode.cu).
#include "mma_tile.cuh"
#include "tile_pages.cuh"

struct Shared {
  TokenRows token_rows[kWarps * kTokens];
  unsigned char queries[kRows * kQueryRowBytes];
  Row rows[kRows];
  float scales[kRows];
  SoftmaxState states[kWarps * kRows];
  Mask mapped[kWarps][kStages];  // tokens of the tiles in a ring that are not wholly seen
  int last_of_unit[4];
};
constexpr int kStageOffset = (sizeof(Shared) + 127) / 128 * 128;
constexpr int kStageBytes = 2 * kTileBytes;
constexpr int kRingBytes = kStages * kStageBytes;   // of a warp
constexpr int kLeftBytes = kRows * kSumFloats * 4;  // a warp leaves its sums where its ring was
constexpr int kWarpBytes = kRingBytes > kLeftBytes ? kRingBytes : kLeftBytes;
static_assert(kRows == kWarpRows, "a warp has all rows");
static_assert(kStageOffset + kWarps * kWarpBytes == kSharedBytes, "the host asks for another size");

__device__ __forceinline__ Shared& shared() { return *reinterpret_cast<Shared*>(smem); }

// A warp's share of the task's keys.
__device__ __forceinline__ void attend(const Params& p, const Task& task, const Query& query, RowState& state, Sums& sums) {
  const int warp = threadIdx.x / 32;
  TilePages pages;
  TileLane tile_lane;
  pages.open(p.kv, task, shared().token_rows + warp * kRuns), tile_lane.open();
  if (!kFp8) tile_lane.v = kept(tile_lane.v);
  // Places in shared memory as offsets from its beginning: this lane's in the first tile of the ring, and its first copy's from
  // there. The places of all stages together, less those of two, are that of the third.
  const unsigned ring = kept(kStageOffset + warp * kWarpBytes + tile_lane.k), to_copy = kept(pages.copier.to - tile_lane.k);
  const unsigned all = kept(kStages * ring + kStages * (kStages - 1) / 2 * kStageBytes + (kStages == 3 ? to_copy : 0));

  // Tiles are counted from token 0 and dealt to warps by number, so a row's sums do not depend on where an item begins.
  const int end = (task.last + kTokens - 1) / kTokens - pages.begin;
  int tile = task.first / kTokens;
  tile += ((warp - tile) & (kWarps - 1)) - pages.begin;

  unsigned holes = 0;  // a bit a stage: some row may not see all of its tile
  auto stage_of = [&](int t) { return unsigned(t + pages.begin) / kWarps % kStages; };
  auto load = [&](int t, unsigned to) {  // the tile whose pages were fetched
    const bool whole = __all_sync(kAllLanes, pages.whole(p.kv, t));
    if (whole) {
      pages.copy(p.kv, t, smem + to);
    } else if (t < end) {
      const Mask mapped = pages.copy_edge(p.kv, t, smem + to);
      if (threadIdx.x % 32 == 0) shared().mapped[warp][stage_of(t)] = mapped;
      holes |= 1u << stage_of(t);
      state.doubt();
    }
    cp_async_commit();
  };

  // The copies of a tile are issued kStages - 1 rounds before its turn: `ahead` is the tile to copy.
  unsigned to = ring + to_copy, from = ring;
  pages.fetch_after(p.kv, tile - kWarps);
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    load(tile + i * kWarps, to);
    pages.fetch_after(p.kv, tile + i * kWarps);
    to += kStageBytes;
    __syncwarp();  // addresses of the tile are no longer read
  }
  constexpr int kAhead = (kStages - 1) * kWarps;
  const int last = kept(end + kAhead);
  for (int ahead = kept(tile + kAhead); ahead < last; ahead += kWarps) {
    const unsigned next = kStages == 2                                 ? all - from
                          : kStages == 3                               ? all - from - to
                          : from == ring + (kStages - 1) * kStageBytes ? ring
                                                                       : from + kStageBytes;
    cp_async_wait<kStages - 2>();
    __syncwarp();  // the tile is there, and the one before it is no longer read
    load(ahead, to);
    pages.fetch_after(p.kv, ahead);
    const int t = ahead - kAhead, start = (t + pages.begin) * kTokens;
    auto hide_late = [&](Scores& s) {
      const unsigned stage = stage_of(t);
      if (holes >> stage & 1) mask(shared().rows, start, shared().mapped[warp][stage], s);
      holes &= ~(1u << stage);
      return holes != 0;
    };
    attend_tile(p, shared_address(smem) + from, tile_lane, query, shared().rows, start, [](Scores&) {}, hide_late, state, sums);
    to = from + to_copy, from = next;
  }
  cp_async_wait<0>();
}

__device__ __forceinline__ void run(const Params& p, int head, const Item& item, const Unit& unit) {
  const int warp = threadIdx.x / 32;
  const Task task = make_task(p, head, item, unit);
  __syncthreads();  // the previous item's shared memory is no longer read
  load_queries<kRows / kWarps, kWarps>(p, task, shared().queries, shared().scales, warp);
  load_rows(p, task, shared().rows);
  for (int w = 0; w < kWarps; ++w) clear_row_ends<kStages>(smem + kStageOffset + w * kWarpBytes);
  __syncthreads();

  Query query;
  RowState state;
  Sums sums;
  query.open(shared().queries);
  reset(shared().scales, state, sums);
  if (task.first < task.last) attend(p, task, query, state, sums);

  float* left = reinterpret_cast<float*>(smem + kStageOffset);
  __syncwarp();
  leave(state, sums, shared().states + warp * kRows, left + warp * (kWarpBytes / 4));
  finish_task<kWarps>(p, task, item, unit, shared().states, left, kWarpBytes / 4, kSumFloats, kCodeFactor, shared().last_of_unit);
}

extern "C" __global__ void __launch_bounds__(kThreads, 256 / kThreads) decode_mma(const Params p) {
  const int head = blockIdx.y;
  clear_padding(p, head);
  for_each_item(p, [&](const Item& item, const Unit& unit) { run(p, head, item, unit); });
}

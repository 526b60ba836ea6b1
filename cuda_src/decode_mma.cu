// Paged attention of few rows on tensor cores: decode, verify, any group size, any block size, head_dim a multiple of 8 up to 256.
//
// What       out = softmax(scale Q K^T) V over a paged cache of 16-bit or fp8 pages, with every mask and option of the numerics
//            contract. Made for memory: keys and values of an item move once from global to shared memory, for all its rows.
// Layout     q, out [num_tokens, num_heads, head_dim]; pages by strides (paged_kv.cuh); work items and partials as in work.cuh.
// Threads    A warp owns every kWarps-th tile of kTokens tokens, counted from token 0, with its own ring of kStages tiles, its own
//            cp.async groups and its own softmax states, so warps never wait for one another inside an item. A lane fetches the
//            page id of a run of kRun tokens, two where a tile has 64 and block_size is even, one tile before its copies, forms
//            the 64-bit addresses where its keys and values begin and leaves them in shared memory for the lanes that copy: with
//            runs of two lane 5 those of tokens 10 and 11. The arithmetic of a tile is mma_tile.cuh's. At the end the warps'
//            states are merged in warp order. With head_dim 128 and 16-bit pages 4 lanes copy a row of 256 bytes in four steps,
//            so a warp 8 rows of K and 8 of V at a time.
// Shared     addresses of runs [kWarps][kTokens] | queries [kRows] | row bounds | softmax scales | states [kWarps][kRows] | masks
//            [kWarps][kStages] | per warp kStages x (K tile, V tile). With head_dim 128, 16-bit pages, 8 rows, 32 tokens, 2 stages
//            and 2 warps: 1024 + 8 * 272 + 8 * 20 + 16 * 8 + 16 + 16 = 3520, at 3584 the tiles, 2 * 2 * 2 * 32 * 272 = 69,632
//            bytes; 32 KiB of keys and values are then in flight per block, 96 KiB on a multiprocessor with 228 KiB.
// Not here   More than 16 packed rows (prefill.cu), float32 and sm_75 (decode.cu).
#include "mma_tile.cuh"

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
constexpr int kInRun = Copier<32>::kAtOnce % kRun == 0 ? kRun : 1;  // a row in narrow pieces may take all lanes
constexpr int kRuns = kTokens / kInRun;
constexpr int kPages = (kRuns + 31) / 32;  // that a lane fetches for a tile
static_assert(kRows == kWarpRows, "a warp has all rows");
static_assert(kStageOffset + kWarps * kWarpBytes == kSharedBytes, "the host asks for another size");

__device__ __forceinline__ Shared& shared() { return *reinterpret_cast<Shared*>(smem); }

__device__ __forceinline__ unsigned smem_offset(const void* p) { return static_cast<const unsigned char*>(p) - smem; }

// A warp's share of the task's keys.
__device__ __forceinline__ void attend(const Params& p, const Task& task, const Query& query, RowState& state, Sums& sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // What does not change from tile to tile; places in shared memory as offsets from its beginning.
  const unsigned char* k_base = kept_pointer(p.kv.k + task.head * p.kv.k_head);
  const unsigned char* v_base = kept_pointer(p.kv.v + task.head * p.kv.v_head);
  const int* table = kept_pointer(p.kv.table(task.sequence));
  const int minus_block_size = kept(-p.kv.block_size), last_token = kept(task.last - 1);
  Copier<32, kInRun> copier;
  TileLane tile_lane;
  copier.open(p.kv), tile_lane.open();
  const TokenRows* token_rows = shared().token_rows + warp * kRuns;
  // this lane's place in the first stage of the ring, and what a place in one stage of two is to be taken from for the other
  const unsigned ring = kept(kStageOffset + warp * kWarpBytes + tile_lane.k), other = kept(2 * ring + kStageBytes);
  const unsigned place_at = kept(smem_offset(token_rows + lane)), copy_from = kept(smem_offset(token_rows + copier.token / kInRun));
  copier.k = kept(copier.k), copier.v = kept(copier.v), copier.to = kept(copier.to - tile_lane.k);
  if (!kFp8) tile_lane.v = kept(tile_lane.v);

  // Tiles are counted from token 0 and dealt to warps by number, so a row's sums do not depend on where an item begins. In the
  // `inner` ones from `begin` on every row sees every key: they take the short way, if strides fit 31 bits and all of the tile has
  // memory. Below a tile's number is counted from `begin`.
  const int begin = (max(task.first, task.clean_lo) + kTokens - 1) / kTokens;
  const bool near = ((p.kv.k_block | p.kv.k_slot | p.kv.v_block | p.kv.v_slot) >> 31) == 0;
  // the last places in 4 GiB for a run of rows to begin at
  const unsigned k_last = -kept((kInRun - 1) * unsigned(p.kv.k_slot) + kHeadBytes);
  const unsigned v_last = -kept((kInRun - 1) * unsigned(p.kv.v_slot) + kHeadBytes);
  const int inner = near ? max(min(task.last, task.clean_hi) / kTokens - begin, 0) : 0;
  const int end = (task.last + kTokens - 1) / kTokens - begin;
  int tile = task.first / kTokens;
  tile += ((warp - tile) & (kWarps - 1)) - begin;
  const int next_token = kept((begin + kWarps) * kTokens + lane % kRuns * kInRun);

  // Of the runs of the tile to copy next: pages, and where the runs begin, at first in a block and then in memory.
  int pages[kPages];
  TokenRows rows[kPages];
  auto token_after = [&](int t, int i) {
    return min(t * kTokens + next_token + i * 32 * kInRun, last_token);  // entries past the last used one are never read
  };
  auto fetch_after = [&](int t) {  // for the tile after tile t
#pragma unroll
    for (int i = 0; i < kPages; ++i) {
      const int token = token_after(t, i);
      const unsigned column = p.kv.block_of(token), slot = token + column * minus_block_size;
      rows[i].k = kept_here(element(k_base, slot, p.kv.k_slot)), rows[i].v = kept_here(element(v_base, slot, p.kv.v_slot));
      pages[i] = p.kv.page_at(table, column);
    }
  };
  auto place = [&] {  // for the lanes that copy
#pragma unroll
    for (int i = 0; i < kPages; ++i) {
      if (kRuns % 32 == 0 || i * 32 + lane < kRuns) store_as(smem + place_at + i * 32 * sizeof(TokenRows), rows[i]);
    }
    __syncwarp();
  };
  auto load = [&](int t, unsigned tile_at) {  // the tile whose pages were fetched; returns whether it takes the short way
    bool whole = true;
#pragma unroll
    for (int i = 0; i < kPages; ++i) {
      rows[i] = {element(rows[i].k, pages[i], p.kv.k_block), element(rows[i].v, pages[i], p.kv.v_block)};
      whole &= pages[i] >= 0 && within_4_gib(rows[i].k, k_last) && within_4_gib(rows[i].v, v_last);
    }
    whole &= unsigned(t) < inner;
    whole = __all_sync(kAllLanes, whole);
    unsigned char* to = smem + (tile_at + copier.to);
    const auto* from = reinterpret_cast<const TokenRows*>(smem + copy_from);
    if (whole) {
      place();
      copier.copy<true, true>(p.kv, to, from, kFull);
    } else if (t < end) {
      Mask mapped = 0;
#pragma unroll
      for (int i = 0; i < (kTokens + 31) / 32; ++i) {
        const int at = i * 32 + lane, token = (t + begin) * kTokens + at;
        const int page = __shfl_sync(kAllLanes, pages[i / kInRun], at / kInRun);
        const bool real = page >= 0 && token >= task.first && token < task.last && at < kTokens;
        mapped |= Mask(__ballot_sync(kAllLanes, real)) << i * 32;
      }
#pragma unroll
      for (int i = 0; i < kPages; ++i) {
        const int token = token_after(t - kWarps, i), slot = token - p.kv.block_of(token) * p.kv.block_size;
        const int block = token + kInRun > task.first ? max(pages[i], 0) : 0;  // an address even where nothing is read
        rows[i] = {k_base + block * p.kv.k_block + slot * p.kv.k_slot, v_base + block * p.kv.v_block + slot * p.kv.v_slot};
      }
      if (lane == 0) shared().mapped[warp][(t + begin) / kWarps % kStages] = mapped;
      place();
      copier.copy<false>(p.kv, to, from, mapped);
    }
    cp_async_commit();
    return whole;
  };

  // The copies of a tile are issued kStages - 1 rounds before its turn: `ahead` is the tile to copy.
  bool whole[kStages];  // what load() returned of the tiles in the ring, oldest first
  unsigned to = ring, from = ring;
  fetch_after(tile - kWarps);
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    whole[i] = load(tile + i * kWarps, to);
    fetch_after(tile + i * kWarps);
    to += kStageBytes;
    __syncwarp();  // addresses of the tile are no longer read
  }
  constexpr int kAhead = (kStages - 1) * kWarps;
  const int last = kept(end + kAhead);
  for (int ahead = kept(tile + kAhead); ahead < last; ahead += kWarps) {
    const unsigned next = kStages == 2 ? other - from : from == ring + (kStages - 1) * kStageBytes ? ring : from + kStageBytes;
    cp_async_wait<kStages - 2>();
    __syncwarp();  // the tile is there, and the one before it is no longer read
    whole[kStages - 1] = load(ahead, kStages == 2 ? next : to);
    fetch_after(ahead);
    const int t = ahead - kAhead;
    auto mapped = [&] { return shared().mapped[warp][(t + begin) / kWarps % kStages]; };
    attend_tile(p, shared_address(smem) + from, tile_lane, query, shared().rows, (t + begin) * kTokens, whole[0], mapped, state,
                sums);
    to = from, from = next;
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) whole[i] = whole[i + 1];
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

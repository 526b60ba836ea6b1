// Paged attention of few rows on tensor cores: decode, verify, any group size, any block size, head_dim a multiple of 8 up to 256.
//
// What       out = softmax(scale Q K^T) V over a paged cache of 16-bit or fp8 pages, with every mask and option of the numerics
//            contract. Made for memory: keys and values of an item move once from global to shared memory, for all its rows.
// Layout     q, out [num_tokens, num_heads, head_dim]; pages by strides (paged_kv.cuh); work items and partials as in work.cuh.
// Threads    A warp owns every kWarps-th tile of kTokens tokens, counted from token 0, with its own ring of kStages tiles, its own
//            cp.async groups and its own softmax states, so warps never wait for one another inside an item. Lane t fetches the
//            page ids of tokens t and t + 32 of a tile one tile before its copies, forms their 64-bit addresses and leaves them in
//            shared memory for the lanes that copy. The arithmetic of a tile is mma_tile.cuh's. At the end the warps' states are
//            merged in warp order. With head_dim 128 and 16-bit pages 8 lanes copy a row of 256 bytes in two steps, so a warp 4
//            rows of K and 4 of V at a time.
// Shared     token addresses [kWarps][kTokens] | queries [kRows] | row bounds | softmax scales | states [kWarps][kRows] | per warp
//            kStages x (K tile, V tile). With head_dim 128, 16-bit pages, 8 rows, 32 tokens, 2 stages and 2 warps: 1024 + 8 * 272
//            + 8 * 20 + 16 * 8 + 16 = 3504, at 3584 the tiles, 2 * 2 * 2 * 32 * 272 = 69,632 bytes; 32 KiB of keys and values are
//            then in flight per block, 96 KiB on a multiprocessor with 228 KiB.
// Not here   Rows in more than two tiles of 8 (prefill.cu), float32 and sm_75 (decode.cu).
#include "mma_tile.cuh"

struct Shared {
  TokenRows token_rows[kWarps * kTokens];
  unsigned char queries[kRows * kQueryRowBytes];
  Row rows[kRows];
  float scales[kRows];
  SoftmaxState states[kWarps * kRows];
  int last_of_unit[4];
};
constexpr int kStageOffset = (sizeof(Shared) + 127) / 128 * 128;
constexpr int kRingBytes = kStages * 2 * kTileBytes;  // of a warp
constexpr int kLeftBytes = kRows * kSumFloats * 4;    // a warp leaves its sums where its ring was
constexpr int kWarpBytes = kRingBytes > kLeftBytes ? kRingBytes : kLeftBytes;
constexpr int kPages = (kTokens + 31) / 32;  // that a lane fetches for a tile
static_assert(kRows == 8 * kRowTiles, "a warp has all rows");
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
  const int minus_block_size = kept(-p.kv.block_size);
  Copier<32> copier;
  TileLane tile_lane;
  copier.open(), tile_lane.open();
  const TokenRows* token_rows = shared().token_rows + warp * kTokens;
  const unsigned ring = kept(kStageOffset + warp * kWarpBytes);
  const unsigned place_at = kept(smem_offset(token_rows + lane)), copy_from = kept(smem_offset(token_rows + copier.token));
  copier.piece = kept(copier.piece), copier.to = kept(copier.to);
  tile_lane.k = kept(tile_lane.k), tile_lane.v = kept(tile_lane.v);

  // Tiles are counted from token 0 and dealt to warps by number, so a row's sums do not depend on where an item begins.
  int tile = task.first / kTokens;
  tile += (warp - tile) & (kWarps - 1);
  const int end = (task.last + kTokens - 1) / kTokens;

  int pages[kPages];
  unsigned slots[kPages];
  auto fetch_pages = [&](int t) {
#pragma unroll
    for (int i = 0; i < kPages; ++i) {
      const int at = i * 32 + lane, token = t * kTokens + at;
      const unsigned column = p.kv.block_of(token);
      slots[i] = token + column * minus_block_size;
      pages[i] = (kTokens % 32 == 0 || at < kTokens) && token >= task.first && token < task.last ? p.kv.page_at(table, column) : -1;
    }
  };
  auto load = [&](int t, unsigned tile_at) {  // a tile whose pages were fetched; returns which tokens have memory
    Mask mapped = 0;
#pragma unroll
    for (int i = 0; i < kPages; ++i) mapped |= Mask(__ballot_sync(kAllLanes, pages[i] >= 0)) << i * 32;
    if (t < end) {
      bool whole = true;
#pragma unroll
      for (int i = 0; i < kPages; ++i) {
        const int at = i * 32 + lane;
        const unsigned slot = slots[i], block = max(pages[i], 0);  // an address even where nothing is read
        const TokenRows rows = {far_element(far_element(k_base, block, p.kv.k_block), slot, p.kv.k_slot),
                                far_element(far_element(v_base, block, p.kv.v_block), slot, p.kv.v_slot)};
        if (kTokens % 32 == 0 || at < kTokens) {
          store_as(smem + place_at + i * 32 * sizeof(TokenRows), rows);
          whole &= pages[i] >= 0 && within_4_gib(rows.k) && within_4_gib(rows.v);
        }
      }
      unsigned char* to = smem + tile_at + copier.to;
      const auto* from = reinterpret_cast<const TokenRows*>(smem + copy_from);
      whole = __all_sync(kAllLanes, whole);
      __syncwarp();
      if (whole) {
        copier.copy<true, true>(to, from, mapped);
      } else {
        copier.copy<false>(to, from, mapped);
      }
    }
    cp_async_commit();
    return mapped;
  };

  // The copies of a tile are issued kStages - 1 rounds before its turn; the first rounds only copy.
  Mask mapped[kStages] = {};  // of the tiles in the ring, oldest first
  unsigned to = ring, from = ring + 2 * kTileBytes;
  fetch_pages(tile);
  for (int t = tile - (kStages - 1) * kWarps; t < end; t += kWarps) {
    cp_async_wait<kStages - 2>();
    __syncwarp();  // tile t is there, and the one before it is no longer read
    mapped[kStages - 1] = load(t + (kStages - 1) * kWarps, to);
    fetch_pages(t + kStages * kWarps);
    if (t >= tile) {
      const int start = t * kTokens;
      const bool clean = mapped[0] == kFull && start >= task.clean_lo && start + kTokens <= task.clean_hi;
      attend_tile(p, shared_address(smem) + from, tile_lane, query, shared().rows, start, clean, mapped[0], state, sums);
    }
    to = from, from = from == ring + (kStages - 1) * 2 * kTileBytes ? ring : from + 2 * kTileBytes;
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) mapped[i] = mapped[i + 1];
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

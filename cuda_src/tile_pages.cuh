// How a warp of decode_mma.cu finds the tokens of its tiles: page ids a tile ahead, addresses when the tile is copied.
//
// What       Tiles that every row sees whole take one of two short ways.
//            kFixedSlots: the block size is a constant, kBlock. Where it divides a tile the rows that a lane copies have the same
//            slots in every tile, and their page ids lie side by side in the table. A lane fetches those of its own rows, and an
//            address is one multiply-add of a page id: nothing passes from lane to lane. With blocks of 16 tokens, tiles of 64 and
//            rows of 64 bytes lane 9 copies tokens 1, 9, 17, ..., 57: slots 1 and 9 of four blocks, by four page ids and two bases.
//            A block of several tiles has one page id for all rows, and a tile begins at one of its slots: addresses of a lane's
//            rows are that of its first and a multiple of the distance between slots. Else a lane fetches the page id of a run of
//            kInRun tokens, two where a tile has 64 and block_size is even, forms the 64-bit addresses where its keys and values
//            begin and leaves them in shared memory for the lanes that copy: with runs of two lane 5 those of tokens 10 and 11.
//            Other tiles go that way too, with 64-bit arithmetic; kFixedSlots then has runs of one.
// Numbers    Tiles are numbered from the first between the clean bounds of the item, so those before it are negative.
// Not here   Which warp takes which tile, and when they are copied and waited for: decode_mma.cu.
#pragma once
#include "tile_copy.cuh"

constexpr int kRowsAtOnce = Copier<32>::kAtOnce;
constexpr bool kFixedSlots = kVec == 16 && kRowsAtOnce >= 8 && kBlock > 0;
constexpr int kBlockTiles = kFixedSlots && kBlock > kTokens ? kBlock / kTokens : 1;
constexpr int kTileBlock = kFixedSlots ? kBlock / kBlockTiles : 1;          // tokens of a block in one tile
constexpr int kInRun = !kFixedSlots && kRowsAtOnce % kRun == 0 ? kRun : 1;  // a row in narrow pieces may take all lanes
constexpr int kRuns = kTokens / kInRun;
constexpr int kLaneRuns = (kRuns + 31) / 32;                                              // of a tile
constexpr int kLaneSlots = kTileBlock > kRowsAtOnce ? kTileBlock / kRowsAtOnce : 1;       // of the rows it copies in a block
constexpr int kLanePages = kFixedSlots ? kTokens / kRowsAtOnce / kLaneSlots : kLaneRuns;  // ids that tell all is there
constexpr int kBases = kBlockTiles > 1 ? 1 : kLaneSlots;
static_assert((kBlock & (kBlock - 1)) == 0 && (kTokens & (kTokens - 1)) == 0, "blocks divide tiles, or tiles blocks");
static_assert(!kFixedSlots || kLanePages > 0, "a lane copies a row of every tile");

__device__ __forceinline__ unsigned smem_offset(const void* p) { return static_cast<const unsigned char*>(p) - smem; }

struct TilePages {
  // Of a page id in pages[] that is one of this lane's runs, where those of its rows might be: negative, and not -1.
  static constexpr unsigned kOfRun = 0x80000000;

  Copier<32, kInRun> copier;
  const unsigned char *k_base, *v_base;  // of the KV head
  const int* table;                      // of the sequence
  int begin, inner;                      // the first tile between the clean bounds; how many from there take the short way
  int first, next_token, last_token;     // of the item; of this lane's first run in this warp's second tile; of the table
  unsigned place_at, copy_from;          // in shared memory, where this lane leaves its runs and finds those that it copies
  // Of the tile to copy next: pages, and where runs begin, at first in a block and then in memory.
  int pages[kLanePages > kLaneRuns ? kLanePages : kLaneRuns];
  TokenRows rows[kLaneRuns];
  // With fixed slots: where this lane's rows would begin in page 0, and where the id of the first of them is, in tile 0.
  const unsigned char *k_slots[kBases], *v_slots[kBases];
  const int* column;
  // With runs: the last places in 4 GiB for one to begin at, and the factor of a column in a slot.
  unsigned k_last, v_last;
  int minus_block_size;

  // `places`: of this warp's runs. What does not change from tile to tile is kept.
  __device__ __forceinline__ void open(const PagedKV& kv, const Task& task, const TokenRows* places) {
    const int lane = threadIdx.x % 32;
    copier.open(kv);
    k_base = kept_pointer(kv.k + task.head * kv.k_head), v_base = kept_pointer(kv.v + task.head * kv.v_head);
    table = kept_pointer(kv.table(task.sequence));
    begin = (max(task.first, task.clean_lo) + kTokens - 1) / kTokens;
    const bool near = ((kv.k_block | kv.k_slot | kv.v_block | kv.v_slot) >> 31) == 0;  // strides fit 31 bits
    inner = near ? max(min(task.last, task.clean_hi) / kTokens - begin, 0) : 0;
    first = task.first, last_token = kept(task.last - 1);
    next_token = kept((begin + kWarps) * kTokens + lane % kRuns * kInRun);
    place_at = kept(smem_offset(places + lane)), copy_from = kept(smem_offset(places + copier.token / kInRun));
    if constexpr (kFixedSlots) {
      column = kept_pointer(table + (begin * kTokens + copier.token) / kBlock);
#pragma unroll
      for (int i = 0; i < kBases; ++i) {
        const int slot = (copier.token + i * kRowsAtOnce) % kBlock;
        k_slots[i] = kept_pointer(k_base + slot * kv.k_slot + copier.piece);
        v_slots[i] = kept_pointer(v_base + slot * kv.v_slot + copier.piece);
      }
    } else {
      copier.k = kept(copier.k), copier.v = kept(copier.v);
      k_last = -kept((kInRun - 1) * unsigned(kv.k_slot) + kHeadBytes);
      v_last = -kept((kInRun - 1) * unsigned(kv.v_slot) + kHeadBytes);
      minus_block_size = kept(-kv.block_size);
    }
  }

  // The first token of this lane's i-th run in the tile after tile t; entries of a table past the last used one are never read.
  __device__ __forceinline__ int token_after(int t, int i) const {
    return min(t * kTokens + next_token + i * 32 * kInRun, last_token);
  }

  // Page ids of the tile that this warp takes after tile t.
  __device__ __forceinline__ void fetch_after(const PagedKV& kv, int t) {
    if constexpr (kFixedSlots) {
      const int next = t + kWarps;
      if (unsigned(next) < inner) {
        const int* ids =
            kBlockTiles > 1 ? element(table, unsigned(next + begin) / kBlockTiles, 4) : element(column, next, kTokens / kBlock * 4);
#pragma unroll
        for (int i = 0; i < kLanePages; ++i) pages[i] = kv.page_of(ids + i * kLaneSlots * kRowsAtOnce / kBlock);
      } else {
        fetch_runs_after(kv, t);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kLaneRuns; ++i) {
        const int token = token_after(t, i);
        const unsigned block = kv.block_of(token), slot = token + block * minus_block_size;
        rows[i].k = kept_here(element(k_base, slot, kv.k_slot)), rows[i].v = kept_here(element(v_base, slot, kv.v_slot));
        pages[i] = kv.page_at(table, block);
      }
    }
  }

  __device__ __forceinline__ void fetch_runs_after(const PagedKV& kv, int t) {
#pragma unroll
    for (int i = 0; i < kLaneRuns; ++i) pages[i] = kept(kv.page_at(table, kv.block_of(token_after(t, i))) | int(kOfRun));
  }

  // Whether all of this lane's part of tile t can be copied the short way.
  __device__ __forceinline__ bool whole(const PagedKV& kv, int t) {
    if constexpr (kFixedSlots) {
      int together = pages[0];
#pragma unroll
      for (int i = 1; i < kLanePages; ++i) together |= pages[i];
      return together >= 0;
    } else {
      bool all = true;
#pragma unroll
      for (int i = 0; i < kLaneRuns; ++i) {
        rows[i] = {element(rows[i].k, pages[i], kv.k_block), element(rows[i].v, pages[i], kv.v_block)};
        all &= pages[i] >= 0 && within_4_gib(rows[i].k, k_last) && within_4_gib(rows[i].v, v_last);
      }
      return all && unsigned(t) < inner;
    }
  }

  // Where runs begin, for the lanes that copy.
  __device__ __forceinline__ const TokenRows* place() const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kLaneRuns; ++i) {
      if (kRuns % 32 == 0 || i * 32 + lane < kRuns) store_as(smem + place_at + i * 32 * sizeof(TokenRows), rows[i]);
    }
    __syncwarp();
    return reinterpret_cast<const TokenRows*>(smem + copy_from);
  }

  // Tile t, which is whole for all lanes.
  __device__ __forceinline__ void copy(const PagedKV& kv, int t, unsigned char* to) const {
    if constexpr (kBlockTiles > 1) {
      const unsigned slot = unsigned(t + begin) % kBlockTiles * kTokens;
      const unsigned char* k_first = element(element(k_slots[0], pages[0], kv.k_block), slot, kv.k_slot);
      const unsigned char* v_first = element(element(v_slots[0], pages[0], kv.v_block), slot, kv.v_slot);
      copier.copy_run(kv, to, k_first, v_first);
    } else if constexpr (kFixedSlots) {
      copier.copy_pages(kv, to, k_slots, v_slots, pages);
    } else {
      copier.template copy<true, true>(kv, to, place(), kFull);
    }
  }

  // Any other tile; returns which of its tokens have memory and are the item's.
  __device__ __forceinline__ Mask copy_edge(const PagedKV& kv, int t, unsigned char* to) {
    const int lane = threadIdx.x % 32;
    if constexpr (kFixedSlots) {
      if (unsigned(t) < inner) fetch_runs_after(kv, t - kWarps);  // a block has no page, or another lane's
#pragma unroll
      for (int i = 0; i < kLaneRuns; ++i) pages[i] = pages[i] == -1 ? -1 : int(pages[i] & ~kOfRun);
    }
    Mask mapped = 0;
#pragma unroll
    for (int i = 0; i < (kTokens + 31) / 32; ++i) {
      const int at = i * 32 + lane, token = (t + begin) * kTokens + at;
      const int page = __shfl_sync(kAllLanes, pages[i / kInRun], at / kInRun);
      const bool real = page >= 0 && token >= first && token <= last_token && at < kTokens;
      mapped |= Mask(__ballot_sync(kAllLanes, real)) << i * 32;
    }
#pragma unroll
    for (int i = 0; i < kLaneRuns; ++i) {
      const int token = token_after(t - kWarps, i), slot = token - kv.block_of(token) * kv.block_size;
      const int block = token + kInRun > first ? max(pages[i], 0) : 0;  // an address even where nothing is read
      rows[i] = {k_base + block * kv.k_block + slot * kv.k_slot, v_base + block * kv.v_block + slot * kv.v_slot};
    }
    copier.template copy<false>(kv, to, place(), mapped);
    return mapped;
  }
};

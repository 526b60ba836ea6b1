// Tiles of keys and values on their way from pages to shared memory.
//
// Layout     A tile is kTokens rows of K and after them kTokens rows of V. Rows are padded to an odd number of 16-byte units, so
//            that the 8 rows of an ldmatrix touch all 32 banks: with head_dim 128 and 16-bit pages 17 units, 272 bytes.
// Threads    Whoever fetched the page id of a token, or of a run of tokens, leaves the addresses of its rows in shared memory
//            (TokenRows), unless those who copy know them. 4 lanes copy a row of whole sectors, two of them at a time, else the
//            next power of two of lanes, some idle: each keeps its place in rows, adds it to a row's address once, and goes on
//            by constants. With head_dim 80 and 16-bit pages a row is 5 sectors, and lanes 2 and 3 have no third piece; with fp8
//            pages it is 5 pieces for 8 lanes.
// Not here   When tiles are fetched and waited for: decode_mma.cu, prefill.cu.
#pragma once
#include "work.cuh"

constexpr int kHeadBytes = kHeadDim * int(sizeof(kCacheType));
constexpr int kUnits = (kHeadBytes + 15) / 16;  // 16-byte units of a row
constexpr int kRowBytes = (kUnits | 1) * 16;
constexpr int kTileBytes = kTokens * kRowBytes;
constexpr unsigned kAllLanes = 0xffffffffu;
static_assert(kHeadBytes % kVec == 0, "a row is whole pieces");

template <bool kWide>
struct MaskOf {
  using type = unsigned;
};
template <>
struct MaskOf<true> {
  using type = unsigned long long;
};
using Mask = MaskOf<(kTokens > 32)>::type;  // a bit a token of a tile
constexpr Mask kFull = ~Mask(0) >> (8 * sizeof(Mask) - kTokens);
struct alignas(16) TokenRows {  // where a token's key and value begin, or those of the first of a run
  const unsigned char *k, *v;
};

// x, in a register: a value that comes from a shuffle the compiler cannot form anew for every tile, as it would to save registers
// that are not needed.
template <class T>
__device__ __forceinline__ T kept(T x) {
  return __shfl_sync(kAllLanes, x, threadIdx.x % 32);
}

template <class T>
__device__ __forceinline__ const T* kept_pointer(const T* x) {
  return reinterpret_cast<const T*>(kept(reinterpret_cast<unsigned long long>(x)));
}

__device__ __forceinline__ const unsigned char* kept_here(const unsigned char* x) {
  return reinterpret_cast<const unsigned char*>(formed_here(reinterpret_cast<unsigned long long>(x)));
}

// Whether a row begins where what follows it has the same high 32 bits of address: at most at `last` of its 4 GiB.
__device__ __forceinline__ bool within_4_gib(const unsigned char* row, unsigned last) {
  return unsigned(reinterpret_cast<unsigned long long>(row)) <= last;
}

// row + offset, where no carry leaves the low 32 bits: one addition in place of two.
__device__ __forceinline__ const unsigned char* add_within_4_gib(const unsigned char* row, unsigned offset) {
  const auto address = reinterpret_cast<unsigned long long>(row);
  return reinterpret_cast<const unsigned char*>(address >> 32 << 32 | (unsigned(address) + offset));
}

// One of kCopiers threads that copy tiles; kPerRun: rows that follow one TokenRows.
template <int kCopiers, int kPerRun = 1>
struct Copier {
  static constexpr int kPieces = kHeadBytes / kVec;
  static constexpr int kLanes = kVec == 16 && kPieces > 2 && kPieces % 2 == 0 ? 4
                                : kPieces % 8 == 0                            ? 8
                                : kPieces > 16                                ? 32
                                : kPieces > 8                                 ? 16
                                : kPieces > 4                                 ? 8
                                : kPieces > 2                                 ? 4
                                                                              : kPieces;
  static constexpr int kPerLane = (kPieces + kLanes - 1) / kLanes;
  static constexpr int kAtOnce = kCopiers / kLanes;  // rows
  static constexpr int kRounds = (kTokens + kAtOnce - 1) / kAtOnce;
  static constexpr int kMost = kVec < 4 ? 1 : kCopiers > 32 ? 4 : 8;  // addresses at once: a prefill has few registers to spare
  static constexpr int kBatch = kRounds < kMost ? kRounds : kMost;
  // Where 8 lanes write several rows at once, rows kLanes apart: the rest of an odd stride then keeps them on different banks.
  static constexpr int kTogether = kVec == 16 && kLanes < 8 ? 8 / kLanes : 1;

  int token;       // the first in a tile that this thread copies
  unsigned piece;  // where its first piece begins, in a row
  unsigned to;     // in a tile
  unsigned k, v;   // and in a run of rows
  static_assert(kAtOnce % kPerRun == 0);

  __device__ __forceinline__ void open(const PagedKV& kv) {
    const int nth = threadIdx.x % kCopiers / kLanes;
    token = kTogether == 1 ? nth : nth / 8 * 8 + nth % kTogether * kLanes + nth / kTogether % kLanes;
    piece = threadIdx.x % kLanes * kVec;
    to = token * kRowBytes + piece;
    k = piece + token % kPerRun * unsigned(kv.k_slot), v = piece + token % kPerRun * unsigned(kv.v_slot);
  }

  // The j-th row of this thread, of K and of V, from where its first piece is; zeros where it is not `valid`.
  __device__ __forceinline__ void copy_row(unsigned char* pointer, int j, const unsigned char* from_k, const unsigned char* from_v,
                                           bool valid) const {
    const SharedAddress address = shared_address(pointer);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int step = i * kLanes * kVec, offset = j * kAtOnce * kRowBytes + step;
      if (kPerLane * kLanes == kPieces || piece + step < kHeadBytes) {
        copy_piece<kVec>(address + offset, pointer + offset, from_k + step, valid);
        copy_piece<kVec>(address + kTileBytes + offset, pointer + kTileBytes + offset, from_v + step, valid);
      }
    }
  }

  // One tile, K and after it V; zeros where `mapped` has no bit. `rows`: the run of the first of this thread's tokens, `pointer`:
  // where its first piece goes. kNear: all runs are within_4_gib.
  template <bool kAll, bool kNear = false>
  __device__ __forceinline__ void copy(const PagedKV& kv, unsigned char* pointer, const TokenRows* rows, Mask mapped) const {
#pragma unroll
    for (int first = 0; first < kRounds; first += kBatch) {
      TokenRows from[kBatch];  // all before the first copy: a load from shared memory between copies waits for them
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int ahead = (first + j) * kAtOnce;
        if (first + j < kRounds)
          from[j] = load_as<TokenRows>(rows + (kTokens % kAtOnce == 0 ? ahead : min(ahead, kTokens - 1 - token)) / kPerRun);
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int at = (first + j) * kAtOnce + token;
        const unsigned char* from_k = kNear ? add_within_4_gib(from[j].k, k) : from[j].k + (piece + token % kPerRun * kv.k_slot);
        const unsigned char* from_v = kNear ? add_within_4_gib(from[j].v, v) : from[j].v + (piece + token % kPerRun * kv.v_slot);
        if (first + j < kRounds && (kTokens % kAtOnce == 0 || at < kTokens))
          copy_row(pointer, first + j, from_k, from_v, kAll || mapped >> at & 1);
      }
    }
  }

  // The same where every token has memory and a row's address is one of the bases plus a page: `k_base`, `v_base` of this thread's
  // rows 0, 1, ... of a block, `pages` of its blocks.
  template <int kBases, int kPages>
  __device__ __forceinline__ void copy_pages(const PagedKV& kv, unsigned char* pointer,
                                             const unsigned char* const (&k_base)[kBases],
                                             const unsigned char* const (&v_base)[kBases], const int (&pages)[kPages]) const {
#pragma unroll
    for (int j = 0; j < kRounds; ++j) {
      const int page = pages[j / kBases];
      copy_row(pointer, j, element(k_base[j % kBases], page, kv.k_block), element(v_base[j % kBases], page, kv.v_block), true);
    }
  }

  // The same where all tokens are neighbours in one block; `k_from`, `v_from`: this thread's first rows.
  __device__ __forceinline__ void copy_run(const PagedKV& kv, unsigned char* pointer, const unsigned char* k_from,
                                           const unsigned char* v_from) const {
#pragma unroll
    for (int j = 0; j < kRounds; ++j) {
      copy_row(pointer, j, element(k_from, j * kAtOnce, kv.k_slot), element(v_from, j * kAtOnce, kv.v_slot), true);
    }
  }
};

// fp8 rows of head_dim 8 more than a multiple of 16 end inside a unit; what no copy writes must be zeros. For a ring of tiles, by
// the block's threads.
template <int kRingTiles>
__device__ __forceinline__ void clear_row_ends(unsigned char* ring) {
  if constexpr (kHeadBytes % 16 != 0) {
    for (int row = threadIdx.x; row < kRingTiles * 2 * kTokens; row += kThreads) {
      store_as(ring + row * kRowBytes + kHeadBytes, make_uint2(0, 0));
    }
  }
}

// Tiles of keys and values on their way from pages to shared memory.
//
// Layout     A tile is kTokens rows of K and after them kTokens rows of V. Rows are padded to an odd number of 16-byte units, so
//            that the 8 rows of an ldmatrix touch all 32 banks: with head_dim 128 and 16-bit pages 17 units, 272 bytes.
// Threads    Whoever fetched a token's page id leaves the addresses of its rows in shared memory (TokenRows). A power of two of
//            lanes copies a row, some perhaps idle: each keeps its place in rows, and addresses advance by constants. With
//            head_dim 80 and 16-bit pages a row is 10 pieces for 16 lanes, 6 of them idle, and a warp copies 2 rows at a time.
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
struct alignas(16) TokenRows {  // where a token's key and value begin
  const unsigned char *k, *v;
};

// One tile, K and after it V, of the tokens that `rows` tells of, by kCopiers threads; zeros where `mapped` has no bit.
template <int kCopiers, bool kAll>
__device__ __forceinline__ void copy_tile(unsigned char* tile, const TokenRows* rows, Mask mapped) {
  constexpr int kPieces = kHeadBytes / kVec;
  constexpr int kLanes = kPieces > 16 ? 32 : kPieces > 8 ? 16 : kPieces > 4 ? 8 : kPieces > 2 ? 4 : kPieces;
  constexpr int kPerLane = (kPieces + kLanes - 1) / kLanes;
  constexpr int kAtOnce = kCopiers / kLanes, kRounds = (kTokens + kAtOnce - 1) / kAtOnce;
  constexpr int kMost = kVec < 4 ? 1 : kCopiers > 32 ? 4 : 8;  // addresses at once: a prefill has few registers to spare
  constexpr int kBatch = kRounds < kMost ? kRounds : kMost;
  // Where 8 lanes write several rows at once, rows kLanes apart: the rest of an odd stride then keeps them on different banks.
  constexpr int kTogether = kVec == 16 && kLanes < 8 ? 8 / kLanes : 1;
  const int nth = threadIdx.x % kCopiers / kLanes, lane = threadIdx.x % kLanes;
  const int first_token = kTogether == 1 ? nth : nth / 8 * 8 + nth % kTogether * kLanes + nth / kTogether % kLanes;
  unsigned char* to = tile + first_token * kRowBytes + lane * kVec;
  const SharedAddress address = shared_address(to);
#pragma unroll
  for (int first = 0; first < kRounds; first += kBatch) {
    TokenRows from[kBatch];  // all before the first copy: a load from shared memory between copies waits for them
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int token = (first + j) * kAtOnce + first_token;
      if (first + j < kRounds) from[j] = load_as<TokenRows>(rows + (kTokens % kAtOnce == 0 ? token : min(token, kTokens - 1)));
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int token = (first + j) * kAtOnce + first_token;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int piece = i * kLanes + lane, offset = (first + j) * kAtOnce * kRowBytes + i * kLanes * kVec;
        const bool real = (kPerLane * kLanes == kPieces || piece < kPieces) && (kTokens % kAtOnce == 0 || token < kTokens);
        if (first + j < kRounds && real) {
          const bool valid = kAll || mapped >> token & 1;
          copy_piece<kVec>(address + offset, to + offset, from[j].k + piece * kVec, valid);
          copy_piece<kVec>(address + kTileBytes + offset, to + kTileBytes + offset, from[j].v + piece * kVec, valid);
        }
      }
    }
  }
}

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

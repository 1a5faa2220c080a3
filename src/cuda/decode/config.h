// Tile sizes of the decode kernel and what it takes beside ForwardParams.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cuda/attention/params.h"
#include "cuda/decode/divisor.h"
#include "cuda/decode/stripes.h"

namespace flash_dmattn::internal::cuda {

constexpr int kDecodeRows = 16;          // (query row, head of the group) pairs of a block: rows of a product
constexpr int kFewDecodeRows = 8;        // so many are the columns of a product instead (DecodeWarp)
constexpr int kMostWindow = 256;         // keys that a warp looks through at once: 8 bytes of a mask per lane
constexpr int kMostRuleWindow = 128;     // likewise where every row is asked for every key
constexpr int kLaneKeys = 8;             // of those, a lane's
constexpr int kShareUnit = 64;           // a split has a multiple of this many keys
constexpr int kMostSplitKeys = 1 << 16;  // a listed key is 16 bits, counted from the first of its split

// Keys of each split of `existing` keys; the last ones get what is left.
constexpr std::int32_t decode_split_keys(std::int32_t existing, const Divisor& splits) {
  if (existing == 0) return kShareUnit;
  return (static_cast<std::int32_t>(splits.quotient(static_cast<std::uint32_t>(existing - 1))) / kShareUnit + 1) *
         kShareUnit;
}

constexpr int decode_warps(int bucket) { return bucket <= 128 ? 4 : 2; }
constexpr bool has_few_decode_rows(std::int64_t rows, std::int64_t group) { return rows * group <= kFewDecodeRows; }
// Blocks that run at the same time on a multiprocessor of sm_90.
constexpr int decode_blocks(bool few_rows) { return few_rows ? 4 : 3; }

// Every warp has its own tiles in shared memory, two of keys and two of values, and never waits for another. With few
// rows, one of values: a step is short then, and a fourth block on each multiprocessor of sm_90 is worth more. A block
// takes at most 75 KiB, so that one fits the smallest processor (sm_86, sm_89, sm_120).
template <int kHeadDimBucket, bool kFewRows>
struct DecodeConfig {
  static constexpr int kHeadDim = kHeadDimBucket;
  static constexpr int kWarps = decode_warps(kHeadDim);
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = kFewRows ? kFewDecodeRows : kDecodeRows;
  static constexpr int kTileKeys = kHeadDim <= 64 ? 32 : 16;
  static constexpr int kKeyStages = 2, kValueStages = kFewRows ? 1 : 2;
  static constexpr int kBlocksPerProcessor = decode_blocks(kFewRows);

  // Shared memory: tiles of each warp (later its sums), queries, listed keys (later what is known of the warps' rows).
  static constexpr std::size_t kTileBytes = std::size_t{kTileKeys} * kHeadDim * 2;
  static constexpr std::size_t kTilesBytes = kWarps * (kKeyStages + kValueStages) * kTileBytes;
  static constexpr std::size_t kQueryBytes = std::size_t{kRows} * kHeadDim * 2;
  static constexpr int kListKeys = kMostWindow + kTileKeys;
  static constexpr std::size_t kSharedBytes = kTilesBytes + kQueryBytes + kWarps * kListKeys * sizeof(std::uint32_t);

  // A row of sums has a gap behind it, so that rows start in different banks.
  static constexpr int kSumsPitch = kHeadDim + 8;
  static_assert(kWarps * kRows * kSumsPitch * sizeof(float) <= kTilesBytes);
};

struct DecodeParams : ForwardParams {
  // All rows of a block see the same keys.
  bool uniform = false;
  // `uniform`, and nothing hides keys but their number and a mask whose bytes for neighbouring keys are neighbours,
  // too, so that a lane reads several keys' bytes at once.
  bool by_bytes = false;
  std::int32_t row_tiles = 1;  // blocks that divide the rows of a key head
  std::int32_t splits = 1;     // blocks that divide the keys
  bool is_cluster = false;     // the splits of a row are the blocks of a cluster
  bool begins_early = false;   // while the kernel before ends
  Divisor by_splits, by_group;
  // What a block's number is divided by, one after another: row tiles, key heads and splits; if splits are a cluster,
  // these first.
  Divisor by_counts[3];
  std::int32_t window = kMostWindow;  // keys a warp looks through at once, a multiple of kLaneKeys
  // Lists of keys per row (key_union.cuh); not defined: none.
  IndexViews indices;
  bool list_by_row = false, list_by_head = false;  // whether query rows, and heads of a group, have lists of their own
  std::int32_t entry_threads = 1;                  // threads that share an entry's keys: 1, 2, 4, ... 32
  Stripes stripes;                                 // which of all keys a split owns
  // What each split leaves, if there are several that are no cluster.
  float* partial_sums = nullptr;    // (B, H, Sq, splits, bucket): probabilities times values
  float2* partial_facts = nullptr;  // (B, H, Sq, splits): the highest score, the sum of probabilities
};

// How the keys of a row are divided. Those that are a cluster are put together by it, others by a second kernel.
struct Splits {
  std::int32_t count = 1;
  bool is_cluster = false;
};

// `params` with the rest filled in. `workspace`: decode_partial_bytes.
DecodeParams decode_params(const ForwardParams& params, const IndexViews& indices, Splits splits, void* workspace);
std::size_t decode_partial_bytes(std::int64_t results, Splits splits, int bucket);

// One unit of compilation for each element type. Enqueues the kernels of one problem.
template <typename Element, int kHeadDim>
cudaError_t launch_decode_kernels(const DecodeParams& params, cudaStream_t stream);

}  // namespace flash_dmattn::internal::cuda

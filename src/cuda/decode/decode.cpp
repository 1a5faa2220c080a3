#include "cuda/decode/decode.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/arena.h"
#include "cuda/attention/head_dims.h"
#include "cuda/decode/config.h"
#include "cuda/launch_blocks.cuh"

namespace flash_dmattn::internal::cuda {
namespace {

// Measured on an H200 against the sm80 forward, 8 key heads of 4 query heads, D 128, bf16, no mask:
//   one query row, 64 keys: 1.2 times (batch 1) to 0.33 times (32) its time; 256 keys: 0.93 to 0.24; 4096: 0.1 to 0.2;
//   16 query rows, batch 4: 0.76 (1024 keys), 0.44 (8192); 32: 1.36 and 0.85.
// Up to 16 query rows keys and values are read at most as often as by kernels that own rows of one head each.
constexpr std::int64_t kMostRows = 16;
constexpr std::int64_t kLeastKeys = 256;
// A list waits for the entries of every row and head that has its own, one after another.
constexpr std::int64_t kMostDistinctEntries = 4;
// A split of fewer keys is not worth the sums that it leaves.
constexpr std::int64_t kLeastSplitKeys = 256;
// Entries that a block's rows list together: it reads all of them, most of them for other blocks' sake.
constexpr std::int64_t kMostListEntries = 1 << 16;
// How long a multiprocessor takes for its blocks' keys, in units of some nanoseconds that are left out, as only ratios
// count. Blocks that run at the same time begin and end together, so that each round of them has a part in which
// nothing is fetched: longer where a mask or intervals say what to fetch, or where the entries of lists are waited for.
// One block alone, or two, do not keep memory busy where keys have to be found; where all are read, one does.
struct SplitCosts {
  std::int64_t percents[5];  // of a key's time, with so many blocks at the same time
  std::int64_t round, combine, split;
};
// Fitted on an H200 (8 key heads of 4 query heads, D 128, bf16).
// 3 blocks a multiprocessor, batch 1 to 32, 1 to 49 splits, 65536 keys, all or 2048 kept: within a fifth.
constexpr SplitCosts kAllKeysCosts = {{0, 100, 2 * 102, 3 * 103}, 400, 220, 0};
constexpr SplitCosts kMaskedCosts = {{0, 175, 2 * 109, 300}, 2048, 220, 0};
constexpr SplitCosts kListedCosts = {{0, 175, 2 * 109, 300}, 256, 220, 0};
// With few rows 4 blocks, batch 1 to 32, 1 to 64 splits, 1024 to 65536 keys, all, or 1/128 to 1/4 of them kept. What
// these choose takes 0.1, 0.7 and 1.0 % longer on average than the best number of splits, and 1, 6 and 10 % at most.
constexpr SplitCosts kAllKeysFewRowsCosts = {{0, 85, 169, 311, 400}, 230, 246, 0};
constexpr SplitCosts kMaskedFewRowsCosts = {{0, 119, 211, 313, 400}, 3192, 1812, 47};
constexpr SplitCosts kListedFewRowsCosts = {{0, 138, 208, 301, 400}, 165, 113, 6};
// What splits take less if they are a cluster. Chosen so among 1 to 16 splits, they take 1 % longer on average than the
// best of these (1 to 48 sequences, 512 to 8192 keys kept), 9 % at most.
constexpr std::int64_t kMaskedClusterSaves = 1200, kListedClusterSaves = 63;
constexpr std::int64_t kMostClusterSplits = 16;
// The multiprocessors that are neighbours, as those of a cluster have to be: a GPU has groups of 14 to 18 of them.
constexpr std::int64_t kNeighbours = 16, kLeastNeighbours = 14;
constexpr std::int64_t kEntriesPerKey = 16;    // that are read in the time of a key
constexpr std::int64_t kLeastListedKeys = 64;  // a split has a tile for each warp
constexpr std::int64_t kMostRounds = 4;        // of blocks on all multiprocessors

constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Whether rows of a key head read different entries.
bool differs_by_head(const BroadcastView& view, std::int64_t group) {
  return view.defined() && view.head_stride != 0 && view.head_divisor < group;
}
bool lists_differ_by_head(const IndexViews& indices, std::int64_t group) {
  return differs_by_head(indices.entries, group) || differs_by_head(indices.lengths, group);
}
bool lists_differ_by_row(const IndexViews& indices, std::int64_t rows) { return rows > 1 && indices.differ_by_row(); }

// Entries of all lists that a block reads, at most.
std::int64_t list_entries(const IndexViews& indices, std::int64_t rows, std::int64_t group) {
  const std::int64_t lists =
      (lists_differ_by_row(indices, rows) ? rows : 1) * (lists_differ_by_head(indices, group) ? group : 1);
  return std::min<std::int64_t>(lists, kDecodeRows) * indices.entries.keys;
}

// What decides about the number of splits.
struct SplitRule {
  std::int64_t batch, key_heads, rows, group, keys;
  bool is_masked;  // by a mask or intervals
  const IndexViews& indices;
};

// Whether so many splits may be a cluster, which makes `clusters` in all; `at_once` blocks fit a multiprocessor.
bool may_be_cluster(const SplitRule& rule, const DecodeGpu& gpu, std::int64_t splits, std::int64_t clusters,
                    std::int64_t at_once) {
  const bool has_lists = rule.indices.defined();
  if (!gpu.has_clusters || !(has_lists || rule.is_masked) || splits == 1) return false;
  // All keys are read faster where heads side by side read them at the same time (describe_block): by 8 %, more where
  // there are fewer blocks than multiprocessors have room for. A mask may show all.
  const std::int64_t processors = std::max(gpu.processors, 1);
  const bool fills_gpu = divide_up(clusters * splits, processors) >= at_once - 1;
  if (!has_lists && (splits > kPortableClusterBlocks || !fills_gpu)) return false;
  // All clusters have to run at the same time: otherwise some have the GPU to themselves when the others have ended.
  // Small ones fit in everywhere.
  const std::int64_t neighbours = splits <= kPortableClusterBlocks ? kNeighbours : kLeastNeighbours;
  return splits <= kMostClusterSplits && clusters <= processors / kNeighbours * (neighbours * at_once / splits);
}

// The splits for which multiprocessors are done first, by the above.
Splits choose_splits(const SplitRule& rule, const DecodeGpu& gpu) {
  const bool few_rows = has_few_decode_rows(rule.rows, rule.group);
  SplitCosts costs = few_rows ? kAllKeysFewRowsCosts : kAllKeysCosts;
  if (rule.is_masked) costs = few_rows ? kMaskedFewRowsCosts : kMaskedCosts;
  std::int64_t keys = rule.keys;
  std::int64_t least = std::max<std::int64_t>(divide_up(keys, kMostSplitKeys - kShareUnit), 1);
  std::int64_t least_keys = kLeastSplitKeys;
  if (rule.indices.defined()) {
    const std::int64_t entries = list_entries(rule.indices, rule.rows, rule.group);
    const std::int64_t most_entries = divide_up(keys, rule.indices.block_size);
    keys = std::min(std::min(entries, most_entries) * rule.indices.block_size, keys);
    costs = few_rows ? kListedFewRowsCosts : kListedCosts;
    costs.round += entries / kEntriesPerKey;
    least = 1;  // a split of listed keys may be of any length
    least_keys = kLeastListedKeys;
  }
  const std::int64_t row_tiles = divide_up(rule.rows * rule.group, kDecodeRows);
  const std::int64_t blocks = std::max<std::int64_t>(rule.batch * rule.key_heads * row_tiles, 1);
  const std::int64_t all = std::max(gpu.processors, 1), at_once = decode_blocks(few_rows), slots = at_once * all;
  const std::int64_t most = std::max(std::min(keys / least_keys, divide_up(kMostRounds * slots, blocks)), least);
  const std::int64_t cluster_saves = rule.indices.defined() ? kListedClusterSaves : kMaskedClusterSaves;
  Splits best;
  std::int64_t best_cost = std::numeric_limits<std::int64_t>::max();
  for (std::int64_t splits = least; splits <= most; ++splits) {
    const std::int64_t of_processor = divide_up(blocks * splits, all);
    const std::int64_t percent =
        of_processor / at_once * costs.percents[at_once] + costs.percents[of_processor % at_once];
    const bool is_cluster = may_be_cluster(rule, gpu, splits, blocks, at_once);
    const std::int64_t cost = divide_up(keys, splits) * percent / 100 + divide_up(of_processor, at_once) * costs.round +
                              (splits > 1 ? costs.combine + splits * costs.split : 0) -
                              (is_cluster ? cluster_saves : 0);
    if (cost < best_cost) best = {static_cast<std::int32_t>(splits), is_cluster}, best_cost = cost;
  }
  return best;
}

// Whether blocks may begin while the kernel before ends. They are put wherever it has ended then: unless
// multiprocessors have as many blocks as they have room for, or one each, which waits for memory's latency rather than
// its rate, some would get a block more than others, which have one less.
bool may_begin_early(const DecodeParams& params, int processors) {
  const std::int64_t blocks = std::int64_t{params.batch} * params.key_heads * params.row_tiles * params.splits;
  const std::int64_t of_processor = divide_up(blocks, std::max(processors, 1));
  return of_processor == 1 || of_processor % decode_blocks(has_few_decode_rows(params.rows, params.group)) == 0;
}

}  // namespace

bool decode_applies(const AttentionProblem& problem) {
  const auto few_entries = [&](const BroadcastView& view) {
    const std::int64_t of_rows = view.row_stride != 0 ? problem.rows : 1;
    return of_rows * (differs_by_head(view, problem.group()) ? problem.group() : 1) <= kMostDistinctEntries;
  };
  if (problem.rows > kMostRows || problem.keys < kLeastKeys) return false;
  const VisibilityViews& views = problem.visibility;
  // With lists a mask or intervals are asked for listed keys alone.
  if (views.indices.defined()) return list_entries(views.indices, problem.rows, problem.group()) <= kMostListEntries;
  return few_entries(views.mask) && few_entries(views.intervals.begin) && few_entries(views.intervals.end);
}

std::size_t decode_partial_bytes(std::int64_t results, Splits splits, int bucket) {
  if (splits.count == 1 || splits.is_cluster) return 0;
  Arena arena(nullptr);
  const auto parts = static_cast<std::size_t>(results * splits.count);
  arena.take<float>(parts * static_cast<std::size_t>(bucket));
  arena.take<float2>(parts);
  return arena.used();
}

std::size_t decode_workspace(const AttentionProblem& problem, const DecodeGpu& gpu) {
  const VisibilityViews& views = problem.visibility;
  const Splits splits = choose_splits({problem.batch, problem.key_heads, problem.rows, problem.group(), problem.keys,
                                       views.mask.defined() || views.intervals.defined(), views.indices},
                                      gpu);
  return decode_partial_bytes(problem.batch * problem.heads * problem.rows, splits, bucket_of(wider_head_dim(problem)));
}

DecodeParams decode_params(const ForwardParams& params, const IndexViews& indices, Splits splits, void* workspace) {
  DecodeParams decode;
  static_cast<ForwardParams&>(decode) = params;
  decode.indices = indices;
  decode.list_by_row = lists_differ_by_row(indices, params.rows);
  decode.list_by_head = lists_differ_by_head(indices, params.group);
  decode.stripes = Stripes(splits.count);
  // Threads go over a split's keys of an entry in words of 32.
  const std::int64_t entry_keys = divide_up(indices.block_size, splits.count);
  while (decode.entry_threads < 32 && decode.entry_threads * 32 < entry_keys) decode.entry_threads *= 2;
  const Visibility& visibility = params.visibility;
  const bool by_row =
      params.rows > 1 && (visibility.is_causal || visibility.begin.defined() || params.mask.row_stride != 0);
  decode.uniform = !by_row && !decode.list_by_row && !decode.list_by_head &&
                   !differs_by_head(params.mask, params.group) && !differs_by_head(visibility.begin, params.group) &&
                   !differs_by_head(visibility.end, params.group);
  decode.by_bytes =
      decode.uniform && !visibility.begin.defined() && (!params.mask.defined() || params.mask.key_stride == 1);
  decode.row_tiles = static_cast<std::int32_t>(divide_up(std::int64_t{params.rows} * params.group, kDecodeRows));
  decode.splits = splits.count, decode.is_cluster = splits.is_cluster;
  // Of an empty problem some are 0, and nothing is divided.
  decode.by_splits = Divisor(splits.count);
  const Divisor by_row_tiles(std::max(decode.row_tiles, 1)), by_key_heads(std::max(params.key_heads, 1));
  decode.by_counts[0] = splits.is_cluster ? decode.by_splits : by_row_tiles;
  decode.by_counts[1] = splits.is_cluster ? by_row_tiles : by_key_heads;
  decode.by_counts[2] = splits.is_cluster ? by_key_heads : decode.by_splits;
  decode.by_group = Divisor(std::max(params.group, 1));
  const int bucket = bucket_of(wider_head_dim(params));
  // Windows of equal size, so that warps get equal shares. Lanes take kLaneKeys neighbours each, or one key of
  // every 32.
  const std::int64_t unit = decode.by_bytes ? kLaneKeys : 32, most = decode.by_bytes ? kMostWindow : kMostRuleWindow;
  const std::int64_t warp_keys =
      std::max<std::int64_t>(divide_up(decode_split_keys(params.keys, decode.by_splits), decode_warps(bucket)), 1);
  const std::int64_t window = divide_up(warp_keys, divide_up(warp_keys, most));
  decode.window = static_cast<std::int32_t>(divide_up(window, unit) * unit);
  if (splits.count > 1 && !splits.is_cluster) {
    Arena arena(workspace);
    const auto parts = static_cast<std::size_t>(params.batch) * static_cast<std::size_t>(params.heads) *
                       static_cast<std::size_t>(params.rows) * static_cast<std::size_t>(splits.count);
    decode.partial_sums = arena.take<float>(parts * static_cast<std::size_t>(bucket));
    decode.partial_facts = arena.take<float2>(parts);
  }
  return decode;
}

cudaError_t launch_decode(const ForwardParams& params, const IndexViews& indices, DType dtype, const DecodeGpu& gpu,
                          void* workspace, cudaStream_t stream) {
  const Splits splits = choose_splits({params.batch, params.key_heads, params.rows, params.group, params.keys,
                                       params.mask.defined() || params.visibility.begin.defined(), indices},
                                      gpu);
  DecodeParams decode = decode_params(params, indices, splits, workspace);
  decode.begins_early = may_begin_early(decode, gpu.processors);
  const auto launch = [&](auto element) {
    using Element = decltype(element);
    return with_bucket(wider_head_dim(params),
                       [&]<int kHeadDim>() { return launch_decode_kernels<Element, kHeadDim>(decode, stream); });
  };
  return dtype == DType::kBFloat16 ? launch(__nv_bfloat16()) : launch(__half());
}

}  // namespace flash_dmattn::internal::cuda

#include "cuda/decode/decode.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "core/arena.h"
#include "cuda/attention/head_dims.h"
#include "cuda/decode/config.h"

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
// How long a multiprocessor takes, in times that a key takes it where it is busy (18 ns on an H200: 8 key heads of 4
// query heads, D 128, bf16). Fitted there to 74 times of 2048 of 65536 keys, by mask and by list, batch 1 to 32 and 1
// to 49 splits: all are within a fifth, by mask up to 25 splits within 8 %. Blocks that run at the same time begin and
// end together, so that each round of them has a part in which nothing is fetched: longer where a mask or intervals say
// what to fetch (in keys that are looked at), or where the entries of lists are waited for. One block alone, or two, do
// not keep memory busy where keys have to be found; where all are read, one does, and others are in its way a little
// (batch 1 to 32, 65536 keys: what this chooses is within 1 % of the fastest number measured).
constexpr std::int64_t kDenseRoundCost = 400, kMaskedRoundCost = 2048, kListsRoundCost = 256, kEntriesPerKey = 16;
constexpr std::int64_t kCombineCost = 220;       // of parts, if there are several splits
constexpr std::int64_t kBlocksPerProcessor = 3;  // of DecodeConfig
// For so many blocks at the same time.
constexpr std::int64_t kPercentOfKeys[] = {0, 175, 2 * 109, 300}, kPercentOfAllKeys[] = {0, 100, 2 * 102, 3 * 103};
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

// The number of splits for which multiprocessors are done first, by the above.
std::int32_t split_count(const SplitRule& rule, int processors) {
  std::int64_t keys = rule.keys, round_cost = rule.is_masked ? kMaskedRoundCost : kDenseRoundCost;
  const auto& percents = rule.is_masked || rule.indices.defined() ? kPercentOfKeys : kPercentOfAllKeys;
  std::int64_t least = std::max<std::int64_t>(divide_up(keys, kMostSplitKeys - kShareUnit), 1);
  std::int64_t least_keys = kLeastSplitKeys;
  if (rule.indices.defined()) {
    const std::int64_t entries = list_entries(rule.indices, rule.rows, rule.group);
    const std::int64_t most_entries = divide_up(keys, rule.indices.block_size);
    keys = std::min(std::min(entries, most_entries) * rule.indices.block_size, keys);
    round_cost = kListsRoundCost + entries / kEntriesPerKey;
    least = 1;  // a split of listed keys may be of any length
    least_keys = kLeastListedKeys;
  }
  const std::int64_t row_tiles = divide_up(rule.rows * rule.group, kDecodeRows);
  const std::int64_t blocks = std::max<std::int64_t>(rule.batch * rule.key_heads * row_tiles, 1);
  const std::int64_t all = std::max(processors, 1), slots = kBlocksPerProcessor * all;
  const std::int64_t most = std::max(std::min(keys / least_keys, divide_up(kMostRounds * slots, blocks)), least);
  std::int64_t best = least, best_cost = 0;
  for (std::int64_t splits = least; splits <= most; ++splits) {
    const std::int64_t of_processor = divide_up(blocks * splits, all);
    const std::int64_t full_rounds = of_processor / kBlocksPerProcessor, rest = of_processor % kBlocksPerProcessor;
    const std::int64_t percent = full_rounds * percents[kBlocksPerProcessor] + percents[rest];
    const std::int64_t cost = divide_up(keys, splits) * percent / 100 +
                              divide_up(of_processor, kBlocksPerProcessor) * round_cost +
                              (splits > 1 ? kCombineCost : 0);
    if (splits == least || cost < best_cost) best = splits, best_cost = cost;
  }
  return static_cast<std::int32_t>(best);
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

std::size_t decode_partial_bytes(std::int64_t results, std::int32_t splits, int bucket) {
  if (splits == 1) return 0;
  Arena arena(nullptr);
  const auto parts = static_cast<std::size_t>(results * splits);
  arena.take<float>(parts * static_cast<std::size_t>(bucket));
  arena.take<float2>(parts);
  return arena.used();
}

std::size_t decode_workspace(const AttentionProblem& problem, int processors) {
  const VisibilityViews& views = problem.visibility;
  const std::int32_t splits =
      split_count({problem.batch, problem.key_heads, problem.rows, problem.group(), problem.keys,
                   views.mask.defined() || views.intervals.defined(), views.indices},
                  processors);
  return decode_partial_bytes(problem.batch * problem.heads * problem.rows, splits, bucket_of(wider_head_dim(problem)));
}

DecodeParams decode_params(const ForwardParams& params, const IndexViews& indices, std::int32_t splits,
                           void* workspace) {
  DecodeParams decode;
  static_cast<ForwardParams&>(decode) = params;
  decode.indices = indices;
  decode.list_by_row = lists_differ_by_row(indices, params.rows);
  decode.list_by_head = lists_differ_by_head(indices, params.group);
  decode.stripes = Stripes(splits);
  // Threads go over a split's keys of an entry in words of 32.
  const std::int64_t entry_keys = divide_up(indices.block_size, splits);
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
  decode.splits = splits;
  const int bucket = bucket_of(wider_head_dim(params));
  // Windows of equal size, so that warps get equal shares. Lanes take kLaneKeys neighbours each, or one key of
  // every 32.
  const std::int64_t unit = decode.by_bytes ? kLaneKeys : 32;
  const std::int64_t warp_keys =
      std::max<std::int64_t>(divide_up(decode_split_keys(params.keys, splits), decode_warps(bucket)), 1);
  const std::int64_t window = divide_up(warp_keys, divide_up(warp_keys, kMostWindow));
  decode.window = static_cast<std::int32_t>(divide_up(window, unit) * unit);
  if (splits > 1) {
    Arena arena(workspace);
    const auto parts = static_cast<std::size_t>(params.batch) * static_cast<std::size_t>(params.heads) *
                       static_cast<std::size_t>(params.rows) * static_cast<std::size_t>(splits);
    decode.partial_sums = arena.take<float>(parts * static_cast<std::size_t>(bucket));
    decode.partial_facts = arena.take<float2>(parts);
  }
  return decode;
}

cudaError_t launch_decode(const ForwardParams& params, const IndexViews& indices, DType dtype, int processors,
                          void* workspace, cudaStream_t stream) {
  const std::int32_t splits = split_count({params.batch, params.key_heads, params.rows, params.group, params.keys,
                                           params.mask.defined() || params.visibility.begin.defined(), indices},
                                          processors);
  const DecodeParams decode = decode_params(params, indices, splits, workspace);
  const auto launch = [&](auto element) {
    using Element = decltype(element);
    return with_bucket(wider_head_dim(params),
                       [&]<int kHeadDim>() { return launch_decode_kernels<Element, kHeadDim>(decode, stream); });
  };
  return dtype == DType::kBFloat16 ? launch(__nv_bfloat16()) : launch(__half());
}

}  // namespace flash_dmattn::internal::cuda

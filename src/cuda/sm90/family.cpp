// The kernels with Hopper's asynchronous products and copies (wgmma, TMA), as a kernel family. The forward is left to
// other families above head dim 128 with a softcap, or a bias that differs by row and does not come in boxes; the
// backward with a softcap, or a bias that differs by row.
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "cuda/attention/backward_call.h"
#include "cuda/attention/call.h"
#include "cuda/attention/key_works.h"
#include "cuda/kernel_family.h"
#include "cuda/plan/prepared_visibility.h"
#include "cuda/sm90/backward_config.h"
#include "cuda/sm90/forward_config.h"
#include "cuda/sm90/launch.h"
#include "cuda/sm90/tensor_map.h"

namespace flash_dmattn::internal::cuda {
namespace {

constexpr int kLeastBucket = 64;  // smaller heads leave the tensor cores waiting for exponentials: sm80 is as fast

bool has_tensor_maps(const AttentionProblem& problem) {
  return sm90::has_tensor_map(problem.query, problem.batch, problem.rows, problem.heads) &&
         sm90::has_tensor_map(problem.key, problem.batch, problem.keys, problem.key_heads) &&
         sm90::has_tensor_map(problem.value, problem.batch, problem.keys, problem.key_heads);
}

// The same entries for every row.
bool is_per_key(const BroadcastView& bias) { return bias.rows == 1; }

// A bias that differs by row as the copy engine sees it: tokens are its rows, columns its keys.
TokenView as_tokens(const BroadcastView& bias) {
  return {bias.data, bias.batch_stride, bias.row_stride, bias.head_stride};
}

// Whether the bias differs by row and comes in boxes.
bool has_boxes_of_bias(const AttentionProblem& problem) {
  const BroadcastView& bias = problem.bias;
  return !is_planned(problem) && !is_per_key(bias) && bias.dtype == problem.dtype && bias.rows == problem.rows &&
         bias.keys == problem.keys && bias.key_stride == 1 &&
         sm90::has_tensor_map(as_tokens(bias), bias.batches, bias.rows, bias.heads);
}

bool takes_forward(const AttentionProblem& problem, const Gpu& gpu) {
  const int bucket = bucket_of(wider_head_dim(problem));
  if (gpu.capability != 90 || bucket < kLeastBucket || problem.keys == 0 || !has_tensor_maps(problem)) return false;
  const bool common = problem.softcap == 0 && (is_per_key(problem.bias) || has_boxes_of_bias(problem));
  if (!common && bucket > sm90::kMostAnyHeadDim) return false;
  // Keys of a plan are copied in pieces of 8 columns.
  return !is_planned(problem) || (has_whole_pieces(problem) && is_aligned(problem.key) && is_aligned(problem.value));
}

// Whether the copy engine may store results. compute-sanitizer's initcheck does not see what that writes, and takes it
// for uninitialised: it runs with FLASH_DMATTN_BULK_STORES=0 (tools/sanitize_gpu.sh). Forwards store by element then;
// backwards that cannot are declined.
bool may_store_boxes() {
  static const bool may = [] {
    const char* value = std::getenv("FLASH_DMATTN_BULK_STORES");
    if (value == nullptr || std::string_view(value) == "1") return true;
    if (std::string_view(value) == "0") return false;
    std::fprintf(stderr, "flash_dmattn: FLASH_DMATTN_BULK_STORES=%s is neither 0 nor 1; it is ignored\n", value);
    return true;
  }();
  return may;
}

struct Sm90ForwardScratch : ForwardScratch {
  std::int32_t *next_huge = nullptr, *taken = nullptr;  // as in Sm90ForwardParams, BlockOrder

  void arrange(const AttentionProblem& problem, Arena* arena) {
    ForwardScratch::arrange(problem, arena);
    constexpr std::int64_t kLeastRows = 2 * kUnitRows;  // of a work tile, or half of that of two heads
    const std::int64_t works = (problem.rows + kLeastRows - 1) / kLeastRows * problem.heads * problem.batch;
    next_huge = arena->take<std::int32_t>(static_cast<std::size_t>(works));
    taken = arena->take<std::int32_t>(2);
  }
};

Status arrange_forward(const AttentionProblem& problem, const Gpu&, std::size_t* bytes) {
  Arena arena(nullptr);
  Sm90ForwardScratch().arrange(problem, &arena);
  *bytes = arena.used();
  return {};
}

// Whether heads 2 n and 2 n + 1 see the same keys with the same bias.
bool pairs_heads(const AttentionProblem& problem, const DevicePlan& plan) {
  const auto pairs = [](std::int64_t heads, std::int64_t head_divisor) { return heads == 1 || head_divisor % 2 == 0; };
  return problem.group() % 2 == 0 && pairs(plan.plan_heads, plan.head_divisor) &&
         pairs(problem.bias.heads, problem.bias.head_divisor);
}

// Calls launch.operator()<Element, bucket of keys, bucket of values>() for a bucket that the family has kernels for.
template <typename Launch>
cudaError_t by_own_types(const AttentionProblem& problem, Launch launch) {
  return by_types(problem, [&]<typename Element, int kHeadDim, int kValueDim>() {
    if constexpr (kHeadDim < kLeastBucket) {
      return cudaErrorInvalidValue;  // takes_forward and takes_backward decline
    } else {
      return launch.template operator()<Element, kHeadDim, kValueDim>();
    }
  });
}

template <int kHeadDim, int kValueDim, bool kPlanned, sm90::Scoring kScoring>
cudaError_t make_maps(const ForwardProblem& problem, bool aligned, sm90::ForwardMaps* maps) {
  using Config = sm90::ForwardConfig<kHeadDim, kValueDim, kPlanned, kScoring>;
  constexpr int kTileKeys = kPlanned ? sm90::kWarpKeys : Config::kTileKeys;
  cudaError_t result = sm90::make_tensor_map(problem.query, problem.dtype, problem.batch, problem.rows, problem.heads,
                                             problem.head_dim, sm90::kConsumerRows, &maps->query);
  if (result != cudaSuccess) return result;
  if (aligned) {
    result = sm90::make_tensor_map(problem.out, problem.dtype, problem.batch, problem.rows, problem.heads,
                                   problem.value_dim, sm90::kWarpRows, &maps->out);
    if (result != cudaSuccess) return result;
  }
  const auto make = [&](const TokenView& tokens, std::int64_t columns, CUtensorMap* map) {
    return sm90::make_tensor_map(tokens, problem.dtype, problem.batch, problem.keys, problem.key_heads, columns,
                                 kTileKeys, map);
  };
  result = make(problem.key, problem.head_dim, &maps->key);
  if (result != cudaSuccess) return result;
  result = make(problem.value, problem.value_dim, &maps->value);
  if (result != cudaSuccess || kScoring != sm90::Scoring::kRowBiased) return result;
  const BroadcastView& bias = problem.bias;
  return sm90::make_tensor_map(as_tokens(bias), bias.dtype, bias.batches, bias.rows, bias.heads, bias.keys,
                               Config::kTileRows, &maps->bias);
}

Status forward(const ForwardProblem& problem, const Gpu& gpu, void* workspace, cudaStream_t stream) {
  Launches launches;
  Arena arena(workspace);
  Sm90ForwardScratch scratch;
  scratch.arrange(problem, &arena);
  const PreparedVisibility& prepared = scratch.prepared;
  scratch.prepared.write(problem, &launches, stream);
  sm90::Sm90ForwardParams params;
  static_cast<ForwardParams&>(params) = forward_params(problem, gpu, prepared);
  params.order.blocks = scratch.order;
  params.order.taken = scratch.taken;
  params.next_huge = scratch.next_huge;
  params.boxes_of_bias = has_boxes_of_bias(problem);
  params.aligned = params.aligned && may_store_boxes();
  params.pairs_heads = prepared.planned && pairs_heads(problem, prepared.plan);
  log_call(kSm90Family.name, "", "forward", problem, plan_kind(prepared));
  launches.then([&] {
    return by_own_types(problem, [&]<typename Element, int kHeadDim, int kValueDim>() {
      sm90::ForwardMaps maps;
      const cudaError_t made =
          sm90::by_kernel<kHeadDim, kValueDim>(params, prepared.planned, [&]<bool kPlanned, sm90::Scoring kScoring>() {
            return make_maps<kHeadDim, kValueDim, kPlanned, kScoring>(problem, params.aligned, &maps);
          });
      if (made != cudaSuccess) return made;
      return sm90::launch_forward<Element, kHeadDim, kValueDim>(params, maps, prepared.planned, stream);
    });
  });
  return launches.status();
}

// Gradients of scores are made of probabilities as they were rounded for dV. With a sink these are small where the
// keys' share of the sum is, too small for float16, while the gradient by lse has to come out whole.
bool rounds_shares_away(const BackwardProblem& problem) {
  return problem.sink.defined() && problem.dlse != nullptr && problem.dtype == DType::kFloat16;
}

// Whether every score has an entry of the bias's gradient to itself, which boxes can store: contiguous, of the dtype
// and shape of the bias (validate.cpp), which comes in boxes.
bool has_boxes_of_dbias(const BackwardProblem& problem) {
  const BroadcastView& dbias = problem.dbias;
  return dbias.batches == problem.batch && dbias.heads == problem.heads &&
         sm90::has_tensor_map(as_tokens(dbias), dbias.batches, dbias.rows, dbias.heads);
}

// Whether the backward has a kernel for its bias, which differs by row.
bool takes_row_bias(const BackwardProblem& problem) {
  return sm90::has_row_biased_backward(bucket_of(wider_head_dim(problem))) && !problem.deterministic &&
         may_store_boxes() && has_boxes_of_bias(problem) && (!problem.dbias.defined() || has_boxes_of_dbias(problem));
}

bool takes_backward(const BackwardProblem& problem, const Gpu& gpu) {
  const int bucket = bucket_of(wider_head_dim(problem));
  const bool stores_boxes =
      with_bucket(bucket, []<int kHeadDim>() { return sm90::BackwardConfig<kHeadDim, kHeadDim>::kStoresBoxes; });
  if (stores_boxes && !may_store_boxes()) return false;
  return gpu.capability == 90 && sm90::has_backward(bucket) && problem.keys > 0 && problem.softcap == 0 &&
         ((is_per_key(problem.bias) && is_per_key(problem.dbias)) || takes_row_bias(problem)) &&
         !rounds_shares_away(problem) &&
         sm90::has_tensor_map(problem.query, problem.batch, problem.rows, problem.heads) &&
         sm90::has_tensor_map(problem.dout, problem.batch, problem.rows, problem.heads) &&
         // Rows are copied and stored in pieces of 8 columns, too.
         has_whole_pieces(problem) && is_aligned(problem.query) && is_aligned(problem.dout) &&
         is_aligned(problem.key) && is_aligned(problem.value) && is_aligned(problem.dkey) && is_aligned(problem.dvalue);
}

BackwardTiles tiles_of(const BackwardProblem& problem, const Gpu& gpu) {
  return with_bucket(wider_head_dim(problem), [&]<int kHeadDim>() {
    return with_value_bucket<kHeadDim>(problem.value_dim, [&]<int kValueDim>() {
      using Config = sm90::BackwardConfig<kHeadDim, kValueDim>;
      const int blocks = Config::kPairs && !problem.deterministic ? 2 : 1;  // as BackwardBlock::kBlocks of its kernel
      return BackwardTiles{.rows = Config::kTileRows,
                           .keys = blocks * Config::kTileKeys,
                           .stays_on = gpu.processors,
                           .stored_share = Config::kStoredShare,
                           .value_columns = Config::kValueDim,
                           .own_blocks = blocks,
                           .stores_dbias = problem.dbias.defined() && !is_per_key(problem.bias)};
    });
  });
}

Status arrange_backward(const BackwardProblem& problem, const Gpu& gpu, std::size_t* bytes) {
  return arrange_backward(problem, tiles_of(problem, gpu), bytes);
}

cudaError_t make_maps(const BackwardProblem& problem, const BackwardTiles& tiles, sm90::BackwardMaps* maps) {
  const auto make = [&](const TokenView& tokens, std::int64_t columns, CUtensorMap* map) {
    return sm90::make_tensor_map(tokens, problem.dtype, problem.batch, problem.rows, problem.heads, columns, tiles.rows,
                                 map);
  };
  const auto make_of_keys = [&](const TokenView& tokens, std::int64_t columns, CUtensorMap* map) {
    return sm90::make_tensor_map(tokens, problem.dtype, problem.batch, problem.keys, problem.key_heads, columns,
                                 sm90::kWarpKeys, map);
  };
  const auto make_of_results = [&](const TokenView& tokens, std::int64_t columns, CUtensorMap* map) {
    if (!tokens.defined()) return cudaSuccess;
    return sm90::make_tensor_map(tokens, problem.dtype, problem.batch, problem.keys, problem.key_heads, columns,
                                 sm90::kWarpRows, map);
  };
  cudaError_t result = make(problem.query, problem.head_dim, &maps->query);
  if (result == cudaSuccess) result = make(problem.dout, problem.value_dim, &maps->dout);
  if (result == cudaSuccess) result = make_of_results(problem.dkey, problem.head_dim, &maps->dkey);
  if (result == cudaSuccess) result = make_of_results(problem.dvalue, problem.value_dim, &maps->dvalue);
  const auto make_of_scores = [&](const BroadcastView& bias, CUtensorMap* map) {
    return sm90::make_tensor_map(as_tokens(bias), bias.dtype, bias.batches, bias.rows, bias.heads, bias.keys,
                                 tiles.rows, map);
  };
  if (result == cudaSuccess && !is_per_key(problem.bias)) result = make_of_scores(problem.bias, &maps->bias);
  maps->stores_dbias = tiles.stores_dbias;
  if (result == cudaSuccess && maps->stores_dbias) result = make_of_scores(problem.dbias, &maps->dbias);
  maps->boxes_of_keys = sm90::has_tensor_map(problem.key, problem.batch, problem.keys, problem.key_heads) &&
                        sm90::has_tensor_map(problem.value, problem.batch, problem.keys, problem.key_heads);
  if (result != cudaSuccess || !maps->boxes_of_keys) return result;
  result = make_of_keys(problem.key, problem.head_dim, &maps->key);
  return result != cudaSuccess ? result : make_of_keys(problem.value, problem.value_dim, &maps->value);
}

Status backward(const BackwardProblem& problem, const Gpu& gpu, void* workspace, cudaStream_t stream) {
  const BackwardTiles tiles = tiles_of(problem, gpu);
  const auto launch = [&](const BackwardParams& params, bool planned) {
    sm90::BackwardMaps maps;
    if (const cudaError_t made = make_maps(problem, tiles, &maps); made != cudaSuccess) return made;
    return by_own_types(problem, [&]<typename Element, int kHeadDim, int kValueDim>() {
      static_assert(sm90::has_backward(kHeadDim));
      return sm90::launch_backward<Element, kHeadDim, kValueDim>(params, maps, planned, stream);
    });
  };
  // No more works come longest first than run twice over, since blocks that run at the same time are to share rows, in
  // the cache, which those of one key head do.
  const int most_ordered = 2 * gpu.processors;
  const BackwardKernels kernels = {
      .family = kSm90Family.name,
      .variant = "",
      .tiles = tiles,
      .launch = launch,
      .list_works =
          [&](const BackwardParams& params) { return list_key_works(params, tiles.keys, most_ordered, stream); },
      .launch_query_gradients =
          [&](const BackwardParams& params) { return sm90::launch_query_gradients(problem, params, stream); }};
  return run_backward(problem, gpu, kernels, workspace, stream);
}

}  // namespace

const KernelFamily kSm90Family = {"sm90",         takes_forward,    arrange_forward, forward,
                                  takes_backward, arrange_backward, backward};

}  // namespace flash_dmattn::internal::cuda

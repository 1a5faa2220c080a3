#include "cuda/attention/gradient_passes.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <bit>
#include <type_traits>

#include "cuda/attention/met_once.cuh"
#include "cuda/launch_blocks.cuh"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/dependent_launch.cuh"

namespace flash_dmattn::internal::cuda {
namespace {

constexpr int kThreads = 256;

std::int64_t blocks_for(std::int64_t threads) {
  constexpr std::int64_t kMost = 1 << 20;  // kernels below stride over what is left
  return std::min((threads + kThreads - 1) / kThreads, kMost);
}

// Sums of dK and dV, and what they are rounded to. A block takes `slab` keys of one head, a row of `lanes` threads a
// key after another: each thread four columns.
struct KeySums {
  KeyGradientSums sums;
  TokenView dkey, dvalue;
  std::int64_t keys;
  int batch, heads, group, slab, lanes;
  int head_dim, value_dim;  // columns of dkey and of dvalue

  struct Slab {
    int pair, batch, head;
    unsigned number;
    std::int64_t first_key;
    int keys;
  };
  __device__ Slab slab_of(unsigned block) const {
    const auto pairs = static_cast<unsigned>(batch * heads);
    const int pair = static_cast<int>(block % pairs);
    const std::int64_t first_key = static_cast<std::int64_t>(block / pairs) * slab;
    const std::int64_t left = keys - first_key;
    return {pair, pair / heads, pair % heads, block / pairs, first_key, static_cast<int>(left < slab ? left : slab)};
  }
  __device__ int first_key() const { return static_cast<int>(threadIdx.x) / lanes; }
  __device__ int key_step() const { return kThreads / lanes; }
  __device__ int first_column() const { return static_cast<int>(threadIdx.x) % lanes * 4; }
  // Of sums with so many columns, where the thread's of the slab's first key begin, in the first color, and how far the
  // next key's are, and the next color's.
  __device__ std::int64_t offset(const Slab& at, int columns) const {
    return ((at.batch * keys + at.first_key) * heads + at.head) * columns + first_column();
  }
  __device__ std::int64_t key_stride(int columns) const { return std::int64_t{heads} * columns; }
  __device__ std::int64_t color_stride(int columns) const { return batch * keys * key_stride(columns); }
  // Which row of marks is that of a key head.
  __device__ std::int64_t mark_row(int at_batch, int head) const {
    return (sums.marks_per_batch ? at_batch : 0) * mark_heads() + head / sums.mark_heads;
  }
  __device__ int mark_heads() const { return heads / sums.mark_heads; }
  // Which of the thread's next kMarks keys of the slab have sums, a bit each, from key `first` on.
  static constexpr int kMarks = 16;
  __device__ std::uint32_t marked(const Slab& at, int first) const {
    std::uint32_t bits = 0;
    const std::uint8_t* own = sums.marks + mark_row(at.batch, at.head) * keys + at.first_key;
#pragma unroll
    for (int i = 0; i < kMarks; ++i) {
      const int key = first + i * key_step();
      if (key >= at.keys) continue;
      if (sums.marks == nullptr || own[key] != 0) bits |= 1u << i;
    }
    return bits;
  }
};

// Whether some chunk of a key head has a list. By a block, for heads of a group that have one plan.
__device__ bool has_list(const DevicePlan& plan, const KeySums& all, int batch, int head) {
  const ChunkKeys* chunks = plan.chunks + plan.first_chunk(batch, head * all.group);
  bool has = false;
  for (int chunk = static_cast<int>(threadIdx.x); chunk < plan.chunk_count; chunk += kThreads) {
    has = has || (chunks[chunk].first < 0 && chunks[chunk].count > 0);
  }
  return __syncthreads_or(has) != 0;
}

// `parts` blocks for each chunk of each of the `plans` that are marked together.
__global__ void __launch_bounds__(kThreads)
    mark_keys_kernel(const __grid_constant__ DevicePlan plan, const __grid_constant__ KeySums all, int plans, int parts,
                     const __grid_constant__ MetOnceTiles met_once) {
  begin_dependent_kernel();
  const auto chunks = static_cast<unsigned>(plan.chunk_count);
  const int chunk = static_cast<int>(blockIdx.x % chunks), part = static_cast<int>(blockIdx.x / chunks) % parts,
            share = static_cast<int>(blockIdx.x / chunks) / parts;
  const int own = part * kThreads + static_cast<int>(threadIdx.x), step = parts * kThreads;
  const int row = share / plans, batch = row / all.mark_heads(), head = row % all.mark_heads() * all.sums.mark_heads;
  const std::int64_t entry = plan.first_chunk(batch, head * all.group + share % plans) + chunk;
  const ChunkKeys keys = plan.chunks[entry];
  std::uint8_t* marks = all.sums.marks + row * all.keys;
  if (keys.first < 0) {
    const std::int32_t* listed = plan.keys + entry * plan.capacity;
#pragma unroll 4
    for (int index = own; index < keys.count; index += step) {
      const std::int32_t key = listed[index];
      if (key >= 0) marks[key] = 1;
    }
  } else if (keys.count > 0) {
    // Whole tiles, as those that own them add up what they have of all their keys.
    const int tile = all.sums.tile_keys;
    const std::int64_t first = keys.first / tile * tile;
    const std::int64_t past = std::int64_t{(keys.first + keys.count - 1) / tile + 1} * tile;
    for (std::int64_t key = first + own; key < min(past, all.keys); key += step) marks[key] = 1;
  }
  if (part > 0) return;
  if (met_once.tiles != nullptr) find_met_once<kThreads>(met_once, plan, entry);
  if (chunk == 0 && all.sums.stored != nullptr) {
    const bool stored = !has_list(plan, all, batch, head);
    // Of all key heads that have these marks.
    const int end_batch = all.sums.marks_per_batch ? batch + 1 : all.batch;
    for (int other = batch; other < end_batch; ++other) {
      std::uint8_t* flags = all.sums.stored + other * all.heads + head;
      for (int i = static_cast<int>(threadIdx.x); i < all.sums.mark_heads; i += kThreads) flags[i] = stored;
    }
  }
}

__global__ void __launch_bounds__(kThreads) clear_key_sums_kernel(const __grid_constant__ KeySums all) {
  let_next_kernel_begin();
  const KeySums::Slab slab = all.slab_of(blockIdx.x);
  const bool stored = all.sums.stored != nullptr && all.sums.stored[slab.pair] != 0;
  if (!stored && all.first_column() < all.sums.key_columns) {
    for (int base = all.first_key(); base < slab.keys; base += KeySums::kMarks * all.key_step()) {
      for (std::uint32_t marked = all.marked(slab, base); marked != 0; marked &= marked - 1) {
        const std::int64_t key = base + (__ffs(static_cast<int>(marked)) - 1) * all.key_step();
        const auto clear = [&](float* sums, int columns) {
          if (sums == nullptr || all.first_column() >= columns) return;
          float* own = sums + all.offset(slab, columns) + key * all.key_stride(columns);
          for (int color = 0; color < all.sums.colors; ++color) {
            *reinterpret_cast<float4*>(own + color * all.color_stride(columns)) = make_float4(0, 0, 0, 0);
          }
        };
        clear(all.sums.dkey, all.sums.key_columns);
        clear(all.sums.dvalue, all.sums.value_columns);
      }
    }
  }
  end_dependent_kernel();
}

// Four columns of a key's gradient, from the thread's first column on, of which `columns` exist in all.
template <typename Element>
__device__ void store_rounded(const TokenView& gradient, std::int64_t row, int column, int columns, float4 sum) {
  if (column >= columns) return;
  std::uint16_t* result = static_cast<std::uint16_t*>(gradient.data) + row + column;
  const std::uint32_t low = pack<Element>(sum.x, sum.y), high = pack<Element>(sum.z, sum.w);
  if (columns % 4 == 0 && reinterpret_cast<std::uintptr_t>(gradient.data) % 8 == 0) {
    *reinterpret_cast<uint2*>(result) = make_uint2(low, high);
    return;
  }
  const std::uint16_t elements[4] = {static_cast<std::uint16_t>(low), static_cast<std::uint16_t>(low >> 16),
                                     static_cast<std::uint16_t>(high), static_cast<std::uint16_t>(high >> 16)};
  for (int i = 0; i < min(4, columns - column); ++i) result[i] = elements[i];
}

// The sums of all colors, added up.
template <bool kColors>
__device__ float4 sum_of_colors(const KeySums& all, const float* sums, int columns, std::int64_t own) {
  float4 sum = __ldcg(reinterpret_cast<const float4*>(sums + own));
  if constexpr (kColors) {
#pragma unroll 2  // compute capability 8.0 has no registers for more
    for (int color = 1; color < all.sums.colors; ++color) {
      const float4 part = __ldcg(reinterpret_cast<const float4*>(sums + own + color * all.color_stride(columns)));
      sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
    }
  }
  return sum;
}

// kColors: of more than one.
template <typename Element, bool kColors>
__global__ void __launch_bounds__(kThreads) round_key_sums_kernel(const __grid_constant__ KeySums all) {
  let_next_kernel_begin();
  const KeySums::Slab slab = all.slab_of(blockIdx.x);
  const int column = all.first_column();
  const bool stored = all.sums.stored != nullptr && all.sums.stored[slab.pair] != 0;
  const int key_columns = all.sums.key_columns, value_columns = all.sums.value_columns;
  const bool has_dkey = all.sums.dkey != nullptr, has_dvalue = all.sums.dvalue != nullptr && column < value_columns;
  const auto row_of = [&](const TokenView& gradient) {
    return slab.batch * gradient.batch_stride + slab.head * gradient.head_stride +
           slab.first_key * gradient.token_stride;
  };
  if (!stored && column < key_columns) {
    const std::int64_t first = all.offset(slab, key_columns), first_value = all.offset(slab, value_columns);
    const std::int64_t dkey_row = row_of(all.dkey), dvalue_row = row_of(all.dvalue);
    // A few keys at a time, so that many loads are under way.
    constexpr int kTogether = 4;
    static_assert(KeySums::kMarks % kTogether == 0);
    std::uint32_t marked = 0;
    for (int turn = 0, round = all.first_key(); round < slab.keys; ++turn, round += kTogether * all.key_step()) {
      marked = turn % (KeySums::kMarks / kTogether) == 0 ? all.marked(slab, round) : marked >> kTogether;
      float4 dkey[kTogether], dvalue[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int key = round + i * all.key_step();
        dkey[i] = dvalue[i] = make_float4(0, 0, 0, 0);
        const bool has_sums = (marked >> i & 1) != 0;
        if (has_sums && has_dkey) {
          dkey[i] = sum_of_colors<kColors>(all, all.sums.dkey, key_columns, first + key * all.key_stride(key_columns));
        }
        if (has_sums && has_dvalue) {
          dvalue[i] = sum_of_colors<kColors>(all, all.sums.dvalue, value_columns,
                                             first_value + key * all.key_stride(value_columns));
        }
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int key = round + i * all.key_step();
        if (key >= slab.keys) break;
        if (has_dkey) {
          store_rounded<Element>(all.dkey, dkey_row + key * all.dkey.token_stride, column, all.head_dim, dkey[i]);
        }
        if (has_dvalue) {
          store_rounded<Element>(all.dvalue, dvalue_row + key * all.dvalue.token_stride, column, all.value_dim,
                                 dvalue[i]);
        }
      }
    }
  }
  end_dependent_kernel();
}

template <typename Element>
__global__ void __launch_bounds__(kThreads) round_kernel(const float* sums, std::int64_t count, Element* result) {
  let_next_kernel_begin();
  for (std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; index < count;
       index += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    result[index] = static_cast<Element>(sums[index]);
  }
  end_dependent_kernel();
}

// What belongs to entry `index` of dbias, added up in one order: colors, batch elements, heads and keys.
__device__ float sum_of_bias(const BackwardProblem& problem, const float* sums, int colors, std::int64_t index) {
  const BroadcastView& dbias = problem.dbias;
  const std::int64_t entry_key = index % dbias.keys, entry_head = index / dbias.keys % dbias.heads;
  const std::int64_t entry_batch = index / dbias.keys / dbias.heads;
  const std::int64_t batches = problem.batch / dbias.batches, keys = problem.keys / dbias.keys;
  float sum = 0;
  for (int color = 0; color < colors; ++color) {
    for (std::int64_t batch = entry_batch * batches; batch < (entry_batch + 1) * batches; ++batch) {
      for (std::int64_t head = entry_head * dbias.head_divisor; head < (entry_head + 1) * dbias.head_divisor; ++head) {
        const float* head_sums = sums + ((color * problem.batch + batch) * problem.heads + head) * problem.keys;
        for (std::int64_t key = entry_key * keys; key < (entry_key + 1) * keys; ++key) sum += head_sums[key];
      }
    }
  }
  return sum;
}

// A thread an entry.
template <typename Element>
__global__ void __launch_bounds__(kThreads) reduce_bias_kernel(const __grid_constant__ BackwardProblem problem,
                                                               const float* sums, int colors, Element* result) {
  let_next_kernel_begin();
  const BroadcastView& dbias = problem.dbias;
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index < dbias.batches * dbias.heads * dbias.keys) {
    result[index] = static_cast<Element>(sum_of_bias(problem, sums, colors, index));
  }
  end_dependent_kernel();
}

KeySums key_sums_of(const BackwardProblem& problem, const KeyGradientSums& sums) {
  // Blocks enough to fill a large GPU, and no more than that if there is nothing to do.
  constexpr std::int64_t kManyBlocks = 1024, kLeastSlab = 16, kMostSlab = 256;
  const std::int64_t slab =
      std::clamp(problem.batch * problem.key_heads * problem.keys / kManyBlocks, kLeastSlab, kMostSlab);
  return {.sums = sums,
          .dkey = problem.dkey,
          .dvalue = problem.dvalue,
          .keys = problem.keys,
          .batch = static_cast<int>(problem.batch),
          .heads = static_cast<int>(problem.key_heads),
          .group = static_cast<int>(problem.group()),
          .slab = static_cast<int>(slab),
          .lanes = static_cast<int>(std::bit_ceil(static_cast<unsigned>(sums.key_columns / 4))),
          .head_dim = static_cast<int>(problem.head_dim),
          .value_dim = static_cast<int>(problem.value_dim)};
}

std::int64_t slabs_of(const KeySums& all) {
  return std::int64_t{all.batch} * all.heads * ((all.keys + all.slab - 1) / all.slab);
}

}  // namespace

void share_marks(const BackwardProblem& problem, const DevicePlan& plan, KeyGradientSums* sums) {
  const std::int64_t group = std::max<std::int64_t>(problem.group(), 1), heads = plan.head_divisor / group;
  if (heads == 0 || plan.head_divisor % group != 0) return;  // query heads of a key head differ
  sums->marks_per_batch = plan.per_batch;
  sums->mark_heads = static_cast<std::int32_t>(heads);
}

cudaError_t launch_mark_keys(const BackwardProblem& problem, const DevicePlan& plan, const KeyGradientSums& sums,
                             const MetOnceTiles& met_once, cudaStream_t stream) {
  const std::int64_t group = problem.group(), plans = plan.head_divisor < group ? group : 1;
  // Where rows choose for themselves lists may be long: of 64k keys they took a block 70 us.
  constexpr std::int64_t kPartKeys = 8192, kMostParts = 8;
  const std::int64_t parts = std::clamp<std::int64_t>(plan.capacity / kPartKeys, 1, kMostParts);
  const std::int64_t rows = sums.mark_rows(problem.batch, problem.key_heads);
  const LaunchShape shape = {
      .blocks = rows * plans * plan.chunk_count * parts, .threads = kThreads, .is_dependent = true};
  return launch_blocks(mark_keys_kernel, shape, stream, plan, key_sums_of(problem, sums), static_cast<int>(plans),
                       static_cast<int>(parts), met_once);
}

cudaError_t launch_clear_key_sums(const BackwardProblem& problem, const KeyGradientSums& sums, bool beside,
                                  cudaStream_t stream) {
  const KeySums all = key_sums_of(problem, sums);
  const LaunchShape shape = {.blocks = slabs_of(all), .threads = kThreads, .is_dependent = beside};
  return launch_blocks(clear_key_sums_kernel, shape, stream, all);
}

cudaError_t launch_key_gradients(const BackwardProblem& problem, const KeyGradientSums& sums, bool beside,
                                 cudaStream_t stream) {
  const KeySums all = key_sums_of(problem, sums);
  const LaunchShape shape = {.blocks = slabs_of(all), .threads = kThreads, .is_dependent = beside};
  const auto launch = [&]<typename Element>(Element) {
    return sums.colors == 1 ? launch_blocks(round_key_sums_kernel<Element, false>, shape, stream, all)
                            : launch_blocks(round_key_sums_kernel<Element, true>, shape, stream, all);
  };
  return problem.dtype == DType::kBFloat16 ? launch(__nv_bfloat16()) : launch(__half());
}

cudaError_t launch_bias_gradients(const float* sums, std::int64_t count, DType dtype, void* gradient, bool beside,
                                  cudaStream_t stream) {
  const auto launch = [&](auto* result) {
    using Element = std::remove_pointer_t<decltype(result)>;
    const LaunchShape shape = {.blocks = blocks_for(count), .threads = kThreads, .is_dependent = beside};
    return launch_blocks(round_kernel<Element>, shape, stream, sums, count, result);
  };
  if (dtype == DType::kBFloat16) return launch(static_cast<__nv_bfloat16*>(gradient));
  if (dtype == DType::kFloat16) return launch(static_cast<__half*>(gradient));
  return launch(static_cast<float*>(gradient));
}

cudaError_t launch_reduced_bias_gradients(const BackwardProblem& problem, const float* sums, int colors, bool beside,
                                          cudaStream_t stream) {
  const BroadcastView& dbias = problem.dbias;
  const auto launch = [&](auto* result) {
    using Element = std::remove_pointer_t<decltype(result)>;
    const LaunchShape shape = {.blocks = (dbias.batches * dbias.heads * dbias.keys + kThreads - 1) / kThreads,
                               .threads = kThreads,
                               .is_dependent = beside};
    return launch_blocks(reduce_bias_kernel<Element>, shape, stream, problem, sums, colors, result);
  };
  if (dbias.dtype == DType::kBFloat16) return launch(static_cast<__nv_bfloat16*>(dbias.data));
  if (dbias.dtype == DType::kFloat16) return launch(static_cast<__half*>(dbias.data));
  return launch(static_cast<float*>(dbias.data));
}

}  // namespace flash_dmattn::internal::cuda

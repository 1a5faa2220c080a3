#include "cuda/attention/gradient_passes.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <bit>

#include "cuda/attention/head_dims.h"
#include "cuda/attention/tokens.cuh"
#include "cuda/ptx/arithmetic.cuh"

namespace flash_dmattn::internal::cuda {
namespace {

constexpr int kThreads = 256;

unsigned blocks_for(std::int64_t threads) {
  constexpr std::int64_t kMost = 1 << 20;  // kernels below stride over what is left
  return static_cast<unsigned>(std::clamp<std::int64_t>((threads + kThreads - 1) / kThreads, 1, kMost));
}

// Sums of dK and dV, and what they are rounded to. A block takes `slab` keys of one head, a row of `lanes` threads a
// key after another: each thread four columns.
struct KeySums {
  float *dkey_sums, *dvalue_sums;  // (colors, B, Sk, Hkv, width); null: none
  TokenView dkey, dvalue;
  std::uint8_t* stored;  // (B, Hkv), 1: nothing is summed; null: all heads are
  std::int64_t keys, color_stride;
  int batch, heads, group, width, colors, slab, lanes;
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
  // Where the thread's sums of the slab's first key begin, in the first color, and how far the next key's are.
  __device__ std::int64_t offset(const Slab& at) const {
    return ((at.batch * keys + at.first_key) * heads + at.head) * width + first_column();
  }
  __device__ std::int64_t key_stride() const { return std::int64_t{heads} * width; }
};

__global__ void clear_key_sums_kernel(const __grid_constant__ DevicePlan plan, const __grid_constant__ KeySums sums) {
  const KeySums::Slab slab = sums.slab_of(blockIdx.x);
  const ChunkKeys* chunks = plan.chunks + plan.first_chunk(slab.batch, slab.head * sums.group);
  bool lists = false;
  for (int chunk = static_cast<int>(threadIdx.x); chunk < plan.chunk_count; chunk += kThreads) {
    lists = lists || (chunks[chunk].first < 0 && chunks[chunk].count > 0);
  }
  lists = __syncthreads_or(lists) != 0;
  if (slab.number == 0 && threadIdx.x == 0) sums.stored[slab.pair] = !lists;
  if (!lists) return;
  if (sums.first_column() >= sums.width) return;
  const auto clear = [&](float* target) {
    if (target == nullptr) return;
    for (int color = 0; color < sums.colors; ++color) {
      float* first = target + color * sums.color_stride + sums.offset(slab);
#pragma unroll 4
      for (int key = sums.first_key(); key < slab.keys; key += sums.key_step()) {
        *reinterpret_cast<float4*>(first + key * sums.key_stride()) = make_float4(0, 0, 0, 0);
      }
    }
  };
  clear(sums.dkey_sums);
  clear(sums.dvalue_sums);
}

template <typename Element>
__global__ void round_key_sums_kernel(const __grid_constant__ KeySums sums) {
  const KeySums::Slab slab = sums.slab_of(blockIdx.x);
  if (sums.stored != nullptr && sums.stored[slab.pair] != 0) return;
  const int column = sums.first_column();
  const auto round = [&](const float* source, const TokenView& gradient, int columns) {
    if (source == nullptr || column >= columns) return;
    auto* target = static_cast<std::uint16_t*>(gradient.data) + slab.batch * gradient.batch_stride +
                   slab.head * gradient.head_stride + slab.first_key * gradient.token_stride + column;
    const bool whole = columns % 4 == 0 && reinterpret_cast<std::uintptr_t>(gradient.data) % 8 == 0;
#pragma unroll 4
    for (int key = sums.first_key(); key < slab.keys; key += sums.key_step()) {
      const float* first = source + sums.offset(slab) + key * sums.key_stride();
      float4 sum = __ldcg(reinterpret_cast<const float4*>(first));
      for (int color = 1; color < sums.colors; ++color) {
        const float4 part = __ldcg(reinterpret_cast<const float4*>(first + color * sums.color_stride));
        sum = make_float4(sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w);
      }
      std::uint16_t* result = target + key * gradient.token_stride;
      const std::uint32_t low = pack<Element>(sum.x, sum.y), high = pack<Element>(sum.z, sum.w);
      if (whole) {
        *reinterpret_cast<uint2*>(result) = make_uint2(low, high);
        continue;
      }
      const std::uint16_t elements[4] = {static_cast<std::uint16_t>(low), static_cast<std::uint16_t>(low >> 16),
                                         static_cast<std::uint16_t>(high), static_cast<std::uint16_t>(high >> 16)};
      for (int i = 0; i < min(4, columns - column); ++i) result[i] = elements[i];
    }
  };
  round(sums.dkey_sums, sums.dkey, sums.head_dim);
  round(sums.dvalue_sums, sums.dvalue, sums.value_dim);
}

template <typename Element>
__global__ void round_kernel(const float* sums, std::int64_t count, Element* result) {
  for (std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; index < count;
       index += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    result[index] = static_cast<Element>(sums[index]);
  }
}

// One thread adds up, in one order, all that belongs to an entry of dbias: colors, batch elements, heads and keys.
template <typename Element>
__global__ void reduce_bias_kernel(const __grid_constant__ BackwardProblem problem, const float* sums, int colors,
                                   Element* result) {
  const BroadcastView& dbias = problem.dbias;
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= dbias.batches * dbias.heads * dbias.keys) return;
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
  result[index] = static_cast<Element>(sum);
}

KeySums key_sums_of(const BackwardProblem& problem, int colors, float* dkey_sums, float* dvalue_sums,
                    std::uint8_t* stored) {
  const int width = bucket_of(wider_head_dim(problem));
  // Blocks enough to fill a large GPU, and no more than that if there is nothing to do.
  constexpr std::int64_t kManyBlocks = 1024, kLeastSlab = 16, kMostSlab = 256;
  const std::int64_t slab =
      std::clamp(problem.batch * problem.key_heads * problem.keys / kManyBlocks, kLeastSlab, kMostSlab);
  return {.dkey_sums = dkey_sums,
          .dvalue_sums = dvalue_sums,
          .dkey = problem.dkey,
          .dvalue = problem.dvalue,
          .stored = stored,
          .keys = problem.keys,
          .color_stride = problem.batch * problem.keys * problem.key_heads * width,
          .batch = static_cast<int>(problem.batch),
          .heads = static_cast<int>(problem.key_heads),
          .group = static_cast<int>(problem.group()),
          .width = width,
          .colors = colors,
          .slab = static_cast<int>(slab),
          .lanes = static_cast<int>(std::bit_ceil(static_cast<unsigned>(width / 4))),
          .head_dim = static_cast<int>(problem.head_dim),
          .value_dim = static_cast<int>(problem.value_dim)};
}

template <typename Launch>
cudaError_t for_key_sums(const KeySums& sums, Launch launch) {
  const std::int64_t blocks = std::int64_t{sums.batch} * sums.heads * ((sums.keys + sums.slab - 1) / sums.slab);
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  launch(static_cast<unsigned>(blocks));
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_clear_key_sums(const BackwardProblem& problem, const DevicePlan& plan, int colors, float* dkey_sums,
                                  float* dvalue_sums, std::uint8_t* stored, cudaStream_t stream) {
  const KeySums sums = key_sums_of(problem, colors, dkey_sums, dvalue_sums, stored);
  return for_key_sums(sums,
                      [&](unsigned blocks) { clear_key_sums_kernel<<<blocks, kThreads, 0, stream>>>(plan, sums); });
}

cudaError_t launch_key_gradients(const BackwardProblem& problem, int colors, float* dkey_sums, float* dvalue_sums,
                                 std::uint8_t* stored, cudaStream_t stream) {
  const KeySums sums = key_sums_of(problem, colors, dkey_sums, dvalue_sums, stored);
  if (dkey_sums == nullptr && dvalue_sums == nullptr) return cudaSuccess;
  auto* kernel =
      problem.dtype == DType::kBFloat16 ? round_key_sums_kernel<__nv_bfloat16> : round_key_sums_kernel<__half>;
  return for_key_sums(sums, [&](unsigned blocks) { kernel<<<blocks, kThreads, 0, stream>>>(sums); });
}

cudaError_t launch_bias_gradients(const float* sums, std::int64_t count, DType dtype, void* gradient,
                                  cudaStream_t stream) {
  const auto launch = [&](auto* result) {
    round_kernel<<<blocks_for(count), kThreads, 0, stream>>>(sums, count, result);
    return cudaGetLastError();
  };
  if (count == 0) return cudaSuccess;
  if (dtype == DType::kBFloat16) return launch(static_cast<__nv_bfloat16*>(gradient));
  if (dtype == DType::kFloat16) return launch(static_cast<__half*>(gradient));
  return launch(static_cast<float*>(gradient));
}

cudaError_t launch_reduced_bias_gradients(const BackwardProblem& problem, const float* sums, int colors,
                                          cudaStream_t stream) {
  const BroadcastView& dbias = problem.dbias;
  const std::int64_t blocks = (dbias.batches * dbias.heads * dbias.keys + kThreads - 1) / kThreads;
  const auto launch = [&](auto* result) {
    reduce_bias_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(problem, sums, colors, result);
    return cudaGetLastError();
  };
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  if (dbias.dtype == DType::kBFloat16) return launch(static_cast<__nv_bfloat16*>(dbias.data));
  if (dbias.dtype == DType::kFloat16) return launch(static_cast<__half*>(dbias.data));
  return launch(static_cast<float*>(dbias.data));
}

}  // namespace flash_dmattn::internal::cuda

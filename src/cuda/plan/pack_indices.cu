#include "cuda/plan/pack_indices.h"

#include <algorithm>

#include "cuda/clear.h"
#include "cuda/launch_blocks.cuh"
#include "cuda/plan/pack_mask.h"
#include "cuda/plan/row_list.cuh"
#include "cuda/plan/rows_past_last.cuh"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/ptx/dynamic_shared.cuh"

namespace flash_dmattn::internal::cuda {
namespace {

constexpr int kUnitWords = kUnitRows / kWordRows;
static_assert(kUnitWords == 2);  // what a block writes of a key is 8 bytes

// A block packs a strip of keys of one unit of rows in shared memory, where bits are set in any order, and writes it
// out key by key. Lists are read once for every strip: long ones are taken where a processor has the memory, and there
// are more keys than a short one has. Short strips leave room for three blocks on a processor of compute capability 9.0
// and for one on the smallest.
template <int kStripKeys>
struct Strip {
  static constexpr int kKeys = kStripKeys, kWarps = kKeys / 512, kThreads = 32 * kWarps;
  static constexpr std::size_t kSharedBytes = std::size_t{kUnitWords} * kKeys * sizeof(std::uint32_t);
  static constexpr int kBlocks = 1536 / kThreads;  // of a processor
};
using ShortStrip = Strip<8192>;
using LongStrip = Strip<16384>;

struct ListShape {
  IndexViews indices;
  std::int32_t rows, keys;
  bool is_causal;
  std::uint32_t heads, chunks, strips;  // packed heads
  std::int64_t head_divisor;            // query heads of each
  PackedMask packed;
  std::uint32_t *words, *units;  // its arrays, to be written; units are zeros
};

// visit(entry) for all entries of a list, and for some that are -1. By all lanes of a warp. A few of a lane are read at
// the same time: one at a time, a processor would wait for memory.
template <typename Visit>
__device__ inline void for_each_entry(const RowList& list, Visit visit) {
  constexpr int kBatch = 8;
  for (std::int64_t first = threadIdx.x % 32; first < list.count; first += 32 * kBatch) {
    std::int32_t entries[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const std::int64_t place = first + 32 * i;
      entries[i] = place < list.count ? __ldg(list.entries + place * list.stride) : -1;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) visit(entries[i]);
  }
}

// Sets bit `bit` of the strip's keys [first_key, first_key + keys) that the row lists. By all lanes of a warp.
__device__ inline void set_listed_bits(const RowList& list, std::int64_t block_size, std::int32_t first_key,
                                       std::int32_t keys, std::uint32_t bit, std::uint32_t* strip_words) {
  if (block_size == 1) {
    for_each_entry(list, [&](std::int32_t entry) {
      // Unsigned, keys before the strip and negative ones are beyond all others.
      const std::uint32_t key = static_cast<std::uint32_t>(entry) - static_cast<std::uint32_t>(first_key);
      if (key < static_cast<std::uint32_t>(keys)) atomicOr(strip_words + key, bit);
    });
    return;
  }
  for_each_entry(list, [&](std::int32_t entry) {
    // A negative entry ends with key 0 or before it.
    const std::int64_t begin = entry * block_size - first_key;
    const std::int64_t end = min(begin + block_size, std::int64_t{keys});
    for (std::int64_t key = max(begin, std::int64_t{0}); key < end; ++key) atomicOr(strip_words + key, bit);
  });
}

template <typename Strip>
__global__ __launch_bounds__(Strip::kThreads,
                             Strip::kBlocks) void pack_indices_kernel(const __grid_constant__ ListShape shape) {
  std::uint32_t* words = dynamic_shared<std::uint32_t>();  // (kUnitWords, Strip::kKeys)
  begin_dependent_kernel();
  const std::uint32_t unit = blockIdx.x / shape.strips % kChunkUnits;
  const std::uint32_t chunk = blockIdx.x / shape.strips / kChunkUnits % shape.chunks;
  const std::uint32_t plane = blockIdx.x / shape.strips / kChunkUnits / shape.chunks;
  const std::int64_t batch = plane / shape.heads, head = plane % shape.heads * shape.head_divisor;
  const std::int32_t first_key = static_cast<std::int32_t>(blockIdx.x % shape.strips) * Strip::kKeys;
  const std::int32_t keys = min(shape.keys - first_key, Strip::kKeys);
  // Chunks may reach beyond the last row, by less than 2^31.
  const std::int64_t first_row = std::int64_t{chunk} * kChunkRows + unit * kUnitRows;
  const auto rows =
      static_cast<std::int32_t>(min(max(shape.rows - first_row, std::int64_t{0}), std::int64_t{kUnitRows}));

  for (int i = threadIdx.x; i < kUnitWords * Strip::kKeys; i += Strip::kThreads) words[i] = 0;
  __syncthreads();
  for (std::int32_t row = threadIdx.x / 32; row < rows; row += Strip::kWarps) {
    // With every key existing, which hides least, the causal rule lets the row see its first row + 1 + Sk - Sq keys.
    if (shape.is_causal && first_row + row + 1 + shape.keys - shape.rows <= first_key) continue;
    const RowList list = list_of_row(shape.indices, batch, head, static_cast<std::int32_t>(first_row + row));
    set_listed_bits(list, shape.indices.block_size, first_key, keys, 1u << row % kWordRows,
                    words + row / kWordRows * Strip::kKeys);
  }
  __syncthreads();

  const std::uint32_t missing_low = rows_past_last(rows, 0), missing_high = rows_past_last(rows, 1);
  const std::int64_t first_entry = (std::int64_t{plane} * shape.chunks + chunk) * shape.keys;
  std::uint32_t* unit_words =
      shape.words + shape.packed.word_offset(first_entry, static_cast<std::int32_t>(unit) * kUnitRows, first_key);
  for (std::int32_t key = threadIdx.x; key < keys; key += Strip::kThreads) {
    const std::uint32_t low = words[key], high = words[Strip::kKeys + key];
    *reinterpret_cast<uint2*>(unit_words + std::int64_t{key} * kBandWords) = {low, high};
    const bool any = (low | high) != 0, all = ((low | missing_low) & (high | missing_high)) == ~0u;
    const std::uint32_t bits = (any ? 1u << unit : 0) | (all ? 1u << (kChunkUnits + unit) : 0);
    if (bits != 0) atomicOr(shape.units + first_entry + first_key + key, bits);
  }
}

template <typename Strip>
cudaError_t pack_strips(ListShape shape, std::int64_t planes, cudaStream_t stream) {
  const std::int64_t strips = (std::int64_t{shape.keys} + Strip::kKeys - 1) / Strip::kKeys;
  shape.strips = static_cast<std::uint32_t>(strips);
  return launch_blocks(pack_indices_kernel<Strip>,
                       {planes * shape.chunks * kChunkUnits * strips, Strip::kThreads, Strip::kSharedBytes, true},
                       stream, shape);
}

// A mask with the bits that lists stand for: sizes and head divisor, no memory.
BroadcastView mask_of(const IndexViews& indices, std::int64_t rows, std::int64_t keys) {
  const BroadcastView entries = without_copies(indices.entries), lengths = without_copies(indices.lengths);
  const bool by_lengths = indices.lengths.defined() && lengths.heads > entries.heads;
  BroadcastView mask;
  mask.batches = indices.lengths.defined() ? std::max(entries.batches, lengths.batches) : entries.batches;
  mask.heads = by_lengths ? lengths.heads : entries.heads;
  mask.head_divisor = by_lengths ? lengths.head_divisor : entries.head_divisor;
  mask.rows = rows, mask.keys = keys;
  mask.batch_stride = mask.head_stride = mask.row_stride = mask.key_stride = 1;
  return mask;
}

}  // namespace

std::size_t packed_indices_bytes(const IndexViews& indices, std::int64_t rows, std::int64_t keys) {
  return packed_mask_bytes(mask_of(indices, rows, keys), rows, keys);
}

PackedMask packed_indices_at(const IndexViews& indices, std::int64_t rows, std::int64_t keys, void* memory) {
  return packed_mask_at(mask_of(indices, rows, keys), rows, keys, memory);
}

cudaError_t pack_indices(const IndexViews& indices, std::int64_t rows, std::int64_t keys, bool is_causal,
                         std::size_t shared_limit, void* memory, PackedMask* packed, cudaStream_t stream) {
  const BroadcastView mask = mask_of(indices, rows, keys);
  *packed = packed_mask_at(mask, rows, keys, memory);
  const std::int64_t chunks = (rows + kChunkRows - 1) / kChunkRows, planes = mask.batches * mask.heads;
  if (planes * chunks * keys == 0) return cudaSuccess;

  ListShape shape = {};
  shape.indices = indices;
  shape.rows = static_cast<std::int32_t>(rows), shape.keys = static_cast<std::int32_t>(keys);
  shape.is_causal = is_causal;
  shape.heads = static_cast<std::uint32_t>(mask.heads), shape.chunks = static_cast<std::uint32_t>(chunks);
  shape.head_divisor = mask.head_divisor;
  shape.packed = *packed;
  shape.words = const_cast<std::uint32_t*>(packed->words);  // readers' pointers to what is written here
  shape.units = const_cast<std::uint32_t*>(packed->units);
  const auto entries = static_cast<std::size_t>(planes * chunks * keys);
  const cudaError_t error = launch_clear(shape.units, entries * sizeof(std::uint32_t), stream);
  if (error != cudaSuccess) return error;
  const bool takes_long = keys > ShortStrip::kKeys && shared_limit >= LongStrip::kSharedBytes;
  return takes_long ? pack_strips<LongStrip>(shape, planes, stream) : pack_strips<ShortStrip>(shape, planes, stream);
}

}  // namespace flash_dmattn::internal::cuda

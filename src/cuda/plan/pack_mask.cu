#include "cuda/plan/pack_mask.h"

#include "core/arena.h"
#include "cuda/launch_blocks.cuh"
#include "cuda/plan/rows_past_last.cuh"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/dependent_launch.cuh"

namespace flash_dmattn::internal::cuda {
namespace {

// A block packs a strip of keys of one chunk. Each of its warps takes 128 rows, so that a lane ends up with four words
// of each of its four keys: one store of 16 bytes a key. A row of the strip is read by the whole warp, 4 bytes a lane:
// with many warps at work and a burst of 32 rows each, that is faster than 8 or 16 bytes a lane (measured on an H200).
// The loads are cached, not streamed: where rows are not aligned, neighbouring strips share sectors (a quarter less
// time there).
constexpr int kPackWarps = 8;
constexpr int kWarpRows = kChunkRows / kPackWarps;
constexpr int kLaneKeys = 4;
constexpr int kLaneWords = kWarpRows / kWordRows;
constexpr int kGroupRows = 8;  // rows whose bits gather in one register, a byte a key
constexpr int kGroups = kWordRows / kGroupRows;
static_assert(kLaneWords == 4 && kLaneWords * kWordRows == 2 * kUnitRows && kGroups == 4);

enum class Access {
  kAligned,  // neighbouring keys are neighbouring bytes, every row aligned to 4 bytes
  kShifted,  // the same, of any alignment: lanes read aligned words and take what they lack from the next lane
  kBytes,    // any strides; pack_columns_kernel is for those of a transposed mask
};

// The last lane only reads what the lane before it lacks.
constexpr int strip_keys(Access access) { return (access == Access::kShifted ? 31 : 32) * kLaneKeys; }

struct PackShape {
  const std::uint8_t* mask;  // (batches, heads, rows, keys)
  std::int64_t batch_stride, head_stride, row_stride, key_stride;
  std::int64_t rows, keys;  // rows of the problem, distinct keys of the mask
  std::uint32_t heads, chunks, strips;
  PackedMask packed;
  std::uint32_t *words, *units;  // its arrays, to be written
};

// What the running block packs: a strip of keys, a chunk of rows and a plane of (batches, heads), whose entries begin
// at `entries`.
struct PackBlock {
  std::int64_t strip, chunk, plane;
  const std::uint8_t* entries;
};

__device__ inline PackBlock pack_block(const PackShape& shape) {
  const std::int64_t plane = blockIdx.x / shape.strips / shape.chunks;
  const std::int64_t batch = static_cast<std::uint32_t>(plane) / shape.heads;
  return {blockIdx.x % shape.strips, blockIdx.x / shape.strips % shape.chunks, plane,
          shape.mask + batch * shape.batch_stride + (plane - batch * shape.heads) * shape.head_stride};
}

// The top bit of each byte says whether the byte is nonzero; the other bits are 0.
__device__ inline std::uint32_t nonzero_bytes(std::uint32_t bytes) {
  // 0x7f carries into the top bit unless the low seven are zero.
  return (((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes) & 0x80808080u;
}

// Keys [begin, end) of four neighbours in a row, a byte each; `entries` points at the first. The others are 0 and not
// read: the caller's memory may end with the row.
__device__ inline std::uint32_t load_bytes(const std::uint8_t* entries, std::int64_t key_stride, int begin, int end) {
  std::uint32_t loaded[kLaneKeys];
#pragma unroll
  for (int k = 0; k < kLaneKeys; ++k) loaded[k] = k >= begin && k < end ? __ldg(entries + k * key_stride) : 0;
  return loaded[0] | loaded[1] << 8 | loaded[2] << 16 | loaded[3] << 24;
}

// `entries` one row on. Recomputed, or the compiler would hold every multiple of the stride in a register.
__device__ inline const std::uint8_t* next_row(const std::uint8_t* entries, std::int64_t row_stride) {
  return recomputed(entries + row_stride);
}

// words[w][k]: rows 32 * w ... of the lane's key k. `entries`: the lane's first key in the warp's first row, of which
// `rows` exist.
template <Access kAccess>
__device__ inline void pack_rows(const PackShape& shape, const std::uint8_t* entries, int rows, std::int64_t first_key,
                                 std::uint32_t (&words)[kLaneWords][kLaneKeys]) {
  // Whether an aligned word that holds some of the lane's keys may reach out of the row.
  const bool at_edge = (kAccess == Access::kShifted && first_key == 0) || first_key + kLaneKeys > shape.keys;
  const int valid_keys = static_cast<int>(min(shape.keys - first_key, std::int64_t{kLaneKeys}));
  const std::int64_t key_stride = kAccess == Access::kBytes ? shape.key_stride : 1;
  // Outer loops are not unrolled: the compiler would start more loads than there are registers. Arrays move along
  // instead, so that every index is known when compiling.
#pragma unroll 1
  for (int w = 0; w < kLaneWords; ++w) {
    std::uint32_t bytes[kWordRows] = {};
    // The same modulo 32 as 8 * (address % 4): the bits by which a row's keys are shifted against aligned words.
    std::uint32_t shift = 8 * static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(entries));
    if (kAccess != Access::kBytes && !at_edge) {
#pragma unroll
      for (int row = 0; row < kWordRows; ++row) {
        const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(entries) & ~std::uintptr_t{3};
        bytes[row] = w * kWordRows + row < rows ? __ldg(reinterpret_cast<const std::uint32_t*>(address)) : 0;
        entries = next_row(entries, shape.row_stride);
      }
    } else {
#pragma unroll 1
      for (int first = w * kWordRows; first < (w + 1) * kWordRows; first += kGroupRows) {
#pragma unroll
        for (int row = 0; row < kWordRows - kGroupRows; ++row) bytes[row] = bytes[row + kGroupRows];
#pragma unroll
        for (int r = 0; r < kGroupRows; ++r) {
          const int before =
              kAccess == Access::kShifted ? static_cast<int>(reinterpret_cast<std::uintptr_t>(entries) & 3) : 0;
          const int end = first + r < rows ? valid_keys + before : 0;
          bytes[kWordRows - kGroupRows + r] =
              load_bytes(entries - before, key_stride, first_key == 0 ? before : 0, end);
          entries = next_row(entries, shape.row_stride);
        }
      }
    }
    if constexpr (kAccess == Access::kShifted) {
#pragma unroll
      for (int row = 0; row < kWordRows; ++row) {
        bytes[row] = __funnelshift_r(bytes[row], __shfl_down_sync(0xffffffffu, bytes[row], 1), shift);
        shift += 8 * static_cast<std::uint32_t>(shape.row_stride);
      }
    }
    std::uint32_t groups[kGroups] = {};  // byte k: eight rows of key k
#pragma unroll
    for (int row = 0; row < kWordRows; ++row) {
      groups[row / kGroupRows] = (groups[row / kGroupRows] >> 1) | nonzero_bytes(bytes[row]);
    }
#pragma unroll
    for (int k = 0; k < kLaneKeys; ++k) {
      words[0][k] = words[1][k], words[1][k] = words[2][k], words[2][k] = words[3][k];
    }
    // Byte k of the four registers becomes the word of key k.
    const std::uint32_t low01 = __byte_perm(groups[0], groups[1], 0x5140);
    const std::uint32_t low23 = __byte_perm(groups[2], groups[3], 0x5140);
    const std::uint32_t high01 = __byte_perm(groups[0], groups[1], 0x7362);
    const std::uint32_t high23 = __byte_perm(groups[2], groups[3], 0x7362);
    words[3][0] = __byte_perm(low01, low23, 0x5410);
    words[3][1] = __byte_perm(low01, low23, 0x7632);
    words[3][2] = __byte_perm(high01, high23, 0x5410);
    words[3][3] = __byte_perm(high01, high23, 0x7632);
  }
}

template <Access kAccess>
__global__ __launch_bounds__(32 * kPackWarps,
                             kAccess == Access::kBytes ? 2 : 3) void pack_mask_kernel(const PackShape shape) {
  constexpr int kStripKeys = strip_keys(kAccess);
  begin_dependent_kernel();
  const auto [strip, chunk, plane, entries_begin] = pack_block(shape);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const std::int64_t first_row = chunk * kChunkRows + warp * kWarpRows;
  const int rows = static_cast<int>(min(max(shape.rows - first_row, std::int64_t{0}), std::int64_t{kWarpRows}));
  const std::int64_t strip_key = strip * kStripKeys, first_key = strip_key + lane * kLaneKeys;
  const std::int64_t first_entry = (plane * shape.chunks + chunk) * shape.keys;

  const std::uint8_t* entries = entries_begin + first_row * shape.row_stride + first_key * shape.key_stride;
  std::uint32_t words[kLaneWords][kLaneKeys] = {};
  pack_rows<kAccess>(shape, entries, rows, first_key, words);

  // Words are gathered first, so that lines of memory are written at once: where warps write theirs when they have
  // them, reading is slowed down. Their order within a key is such that eight lanes' keys, which are kLaneKeys apart,
  // and eight neighbours are in different banks.
  __shared__ uint4 s_words[kStripKeys * kPackWarps];
  // Of each key two bits for its units with a visible row, and two for those without a hidden one.
  __shared__ std::uint8_t s_units[kPackWarps][kStripKeys];
  static_assert(kWarpRows == kBandRows && kPackWarps == 8 && kLaneKeys == 4);
  const auto staged = [](int key, int band) {
    return key * kPackWarps + (band ^ key / kLaneKeys % kPackWarps ^ key % kLaneKeys * 2);
  };
  const auto missing = [&](int word) { return rows_past_last(rows, word); };
#pragma unroll
  for (int k = 0; k < kLaneKeys; ++k) {
    const int key = lane * kLaneKeys + k;
    if (lane * kLaneKeys < kStripKeys) {
      const uint4 packed = {words[0][k], words[1][k], words[2][k], words[3][k]};
      s_words[staged(key, warp)] = packed;
      s_units[warp][key] =
          static_cast<std::uint8_t>(((packed.x | packed.y) != 0 ? 1 : 0) | ((packed.z | packed.w) != 0 ? 2 : 0) |
                                    (((packed.x | missing(0)) & (packed.y | missing(1))) == ~0u ? 4 : 0) |
                                    (((packed.z | missing(2)) & (packed.w | missing(3))) == ~0u ? 8 : 0));
    }
  }
  __syncthreads();
  const int keys = static_cast<int>(min(shape.keys - strip_key, std::int64_t{kStripKeys}));
  auto* strip_words = reinterpret_cast<uint4*>(
      shape.words + shape.packed.word_offset(first_entry, 0, static_cast<std::int32_t>(strip_key)));
  for (int i = threadIdx.x; i < kChunkBands * kStripKeys; i += 32 * kPackWarps) {
    const int band = i / kStripKeys, key = i % kStripKeys;
    if (key < keys) strip_words[std::int64_t{band} * shape.packed.chunk_stride + key] = s_words[staged(key, band)];
  }
  if (threadIdx.x < keys) {
    std::uint32_t units = 0;
#pragma unroll
    for (int w = 0; w < kPackWarps; ++w) {
      const std::uint32_t bits = s_units[w][threadIdx.x];
      units |= (bits % 4 | bits / 4 << kChunkUnits) << (2 * w);
    }
    shape.units[first_entry + strip_key + threadIdx.x] = units;
  }
}

constexpr int kColumnKeys = 4 * kPackWarps;  // of a block of pack_columns_kernel
constexpr int kVectorBytes = sizeof(uint4);

// Bit i: byte i of 16 is nonzero.
__device__ inline std::uint32_t nonzero_bits(uint4 bytes) {
  std::uint32_t bits = 0;
#pragma unroll
  for (const std::uint32_t four : {bytes.x, bytes.y, bytes.z, bytes.w}) {
    // The product moves the top bits of the bytes, 7 bits apart then, to the highest four.
    bits = bits >> 4 | (nonzero_bytes(four) * 0x00204081u & 0xf0000000u);
  }
  return bits >> 16;
}

// Rows 32 * lane ... of two keys whose first rows are at `column` and `key_stride` behind it; of each `rows` exist.
// Aligned blocks of 16 bytes are read that may begin before a column and end after it, by less than 16 bytes.
__device__ inline void pack_column_pair(const std::uint8_t* column, std::int64_t key_stride, int rows,
                                        std::uint32_t (&words)[2]) {
  const int lane = threadIdx.x % 32;
  std::uint32_t own[2], end[2];
  int before[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const std::uint8_t* own_column = column + k * key_stride;
    before[k] = static_cast<int>(reinterpret_cast<std::uintptr_t>(own_column) % kVectorBytes);
    const auto* vectors = reinterpret_cast<const uint4*>(own_column - before[k]);
    const auto bits = [&](int vector) {
      return vector * kVectorBytes < rows + before[k] ? nonzero_bits(__ldg(vectors + vector)) : 0;
    };
    own[k] = bits(2 * lane) | bits(2 * lane + 1) << kVectorBytes;
    end[k] = lane == 31 && before[k] != 0 ? bits(64) : 0;
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const std::uint32_t next = __shfl_down_sync(0xffffffffu, own[k], 1);
    words[k] = __funnelshift_r(own[k], lane == 31 ? end[k] : next, before[k]);
  }
}

// Rows 32 * lane ... of one key, byte by byte.
__device__ inline std::uint32_t pack_column(const std::uint8_t* column, int rows) {
  const int first_row = static_cast<int>(threadIdx.x % 32) * kWordRows;
  std::uint32_t word = 0;
#pragma unroll 1
  for (int row = 0; row < min(rows - first_row, kWordRows); ++row) {
    word |= (__ldg(column + first_row + row) != 0 ? 1u : 0u) << row;
  }
  return word;
}

// The same where a key's rows are neighbouring bytes, of any alignment: a warp takes two keys at a time, and each lane
// ends up with one word of either. As above, they are gathered before they are written.
__global__ __launch_bounds__(32 * kPackWarps, 6) void pack_columns_kernel(const PackShape shape) {
  static_assert(kChunkWords == 32 && 2 * kChunkUnits == 32);
  static_assert(kPackWarps == kChunkBands && kColumnKeys == 32 && kBandWords * sizeof(std::uint32_t) == sizeof(uint4));
  // Of a key all bands at once: a gap behind each, so that their words are in different banks.
  __shared__ uint4 s_words[kChunkBands][kColumnKeys + 1];
  begin_dependent_kernel();
  const auto [strip, chunk, plane, entries_begin] = pack_block(shape);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rows = static_cast<int>(min(shape.rows - chunk * kChunkRows, std::int64_t{kChunkRows}));
  const std::uint32_t missing = rows_past_last(rows, lane);
  const std::uint8_t* rows_begin = entries_begin + chunk * kChunkRows;
  const std::int64_t first_entry = (plane * shape.chunks + chunk) * shape.keys, strip_key = strip * kColumnKeys;
  const int keys = static_cast<int>(min(shape.keys - strip_key, std::int64_t{kColumnKeys}));
#pragma unroll 1
  for (int pair = 2 * warp; pair < keys; pair += 2 * kPackWarps) {
    const std::int64_t key = strip_key + pair;
    const std::uint8_t* column = rows_begin + key * shape.key_stride;
    std::uint32_t words[2];
    // Between two other keys' columns all memory is the mask's.
    if (shape.key_stride >= kVectorBytes && key > 0 && key + 2 < shape.keys) {
      pack_column_pair(column, shape.key_stride, rows, words);
    } else {
      words[0] = pack_column(column, rows);
      words[1] = pair + 1 < keys ? pack_column(column + shape.key_stride, rows) : 0;
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const std::uint32_t word = words[k] & ~missing, shown = word | missing;
      reinterpret_cast<std::uint32_t*>(&s_words[lane / kBandWords][pair + k])[lane % kBandWords] = word;
      // Half of the lanes see whether a unit has a visible row, the others whether it has no hidden one.
      const int first = 2 * (lane % kChunkUnits);
      const bool any = (__shfl_sync(0xffffffffu, word, first) | __shfl_sync(0xffffffffu, word, first + 1)) != 0;
      const bool all = (__shfl_sync(0xffffffffu, shown, first) & __shfl_sync(0xffffffffu, shown, first + 1)) == ~0u;
      const std::uint32_t units = __ballot_sync(0xffffffffu, lane < kChunkUnits ? any : all);
      if (lane == 0 && pair + k < keys) shape.units[first_entry + key + k] = units;
    }
  }
  __syncthreads();
  // A band by each warp.
  if (lane >= keys) return;
  std::uint32_t* target = shape.words + shape.packed.word_offset(first_entry, warp * kBandRows,
                                                                 static_cast<std::int32_t>(strip_key) + lane);
  *reinterpret_cast<uint4*>(target) = s_words[warp][lane];
}

using PackKernel = void(PackShape);

cudaError_t launch(PackKernel* kernel, int strip_keys, PackShape shape, std::int64_t planes, cudaStream_t stream) {
  shape.strips = static_cast<std::uint32_t>((shape.keys + strip_keys - 1) / strip_keys);
  const std::int64_t blocks = planes * shape.chunks * shape.strips;
  return launch_blocks(kernel, {blocks, 32 * kPackWarps, 0, true}, stream, shape);
}

template <Access kAccess>
cudaError_t launch(const PackShape& shape, std::int64_t planes, cudaStream_t stream) {
  return launch(pack_mask_kernel<kAccess>, strip_keys(kAccess), shape, planes, stream);
}

struct PackedArrays {
  std::uint32_t *words, *units;
};

PackedArrays take_arrays(Arena& arena, const BroadcastView& distinct, std::int64_t rows) {
  const std::int64_t chunks = (rows + kChunkRows - 1) / kChunkRows;
  const auto entries = static_cast<std::size_t>(distinct.batches * distinct.heads * chunks * distinct.keys);
  return {arena.take<std::uint32_t>(entries * kChunkWords), arena.take<std::uint32_t>(entries)};
}

// The mask's distinct entries in a problem of `keys` keys.
BroadcastView distinct_entries(const BroadcastView& mask, std::int64_t keys) {
  BroadcastView distinct = without_copies(mask);
  if (keys == 0) distinct.keys = 0;
  return distinct;
}

}  // namespace

std::size_t packed_mask_bytes(const BroadcastView& mask, std::int64_t rows, std::int64_t keys) {
  Arena arena(nullptr);
  take_arrays(arena, distinct_entries(mask, keys), rows);
  return arena.used();
}

PackedMask packed_mask_at(const BroadcastView& mask, std::int64_t rows, std::int64_t keys, void* memory) {
  const BroadcastView distinct = distinct_entries(mask, keys);
  Arena arena(memory);
  const PackedArrays arrays = take_arrays(arena, distinct, rows);
  const std::int64_t chunks = (rows + kChunkRows - 1) / kChunkRows;
  PackedMask packed;
  packed.words = arrays.words;
  packed.units = arrays.units;
  packed.chunk_stride = static_cast<std::int32_t>(distinct.keys);
  packed.head_stride = distinct.heads > 1 ? chunks * distinct.keys : 0;
  packed.batch_stride = distinct.batches > 1 ? distinct.heads * chunks * distinct.keys : 0;
  packed.key_stride = distinct.keys > 1 ? 1 : 0;
  packed.head_divisor = distinct.head_divisor;
  return packed;
}

cudaError_t pack_mask(const BroadcastView& mask, std::int64_t rows, std::int64_t keys, void* memory, PackedMask* packed,
                      cudaStream_t stream) {
  const BroadcastView distinct = distinct_entries(mask, keys);
  Arena arena(memory);
  const PackedArrays arrays = take_arrays(arena, distinct, rows);
  const std::int64_t chunks = (rows + kChunkRows - 1) / kChunkRows, planes = distinct.batches * distinct.heads;
  *packed = packed_mask_at(mask, rows, keys, memory);
  if (planes == 0 || chunks == 0 || distinct.keys == 0) return cudaSuccess;

  PackShape shape = {};
  shape.mask = static_cast<const std::uint8_t*>(distinct.data);
  shape.batch_stride = distinct.batch_stride, shape.head_stride = distinct.head_stride;
  shape.row_stride = distinct.row_stride, shape.key_stride = distinct.key_stride;
  shape.rows = rows, shape.keys = distinct.keys;
  shape.heads = static_cast<std::uint32_t>(distinct.heads), shape.chunks = static_cast<std::uint32_t>(chunks);
  shape.packed = *packed;
  shape.words = arrays.words, shape.units = arrays.units;

  if (distinct.key_stride != 1) {
    return distinct.row_stride == 1 ? launch(pack_columns_kernel, kColumnKeys, shape, planes, stream)
                                    : launch<Access::kBytes>(shape, planes, stream);
  }
  const std::uintptr_t offsets =
      reinterpret_cast<std::uintptr_t>(distinct.data) |
      static_cast<std::uintptr_t>(distinct.batch_stride | distinct.head_stride | distinct.row_stride);
  return (offsets & 3) == 0 ? launch<Access::kAligned>(shape, planes, stream)
                            : launch<Access::kShifted>(shape, planes, stream);
}

}  // namespace flash_dmattn::internal::cuda

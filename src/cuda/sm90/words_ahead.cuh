// Words of a packed mask for the steps of the sm90 backward.
#pragma once

#include <cstdint>

#include "cuda/plan/visibility.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/sm90/warps.h"

namespace flash_dmattn::internal::cuda::sm90 {

// In shared memory, where those of a work's keys lie and, if producers have the registers to read them before a step
// has a stage (kReadsWordsAhead), those for some bands of rows, of which several steps have some. A lane brings and
// reads the words of its own key: kWarpKeys keys are a warp's.
template <typename Config>
class WordsAhead {
  static constexpr int kKeys = Config::kTileKeys;
  static constexpr int kBands = Config::kWordBands, kRows = kBands * kBandRows;  // registers
  static_assert(kBandWords * sizeof(std::uint32_t) == sizeof(uint4));
  static_assert(kChunkRows % kRows == 0 && kBandRows % Config::kTileRows == 0);

 public:
  // Where the mask has the words of a column's key, unless nobody asks for them; `first`: as in PackedMask.
  __device__ void set_key(const PackedMask& packed, std::int64_t first, std::int32_t key, int column, bool is_seen) {
    of_key_[column] = is_seen && packed.defined() ? packed.words_at(first, 0, key) : nullptr;
  }
  // Before the first step of a work: those that are there are of the one before.
  __device__ void begin_work(int warp, int lane) {
    if (lane == 0) part_[warp] = -1;
    __syncwarp();
  }

  // Asks for those of the bands around `first_row`, unless they are there; zeros if nobody asks for the key's.
  __device__ void read(const PackedMask& packed, int warp, int lane, int first_row) {
    const int part = first_row / kRows, column = warp * kWarpKeys + lane;
    if (part == part_[warp]) return;
    __syncwarp();  // all lanes know that
    if (lane == 0) part_[warp] = part;
    const std::uint32_t* words = of_key_[column];
#pragma unroll
    for (int i = 0; i < kBands; ++i) {
      const std::int64_t band = (part * kBands + i) * packed.band_stride();
      copy_async_16(shared_address(&words_[i][column]), words == nullptr ? packed.words : words + band,
                    words != nullptr);
    }
    commit_copies();
  }
  // Those of a step that begins with `row`, when they have come; zeros if nobody asks for the key's.
  __device__ void take(std::uint32_t (&words)[Config::kWords], int column, int row) const {
    wait_copies<0>();
    const std::uint32_t address = shared_address(&words_[row / kBandRows % kBands][column]) +
                                  row % kBandRows / kWordRows * static_cast<int>(sizeof(std::uint32_t));
    if constexpr (Config::kWords == 2) {
      load_shared_8(words, address);
    } else {
      load_shared_16(words, address);
    }
  }

  // Not read ahead: the word of 32 rows from `row` on, of a key for which it has been said where they lie.
  __device__ std::uint32_t word(const PackedMask& packed, int column, int row) const {
    // Unsigned, which takes a register less: head dim 256 has no other.
    const auto own_row = static_cast<std::uint32_t>(row), word = own_row % kBandRows / kWordRows;
    const std::uint64_t band = own_row / kBandRows;
    return of_key_[column][band * static_cast<std::uint32_t>(packed.chunk_stride) * kBandWords + word];
  }

 private:
  const std::uint32_t* of_key_[kKeys];  // those of the first band, in global memory
  uint4 words_[kBands][Config::kReadsWordsAhead ? kKeys : 1];
  int part_[Config::kProducerWarps];  // which kRows rows these are
};

}  // namespace flash_dmattn::internal::cuda::sm90

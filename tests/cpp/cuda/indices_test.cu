// Lists of keys packed on the device against the mask that says the same, entry by entry.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "cuda/attention/params.h"
#include "cuda/device_kernels.h"
#include "cuda/plan/pack_indices.h"
#include "cuda/plan/pack_mask.h"
#include "index_testing.h"
#include "plan_testing.h"
#include "rounds.h"

namespace flash_dmattn::internal::cuda {
namespace {

void expect_packed(Lists& lists, bool is_causal, std::size_t shared_limit = kLeastSharedBytes) {
  const auto [batch, heads, key_heads, rows, keys] = lists.sizes;
  Tensor<std::uint8_t> mask;
  Rng rng(0);
  mask = make_tensor<std::uint8_t>(rng, lists.sizes, {1, 1, 1, 1}, Layout::kContiguous);
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t key = 0; key < keys; ++key) mask.at(b, h, row, key) = lists.names(b, h, row, key);
      }
    }
  }
  mask.upload();
  DeviceMemory mask_memory(packed_mask_bytes(mask.view, rows, keys));
  DeviceMemory memory(packed_indices_bytes(lists.views, rows, keys));
  PackedMask expected, packed;
  expect_success(pack_mask(mask.view, rows, keys, mask_memory.get(), &expected, nullptr));
  expect_success(pack_indices(lists.views, rows, keys, is_causal, shared_limit, memory.get(), &packed, nullptr));
  expect_success(cudaDeviceSynchronize());
  const PackedMask described = packed_indices_at(lists.views, rows, keys, memory.get());
  EXPECT_EQ(described.words, packed.words);
  EXPECT_EQ(described.units, packed.units);
  const std::int64_t chunks = (rows + kChunkRows - 1) / kChunkRows;
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
        SCOPED_TRACE("batch " + std::to_string(b) + " head " + std::to_string(h) + " chunk " + std::to_string(chunk));
        const auto words_of = [&](const PackedMask& bits) {
          return to_host(bits.words + bits.offset(b, h, chunk, 0) * kChunkWords, keys * kChunkWords);
        };
        const auto words = words_of(packed), expected_words = words_of(expected);
        for (std::int64_t key = 0; key < keys; ++key) {
          for (std::int64_t w = 0; w < kChunkWords; ++w) {
            const std::int64_t first_row = chunk * kChunkRows + w * kWordRows;
            // Bits of rows that the causal rule lets see the key, with every key existing.
            const std::int64_t hidden = std::clamp<std::int64_t>(key - (keys - rows) - first_row, 0, kWordRows);
            const std::uint32_t judged = !is_causal ? ~0u : hidden == kWordRows ? 0 : ~0u << hidden;
            const std::uint32_t* word = packed.words_at(packed.offset(b, h, 0, 0), first_row, key);
            const auto at = static_cast<std::size_t>(word - packed.words_at(packed.offset(b, h, chunk, 0), 0, 0));
            ASSERT_EQ(words[at] & judged, expected_words[at] & judged) << "key " << key << " word " << w;
            if (is_causal) continue;
            const auto units_of = [&](const PackedMask& bits) {
              return to_host(bits.units + bits.offset(b, h, chunk, key), 1)[0];
            };
            if (w == 0) {
              ASSERT_EQ(units_of(packed), units_of(expected)) << "key " << key;
            }
          }
        }
      }
    }
  }
}

TEST(PackIndices, BitsAreThoseOfTheMaskThatSaysTheSame) {
  Rng rng(1);
  for (int round = 0; round < rounds(400); ++round) {
    const Sizes sizes = {uniform(rng, 1, 2), 4, 2, uniform(rng, 1, round % 8 == 0 ? 1300 : 150), uniform(rng, 1, 90)};
    const std::int64_t block_size = std::array{1, 1, 3, 16, 200, std::numeric_limits<std::int32_t>::max()}[rng() % 6];
    SCOPED_TRACE("round " + std::to_string(round) + " rows " + std::to_string(sizes.rows) + " keys " +
                 std::to_string(sizes.keys) + " block " + std::to_string(block_size));
    Lists lists = random_lists(rng, sizes, uniform(rng, 0, 12), rng() % 2 == 0, block_size);
    expect_packed(lists, rng() % 3 == 0);
    if (HasFatalFailure()) return;
  }
}

// Bytes of shared memory that a block of this GPU may have.
std::size_t shared_limit_of_gpu() {
#ifdef __CUDACC__
  return current_gpu().shared_limit;
#else
  return kWideSharedBytes;  // emulated
#endif
}

// Strips of keys, of which later ones are skipped under the causal rule: short ones, and long ones if there is memory.
TEST(PackIndices, MoreKeysThanABlockPacks) {
  Rng rng(2);
  for (const std::size_t shared_limit : {kLeastSharedBytes, shared_limit_of_gpu()}) {
    for (const bool is_causal : {false, true}) {
      for (const std::int64_t block_size : {1, 1000}) {
        Lists lists = random_lists(rng, {1, 1, 1, 200, 20000}, 40, false, block_size);
        expect_packed(lists, is_causal, shared_limit);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(PackIndices, NothingToPack) {
  for (const Sizes& sizes : {Sizes{0, 2, 1, 5, 7}, {2, 2, 1, 0, 7}, {2, 2, 1, 5, 0}}) {
    IndexViews views;
    views.block_size = 1;
    views.entries.batches = sizes.batch, views.entries.heads = sizes.heads, views.entries.rows = sizes.rows;
    views.entries.keys = 0;
    views.entries.batch_stride = views.entries.head_stride = views.entries.row_stride = 1;
    DeviceMemory memory(packed_indices_bytes(views, sizes.rows, sizes.keys));
    PackedMask packed;
    expect_success(
        pack_indices(views, sizes.rows, sizes.keys, false, kLeastSharedBytes, memory.get(), &packed, nullptr));
  }
  expect_success(cudaDeviceSynchronize());
}

}  // namespace
}  // namespace flash_dmattn::internal::cuda

// The sm90 forward: flash attention with the tensor cores' asynchronous products (wgmma) and the copy engine (TMA).
//
// A block computes one work after another (work_queue.cuh): kTileRows query rows, kConsumerRows for each of its
// consumers, warp groups that compute (forward_consumer.cuh). Other warps, the producers, bring queries, and tiles of
// keys and values. A stage of shared memory is handed back and forth by two barriers: a phase of "full" ends when what
// was copied there has arrived, one of "empty" when all consumers have read it. While a consumer exponentiates the
// scores of one tile, the tensor cores compute the scores of the other consumers and add up their values.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/attention/block_order.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/scores.cuh"
#include "cuda/attention/softmax.cuh"
#include "cuda/plan/entry_offset.cuh"
#include "cuda/plan/visibility.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/ptx/dynamic_shared.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/sm90/forward_config.h"
#include "cuda/sm90/forward_consumer.cuh"
#include "cuda/sm90/launch.h"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/planned_producer.cuh"
#include "cuda/sm90/work_queue.cuh"

namespace flash_dmattn::internal::cuda::sm90 {

template <typename ElementType, int kHeadDim, int kValueDim, bool kIsPlanned, Scoring kItsScoring>
struct ForwardBlock {
  using Element = ElementType;
  static constexpr bool kPlanned = kIsPlanned;
  static constexpr Scoring kScoring = kItsScoring;
  static_assert(!kPlanned || (kScoring != Scoring::kKeyBiased && kScoring != Scoring::kRowBiased));
  using Config = ForwardConfig<kHeadDim, kValueDim, kPlanned, kScoring>;
  static constexpr bool kRowBiased = Config::kRowBiased, kStagesKeyBias = Config::kStagesKeyBias;
  static constexpr int kTileKeys = Config::kTileKeys, kConsumers = Config::kConsumers;
  static constexpr int kKeyStages = Config::kKeyStages, kValueStages = Config::kValueStages;
  // Bytes from one panel of 64 columns to the next.
  static constexpr std::uint32_t kQueryPanel = Config::kTileRows * 128, kTilePanel = kTileKeys * 128;

  using Planned = PlannedShared<Config>;
  using Facts = typename Planned::Facts;

  struct Shared {
    Pipeline<kConsumers> queries;  // of each consumer: a phase is a work
    Pipeline<kKeyStages> keys;
    Pipeline<kValueStages> values;
    Pipeline<Config::kBiasStages == 0 ? 1 : Config::kBiasStages> biases;  // only if there are stages of it
    WorkRing ring;
  };
  static constexpr std::size_t kPlannedOffset = Config::kTilesBytes + (sizeof(Shared) + 15) / 16 * 16;
  // Each warp of a consumer stores its 16 rows through memory of its own: a box of 64 columns at a time or, if there is
  // room, all of its boxes; where there is no room for that, as many columns as there is; and where there is none at
  // all, through its rows of the queries.
  static constexpr int kWarps = 4 * kConsumers;
  static constexpr std::size_t staging_bytes(int columns) { return std::size_t{kWarps} * 16 * 2 * columns; }
  static constexpr std::size_t kPlannedEnd = kPlannedOffset + (kPlanned ? sizeof(Planned) : 0);
  static constexpr std::size_t staging_offset(bool boxes) {
    const std::size_t alignment = boxes ? 1024 : 16;
    return (kPlannedEnd + alignment - 1) / alignment * alignment;
  }
  static constexpr int staged_boxes() {
    for (const int boxes : {Config::kValuePanels, 1}) {
      if (staging_offset(true) + staging_bytes(64 * boxes) <= kWideSharedBytes) return boxes;
    }
    return 0;
  }
  static constexpr int staged_columns() {
    for (int columns = 32; columns >= 16; columns /= 2) {
      if (staging_offset(false) + staging_bytes(columns) <= kWideSharedBytes) return columns;
    }
    return 0;
  }
  static constexpr bool kStoresBoxes = staged_boxes() > 0;
  static constexpr int kStagedBoxes = kStoresBoxes ? staged_boxes() : 1;
  static constexpr bool kStagesInQueries = !kStoresBoxes && staged_columns() == 0;
  static constexpr int kStagedColumns = kStoresBoxes || kStagesInQueries ? 64 : staged_columns();
  static constexpr std::size_t kStagingOffset = staging_offset(kStoresBoxes);
  static constexpr std::size_t kSharedBytes =
      kStagingOffset + (kStagesInQueries ? 0 : staging_bytes(kStagedColumns * kStagedBoxes));
  static_assert(kSharedBytes <= kWideSharedBytes);

  const Sm90ForwardParams& params;
  const ForwardMaps& maps;
  std::uint32_t queries, keys, values, biases;  // in shared memory
  Shared& shared;
  Planned& planned;  // only in a plan

  __device__ ForwardBlock(const Sm90ForwardParams& params, const ForwardMaps& maps, unsigned char* memory)
      : params(params),
        maps(maps),
        queries(shared_address(memory)),
        keys(queries + static_cast<std::uint32_t>(Config::kQueryBytes)),
        values(keys + static_cast<std::uint32_t>(kKeyStages * Config::kKeyBytes)),
        biases(values + static_cast<std::uint32_t>(kValueStages * Config::kValueBytes)),
        shared(*reinterpret_cast<Shared*>(memory + Config::kTilesBytes)),
        planned(*reinterpret_cast<Planned*>(memory + kPlannedOffset)) {}

  __device__ void init() {
    if (threadIdx.x == 0) {
      shared.queries.init(1, kStagesInQueries ? 4 : 1);
      if constexpr (kPlanned) {
        shared.keys.init(
            KeyProducer<Element, Config>::kArrivals,
            kConsumers * ForwardConsumer<ForwardBlock>::kKeyReleases + ValueProducer<Config>::kKeyArrivals);
        shared.values.init(ValueProducer<Config>::kArrivals, kConsumers);
        shared.ring.init(32 * (4 * kConsumers + 2 * Config::kRoleWarps));
      } else {
        shared.keys.init(1, kConsumers);
        shared.values.init(1, kConsumers);
        if constexpr (Config::kBiasStages > 0) {
          shared.biases.init(kStagesKeyBias ? 32 : 1, kConsumers * ForwardConsumer<ForwardBlock>::kBiasReleases);
        }
        shared.ring.init(32 * (4 * kConsumers + (stages_key_bias() ? 1 : 0)));
      }
      fence_barrier_init();
    }
    __syncthreads();
  }

  // Which rows of which head, or first of two heads, a work tile has. Work begins in the order of these numbers.
  struct Rows {
    int batch, head, first_row;

    __device__ Rows(const Sm90ForwardParams& params, unsigned index) {
      const int step = kPlanned && params.pairs_heads ? 2 : 1, tile_rows = Config::kTileRows / step;
      const int row_tiles = (params.rows + tile_rows - 1) / tile_rows;
      // Under the causal rule the last rows see the most: those of as many heads as fill the GPU start first. Else, and
      // where keys are gathered, heads come one after another: what they share stays in the cache.
      const bool spreads = !kPlanned && params.visibility.is_causal;
      const int heads_at_once = spreads ? (params.processors + row_tiles - 1) / row_tiles : 1;
      const auto at_once = static_cast<unsigned>(heads_at_once * row_tiles);
      int first_pair = static_cast<int>(index / at_once) * heads_at_once;
      int rest = static_cast<int>(index - index / at_once * at_once);
      if constexpr (!kPlanned) {  // divisions take long, and a short work waits for them
        const int width = min(heads_at_once, params.batch * params.heads / step - first_pair);
        first_pair += rest % width, rest /= width;
      }
      const int pair = first_pair * step;
      batch = params.batch == 1 ? 0 : pair / params.heads, head = pair - batch * params.heads;
      first_row = (row_tiles - 1 - rest) * tile_rows;
    }
  };

  // For order_blocks: how many tiles the block's units visit.
  __device__ static int visits(const Sm90ForwardParams& params, unsigned block, int lane, int lanes) {
    const Rows rows(params, block);
    const std::int64_t chunk = params.plan.first_chunk(rows.batch, rows.head) + rows.first_row / kChunkRows;
    const std::int32_t* units = params.plan.unit_tiles + chunk * kChunkUnits + rows.first_row % kChunkRows / kUnitRows;
    int visits = 0;
    for (int unit = lane; unit < (params.pairs_heads ? 1 : 2); unit += lanes) visits += units[unit];
    return visits;
  }

  __device__ void describe(Work& work, int slot) {
    if constexpr (kPlanned) {
      if (!shared.ring.knows_order && work.index >= params.works - params.order.count) {
        wait_for_order(params.order);
        shared.ring.knows_order = true;
      }
    }
    const Rows rows(params, kPlanned ? ordered_block(params.order, static_cast<unsigned>(work.index),
                                                     static_cast<unsigned>(params.works))
                                     : static_cast<unsigned>(work.index));
    work.batch = rows.batch, work.head = rows.head, work.first_row = rows.first_row;
    work.key_head = rows.head / params.group;
    work.existing = key_count(params.visibility, rows.batch);
    if constexpr (kPlanned) {
      find_sources<Element>(params, work, &planned.sources[slot]);
    }
  }

  // Tiles of keys that `rows` rows see, by length and causal rule: none if the first does not exist.
  __device__ int tile_count(int existing, int first_row, int rows) const {
    if (first_row >= params.rows) return 0;
    const int last_row = min(first_row + rows, params.rows) - 1;
    return (causal_limit(params.visibility, existing, last_row) + kTileKeys - 1) / kTileKeys;
  }
  __device__ int tile_count(const Work& work) const {
    return tile_count(work.existing, work.first_row, Config::kTileRows);
  }

  // What a consumer owns.
  __device__ int head_of(const Work& work, int consumer) const {
    return kPlanned && params.pairs_heads ? work.head + consumer : work.head;
  }
  __device__ int first_row_of(const Work& work, int consumer) const {
    return kPlanned && params.pairs_heads ? work.first_row : work.first_row + kConsumerRows * consumer;
  }

  __device__ bool stages_key_bias() const { return kStagesKeyBias && params.bias.defined() && params.bias.rows == 1; }
  __device__ bool stages_bias() const { return kRowBiased || stages_key_bias(); }

  // ---- Producer

  // A work is a phase of the barriers of queries.
  __device__ static std::uint32_t query_parity(int work_slot) {
    static_assert(WorkRing::kSlots % 2 == 0);
    return work_slot % 2;
  }

  // Of each consumer, once it has no more need of those of the work before.
  __device__ void load_queries(const Work& work, int work_slot) {
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      const std::uint32_t full = shared_address(&shared.queries.full[consumer]);
      wait(shared_address(&shared.queries.empty[consumer]), query_parity(work_slot) ^ 1);
      arrive_expecting(full, Config::kQueryBytes / kConsumers);
#pragma unroll
      for (int panel = 0; panel < Config::kKeyPanels; ++panel) {
        load_box(queries + panel * kQueryPanel + consumer * kConsumerRows * 128, maps.query, panel * 64,
                 first_row_of(work, consumer), head_of(work, consumer), work.batch, full);
      }
    }
  }

  // By the producers.
  __device__ void produce() {
    if constexpr (!kPlanned) {
      if (threadIdx.x == 0) produce_dense();
      if constexpr (kStagesKeyBias) {
        if (threadIdx.x / 32 == 1 && stages_key_bias()) produce_key_bias();
      }
    } else {
      // By a shuffle, so that the compiler keeps them: it would read a special register each time, which takes long.
      const int lane = __shfl_sync(~0u, static_cast<int>(threadIdx.x) % 32, static_cast<int>(threadIdx.x) % 32);
      const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32 % Config::kRoleWarps, 0);
      if (threadIdx.x < 32 * Config::kRoleWarps) {
        produce_keys(warp, lane);
      } else {
        produce_values(warp, lane);
      }
    }
  }

  // By one thread. From the last tile to the first, so that those with hidden keys come first.
  __device__ void produce_dense() {
    Position<kKeyStages> at;
    while (true) {
      const int slot = shared.ring.at.stage;
      const Work& work = shared.ring.announce(params, [&](Work& next, int own_slot) { describe(next, own_slot); });
      if (work.kind == Work::kNone) return;
      load_queries(work, slot);
      for (int tile = tile_count(work) - 1; tile >= 0; --tile) {
        const auto load = [&]<int kPanels>(std::integral_constant<int, kPanels>, auto& pipeline, std::uint32_t target,
                                           const CUtensorMap& map) {
          const std::uint32_t full = shared_address(&pipeline.full[at.stage]);
          wait(shared_address(&pipeline.empty[at.stage]), at.parity ^ 1);
          arrive_expecting(full, kPanels * kTilePanel);
#pragma unroll
          for (int panel = 0; panel < kPanels; ++panel) {
            load_box(target + (at.stage * kPanels + panel) * kTilePanel, map, panel * 64, tile * kTileKeys,
                     work.key_head, work.batch, full);
          }
        };
        load(std::integral_constant<int, Config::kKeyPanels>(), shared.keys, keys, maps.key);
        if constexpr (kRowBiased) load_biases(work, tile, at);
        load(std::integral_constant<int, Config::kValuePanels>(), shared.values, values, maps.value);
        at.advance();
      }
    }
  }

  // Of a tile of keys, at the stage of its values.
  __device__ void load_biases(const Work& work, int tile, const Position<kKeyStages>& at) {
    static_assert(!kRowBiased || Config::kBiasStages == kKeyStages);
    const BroadcastView& bias = params.bias;
    const std::uint32_t full = shared_address(&shared.biases.full[at.stage]);
    wait(shared_address(&shared.biases.empty[at.stage]), at.parity ^ 1);
    arrive_expecting(full, Config::kBiasBytes);
#pragma unroll
    for (int panel = 0; panel < Config::kBiasPanels; ++panel) {
      load_box(biases + at.stage * static_cast<std::uint32_t>(Config::kBiasBytes) + panel * kQueryPanel, maps.bias,
               tile * kTileKeys + panel * 64, work.first_row,
               static_cast<int>(entry_of_head(work.head, bias.head_divisor)), bias.batches == 1 ? 0 : work.batch, full);
    }
  }

  // By one warp: the bias of a tile's keys, as fp32.
  __device__ void produce_key_bias() {
    constexpr int kShare = (kTileKeys + 31) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    WorkTaker taker(shared.ring);
    Position<kValueStages> at;
    while (true) {
      const Work& work = taker.take();
      if (work.kind == Work::kNone) return;
      const std::int64_t first = entry_offset(params.bias, work.batch, work.head);
      for (int tile = tile_count(work) - 1; tile >= 0; --tile) {
        float share[kShare];
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
          const int key = tile * kTileKeys + 32 * i + lane;
          share[i] = key < work.existing ? load_bias<Element>(params.bias, first + key * params.bias.key_stride) : 0.0f;
        }
        wait(shared_address(&shared.biases.empty[at.stage]), at.parity ^ 1);
        const std::uint32_t target = biases + at.stage * static_cast<std::uint32_t>(Config::kBiasBytes);
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
          const int column = 32 * i + lane;
          if (column < kTileKeys) store_shared(target + 4 * column, __float_as_uint(share[i]));
        }
        arrive(shared_address(&shared.biases.full[at.stage]));
        at.advance();
      }
      taker.release();
    }
  }

  __device__ void produce_keys(int warp, int lane) {
    WorkTaker taker(shared.ring);
    KeyProducer<Element, Config> producer({warp, lane, maps.key, params.head_dim, shared.keys, keys}, params, planned,
                                          shared.ring, warp, lane);
    while (taker.take().kind != Work::kNone) {
      producer.run(taker.slot());
      taker.release();
    }
  }

  __device__ void produce_values(int warp, int lane) {
    WorkTaker taker(shared.ring);
    ValueProducer<Config> producer({warp, lane, maps.value, params.value_dim, shared.values, values}, planned,
                                   shared.keys);
    // The last warp announces works: the next one while it waits for keys; when all others are done, the last ones.
    bool announced = false;
    const auto announce = [&](bool waits) {
      if (warp == Config::kRoleWarps - 1 && lane == 0 && !announced && (waits || shared.ring.knows_next(params))) {
        shared.ring.announce(params, [&](Work& next, int slot) { describe(next, slot); });
        announced = true;
      }
      __syncwarp();
    };
    while (true) {
      announce(true);
      const Work& work = taker.take();
      if (work.kind == Work::kNone) return;
      announced = false;
      if (warp == 0 && lane == 0) load_queries(work, taker.slot());
      announce(false);
      producer.run(work, planned.sources[taker.slot()]);
      taker.release();
    }
  }
};

template <typename Element, int kHeadDim, int kValueDim, bool kPlanned, Scoring kScoring>
__global__ void __launch_bounds__(ForwardBlock<Element, kHeadDim, kValueDim, kPlanned, kScoring>::Config::kThreads, 1)
    forward_kernel(const __grid_constant__ Sm90ForwardParams params, const __grid_constant__ ForwardMaps maps) {
  using Block = ForwardBlock<Element, kHeadDim, kValueDim, kPlanned, kScoring>;
  using Config = typename Block::Config;
  unsigned char* memory = dynamic_shared_panels();
  Block block(params, maps, memory);
  block.init();
  if constexpr (kPlanned) {
    // Else it runs beside the kernel that puts the last works in order, which has waited for those before it.
    if (params.order.count == 0) begin_dependent_kernel();
  }
  if (threadIdx.x < kWarpGroup) {
    give_registers_up<Config::kProducerRegisters>();
    Block(params, maps, at_kept_address(memory)).produce();
    if constexpr (kPlanned) end_dependent_kernel();
  } else if (threadIdx.x < Config::kProducers * kWarpGroup) {
    give_registers_up<Config::kValueProducerRegisters>();
    Block(params, maps, at_kept_address(memory)).produce();
  } else {
    take_registers<Config::kConsumerRegisters>();
    ForwardConsumer<Block>(block).run();
  }
}

}  // namespace flash_dmattn::internal::cuda::sm90

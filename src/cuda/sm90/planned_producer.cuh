// The producers of a planned forward: they bring the tiles of keys that a block's rows see, and what consumers must
// know of their keys.
//
// Keys of a list are gathered by cp.async, a row of keys by eight lanes, straight to where the products read them; 32
// neighbours of a range that all exist and are seen come as a box (TMA). Every warp brings a share of a stage's keys,
// its own, so that warps need not wait for each other. Keys and values have warps of their own: the same ones would
// take longer for both than the products. Those of keys also find the tiles, and make what is known of keys
// (StageFacts). What they read about a key they read ahead: its index two stages, its interval, packed words and bias
// one. Those of values also bring queries, and announce works.
#pragma once

#include <cstdint>

#include "cuda/attention/params.h"
#include "cuda/attention/scores.cuh"
#include "cuda/attention/tokens.cuh"
#include "cuda/plan/visibility.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/sm90/launch.h"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/planned_tiles.cuh"
#include "cuda/sm90/warps.h"
#include "cuda/sm90/work_queue.cuh"

namespace flash_dmattn::internal::cuda::sm90 {

// What consumers know of a stage's keys. The stage holds kTileKeys / kPlanTileKeys tiles of the plan.
template <int kTileKeys>
struct alignas(16) StageFacts {
  static constexpr int kMostWords = 4;
  static constexpr std::uint32_t kLast = 1u << 31;  // no stage comes after this one
  // Unit `unit` of the block sees every key of the stage's tile `tile`: its words are not written.
  __device__ static std::uint32_t full_mark(int tile, int unit) { return 1u << (2 * tile + unit); }

  // Of the block's rows, 32 at a time, and of a pair of neighbouring keys: what the first 16 rows see of both, then
  // what the others see (pair_word).
  std::uint32_t words[kMostWords][kTileKeys];
  float bias[kTileKeys];  // only if it is the same for every row
  std::uint32_t marks;
  std::int32_t box[kTileKeys / kWarpKeys];  // of a warp's keys: the first one if they are copied as a box, or -1
  alignas(16) std::int32_t key[kTileKeys];  // -1: no row of the block sees it; the stage holds zeros there
};

// What both producers do: each thread copies pieces of rows of kColumns columns to a stage. Config: ForwardConfig.
template <typename Config, int kColumns, int kStages>
class StageCopier {
 public:
  static constexpr int kTileKeys = Config::kTileKeys;
  using Facts = StageFacts<kTileKeys>;

  // Of keys or values, which have `columns`. `stages`: in shared memory.
  __device__ StageCopier(int warp, int lane, const CUtensorMap& map, int columns, Pipeline<kStages>& pipeline,
                         std::uint32_t stages)
      : pipeline_(pipeline), map_(map), columns_(columns), warp_(warp), lane_(lane), stages_(stages) {}

  // From here on of another work. `base`: of its key head; `stride`: bytes from one row to the next.
  __device__ void start(const Work& work, const std::uint16_t* base, std::int32_t stride) {
    key_head_ = work.key_head, batch_ = work.batch;
    base_ = base + lane_ % 8 * 8;
    stride_ = stride;
  }

  // The warp's share of the next stage, once that is empty. `box`: that of the facts, by a reduction, as the copy
  // engine is told of it by an instruction that else stands in a loop over lanes.
  __device__ void bring(const Facts& facts, std::int32_t box) {
    const std::uint32_t full = full_barrier();
    wait(shared_address(&pipeline_.empty[at_.stage]), at_.parity ^ 1);
    const std::uint32_t target = stages_ + at_.stage * (kPanels * kPanelBytes) + warp_ * kWarpKeys * 128;
    if (box < 0) {
      gather(facts.key + warp_ * kWarpKeys, target);
    } else if (lane_ == 0) {
      expect_bytes(full, kPanels * kWarpKeys * 128);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        load_box(target + panel * kPanelBytes, map_, panel * 64, box, key_head_, batch_, full);
      }
    }
    arrive_when_copied(full);
  }
  __device__ std::uint32_t full_barrier() const { return shared_address(&pipeline_.full[at_.stage]); }
  __device__ void advance() { at_.advance(); }
  __device__ int lane() const { return lane_; }
  __device__ int warp() const { return warp_; }

 private:
  static constexpr int kPanels = panels(kColumns);
  static constexpr std::uint32_t kPanelBytes = kTileKeys * 128;

  // Eight lanes take eight rows that follow one another, 128 bytes at a time.
  __device__ void gather(const std::int32_t* keys, std::uint32_t target) const {
    const int first_row = lane_ / 8 * 8, piece = lane_ % 8;
    const std::uint32_t first = target + first_row * 128 + piece * 16;
    std::int32_t indices[8];
#pragma unroll
    for (int row = 0; row < 8; row += 4) {
      const int4 four = *reinterpret_cast<const int4*>(keys + first_row + row);
      indices[row] = four.x, indices[row + 1] = four.y, indices[row + 2] = four.z, indices[row + 3] = four.w;
    }
#pragma unroll
    for (int row = 0; row < 8; ++row) {
      const std::uint16_t* source = offset_pointer(base_, indices[row], stride_);
      const std::uint32_t address = (first ^ (row * 16)) + row * 128;
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        // The last panel of some head dims is half empty; products do not read that.
        if (panel * 64 + piece * 8 >= kColumns) continue;
        copy_async_16(address + panel * kPanelBytes, source + panel * 64,
                      indices[row] >= 0 && panel * 64 + piece * 8 < columns_);
      }
    }
  }

  Pipeline<kStages>& pipeline_;
  const CUtensorMap& map_;
  std::int32_t key_head_ = 0, batch_ = 0;
  const std::uint16_t* base_ = nullptr;  // from the lane's piece of a row on
  std::int32_t stride_ = 0;
  const int columns_, warp_, lane_;
  const std::uint32_t stages_;
  Position<kStages> at_;
};

// What the producers and consumers of a block share.
template <typename Config>
struct PlannedShared {
  static constexpr int kStageTiles = Config::kTileKeys / kPlanTileKeys;
  using Facts = StageFacts<Config::kTileKeys>;

  PlannedSources sources[WorkRing::kSlots];  // of the works
  Facts facts[Config::kFactsSlots];
  int tiles[Config::kRoleWarps][TileQueue<kStageTiles>::kRing];

  __device__ static int next_slot(int slot) { return slot + 1 == Config::kFactsSlots ? 0 : slot + 1; }
};

template <typename Config>
class ValueProducer {
 public:
  static constexpr int kArrivals = 32 * Config::kRoleWarps;  // at a full barrier: of every thread's copies
  static constexpr int kKeyArrivals = Config::kRoleWarps;    // at an empty barrier of keys: of every warp

  __device__ ValueProducer(StageCopier<Config, Config::kValueDim, Config::kValueStages> copier,
                           const PlannedShared<Config>& shared, Pipeline<Config::kKeyStages>& keys)
      : copier_(copier), shared_(shared), keys_(keys) {}

  // Once over all tiles.
  __device__ void run(const Work& work, const PlannedSources& sources) {
    copier_.start(work, sources.values, sources.value_stride);
    bool more = true;
#pragma unroll 1
    while (more) {
      // With the keys comes what is known of them.
      wait(shared_address(&keys_.full[key_at_.stage]), key_at_.parity);
      __syncwarp();
      if (copier_.lane() == 0) arrive(shared_address(&keys_.empty[key_at_.stage]));
      const auto& facts = shared_.facts[slot_];
      more = (facts.marks & facts.kLast) == 0;
      copier_.bring(facts, __reduce_max_sync(~0u, facts.box[copier_.warp()]));
      copier_.advance();
      key_at_.advance();
      slot_ = shared_.next_slot(slot_);
    }
  }

 private:
  StageCopier<Config, Config::kValueDim, Config::kValueStages> copier_;
  const PlannedShared<Config>& shared_;
  Pipeline<Config::kKeyStages>& keys_;
  Position<Config::kKeyStages> key_at_;
  int slot_ = 0;
};

template <typename Element, typename Config>
class KeyProducer {
 public:
  // At a full barrier: of every thread's copies, and of every warp's facts.
  static constexpr int kArrivals = 32 * Config::kRoleWarps + Config::kRoleWarps;
  using Copier = StageCopier<Config, Config::kHeadDim, Config::kKeyStages>;
  using Shared = PlannedShared<Config>;
  using Facts = typename Shared::Facts;
  using Queue = TileQueue<Shared::kStageTiles>;

  __device__ KeyProducer(Copier copier, const Sm90ForwardParams& params, Shared& shared, const WorkRing& ring, int warp,
                         int lane)
      : copier_(copier), params_(params), shared_(shared), ring_(ring), warp_(warp), lane_(lane) {}

  // Once over all tiles. There is one stage at least, if need be without a key.
  __device__ void run(int work_slot) {
    work_slot_ = work_slot;
    const PlannedSources& sources = this->sources();
    existing_ = work().existing, uncut_end_ = sources.uncut_end;
    listed_ = sources.listed, packed_words_ = sources.packed_words;
    has_bias_ = sources.key_bias != nullptr;
    copier_.start(work(), sources.keys, sources.key_stride);
    const bool pairs = params_.pairs_heads;
    Queue queue(sources, work().first_row % kChunkRows / kUnitRows, pairs ? 1 : 2, shared_.tiles[warp_], lane_);
    Stage stage = next_stage(&queue), next = next_stage(&queue);
    InFlight flight = request_facts(stage.tile, request_index(stage.tile));
    std::int32_t next_index = request_index(next.tile);
    bool more = true;
#pragma unroll 1
    while (more) {
      Facts& facts = shared_.facts[slot_];
      const std::int32_t box = make_facts(stage, flight, facts);
      __syncwarp();
      flight = request_facts(next.tile, next_index);
      more = (stage.marks & Facts::kLast) == 0;
      stage = next;
      next = next_stage(&queue);
      next_index = request_index(next.tile);
      copier_.bring(facts, box);
      if (lane_ == 0) arrive(copier_.full_barrier());  // with what the warp wrote of facts
      copier_.advance();
      slot_ = Shared::next_slot(slot_);
    }
  }

 private:
  // A stage as one warp sees it: the tile that has the warp's keys, and the marks of all.
  struct Stage {
    int tile;
    std::uint32_t marks;
  };
  // What is known of the lane's key of a stage, under way from memory. `seen`: packed words or, without a packed mask,
  // the interval and the byte of a key mask; what else there is, is read when it is needed: registers are short.
  struct InFlight {
    std::int32_t key;
    std::uint32_t seen[Facts::kMostWords];
    std::uint32_t bias;  // its bits
  };
  static constexpr int kBegin = 0, kEnd = 1, kMask = 2;

  __device__ const Work& work() const { return ring_.works[work_slot_]; }
  __device__ const PlannedSources& sources() const { return shared_.sources[work_slot_]; }
  // The lane's key is number key_slot() of a stage.
  __device__ int key_slot() const { return warp_ * kWarpKeys + lane_; }
  // Words of 32 rows that the block has for a key.
  __device__ int words() const { return params_.pairs_heads ? 2 : 4; }

  __device__ Stage next_stage(Queue* queue) const {
    int tiles[Shared::kStageTiles];
    queue->next(tiles);
    Stage stage = {tiles[0], queue->empty() ? Facts::kLast : 0};
#pragma unroll
    for (int tile = 0; tile < Shared::kStageTiles; ++tile) {
      stage.marks |= Queue::full_units(tiles[tile]) << (2 * tile);
      if (tile > 0 && warp_ * kWarpKeys >= tile * kPlanTileKeys) stage.tile = tiles[tile];
    }
    return stage;
  }

  // The lane's key, or -1.
  __device__ std::int32_t request_index(int tile) const {
    if (tile == Queue::kNoTile) return -1;
    const int position = Queue::position(tile) * kPlanTileKeys + key_slot() % kPlanTileKeys;
    if (listed_ != nullptr) return listed_[position];  // padded to whole tiles
    const PlannedSources& sources = this->sources();
    return position < sources.count ? sources.first + position : -1;
  }

  __device__ void read_interval_and_mask(std::int32_t key, std::uint32_t (&seen)[Facts::kMostWords]) const {
    const PlannedSources& sources = this->sources();
    const Visibility& visibility = params_.visibility;
    seen[kBegin] = 0, seen[kEnd] = params_.rows, seen[kMask] = 1;
    if (sources.begins != nullptr) {
      seen[kBegin] = sources.begins[key * visibility.begin.key_stride];
      seen[kEnd] = sources.ends[key * visibility.end.key_stride];
    }
    if (sources.key_mask != nullptr) seen[kMask] = sources.key_mask[key * visibility.key_mask.key_stride];
  }

  __device__ InFlight request_facts(int tile, std::int32_t key) const {
    InFlight flight = {key, {}, 0};
    if (key < 0 || key >= existing_) return flight;
    if (!Queue::is_full(tile)) {
      if (packed_words_ == nullptr) {
        read_interval_and_mask(key, flight.seen);
      } else {
        // Together: a warp's read of a word takes as long as one of four, as it is of so many lines of memory.
        const std::uint32_t* packed = params_.visibility.packed.words_of_key(packed_words_, key);
        if (words() == Facts::kMostWords) {
          const uint4 four = *reinterpret_cast<const uint4*>(packed);
          flight.seen[0] = four.x, flight.seen[1] = four.y, flight.seen[2] = four.z, flight.seen[3] = four.w;
        } else {
          const uint2 two = *reinterpret_cast<const uint2*>(packed);
          flight.seen[0] = two.x, flight.seen[1] = two.y;
        }
      }
    }
    if (has_bias_) {
      const void* key_bias = sources().key_bias;
      const std::int64_t offset = key * params_.bias.key_stride;
      flight.bias = params_.bias.dtype == DType::kFloat32 ? static_cast<const std::uint32_t*>(key_bias)[offset]
                                                          : static_cast<const std::uint16_t*>(key_bias)[offset];
    }
    return flight;
  }

  __device__ float bias_of(std::uint32_t bits) const {
    if (params_.bias.dtype == DType::kFloat32) return __uint_as_float(bits);
    return static_cast<float>(__builtin_bit_cast(Element, static_cast<std::uint16_t>(bits)));
  }

  // Returns the box, as `bring` wants it.
  __device__ std::int32_t make_facts(const Stage& stage, const InFlight& flight, Facts& facts) const {
    const bool seen = Queue::is_full(stage.tile) || make_words(flight, facts);
    const std::int32_t key = seen ? flight.key : -1;
    // Neighbours that are all there come as a box: the least is the first of them, or -1.
    const std::int32_t first = __reduce_min_sync(~0u, key), box = listed_ == nullptr ? first : -1;
    if (lane_ == 0) {
      if (warp_ == 0) facts.marks = stage.marks;
      facts.box[warp_] = box;
    }
    if (has_bias_) facts.bias[key_slot()] = bias_of(flight.bias);
    facts.key[key_slot()] = key;
    return box;
  }

  // Of the key's word and its neighbour's the halves of the same rows, side by side, turned left by the number of the
  // keys' column tile in the tile of the plan.
  __device__ std::uint32_t pair_word(std::uint32_t visible) const {
    const std::uint32_t other = __shfl_xor_sync(~0u, visible, 1);
    const std::uint32_t halves = __byte_perm(visible, other, lane_ % 2 == 0 ? 0x5410 : 0x3276);
    const int column_tile = key_slot() % kPlanTileKeys / 8;
    return __funnelshift_l(halves, halves, column_tile);
  }

  // The rows that see the key, but for a packed mask.
  __device__ RowRange range_of(const InFlight& flight, bool packed) const {
    const std::int32_t key = flight.key;
    if (key < 0 || key >= existing_) return {0, 0};
    std::uint32_t seen[Facts::kMostWords];
    if (packed) {
      read_interval_and_mask(key, seen);
    } else {
#pragma unroll
      for (int word = 0; word < Facts::kMostWords; ++word) seen[word] = flight.seen[word];
    }
    RowRange range = {static_cast<std::int32_t>(seen[kBegin]),
                      min(static_cast<std::int32_t>(seen[kEnd]), params_.rows)};
    if (params_.visibility.is_causal) range.begin = max(range.begin, key - (existing_ - params_.rows));
    if (seen[kMask] == 0) range.end = 0;
    return range;
  }

  // Says whether any row of the block sees the key.
  __device__ bool make_words(const InFlight& flight, Facts& facts) const {
    const bool packed = packed_words_ != nullptr;
    // Keys that do not exist have words without bits.
    const bool uncut = packed && __all_sync(~0u, flight.key < uncut_end_);
    const RowRange range = uncut ? RowRange{} : range_of(flight, packed);
    const int first_row = work().first_row;
    std::uint32_t any = 0;
#pragma unroll
    for (int word = 0; word < Facts::kMostWords; ++word) {
      if (word >= words()) break;
      std::uint32_t visible = packed ? flight.seen[word] : ~0u;
      if (!uncut) {
        const int row = first_row + word * kWordRows;
        visible &= bit_range(max(range.begin, 0) - row, max(range.end, 0) - row);
      }
      facts.words[word][key_slot()] = pair_word(visible);
      any |= visible;
    }
    return any != 0;
  }

  Copier copier_;
  const Sm90ForwardParams& params_;
  Shared& shared_;
  const WorkRing& ring_;
  int work_slot_ = 0;
  // What every stage asks for of the work, in registers: a read of shared memory waits behind those of products.
  const std::int32_t* listed_ = nullptr;
  const std::uint32_t* packed_words_ = nullptr;
  std::int32_t existing_ = 0, uncut_end_ = 0;
  bool has_bias_ = false;
  const int warp_, lane_;
  int slot_ = 0;  // of the facts
};

}  // namespace flash_dmattn::internal::cuda::sm90

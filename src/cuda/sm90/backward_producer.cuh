// The producers of the sm90 backward, one warp group: they look works up, bring their keys and values and, step by
// step, queries, output gradients and what is known of them. Each warp knows 32 of the keys, a lane one.
#pragma once

#include <cuda.h>

#include <climits>
#include <cstdint>

#include "cuda/attention/key_block.cuh"
#include "cuda/attention/key_works.cuh"
#include "cuda/attention/met_once.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/tokens.cuh"
#include "cuda/plan/entry_offset.cuh"
#include "cuda/plan/visibility.cuh"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/sm90/backward_block.cuh"
#include "cuda/sm90/gathered_rows.cuh"
#include "cuda/sm90/pair_producer.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/step_facts.cuh"
#include "cuda/sm90/warps.h"

namespace flash_dmattn::internal::cuda::sm90 {

template <typename Block>
struct BackwardProducer : PairProducer<Block> {
  using Base = PairProducer<Block>;
  using Config = typename Block::Config;
  using Facts = typename Block::Facts;
  using Walk = typename Block::Walk;
  using Step = typename Block::Step;
  using Work = typename Block::Work;
  static constexpr bool kPlanned = Block::kPlanned, kReadsWordsAhead = Block::kReadsWordsAhead,
                        kStoresQueries = Block::kStoresQueries;
  static constexpr std::uint32_t kAbsent = Block::kAbsent, kKeyPanel = Block::kKeyPanel, kRowPanel = Block::kRowPanel;
  static constexpr int kTileRows = Block::kTileRows, kTileKeys = Block::kTileKeys, kStages = Block::kStages;
  static constexpr bool kPaired = Block::kPaired;
  static constexpr int kWorkKeys = Block::kWorkKeys;
  using Base::Base;
  using Block::params, Block::maps, Block::shared, Block::keys, Block::values, Block::biases;
  using Block::queries_at, Block::output_gradients_at, Block::first_position;

  static constexpr int kBiasWarp = 1;  // brings biases that differ by row

  __device__ void produce() {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    if (warp >= Config::kProducerWarps) return;
    Position<kStages> at;  // of the next step
    if (lane == 0) shared.taken[warp] = 0;
    __syncwarp();
    if (is_for_this_kernel()) {
#pragma unroll 1
      while (take_work(warp, lane)) {
        find_key(warp, lane);
        produce_steps(warp, lane, at);
        __syncwarp();
        if (lane == 0) ++shared.taken[warp];
        __syncwarp();
      }
    }
    wait_or_say(shared.steps.empty[at.stage], at.parity ^ 1);
    if (warp == 0 && lane == 0) set_mark(at, Facts::kDone);
    arrive(shared_address(&shared.steps.full[at.stage]));
    if (takes_turns() && threadIdx.x == kSayingThread) shared.turns.say_all(params.turns);
  }

  __device__ bool takes_turns() const { return (kAbsent & Facts::kTakesTurns) == 0 && params.turns.queries != nullptr; }

  // Of a kernel that stores queries, and its twin that does not, one has no works.
  __device__ bool is_for_this_kernel() const {
    if constexpr (!kPlanned || !Config::kMayStoreQueries) return true;
    return params.met_once.tiles == nullptr || stores_queries(params.met_once) == kStoresQueries;
  }

  // The thread of the second warp that says what consumers have added (query_turns.cuh). Whatever it waits for, it goes
  // on: other blocks may wait for that.
  static constexpr unsigned kSayingThread = 32;
  static_assert(Config::kProducerWarps > 1);
  __device__ void wait_or_say(std::uint64_t& barrier, std::uint32_t parity) const {
    if (takes_turns() && threadIdx.x == kSayingThread) {
      shared.turns.say_until(shared_address(&barrier), parity, params.turns);
    }
    __syncwarp();
    wait(shared_address(&barrier), parity);
  }

  // The warp's work.
  __device__ Work& work(int warp) const { return shared.works[shared.taken[warp] % 2]; }

  // Whether most warps are done with a work earlier than the first one (end_work), and so which one takes the next
  // work.
  __device__ bool ends_early() const { return Config::kEndsWorksEarly && !takes_turns(); }
  __device__ int taking_warp() const { return ends_early() ? Config::kProducerWarps - 1 : 0; }

  // The block's next work, if there is one: which, says one warp.
  __device__ bool take_work(int warp, int lane) const {
    Work& work = this->work(warp);
    const std::uint32_t taken = shared.taken[warp];
    wait_or_say(shared.works_empty[taken % 2], (taken / 2 % 2) ^ 1);
    if (recomputed(warp) == taking_warp()) {
      const int next = next_work(taken, lane);
      if (lane == 0) {
        work.block.exists = false;
        if (next >= 0) {
          work.block = block_of_work<kWorkKeys, kPlanned>(params, next);
          work.existing = key_count(params.visibility, work.block.batch);
          if (kPlanned && takes_turns()) count_earlier_works(work);
        }
      }
    }
    if (recomputed(warp) == taking_warp()) arrive(shared_address(&shared.works_full[taken % 2]));
    wait_or_say(shared.works_full[taken % 2], taken / 2 % 2);
    return work.block.exists;
  }

  // By a warp: the number of the next work, less than 0: there is none. Where blocks wait for one another they
  // count their first works, too: a block that is not running yet has none that others could wait for.
  __device__ int next_work(std::uint32_t taken, int lane) const {
    const int works = all_works<kWorkKeys, kPlanned>(params);
    int work;
    do {
      work = key_work<kWorkKeys, kPlanned>(params, next_place(taken, lane), works);
    } while (work == kNoWork);
    return work;
  }
  __device__ int next_place(std::uint32_t taken, int lane) const {
    if constexpr (kPaired) {
      if (Block::rank() != 0) return Base::place_of_pair(taken, lane);
    }
    int place = static_cast<int>(blockIdx.x) / Block::kBlocks;
    if (taken > 0 || takes_turns()) {
      if (lane == 0) place = atomicAdd(params.works.taken, 1);
      if (!takes_turns()) place += recomputed(static_cast<int>(gridDim.x)) / Block::kBlocks;
      place = __shfl_sync(~0u, place, 0);
    }
    if constexpr (kPaired) Base::hand_place_on(taken, place, lane);
    return place;
  }

  __device__ void count_earlier_works(Work& work) const {
    const std::int32_t* starts = params.works.starts;
    const int before = starts[entry_of(params, work.block)];
    work.earlier_of_key_head = before - starts[first_entry_of_key_head(params, work.block)];
    work.earlier_of_share = before - starts[first_entry_of_share(params, work.block)];
  }

  // The lane's key, and the rows that see it.
  __device__ void find_key(int warp, int lane) const {
    Work& work = this->work(warp);
    const KeyBlock& block = work.block;
    const std::int32_t key = key_of(block, warp * kWarpKeys + lane);
    const RowRange range = visible_rows<true>(params.visibility, block.batch, block.first_head, work.existing, key);
    bool visible = range.begin < range.end;
    if constexpr (kPlanned) {
      visible = any_row_sees<true>(params.visibility, range, block.batch, block.first_head, key, block.first_chunk,
                                   block.end_chunk);
    }
    const int column = warp * kWarpKeys + lane;
    const std::int32_t seen_key = visible ? key : -1;
    work.key[column] = seen_key;
    if constexpr (kPaired) Base::hand_key_on(seen_key, warp, lane);
    shared.range[column] = range;
    if constexpr (kPlanned) {
      // The same for all heads of the work.
      const PackedMask& packed = params.visibility.packed;
      shared.words.set_key(packed, head_offset<true>(packed, block.batch, block.first_head), key, column, visible);
      // Words have no rows past the last: a range need not end there.
      const int begin = __reduce_max_sync(~0u, visible ? range.begin : 0),
                end = __reduce_min_sync(~0u, visible && range.end < params.rows ? range.end : INT_MAX);
      if (lane == 0) shared.common_range[warp] = {begin, end};
      __syncwarp();
    }
  }

  // The key of a column of the tile, -1: none.
  __device__ std::int32_t key_of(const KeyBlock& block, int column) const {
    const int position = first_position(block) + column;
    if (!block.listed) return position;
    if (position >= params.plan.chunks[block.plan_chunk].count) return -1;
    return params.plan.keys[static_cast<std::int64_t>(block.plan_chunk) * params.plan.capacity + position];
  }

  // Copies 32 rows of two tensors, the first with columns of queries and keys, the second with those of values, to
  // panels. `index`: which rows, one a lane. Those that are used once, L2 may forget.
  template <std::uint32_t kPanel, bool kUsedOnce>
  __device__ void gather(int lane, std::int32_t index, const TokenRows& first, const TokenRows& second,
                         std::uint32_t first_target, std::uint32_t second_target) const {
    for_each_gathered_row(lane, index, [&](std::int32_t source, int first_column, std::uint32_t offset) {
#pragma unroll
      for (int panel = 0; panel < Config::kKeyPanels; ++panel) {
        const int column = panel * 64 + first_column;
        const auto copy = [&](std::uint32_t target, const std::uint16_t* row, int columns) {
          const bool valid = source >= 0 && column < columns;
          if constexpr (kUsedOnce) {
            copy_async_16(target + panel * kPanel + offset, row + column, valid, L2Policy::kUsedOnce);
          } else {
            copy_async_16(target + panel * kPanel + offset, row + column, valid);
          }
        };
        copy(first_target, first.row(source), params.head_dim);
        if (panel < Config::kValuePanels) copy(second_target, second.row(source), params.value_dim);
      }
    });
  }

  // Once consumers are done with those before. Keys that nobody sees arrive as zeros.
  __device__ void bring_keys(int warp, int lane) const {
    const Work& work = this->work(warp);
    const KeyBlock& block = work.block;
    const std::int32_t key = work.key[warp * kWarpKeys + lane];
    wait_or_say(shared.keys.empty[0], (shared.taken[warp] % 2) ^ 1);
    const std::uint32_t full = shared_address(&shared.keys.full[0]);
    if constexpr (kPaired) Base::bring_other_keys(block, warp, lane);
    // Neighbours that all exist and are seen come in boxes: a handful of instructions in place of some hundred.
    if (maps.boxes_of_keys && !block.listed && __all_sync(~0u, key >= 0)) {
      if (lane == 0) {
        expect_bytes(full, (Config::kKeyPanels + Config::kValuePanels) * kWarpKeys * 128);
#pragma unroll
        for (int panel = 0; panel < Config::kKeyPanels; ++panel) {
          const std::uint32_t offset = panel * kKeyPanel + warp * kWarpKeys * 128;
          load_box(keys + offset, maps.key, panel * 64, key, block.key_head, block.batch, full);
          if (panel >= Config::kValuePanels) continue;
          load_box(values + offset, maps.value, panel * 64, key, block.key_head, block.batch, full);
        }
      }
      __syncwarp();
      return kPaired ? arrive_when_copied(full) : arrive(full);
    }
    gather<kKeyPanel, Config::kReadsKeysOnce>(lane, key, rows_of(params.key, block.batch, block.key_head, 0),
                                              rows_of(params.value, block.batch, block.key_head, 0),
                                              keys + warp * kWarpKeys * 128, values + warp * kWarpKeys * 128);
    arrive_when_copied(full);
  }

  __device__ std::int64_t tile_of(const KeyBlock& block, const Step& step) const {
    const int row_tiles = (params.rows + kTileRows - 1) / kTileRows;
    return (static_cast<std::int64_t>(block.batch) * params.heads + step.head) * row_tiles + step.row_tile;
  }

  // The tile of rows of the sums that the step adds to.
  __device__ int sums_of(const KeyBlock& block, const Step& step) const {
    const std::int64_t tile = tile_of(block, step);
    if (params.dquery_colors == 1) return static_cast<int>(tile);
    const int row_tiles = (params.rows + kTileRows - 1) / kTileRows, color = block.tile % params.dquery_colors;
    return static_cast<int>(tile + std::int64_t{color} * params.batch * params.heads * row_tiles);
  }

  // Whether the step's rows are met once, and their dquery is stored.
  __device__ bool stores_queries_of(const KeyBlock& block, const Step& step) const {
    if (!kStoresQueries || !step.exists()) return false;
    const int first_row = step.first_row(), chunk = first_row / kChunkRows;
    return is_met_once(params.met_once, block.plan_chunk + chunk - block.first_chunk, first_row);
  }
  __device__ StepRows rows_of_dquery(const KeyBlock& block, const Step& step) const {
    const TokenRows rows = rows_of(params.dquery, block.batch, step.head, step.first_row());
    return {const_cast<std::uint16_t*>(rows.base), params.rows - step.first_row()};
  }

  // By the first warp, when it has handed on the step. A turn is granted kStages - 1 steps after it was asked for,
  // before consumers come to adding: by then they have heard of the one that had its place before.
  __device__ void await_turns(const KeyBlock& block, const Step& step, int lane) const {
    int previous = -1;
    if (step.exists()) previous = Walk::previous_tile(params, block, step.row_tile, params.dquery_colors);
    if (lane == 0) {
      if (step.exists()) shared.turns.ask(sums_of(block, step), previous);
      shared.turns.grant(params.turns, step.exists() ? kStages - 1 : 0);
    }
    __syncwarp();
  }

  // By a thread of the second warp, before it hands on the step.
  __device__ void say_what_is_added(const KeyBlock& block, const Step& step) const {
    shared.turns.say(params.turns);
    if (step.exists()) shared.turns.bring(sums_of(block, step), block.tile);
  }

  // Whether every row of the step sees every key of the block.
  __device__ bool is_full(const Work& work, const Step& step) const {
    if constexpr (kPlanned) return step.full;
    return causal_limit(params.visibility, work.existing, step.first_row()) >= first_position(work.block) + kTileKeys;
  }

  // By one thread: of a step `bits`, besides what says which one it is.
  __device__ void set_mark(const Position<kStages>& at, std::uint32_t bits) const {
    shared.facts[at.stage].mark = bits | shared.marks | at.stage << Facts::kStageShift |
                                  queries_at(at.stage) / Facts::kAddressUnits << Facts::kAddressShift |
                                  (at.parity != 0 ? Facts::kOddRound : 0) | shared.number << Facts::kNumberShift |
                                  Facts::number_before(shared.number) << Facts::kLastNumberShift;
  }

  // Every warp walks for itself. The first one brings rows, and what is known of them; all make words of their keys,
  // which they bring once the first step is on its way: its rows have a place before keys do.
  __device__ void produce_steps(int warp, int lane, Position<kStages>& at) const {
    const Work& work = this->work(warp);
    Walk& walk = shared.walks[warp];
    walk.start(params, work.block, work.existing);
    if (recomputed(warp) == 0 && lane == 0) shared.head = -1;
    bool exists = true, has_keys = false;
    if constexpr (kReadsWordsAhead) shared.words.begin_work(warp, lane);
#pragma unroll 1
    while (exists) {
      Step step = walk.next(params, work.block, work.existing);
      exists = step.exists();
      if (!exists && has_keys && recomputed(warp) != 0 && ends_early()) return end_work(at);
      if constexpr (!kPlanned) {
        // From the last rows to the first, tiles of keys that start at the same time meet one after another.
        if (exists && takes_turns()) step.row_tile = Walk::mirrored(params, work.block, work.existing, step.row_tile);
      }
      // Tested anew each time: there are no predicates to keep it in.
      const int full = exists && is_full(work, step) ? 1 : 0;
      std::uint32_t words[Config::kWords];
      // Words are found before there is a stage: consumers wait for all that comes after that.
      if (kReadsWordsAhead && exists && recomputed(full) == 0) find_words(words, work, step, warp, lane);
      wait_or_say(shared.steps.empty[at.stage], at.parity ^ 1);
      if (recomputed(warp) == 0) bring_step(work, step, recomputed(full) != 0, at, lane);
      if (exists && recomputed(full) == 0) {
        if constexpr (kReadsWordsAhead) {
          store_words(words, shared.facts[at.stage].words[warp * kWarpKeys + lane]);
        } else {
          make_words(work, step, warp * kWarpKeys + lane, shared.facts[at.stage]);
        }
      }
      if (takes_turns() && threadIdx.x == kSayingThread) say_what_is_added(work.block, step);
      __syncwarp();
      arrive(shared_address(&shared.steps.full[at.stage]));
      at.advance();
      if constexpr (Config::kRowBiased) {
        if (recomputed(warp) == kBiasWarp && exists && lane == 0) bring_bias(work.block, step);
        __syncwarp();
      }
      if (takes_turns() && recomputed(warp) == 0) await_turns(work.block, step, lane);
      if (!has_keys) bring_keys(warp, lane);
      has_keys = true;
    }
  }

  // What says that a work has no more steps is written by the first warp, once the stage is empty. The others have
  // nothing to write and do not wait for that, but look the next work up meanwhile, which takes longer than a step:
  // all they need is that the stage was full before, or this would count as their part of that.
  __device__ void end_work(Position<kStages>& at) const {
    wait(shared_address(&shared.steps.full[at.stage]), at.parity ^ 1);
    arrive(shared_address(&shared.steps.full[at.stage]));
    at.advance();
  }

  // By the first warp: which step it is, and its rows. One that does not exist is the end of the work.
  __device__ void bring_step(const Work& work, const Step& step, bool full, const Position<kStages>& at,
                             int lane) const {
    Facts& facts = shared.facts[at.stage];
    if (lane == 0) {
      const bool stores = stores_queries_of(work.block, step);
      if (stores) shared.rows_met_once[shared.number] = rows_of_dquery(work.block, step);
      set_mark(at, (step.exists() ? Facts::kExists : 0) | (full ? Facts::kFull : 0) |
                       (step.head != shared.head ? Facts::kStartsHead : 0) | (stores ? Facts::kMetOnce : 0) |
                       (shared.taken[0] % 2 != 0 ? Facts::kOddWork : 0));
      if constexpr (Config::kRowBiased) {
        if (step.exists()) shared.row_bias.places[shared.number] = {step.first_row(), step.head};
      }
      if (step.exists()) shared.number = Facts::number_after(shared.number);
      facts.head = shared.head = step.head;
      facts.first_row = step.first_row();
      facts.tile = sums_of(work.block, step);
    }
    if (step.exists()) bring_rows(work.block, step, facts, at, lane);
  }

  // By one thread: of the step's rows and each consumer's keys, once those of the step before have been read.
  __device__ void bring_bias(const KeyBlock& block, const Step& step) const {
    const BroadcastView& bias = params.bias;
    const auto head = static_cast<int>(entry_of_head(step.head, bias.head_divisor));
    const int batch = bias.batches == 1 ? 0 : block.batch;
    const std::uint32_t before = shared.row_bias.steps_brought++;
#pragma unroll 1
    for (int consumer = 0; consumer < Config::kConsumers; ++consumer) {
      const auto& pipeline = shared.row_bias.consumers[consumer];
      const std::uint32_t full = shared_address(&pipeline.full[0]);
      wait(shared_address(&pipeline.empty[0]), before % 2 ^ 1);
      arrive_expecting(full, kRowPanel);
      load_box(biases + consumer * kRowPanel, maps.bias, first_position(block) + consumer * Config::kConsumerKeys,
               step.first_row(), head, batch, full);
    }
  }

  // Queries, output gradients and facts of the step's rows. Rows past the last have facts too.
  __device__ void bring_rows(const KeyBlock& block, const Step& step, Facts& facts, const Position<kStages>& at,
                             int lane) const {
    const RowFacts* source = params.row_facts + tile_of(block, step) * (2 * kTileRows);
    if (shared.has_unseen_row && gather_rows(block.batch, step, source, facts, at, lane)) return;
    if constexpr (Config::reads_places_once(kPlanned)) {
      const int head = step.head, first_row = step.first_row(), batch = block.batch, stage = at.stage;
      if (lane == 0) bring_boxes(head, first_row, batch, stage, source);
    } else {
      if (lane == 0) bring_boxes(step.head, step.first_row(), block.batch, at.stage, source);
    }
  }
  // By one thread. What these refer to in memory is read again for every box, as what brings one may write memory.
  __device__ __forceinline__ void bring_boxes(const int& head, const int& first_row, const int& batch, const int& stage,
                                              const RowFacts* source) const {
    const std::uint32_t full = shared_address(&shared.steps.full[stage]);
    auto& rows = shared.facts[stage].rows;
    expect_bytes(full, Config::kRowBytes + sizeof(rows));
    load_bytes(shared_address(&rows), source, sizeof(rows), full);
#pragma unroll
    for (int panel = 0; panel < Config::kKeyPanels; ++panel) {
      load_box(queries_at(stage) + panel * kRowPanel, maps.query, panel * 64, first_row, head, batch, full);
      if (panel >= Config::kValuePanels) continue;
      load_box(output_gradients_at(stage) + panel * kRowPanel, maps.dout, panel * 64, first_row, head, batch, full);
    }
  }

  // The same if some row sees no key, which it says: query and output gradient of such a row, which may be anything,
  // arrive as zeros.
  __device__ bool gather_rows(int batch, const Step& step, const RowFacts* source, Facts& facts,
                              const Position<kStages>& at, int lane) const {
    const auto sees = [&](int row) { return source[row] != INFINITY; };
    bool unseen = false;
    for (int row = lane; row < kTileRows; row += 32) unseen |= !sees(row) && step.first_row() + row < params.rows;
    if (!__any_sync(~0u, unseen)) return false;
    const TokenRows queries = rows_of(params.query, batch, step.head, step.first_row()),
                    gradients = rows_of(params.dout, batch, step.head, step.first_row());
#pragma unroll 1
    for (int first_row = 0; first_row < kTileRows; first_row += 32) {
      const int row = first_row + lane;
      facts.rows.lse[row] = source[row], facts.rows.delta[row] = source[kTileRows + row];
      gather<kRowPanel, false>(lane, sees(row) ? row : -1, queries, gradients, queries_at(at.stage) + first_row * 128,
                               output_gradients_at(at.stage) + first_row * 128);
    }
    commit_copies();
    wait_copies<0>();
    fence_async_proxy();
    return true;
  }

  // What a step's rows see of the column's key, 32 of them in a word: found one by one, where there are few registers
  // or, without a plan, few such steps.
  __device__ void make_words(const Work& work, const Step& step, int column, Facts& facts) const {
    const PackedMask& packed = params.visibility.packed;
    const bool is_packed = kPlanned && packed.defined();
#pragma unroll
    for (int word = 0; word < Config::kWords; ++word) {
      const int row = step.first_row() + word * kWordRows;
      std::uint32_t seen = 0;
      if (work.key[column] >= 0) {
        seen = is_packed ? shared.words.word(packed, column, row) : ~0u;
        const RowRange range = shared.range[column];
        seen &= bit_range(range.begin - row, range.end - row);
      }
      facts.words[column][word] = seen;
    }
  }

  // The same for the lane's key, found all together before there is a stage for them.
  __device__ void find_words(std::uint32_t (&words)[Config::kWords], const Work& work, const Step& step, int warp,
                             int lane) const {
    const int column = warp * kWarpKeys + lane, first_row = step.first_row();
    const PackedMask& packed = params.visibility.packed;
    if (packed.defined()) {
      shared.words.read(packed, warp, lane, first_row);
      shared.words.take(words, column, first_row);
      // Most steps of a causal mask lie below the diagonal: no word has to be cut.
      const RowRange common = shared.common_range[warp];
      if (first_row >= common.begin && first_row + kTileRows <= common.end) return;
    }
    const RowRange range = work.key[column] < 0 ? RowRange{0, 0} : shared.range[column];
#pragma unroll
    for (int word = 0; word < Config::kWords; ++word) {
      const int row = first_row + word * kWordRows;
      const std::uint32_t seen = bit_range(range.begin - row, range.end - row);
      words[word] = packed.defined() ? words[word] & seen : seen;
    }
  }
  __device__ static void store_words(const std::uint32_t (&words)[Config::kWords],
                                     std::uint32_t (&target)[Config::kWords]) {
    if constexpr (Config::kWords == 2) {
      store_shared_8(shared_address(target), words);
    } else {
      store_shared_16(shared_address(target), words);
    }
  }
};

}  // namespace flash_dmattn::internal::cuda::sm90

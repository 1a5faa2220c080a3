// What a block of the backward keeps in shared memory, and how it gets there: tiles of keys and values for the whole
// walk, of queries and output gradients for a step or two, and what is known of keys, rows and steps.
#pragma once

#include "cuda/attention/key_block.cuh"
#include "cuda/attention/key_works.cuh"
#include "cuda/attention/met_once.cuh"
#include "cuda/attention/row_walk.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/attention/tokens.cuh"
#include "cuda/sm80/backward_config.h"
#include "cuda/sm80/row_pairs.cuh"

namespace flash_dmattn::internal::cuda {

// kStoresQueries: the kernel for calls that store dquery of rows that are met once (MetOnceTiles).
template <typename Element, int kHeadDim, int kValueDim, bool kPlanned, bool kRowBias, bool kNarrow,
          bool kStoresQueries>
struct BackwardMemory {
  using Config = BackwardConfig<kHeadDim, kValueDim, kNarrow>;
  static constexpr int kTileRows = Config::kTileRows, kTileKeys = Config::kTileKeys, kThreads = Config::kThreads;
  using KeyTile = SharedTile<kHeadDim>;
  using ValueTile = SharedTile<kValueDim>;
  using ScoreTile = SharedTile<kTileKeys>;
  using Walk = RowWalk<kTileRows, kTileKeys, kPlanned>;
  using Step = typename Walk::Step;

  // Rings, indexed by a step's number: BackwardBlock::run says which steps have a slot at the same time.
  static constexpr int kStepSlots = 4, kFactSlots = 3, kWordSlots = 2;

  // Whether a block stays for many works of a plan: where registers are short, the loop over them would spill some.
  static constexpr bool kStays = kPlanned && !kRowBias && kHeadDim <= 192;

  // Whether there are kernels that store dquery of rows that are met once.
  static constexpr bool kMayStoreQueries = kStays && Config::kMayStoreQueries;

  struct NotedStep : Step {
    bool is_met_once;
  };

  // A work that is looked up while the last steps of the one before are computed.
  struct NextWork {
    KeyBlock block;
    int number;   // or kNoMoreWorks
    int lookups;  // so many times look_up_work was called for it
  };

  // What is the same for the whole block is here too: registers are short.
  struct Shared {
    RowFacts row_facts[kFactSlots][2 * kTileRows];  // of a step's rows: lse, then delta
    std::int32_t key[kTileKeys];  // of each column; -1: none, or no row sees it, and the tile holds zeros
    RowRange range[kTileKeys];
    float bias[kTileKeys];                           // if it is the same for every row
    float dbias[Config::kScoreRowWarps][kTileKeys];  // likewise; each row of warps adds to a part of its own
    std::uint32_t words[kWordSlots][Config::kWords][kTileKeys];
    NotedStep steps[kStepSlots];
    Walk walk;
    KeyBlock block;
    int existing;
    int head;                            // of the step
    bool has_large_row, has_unseen_row;  // of the call
    bool stores_queries;                 // likewise: where rows are met once
    bool is_met_once;                    // of the step, for its last product: no register holds it until then
    bool transforms;                     // whether anything is done to scores before the softmax
    NextWork next;                       // planned
  };
  static constexpr std::size_t kSharedBytes = Config::kTileSharedBytes + sizeof(Shared);
  // As many as may run at the same time, registers aside: a block without works costs a microsecond.
  static constexpr int kBlocksPerProcessor = static_cast<int>(kWideSharedBytes / kSharedBytes);

  const BackwardParams& params;
  KeyTile keys;
  ValueTile values;
  std::uint32_t rows_address;  // stages of queries and output gradients
  ScoreTile probabilities, score_gradients;
  Shared& shared;
  const KeyBlock& block;

  // `own_block` may be that of the next work.
  __device__ BackwardMemory(const BackwardParams& params, const KeyBlock& own_block, unsigned char* memory)
      : params(params),
        keys{shared_address(memory)},
        values{keys.address + static_cast<std::uint32_t>(Config::kKeyBytes)},
        rows_address(values.address + static_cast<std::uint32_t>(Config::kValueBytes)),
        probabilities{rows_address + static_cast<std::uint32_t>(Config::kStages * Config::kRowBytes)},
        score_gradients{probabilities.address + static_cast<std::uint32_t>(Config::kScoreBytes)},
        shared(shared_in(memory)),
        block(shared.block) {
    if (threadIdx.x == 0) {
      shared.block = own_block;
      shared.next.lookups = 0;
      shared.existing = key_count(params.visibility, own_block.batch);
      shared.has_large_row = params.row_flags->has_large_row != 0;
      shared.has_unseen_row = params.row_flags->has_unseen_row != 0;
      shared.stores_queries = kStoresQueries && stores_queries(params.met_once);
      shared.transforms = params.score.transforms || shared.has_large_row;
    }
    __syncthreads();
  }

  __device__ static Shared& shared_in(unsigned char* memory) {
    return *reinterpret_cast<Shared*>(memory + Config::kTileSharedBytes);
  }

  // Planned: takes the next work, and at the second call starts reading what it owns: each call has the time of a step
  // until the next one. By one warp. First works are counted, too, as blocks may begin when others end.
  __device__ static void look_up_work(const BackwardParams& params, NextWork& next) {
    const int lane = static_cast<int>(threadIdx.x), lookups = next.lookups;
    __syncwarp();
    if (lookups == 0 && lane == 0) {
      const int place = atomicAdd(params.works.taken, 1);
      const int works = works_before<kTileKeys, true>(params, params.batch * params.key_heads);
      next.number = place < works ? place : kNoMoreWorks;
    }
    if (lookups == 1 && next.number != kNoMoreWorks && lane < static_cast<int>(sizeof(KeyBlock) / 4)) {
      const auto* source = reinterpret_cast<const std::uint32_t*>(&params.works.blocks[next.number]);
      copy_async_4(shared_address(reinterpret_cast<std::uint32_t*>(&next.block) + lane), source + lane, true);
    }
    if (lane == 0) next.lookups = lookups + 1;
    __syncwarp();
  }

  // The work that has been looked up. By all threads, when they are done with the one before. `first`: none was.
  __device__ static const NextWork& next_work(const BackwardParams& params, unsigned char* memory, bool first) {
    NextWork& next = shared_in(memory).next;
    if (first && threadIdx.x < 32) {
      if (threadIdx.x == 0) next.lookups = 0;
      __syncwarp();
      for (int lookup = 0; lookup < 2; ++lookup) look_up_work(params, next);
    }
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    return next;
  }

  __device__ int existing() const { return shared.existing; }

  __device__ KeyTile queries(int stage) const {
    return {rows_address + static_cast<std::uint32_t>(stage * Config::kRowBytes)};
  }
  __device__ ValueTile output_gradients(int stage) const {
    return {rows_address + static_cast<std::uint32_t>(stage * Config::kRowBytes + Config::kQueryBytes)};
  }

  __device__ int row_tiles() const { return (params.rows + kTileRows - 1) / kTileRows; }

  __device__ bool is_met_once(const Step& step) const {
    if (!kStoresQueries || !shared.stores_queries || !step.exists()) return false;
    const int first_row = step.first_row(), chunk = first_row / kChunkRows;
    return internal::cuda::is_met_once(params.met_once, block.plan_chunk + chunk - block.first_chunk, first_row);
  }

  // By one warp.
  __device__ void note_step(int number) const {
    if (threadIdx.x >= 32) return;
    const Step step = shared.walk.next(params, block, existing());
    if (threadIdx.x == 0) shared.steps[number % kStepSlots] = {step, is_met_once(step)};
    // Every walk ends with as many notes of no step as steps are noted ahead.
    if (kStays && !step.exists()) look_up_work(params, shared.next);
  }

  // The last threads begin, since the first warp starts the walk meanwhile.
  __device__ void read_key_facts() const {
    for (int column = kThreads - 1 - static_cast<int>(threadIdx.x); column < kTileKeys; column += kThreads) {
      int key = block.tile * kTileKeys + column;
      if (block.listed) {
        const ChunkKeys chunk_keys = params.plan.chunks[block.plan_chunk];
        key = key < chunk_keys.count
                  ? params.plan.keys[static_cast<std::int64_t>(block.plan_chunk) * params.plan.capacity + key]
                  : -1;
      }
      const RowRange range = visible_rows(params.visibility, block.batch, block.first_head, existing(), key);
      bool visible = range.begin < range.end;
      if constexpr (kPlanned) {
        visible = any_row_sees(params.visibility, range, block.batch, block.first_head, key, block.first_chunk,
                               block.end_chunk);
      }
      shared.key[column] = visible ? key : -1;
      shared.range[column] = range;
#pragma unroll
      for (int part = 0; part < Config::kScoreRowWarps; ++part) shared.dbias[part][column] = 0;
    }
  }

  // Of a bias that is the same for every row.
  __device__ void read_key_bias(int head) const {
    if (kRowBias || !params.bias.defined()) return;
    for (int column = static_cast<int>(threadIdx.x); column < kTileKeys; column += kThreads) {
      const int key = shared.key[column];
      const std::int64_t offset = params.bias.offset(block.batch, head) + key * params.bias.key_stride;
      shared.bias[column] = key < 0 ? 0 : load_bias<Element>(params.bias, offset);
    }
  }

  // Keys and values, once for the whole walk.
  __device__ void load_keys() const {
    const TokenRows sources[] = {rows_of(params.key, block.batch, block.key_head, 0),
                                 rows_of(params.value, block.batch, block.key_head, 0)};
    load_row_pairs<kTileKeys, kThreads>(
        static_cast<int>(threadIdx.x), keys, values, sources, [&](int row) { return shared.key[row]; },
        {params.head_dim, params.value_dim}, params.aligned);
  }

  // Rows past the last have facts too.
  __device__ void load_row_facts(Step step, int slot) const {
    const int thread = static_cast<int>(threadIdx.x);
    if (!step.exists() || thread >= kTileRows / 2) return;
    const std::int64_t tile =
        (static_cast<std::int64_t>(block.batch) * params.heads + step.head) * row_tiles() + step.row_tile;
    copy_async_16(shared_address(&shared.row_facts[slot][4 * thread]),
                  params.row_facts + tile * (2 * kTileRows) + 4 * thread, true);
  }

  // Queries and output gradients; the step's row facts are there.
  __device__ void load_step(Step step, int stage, int slot) const {
    load_rows(step, stage, [&](int row) { return shared.row_facts[slot][row] != INFINITY; });
  }
  // The same: of rows for which `sees` is false, as they see no key or do not exist, zeros, whatever they hold.
  template <typename Sees>
  __device__ void load_rows(Step step, int stage, Sees sees) const {
    const TokenRows sources[] = {rows_of(params.query, block.batch, step.head, step.first_row()),
                                 rows_of(params.dout, block.batch, step.head, step.first_row())};
    load_row_pairs<kTileRows, kThreads>(
        static_cast<int>(threadIdx.x), queries(stage), output_gradients(stage), sources,
        [&](int row) { return sees(row) ? row : -1; }, {params.head_dim, params.value_dim}, params.aligned);
  }

  __device__ void make_words(Step step, int slot) const {
    if (step.full) return;
#pragma unroll
    for (int index = static_cast<int>(threadIdx.x); index < kTileKeys * Config::kWords; index += kThreads) {
      const int word = index / kTileKeys, column = index % kTileKeys;
      const int key = shared.key[column];
      shared.words[slot][word][column] = key < 0 ? 0
                                                 : visible_word(params.visibility, shared.range[column], block.batch,
                                                                step.head, key, step.first_row() + word * kWordRows);
    }
  }
};

}  // namespace flash_dmattn::internal::cuda

// The portable backward: one block owns a tile of keys and walks over the tiles of query rows that see it, for some
// query heads of a group. Gradients of its keys and values stay in registers; those of queries are added up in global
// memory.
//
// Five products a step, S the scores, P the probabilities, d the gradients:
//   S = Q K^T,  dP = dO V^T,  dV += P^T dO,  dK += dS^T Q,  dQ += dS K      with dS = P (dP - delta)
// (Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 2).
#pragma once

#include "cuda/attention/block_order.cuh"
#include "cuda/attention/hide.cuh"
#include "cuda/attention/key_block.cuh"
#include "cuda/attention/key_results.cuh"
#include "cuda/attention/large_rows.cuh"
#include "cuda/attention/row_walk.cuh"
#include "cuda/attention/tokens.cuh"
#include "cuda/attention/walk.cuh"
#include "cuda/attention/warp_gemm.cuh"
#include "cuda/sm80/backward_config.h"

namespace flash_dmattn::internal::cuda {

// kLargeRows: the kernel for calls with large rows, where they have one.
template <typename Element, int kHeadDim, bool kPlanned, bool kRowBias, bool kNarrow, bool kLargeRows = false>
struct BackwardBlock {
  using Config = BackwardConfig<kHeadDim, kNarrow>;
  static constexpr bool kOthersOnly = Config::kLargeRowsApart && !kLargeRows;
  static constexpr int kRows = Config::kRows, kKeys = Config::kKeys, kThreads = Config::kThreads;
  using DimTile = SharedTile<kHeadDim>;
  using ScoreTile = SharedTile<kKeys>;
  // A warp's part of scores, of dK and dV, and of dQ.
  static constexpr int kScoreRows = kRows / Config::kScoreRowWarps;
  static constexpr int kScoreKeys = kKeys * Config::kScoreRowWarps / Config::kWarps;
  static constexpr int kMTiles = kScoreRows / 16, kNTiles = kScoreKeys / 8;
  static constexpr int kKeyRows = kKeys / Config::kKeyWarps;
  static constexpr int kKeyDims = kHeadDim * Config::kKeyWarps / Config::kWarps;
  static constexpr int kQueryRows = kRows / Config::kQueryRowWarps;
  static constexpr int kQueryDims = kHeadDim * Config::kQueryRowWarps / Config::kWarps;
  static constexpr int kThreadRows = 2 * kMTiles;

  using Walk = RowWalk<kRows, kKeys, kPlanned>;
  using Step = typename Walk::Step;

  // What is the same for the whole block is here too: registers are short.
  struct Shared {
    float2 row_facts[3][kRows];  // RowFacts of three steps, by number
    std::int32_t key[kKeys];     // -1: none, or no row sees it; its place holds zeros
    RowRange range[kKeys];
    float bias[kKeys];                           // if it is the same for every row
    float dbias[Config::kScoreRowWarps][kKeys];  // likewise
    std::uint32_t words[2][Config::kWords][kKeys];
    Step steps[4];  // this one and the next three, by number
    Walk walk;
    KeyBlock block;
    int existing;
    int head;            // of the step
    bool has_large_row;  // of the call
    bool transforms;     // whether anything is done to scores before the softmax
  };
  static constexpr std::size_t kSharedBytes = Config::kTileSharedBytes + sizeof(Shared);

  const BackwardParams& params;
  DimTile keys, values;
  std::uint32_t rows_address;  // stages of queries and output gradients
  ScoreTile probabilities, score_gradients;
  Shared& shared;
  const KeyBlock& block;

  float dkeys[kKeyRows / 16][kKeyDims / 8][4];
  float dvalues[kKeyRows / 16][kKeyDims / 8][4];

  __device__ BackwardBlock(const BackwardParams& params, const KeyBlock& own_block, unsigned char* memory)
      : params(params),
        keys{shared_address(memory)},
        values{keys.address + static_cast<std::uint32_t>(Config::kKeyBytes)},
        rows_address(values.address + static_cast<std::uint32_t>(Config::kKeyBytes)),
        probabilities{rows_address + static_cast<std::uint32_t>(Config::kStages * 2 * Config::kRowBytes)},
        score_gradients{probabilities.address + static_cast<std::uint32_t>(Config::kScoreBytes)},
        shared(*reinterpret_cast<Shared*>(memory + Config::kTileSharedBytes)),
        block(shared.block) {
    if (threadIdx.x == 0) {
      shared.block = own_block;
      shared.existing = key_count(params.visibility, own_block.batch);
      shared.has_large_row = *params.has_large_row != 0;
      shared.transforms = params.score.transforms || shared.has_large_row;
    }
    __syncthreads();
  }

  // For order_blocks.
  __device__ static int visits(const BackwardParams& params, unsigned number, int lane, int lanes) {
    const KeyBlock block = key_block<kKeys, kPlanned>(params, number);
    return block.exists ? Walk::visits(params, block, lane, lanes) : 0;
  }

  // Where registers are short, what depends on the thread is made anew wherever it is needed: kept, it would take some.
  static constexpr bool kKeepsPlaces = Config::kKeepsPlaces && !kRowBias && !kLargeRows;
  __device__ static int thread_index() {
    return kKeepsPlaces ? static_cast<int>(threadIdx.x) : recomputed(static_cast<int>(threadIdx.x));
  }
  __device__ static int warp() { return thread_index() / 32; }

  __device__ int existing() const { return shared.existing; }

  __device__ DimTile queries(int stage) const {
    return {rows_address + static_cast<std::uint32_t>(stage * 2 * Config::kRowBytes)};
  }
  __device__ DimTile output_gradients(int stage) const {
    return {rows_address + static_cast<std::uint32_t>((stage * 2 + 1) * Config::kRowBytes)};
  }

  __device__ int row_tiles() const { return (params.rows + kRows - 1) / kRows; }

  // By one warp, three steps ahead.
  __device__ void note_step(int number) const {
    if (threadIdx.x >= 32) return;
    const Step step = shared.walk.next(params, block, existing());
    if (threadIdx.x == 0) shared.steps[number % 4] = step;
  }

  // ---- Loads

  __device__ void read_key_facts() const {
    for (int place = static_cast<int>(threadIdx.x); place < kKeys; place += kThreads) {
      int key = block.tile * kKeys + place;
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
      shared.key[place] = visible ? key : -1;
      shared.range[place] = range;
#pragma unroll
      for (int part = 0; part < Config::kScoreRowWarps; ++part) shared.dbias[part][place] = 0;
    }
  }

  // Of a bias that is the same for every row.
  __device__ void read_key_bias(int head) const {
    if (kRowBias || !params.bias.defined()) return;
    for (int place = static_cast<int>(threadIdx.x); place < kKeys; place += kThreads) {
      const int key = shared.key[place];
      const std::int64_t offset = params.bias.offset(block.batch, head) + key * params.bias.key_stride;
      shared.bias[place] = key < 0 ? 0 : load_bias<Element>(params.bias, offset);
    }
  }

  __device__ void load_keys() const {
    const DimTile tiles[] = {keys, values};
    const TokenRows sources[] = {rows_of(params.key, block.batch, block.key_head, 0),
                                 rows_of(params.value, block.batch, block.key_head, 0)};
    load_rows<kKeys, kHeadDim, kThreads>(
        static_cast<int>(threadIdx.x), tiles, sources, [&](int row) { return shared.key[row]; }, params.head_dim,
        params.aligned);
  }

  // Rows past the last have facts too.
  __device__ void load_row_facts(Step step, int slot) const {
    const int thread = static_cast<int>(threadIdx.x);
    if (!step.exists() || thread >= kRows / 2) return;
    const std::int64_t tile =
        (static_cast<std::int64_t>(block.batch) * params.heads + step.head) * row_tiles() + step.row_tile;
    copy_async_16(shared_address(&shared.row_facts[slot][2 * thread]), params.row_facts + tile * kRows + 2 * thread,
                  true);
  }

  // Queries and output gradients. Rows that see no key are zeros, whatever they hold.
  __device__ void load_step(Step step, int stage, int slot) const {
    const DimTile tiles[] = {queries(stage), output_gradients(stage)};
    const TokenRows sources[] = {rows_of(params.query, block.batch, step.head, step.first_row()),
                                 rows_of(params.dout, block.batch, step.head, step.first_row())};
    load_rows<kRows, kHeadDim, kThreads>(
        static_cast<int>(threadIdx.x), tiles, sources,
        [&](int row) { return shared.row_facts[slot][row].x != INFINITY ? row : -1; }, params.head_dim, params.aligned);
  }

  __device__ void make_words(Step step, int buffer) const {
    if (step.full) return;
#pragma unroll
    for (int index = static_cast<int>(threadIdx.x); index < kKeys * Config::kWords; index += kThreads) {
      const int word = index / kKeys, place = index % kKeys;
      const int key = shared.key[place];
      shared.words[buffer][word][place] = key < 0 ? 0
                                                  : visible_word(params.visibility, shared.range[place], block.batch,
                                                                 step.head, key, step.first_row() + word * kWordRows);
    }
  }

  // ---- One step

  __device__ static int score_row() { return warp() % Config::kScoreRowWarps * kScoreRows; }
  __device__ static int score_key() { return warp() / Config::kScoreRowWarps * kScoreKeys; }

  // Which scores are the thread's: pairs of neighbouring columns.
  struct Place {
    int row, column;  // the first

    __device__ explicit Place(int thread = thread_index()) {
      const int lane = thread % 32, warp = thread / 32;
      row = warp % Config::kScoreRowWarps * kScoreRows + lane / 4;
      column = warp / Config::kScoreRowWarps * kScoreKeys + 2 * (lane % 4);
    }
    __device__ int row_of(int i) const { return row + i * 8; }
    __device__ int column_of(int n) const { return column + n * 8; }
    // Where a pair lies in a ScoreTile.
    __device__ std::uint32_t pair_address(ScoreTile tile, int i, int n) const {
      return tile.piece(row_of(i), column_of(n) / 8) + 2 * (column % 8);
    }
  };

  // Softcap and bias. The softcap's derivative is left where the score's gradient will be.
  __device__ void transform_scores(float (&scores)[kMTiles][kNTiles][4], Step step) const {
    const Place place;
    scale_products(params.score, scores);
    if (params.score.softcap != 0) {
      const auto derivative = [&](float score) {
        const float ratio = score * params.score.inverse_softcap;
        return 1 - ratio * ratio;
      };
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i)
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) {
          const float* pair = &scores[i / 2][n][2 * (i % 2)];
          store_shared(place.pair_address(score_gradients, i, n),
                       pack<__half>(derivative(pair[0]), derivative(pair[1])));
        }
    }
    const BroadcastView& bias = params.bias;
    if constexpr (kRowBias) {
      add_row_bias<Element>(
          bias, bias.offset(block.batch, step.head), params.rows, scores,
          [&](int i) { return step.first_row() + place.row_of(i); },
          [&](int n, int pair) { return shared.key[place.column_of(n) + pair]; });
    } else if (bias.defined()) {
      add_key_bias(scores, [&](int n) { return *reinterpret_cast<const float2*>(&shared.bias[place.column_of(n)]); });
    }
  }

  // What a hidden probability is: no visible one is, as those that underflow are +0.
  static constexpr float kHidden = -0.0f;

  // One of `parts` shares of the scores to probabilities, those of hidden scores, too. lse_log2: of the thread's rows.
  __device__ void exponentiate(float (&scores)[kMTiles][kNTiles][4], const float (&lse_log2)[kThreadRows], int part,
                               int parts) const {
    constexpr int kPairs = kThreadRows * kNTiles;
#pragma unroll
    for (int index = part * kPairs / parts; index < (part + 1) * kPairs / parts; ++index) {
      const int i = index % kThreadRows, n = index / kThreadRows;
      float* pair = &scores[i / 2][n][2 * (i % 2)];
      pair[0] = exp2_in_order(fmaf(pair[0], params.score.multiplier, -lse_log2[i]));
      pair[1] = exp2_in_order(fmaf(pair[1], params.score.multiplier, -lse_log2[i]));
    }
  }

  // Hides probabilities and stores them. Returns whether any is hidden.
  __device__ bool store_probabilities(float (&scores)[kMTiles][kNTiles][4], Step step, int buffer) const {
    const Place place;
    bool hides = true;
    if constexpr (kPlanned) {
      hides = !step.full;
      if (hides) {
        // A warp's rows lie in one word.
        hide_by_words(
            scores, shared.words[buffer][score_row() / kWordRows], score_row() % kWordRows,
            [&](int n) { return place.column_of(n); }, kHidden);
      }
    } else {
      // Rows past the last have probabilities of 0 without help.
      const int last_key = block.tile * kKeys + kKeys - 1;
      hides = causal_limit(params.visibility, existing(), step.first_row()) <= last_key;
      if (hides) {
        hide_past_limits(
            scores,
            [&](int i) {
              return causal_limit(params.visibility, existing(), step.first_row() + place.row_of(i)) -
                     block.tile * kKeys;
            },
            [&](int n) { return place.column_of(n); }, kHidden);
      }
    }
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i)
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
        const float* pair = &scores[i / 2][n][2 * (i % 2)];
        store_shared(place.pair_address(probabilities, i, n), pack<Element>(pair[0], pair[1]));
      }
    return hides;
  }

  // `gradients` are those of the probabilities and become those of the scores, before softcap.
  __device__ void make_score_gradients(const float (&probability)[kMTiles][kNTiles][4],
                                       float (&gradients)[kMTiles][kNTiles][4], int slot, bool hides) const {
    const Place place;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const float delta = shared.row_facts[slot][place.row_of(i)].y;
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          float& gradient = gradients[i / 2][n][2 * (i % 2) + pair];
          gradient = probability[i / 2][n][2 * (i % 2) + pair] * (gradient - delta);
        }
    }
    // A hidden score has no gradient, even where a row or a key that others see is not finite.
    if (!hides) return;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i)
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const int at = 2 * (i % 2) + pair;
          if (__float_as_uint(probability[i / 2][n][at]) == __float_as_uint(kHidden)) gradients[i / 2][n][at] = 0;
        }
  }

  __device__ void store_score_gradients(const float (&gradients)[kMTiles][kNTiles][4]) const {
    const Place place;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i)
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
        const float* pair = &gradients[i / 2][n][2 * (i % 2)];
        store_shared(place.pair_address(score_gradients, i, n), pack<Element>(pair[0], pair[1]));
      }
  }

  // The same, times the softcap's derivative that transform_scores left in their places.
  __device__ void store_capped_gradients(const float (&gradients)[kMTiles][kNTiles][4]) const {
    const Place place;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i)
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
        const std::uint32_t address = place.pair_address(score_gradients, i, n);
        const std::uint32_t packed = load_shared(address);
        const float2 derivative = __half22float2(*reinterpret_cast<const __half2*>(&packed));
        const float* pair = &gradients[i / 2][n][2 * (i % 2)];
        store_shared(address, pack<Element>(pair[0] * derivative.x, pair[1] * derivative.y));
      }
  }

  // Sums over the step's rows of a bias that all rows share; each warp adds to places of its own.
  __device__ void add_key_bias_gradients(const float (&gradients)[kMTiles][kNTiles][4]) const {
    const Place place;
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) sum += gradients[i / 2][n][2 * (i % 2) + pair];
        sum += __shfl_xor_sync(~0u, sum, 4);
        sum += __shfl_xor_sync(~0u, sum, 8);
        sum += __shfl_xor_sync(~0u, sum, 16);
        if (place.row % 8 == 0) shared.dbias[place.row / kScoreRows][place.column_of(n) + pair] += sum;
      }
  }

  // A bias with rows of its own: every score has its place, which other heads or batch elements may share.
  __device__ void add_bias_gradients(const float (&gradients)[kMTiles][kNTiles][4], Step step) const {
    const Place place;
    const BroadcastView& dbias = params.dbias;
    float* sums = params.dbias_sums + dbias.offset(block.batch, step.head);
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int key = shared.key[place.column_of(n) + pair];
        float* key_sums = sums + key * dbias.key_stride;
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
          const float gradient = gradients[i / 2][n][2 * (i % 2) + pair];
          const int row = recomputed(step.first_row() + place.row_of(i));
          if (key >= 0 && row < params.rows && gradient != 0) atomicAdd(key_sums + row * dbias.row_stride, gradient);
        }
      }
  }

  // Adds what the steps of some query heads left and starts anew.
  __device__ void flush_key_bias_gradients(int head) const {
    __syncthreads();
    float* sums = params.dbias_sums + block.color * params.bias_color_stride + params.dbias.offset(block.batch, head);
    for (int place = static_cast<int>(threadIdx.x); place < kKeys; place += kThreads) {
      float sum = 0;
#pragma unroll
      for (int part = 0; part < Config::kScoreRowWarps; ++part) {
        sum += shared.dbias[part][place];
        shared.dbias[part][place] = 0;
      }
      if (shared.key[place] >= 0) atomicAdd(sums + shared.key[place] * params.dbias.key_stride, sum);
    }
    __syncthreads();
  }

  using QuerySums = float[kQueryRows / 16][kQueryDims / 8][4];

  // Adds one of kParts shares of a step's query gradients, in the order of the registers, so that neighbouring threads
  // add to neighbouring places.
  template <int kParts>
  __device__ void add_query_gradients(const QuerySums& sums, Step step, int part) const {
    constexpr int kCount = kQueryRows / 16 * (kQueryDims / 8), kShare = (kCount + kParts - 1) / kParts;
    const std::int64_t tile =
        (static_cast<std::int64_t>(block.batch) * params.heads + step.head) * row_tiles() + step.row_tile;
    float* target = params.dquery_sums + tile * (kRows * kHeadDim) + threadIdx.x * 4;
#pragma unroll
    for (int index = part * kShare; index < min((part + 1) * kShare, kCount); ++index) {
      const float(&four)[4] = sums[index / (kQueryDims / 8)][index % (kQueryDims / 8)];
      add_to_global(target + index * kThreads * 4, four[0], four[1], four[2], four[3]);
    }
  }

  // Of large rows scores become their distances from lse.
  __device__ void subtract_large_rows(float (&scores)[kMTiles][kNTiles][4], Step step, int slot) const {
    const Place place(recomputed(static_cast<int>(threadIdx.x)));
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const int row = place.row_of(i);
      if (!is_large_row(shared.row_facts[slot][row].x)) continue;
      subtract_large_lse(params, block.batch, step.head, step.first_row() + row, i, scores);
    }
  }

  __device__ void run_step(Step step, int stage, int slot, int buffer) {
    const bool transforms = kOthersOnly ? params.score.transforms : shared.transforms;  // read before it is needed
    float scores[kMTiles][kNTiles][4];
    clear(scores);
    multiply_blocks<Element, kHeadDim, Depth::kAlongRows, Depth::kAlongRows, Config::kScoreAhead>(
        scores, queries(stage), score_row(), keys, score_key());
    if (transforms) {
      if (params.score.transforms) transform_scores(scores, step);
      if (!kOthersOnly && shared.has_large_row) subtract_large_rows(scores, step, slot);
    }
    float lse_log2[kThreadRows], gradients[kMTiles][kNTiles][4];
    const Place place;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) lse_log2[i] = shared.row_facts[slot][place.row_of(i)].x;
    clear(gradients);
    bool hides = false;
    if constexpr (!Config::kMixesProbabilities) {
      exponentiate(scores, lse_log2, 0, 1);
      hides = store_probabilities(scores, step, buffer);
    }
    multiply_blocks<Element, kHeadDim, Depth::kAlongRows, Depth::kAlongRows,
                    kLargeRows ? 1 : Config::kProbabilityAhead>(
        gradients, output_gradients(stage), score_row(), values, score_key(), [&](int number, int steps) {
          // Not after the first products, which would wait for them.
          if (Config::kMixesProbabilities && number > 0) exponentiate(scores, lse_log2, number - 1, steps - 1);
        });
    if constexpr (Config::kMixesProbabilities) hides = store_probabilities(scores, step, buffer);
    make_score_gradients(scores, gradients, slot, hides);
    if (params.score.softcap != 0) {
      store_capped_gradients(gradients);
    } else {
      store_score_gradients(gradients);
    }
    if (params.dbias_sums != nullptr) {
      if constexpr (kRowBias) {
        add_bias_gradients(gradients, step);
      } else {
        add_key_bias_gradients(gradients);
      }
    }
    __syncthreads();
    if (params.wants_dvalue) {
      multiply_blocks<Element, kRows, Depth::kAlongColumns, Depth::kAlongColumns, Config::kGradientAhead>(
          dvalues, probabilities, key_row(), output_gradients(stage), key_dim());
    }
    if (params.wants_dkey) {
      multiply_blocks<Element, kRows, Depth::kAlongColumns, Depth::kAlongColumns, Config::kGradientAhead>(
          dkeys, score_gradients, key_row(), queries(stage), key_dim());
    }
    // Last, so that the additions are under way while the next step begins.
    if (params.dquery_sums != nullptr) {
      QuerySums dqueries;
      clear(dqueries);
      multiply_blocks<Element, kKeys, Depth::kAlongRows, Depth::kAlongColumns, Config::kGradientAhead>(
          dqueries, score_gradients, warp() % Config::kQueryRowWarps * kQueryRows, keys,
          warp() / Config::kQueryRowWarps * kQueryDims);
      add_query_gradients<1>(dqueries, step, 0);
    }
  }

  // ---- Results

  __device__ int key_row() const { return warp() % Config::kKeyWarps * kKeyRows; }
  __device__ int key_dim() const { return warp() / Config::kKeyWarps * kKeyDims; }

  __device__ void store_results() const {
    if (!block.stores) {
      const std::int64_t color = block.color * params.key_color_stride;
      const auto add = [&](const auto& gradient, float* sums, float factor) {
        add_to_sums<kHeadDim>(gradient, params, block, shared.key, key_row(), key_dim(), sums + color, factor);
      };
      if (params.wants_dkey) add(dkeys, params.dkey_sums, params.score.scale);
      if (params.wants_dvalue) add(dvalues, params.dvalue_sums, 1);
      return;
    }
    const auto store = [&](const auto& gradient, DimTile tile, const TokenView& target, float factor) {
      store_keys<Element, kKeys, kThreads>(gradient, params, block, tile, key_row(), key_dim(), target, factor);
    };
    __syncthreads();
    if (params.wants_dkey) store(dkeys, keys, params.dkey, params.score.scale);
    if (params.wants_dvalue) store(dvalues, values, params.dvalue, 1);
  }

  __device__ void run() {
    clear(dkeys);
    clear(dvalues);
    if (threadIdx.x < 32) shared.walk.start(params, block, existing());
    for (int number = 0; number < 3; ++number) note_step(number);
    read_key_facts();
    __syncthreads();
    if (!shared.steps[0].exists() && !block.stores) return;  // nothing to add
    load_row_facts(shared.steps[0], 0);
    load_row_facts(shared.steps[1], 1);
    commit_copies();
    const int first_head = shared.steps[0].exists() ? shared.steps[0].head : block.first_head;
    if (threadIdx.x == 0) shared.head = first_head;
    read_key_bias(first_head);
    load_keys();
    commit_copies();
    wait_copies<1>();  // for the facts
    __syncthreads();
    if (shared.steps[0].exists()) {
      load_step(shared.steps[0], 0, 0);
      if constexpr (kPlanned) make_words(shared.steps[0], 0);
    }
    commit_copies();
    for (int number = 0; shared.steps[number % 4].exists(); ++number) {
      const int buffer = number % 2, stage = Config::kStages == 2 ? buffer : 0;
      const auto slot_of = [&](int of) { return static_cast<int>(static_cast<unsigned>(of) % 3); };
      wait_copies<0>();
      __syncthreads();
      note_step(number + 3);
      if constexpr (!kRowBias) {
        const int head = shared.head, next_head = shared.steps[number % 4].head;
        if (next_head != head) {
          if (params.dbias_sums != nullptr &&
              params.dbias.offset(block.batch, head) != params.dbias.offset(block.batch, next_head)) {
            flush_key_bias_gradients(head);
          }
          read_key_bias(next_head);
          __syncthreads();
          if (threadIdx.x == 0) shared.head = next_head;  // nobody reads it before the next step's barrier
        }
      }
      load_row_facts(shared.steps[(number + 2) % 4], slot_of(number + 2));
      if (Config::kStages == 2 && shared.steps[(number + 1) % 4].exists()) {
        load_step(shared.steps[(number + 1) % 4], stage ^ 1, slot_of(number + 1));
      }
      commit_copies();
      if constexpr (kPlanned) {
        if (shared.steps[(number + 1) % 4].exists()) make_words(shared.steps[(number + 1) % 4], buffer ^ 1);
      }
      run_step(shared.steps[number % 4], stage, slot_of(number), buffer);
      if (Config::kStages == 1) {
        __syncthreads();
        if (shared.steps[(number + 1) % 4].exists()) load_step(shared.steps[(number + 1) % 4], 0, slot_of(number + 1));
        commit_copies();
      }
    }
    wait_copies<0>();
    if (!kRowBias && params.dbias_sums != nullptr) flush_key_bias_gradients(shared.head);
    store_results();
  }
};

template <typename Element, int kHeadDim, bool kPlanned, bool kRowBias, bool kNarrow, bool kLargeRows>
__global__ void __launch_bounds__(BackwardConfig<kHeadDim, kNarrow>::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(1024) unsigned char shared[];
  using Block = BackwardBlock<Element, kHeadDim, kPlanned, kRowBias, kNarrow, kLargeRows>;
  if (Block::Config::kLargeRowsApart && kLargeRows != (*params.has_large_row != 0)) return;
  const KeyBlock block = key_block<Block::kKeys, kPlanned>(params, kPlanned ? ordered_block(params.order) : blockIdx.x);
  if (block.exists) Block(params, block, shared).run();
}

}  // namespace flash_dmattn::internal::cuda

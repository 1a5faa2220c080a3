// The sm80 backward: one block owns a tile of keys and walks over the tiles of query rows that see it, for some
// query heads of a group. Gradients of its keys and values stay in registers; those of queries are added up in global
// memory. With a plan a block stays for many tiles, its works (attention/key_works.h).
//
// Five products a step, S the scores, P the probabilities, d the gradients:
//   S = Q K^T,  dP = dO V^T,  dV += P^T dO,  dK += dS^T Q,  dQ += dS K      with dS = P (dP - delta)
// (Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 2).
#pragma once

#include "cuda/attention/fragments.cuh"
#include "cuda/attention/hide.cuh"
#include "cuda/attention/key_results.cuh"
#include "cuda/attention/large_rows.cuh"
#include "cuda/attention/warp_gemm.cuh"
#include "cuda/ptx/dynamic_shared.cuh"
#include "cuda/sm80/backward_memory.cuh"

namespace flash_dmattn::internal::cuda {

// kLargeRows: the kernel for calls with large rows, where they have one. kStoresQueries: as in BackwardMemory.
template <typename Element, int kHeadDim, int kValueDim, bool kPlanned, bool kRowBias, bool kNarrow,
          bool kLargeRows = false, bool kStoresQueries = false>
struct BackwardBlock : BackwardMemory<Element, kHeadDim, kValueDim, kPlanned, kRowBias, kNarrow, kStoresQueries> {
  using Memory = BackwardMemory<Element, kHeadDim, kValueDim, kPlanned, kRowBias, kNarrow, kStoresQueries>;
  using Memory::keys, Memory::values, Memory::queries, Memory::output_gradients;
  using Memory::kStays;
  using Memory::kStepSlots, Memory::kFactSlots;
  using Memory::kTileRows, Memory::kTileKeys, Memory::kThreads;
  using Memory::params, Memory::shared, Memory::block, Memory::existing;
  using Memory::probabilities, Memory::score_gradients;
  using typename Memory::Config, typename Memory::ScoreTile, typename Memory::Step;

  static constexpr bool kOthersOnly = Config::kLargeRowsApart && !kLargeRows;
  // A warp's part of scores, of dK and dV, and of dQ.
  static constexpr int kScoreRows = kTileRows / Config::kScoreRowWarps;
  static constexpr int kScoreKeys = kTileKeys * Config::kScoreRowWarps / Config::kWarps;
  static constexpr int kMTiles = kScoreRows / 16, kNTiles = kScoreKeys / 8;
  static constexpr int kKeyRows = kTileKeys / Config::kKeyWarps;
  static constexpr int kKeyDims = kHeadDim * Config::kKeyWarps / Config::kWarps;
  static constexpr int kValueDims = kValueDim * Config::kKeyWarps / Config::kWarps;
  static constexpr int kQueryRows = kTileRows / Config::kQueryRowWarps;
  static constexpr int kQueryDims = kHeadDim * Config::kQueryRowWarps / Config::kWarps;
  static constexpr int kThreadRows = 2 * kMTiles;
  using Scores = float[kMTiles][kNTiles][4];

  float dkeys[kKeyRows / 16][kKeyDims / 8][4];
  float dvalues[kKeyRows / 16][kValueDims / 8][4];

  using Memory::Memory;

  // Where registers are short, what depends on the thread is made anew wherever it is needed: kept, it would take some.
  static constexpr bool kKeepsOrigin =
      Config::kKeepsOrigin && !kRowBias && !kLargeRows && !(kStoresQueries && kHeadDim == 128);
  __device__ static int thread_index() {
    return kKeepsOrigin ? static_cast<int>(threadIdx.x) : recomputed(static_cast<int>(threadIdx.x));
  }
  __device__ static int warp() { return thread_index() / 32; }

  // ---- One step

  __device__ static int score_row() { return warp() % Config::kScoreRowWarps * kScoreRows; }
  __device__ static int score_key() { return warp() / Config::kScoreRowWarps * kScoreKeys; }

  // Of the thread's part of the scores.
  struct Origin : FragmentOrigin {
    __device__ explicit Origin(int thread = thread_index()) {
      const int lane = thread % 32, warp = thread / 32;
      row = warp % Config::kScoreRowWarps * kScoreRows + lane / 4;
      column = warp / Config::kScoreRowWarps * kScoreKeys + 2 * (lane % 4);
    }
    // Of a pair in a ScoreTile.
    __device__ std::uint32_t pair_address(ScoreTile tile, int i, int n) const {
      return tile.piece(row_of(i), column_of(n) / 8) + 2 * (column % 8);
    }
  };

  // Softcap and bias. The softcap's derivative waits, as float16, where the score's gradient will be stored
  // (store_capped_gradients): there are no registers to keep it in.
  __device__ void transform_scores(Scores& scores, Step step) const {
    const Origin origin;
    if constexpr (kRowBias) {
      scale_products(params.score, scores);
    } else {
      cap_products(params.score, scores);
    }
    if (params.score.softcap != 0) {
      for_each_pair(scores, [&](int i, int n, const float* pair) {
        store_shared(
            origin.pair_address(score_gradients, i, n),
            pack<__half>(softcap_derivative(params.score, pair[0]), softcap_derivative(params.score, pair[1])));
      });
    }
    const BroadcastView& bias = params.bias;
    if constexpr (kRowBias) {
      add_row_bias<Element>(
          bias, bias.offset(block.batch, step.head), params.rows, scores,
          [&](int i) { return step.first_row() + origin.row_of(i); },
          [&](int n, int pair) { return shared.key[origin.column_of(n) + pair]; });
    } else if (bias.defined()) {
      add_key_bias(params.score.outer_scale, scores,
                   [&](int n) { return *reinterpret_cast<const float2*>(&shared.bias[origin.column_of(n)]); });
    } else {
      scale_by(params.score.outer_scale, scores);
    }
  }

  // Marks the probability of a hidden score, whose gradient is then 0 whatever is computed for it. No visible score has
  // this probability: one that underflows is +0.
  static constexpr float kHidden = -0.0f;

  // Turns one of `parts` parts of the scores, hidden ones included, into probabilities. lse_log2: of the thread's rows.
  __device__ void exponentiate(Scores& scores, const float (&lse_log2)[kThreadRows], int part, int parts) const {
    constexpr int kPairs = kThreadRows * kNTiles;
#pragma unroll
    for (int index = part * kPairs / parts; index < (part + 1) * kPairs / parts; ++index) {
      const int i = index % kThreadRows, n = index / kThreadRows;
      float* pair = pair_at(scores, i, n);
      pair[0] = exp2_in_order(fmaf(pair[0], params.score.multiplier, -lse_log2[i]));
      pair[1] = exp2_in_order(fmaf(pair[1], params.score.multiplier, -lse_log2[i]));
    }
  }

  // Hides probabilities and stores them. Returns whether any is hidden.
  __device__ bool store_probabilities(Scores& scores, Step step, int word_slot) const {
    const Origin origin;
    bool hides = true;
    if constexpr (kPlanned) {
      hides = !step.full;
      if (hides) {
        // A warp's rows lie in one word.
        hide_by_words(
            scores, shared.words[word_slot][score_row() / kWordRows], score_row() % kWordRows,
            [&](int n) { return origin.column_of(n); }, kHidden);
      }
    } else {
      // Rows past the last need not be hidden: their lse of +inf makes every probability 0.
      const int last_key = block.tile * kTileKeys + kTileKeys - 1;
      hides = causal_limit(params.visibility, existing(), step.first_row()) <= last_key;
      if (hides) {
        hide_past_limits(
            scores,
            [&](int i) {
              return causal_limit(params.visibility, existing(), step.first_row() + origin.row_of(i)) -
                     block.tile * kTileKeys;
            },
            [&](int n) { return origin.column_of(n); }, kHidden);
      }
    }
    for_each_pair(scores, [&](int i, int n, const float* pair) {
      store_shared(origin.pair_address(probabilities, i, n), pack<Element>(pair[0], pair[1]));
    });
    return hides;
  }

  __device__ void store_score_gradients(const Scores& gradients) const {
    const Origin origin;
    for_each_pair(gradients, [&](int i, int n, const float* pair) {
      store_shared(origin.pair_address(score_gradients, i, n), pack<Element>(pair[0], pair[1]));
    });
  }

  // `gradients` are those of the probabilities and become those of the scores, before softcap.
  __device__ void make_score_gradients(const Scores& probability, Scores& gradients, int slot, bool hides) const {
    // At head dim 128 one register is missing to keep what depends on the thread.
    const Origin origin(kHeadDim == 128 ? recomputed(static_cast<int>(threadIdx.x)) : thread_index());
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const float delta = shared.row_facts[slot][kTileRows + origin.row_of(i)];
      for_each_in_row(gradients, i, [&](int n, int pair, float& gradient) {
        gradient = pair_at(probability, i, n)[pair] * (gradient - delta);
      });
    }
    // A hidden score has no gradient, even where a row or a key that others see is not finite.
    if (!hides) return;
    for_each_element(gradients, [&](int i, int n, int pair, float& gradient) {
      if (__float_as_uint(pair_at(probability, i, n)[pair]) == __float_as_uint(kHidden)) gradient = 0;
    });
  }

  // As store_fragment, times the softcap's derivative, which transform_scores left at the same addresses.
  __device__ void store_capped_gradients(const Scores& gradients) const {
    const Origin origin;
    for_each_pair(gradients, [&](int i, int n, const float* pair) {
      const std::uint32_t address = origin.pair_address(score_gradients, i, n);
      const std::uint32_t packed = load_shared(address);
      const float2 derivative = unpack<__half>(packed);
      store_shared(address, pack<Element>(pair[0] * derivative.x, pair[1] * derivative.y));
    });
  }

  // Sums over the step's rows, for a bias that is the same for every row. Warps that own different rows add to
  // different parts of shared.dbias.
  __device__ void add_key_bias_gradients(const Scores& gradients) const {
    const Origin origin;
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        float sum = 0;
        for_each_in_column(gradients, n, pair, [&](int, float gradient) { sum += gradient; });
        sum += __shfl_xor_sync(~0u, sum, 4);
        sum += __shfl_xor_sync(~0u, sum, 8);
        sum += __shfl_xor_sync(~0u, sum, 16);
        if (origin.row % 8 == 0) shared.dbias[origin.row / kScoreRows][origin.column_of(n) + pair] += sum;
      }
  }

  // A bias with rows of its own: every score adds to an entry, which may also be that of other heads or batch elements.
  __device__ void add_row_bias_gradients(const Scores& gradients, Step step) const {
    const Origin origin;
    const BroadcastView& dbias = params.dbias;
    float* sums = params.dbias_sums + dbias.offset(block.batch, step.head);
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int key = shared.key[origin.column_of(n) + pair];
        float* key_sums = sums + key * dbias.key_stride;
        for_each_in_column(gradients, n, pair, [&](int i, float gradient) {
          const int row = recomputed(step.first_row() + origin.row_of(i));
          if (key >= 0 && row < params.rows && gradient != 0) atomicAdd(key_sums + row * dbias.row_stride, gradient);
        });
      }
  }

  // Adds what the steps of one query head, or of several with the same bias, left in shared.dbias to global memory and
  // clears it.
  __device__ void flush_key_bias_gradients(int head) const {
    __syncthreads();
    float* sums = params.dbias_sums + block.color * params.bias_color_stride + params.dbias.offset(block.batch, head);
    for (int column = static_cast<int>(threadIdx.x); column < kTileKeys; column += kThreads) {
      float sum = 0;
#pragma unroll
      for (int part = 0; part < Config::kScoreRowWarps; ++part) {
        sum += shared.dbias[part][column];
        shared.dbias[part][column] = 0;
      }
      if (shared.key[column] >= 0) atomicAdd(sums + shared.key[column] * params.dbias.key_stride, sum);
    }
    __syncthreads();
  }

  using QueryGradients = float[kQueryRows / 16][kQueryDims / 8][4];

  // Adds a step's query gradients in the order of the registers, so that neighbouring threads add to neighbouring
  // addresses.
  __device__ void add_query_gradients(const QueryGradients& dqueries, Step step) const {
    constexpr int kDimNTiles = kQueryDims / 8, kTiles = kQueryRows / 16 * kDimNTiles;
    const std::int64_t tile =
        (static_cast<std::int64_t>(block.batch) * params.heads + step.head) * this->row_tiles() + step.row_tile;
    float* target = params.dquery_sums + tile * (kTileRows * kHeadDim) + threadIdx.x * 4;
#pragma unroll
    for (int index = 0; index < kTiles; ++index) {
      const float(&four)[4] = dqueries[index / kDimNTiles][index % kDimNTiles];
      add_to_global(target + index * kThreads * 4, four[0], four[1], four[2], four[3]);
    }
  }

  // Those of rows that no other step meets: dquery itself.
  __device__ void store_query_gradients(const QueryGradients& dqueries, Step step) const {
    // Worked out here: there are no registers to keep it in.
    const int thread = recomputed(static_cast<int>(threadIdx.x)), lane = thread % 32, own_warp = thread / 32;
    const int first_row = step.first_row() + own_warp % Config::kQueryRowWarps * kQueryRows + lane / 4,
              first_column = own_warp / Config::kQueryRowWarps * kQueryDims + 2 * (lane % 4);
    const TokenView& dquery = params.dquery;
    auto* target = static_cast<std::uint16_t*>(dquery.data) + block.batch * dquery.batch_stride +
                   step.head * dquery.head_stride + first_row * dquery.token_stride + first_column;
#pragma unroll
    for (int i = 0; i < kQueryRows / 8; ++i, target += 8 * dquery.token_stride) {
      if (first_row + 8 * i >= params.rows) break;
#pragma unroll
      for (int n = 0; n < kQueryDims / 8; ++n) {
        if (first_column + 8 * n >= params.head_dim) break;
        const float* pair = pair_at(dqueries, i, n);
        *reinterpret_cast<std::uint32_t*>(target + 8 * n) =
            pack<Element>(pair[0] * params.score.scale, pair[1] * params.score.scale);
      }
    }
  }

  // Of large rows scores become their distances from lse.
  __device__ void subtract_large_rows(Scores& scores, Step step, int slot) const {
    const Origin origin(recomputed(static_cast<int>(threadIdx.x)));
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const int row = origin.row_of(i);
      if (!is_large_row(shared.row_facts[slot][row])) continue;
      subtract_large_lse(params, block.batch, step.head, step.first_row() + row, i, scores);
    }
  }

  // `stage` holds the step's queries and output gradients, `slot` its row facts, `word_slot` its words.
  __device__ void run_step(Step step, int stage, int slot, int word_slot) {
    const bool transforms = kOthersOnly ? params.score.transforms : shared.transforms;  // read before it is needed
    Scores scores;
    clear(scores);
    gemm_from_shared<Element, kHeadDim, Depth::kAlongRows, Depth::kAlongRows, Config::kScoreAhead>(
        scores, queries(stage), score_row(), keys, score_key());
    if (transforms) {
      if (params.score.transforms) transform_scores(scores, step);
      if (!kOthersOnly && shared.has_large_row) subtract_large_rows(scores, step, slot);
    }
    float lse_log2[kThreadRows];
    Scores gradients;
    const Origin origin;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) lse_log2[i] = shared.row_facts[slot][origin.row_of(i)];
    clear(gradients);
    bool hides = false;
    if constexpr (!Config::kMixesProbabilities) {
      exponentiate(scores, lse_log2, 0, 1);
      hides = store_probabilities(scores, step, word_slot);
    }
    gemm_from_shared<Element, kValueDim, Depth::kAlongRows, Depth::kAlongRows,
                     kLargeRows ? 1 : Config::kProbabilityAhead>(
        gradients, output_gradients(stage), score_row(), values, score_key(), [&](int number, int steps) {
          // Not after the first products: the exponentials wait for the scores, and the next products would wait for
          // them.
          if (Config::kMixesProbabilities && number > 0) exponentiate(scores, lse_log2, number - 1, steps - 1);
        });
    if constexpr (Config::kMixesProbabilities) hides = store_probabilities(scores, step, word_slot);
    make_score_gradients(scores, gradients, slot, hides);
    if (params.score.softcap != 0) {
      store_capped_gradients(gradients);
    } else {
      store_score_gradients(gradients);
    }
    if (params.dbias_sums != nullptr) {
      if constexpr (kRowBias) {
        add_row_bias_gradients(gradients, step);
      } else {
        add_key_bias_gradients(gradients);
      }
    }
    __syncthreads();
    if (params.wants_dvalue) {
      gemm_from_shared<Element, kTileRows, Depth::kAlongColumns, Depth::kAlongColumns, Config::kGradientAhead>(
          dvalues, probabilities, key_row(), output_gradients(stage), value_dim());
    }
    if (params.wants_dkey) {
      gemm_from_shared<Element, kTileRows, Depth::kAlongColumns, Depth::kAlongColumns, Config::kGradientAhead>(
          dkeys, score_gradients, key_row(), queries(stage), key_dim());
    }
    // Last, so that the additions are under way while the next step begins.
    if (params.dquery_sums != nullptr) {
      QueryGradients dqueries;
      clear(dqueries);
      gemm_from_shared<Element, kTileKeys, Depth::kAlongRows, Depth::kAlongColumns, Config::kGradientAhead>(
          dqueries, score_gradients, warp() % Config::kQueryRowWarps * kQueryRows, keys,
          warp() / Config::kQueryRowWarps * kQueryDims);
      if (kStoresQueries && shared.is_met_once) {
        store_query_gradients(dqueries, step);
      } else {
        add_query_gradients(dqueries, step);
      }
    }
  }

  // ---- Results

  __device__ int key_row() const { return warp() % Config::kKeyWarps * kKeyRows; }
  __device__ int key_dim() const { return warp() / Config::kKeyWarps * kKeyDims; }
  __device__ int value_dim() const { return warp() / Config::kKeyWarps * kValueDims; }

  __device__ void store_results() const {
    if (!block.stores) {
      const std::int64_t first_row = block.color * params.key_color_stride;
      const auto add = [&]<int kDim>(const auto& gradient, SharedTile<kDim>, int first_column, float* sums,
                                     float factor) {
        add_to_sums<kDim>(gradient, params, block, shared.key, key_row(), first_column, sums + first_row * kDim,
                          factor);
      };
      if (params.wants_dkey) add(dkeys, keys, key_dim(), params.dkey_sums, params.score.scale);
      if (params.wants_dvalue) add(dvalues, values, value_dim(), params.dvalue_sums, 1);
      return;
    }
    const auto store = [&](const auto& gradient, auto tile, int first_column, const TokenView& target, int columns,
                           float factor) {
      store_keys<Element, kTileKeys, kThreads>(gradient, params, block, tile, key_row(), first_column, target, columns,
                                               factor);
    };
    __syncthreads();
    if (params.wants_dkey) store(dkeys, keys, key_dim(), params.dkey, params.head_dim, params.score.scale);
    if (params.wants_dvalue) store(dvalues, values, value_dim(), params.dvalue, params.value_dim, 1);
  }

  // ---- All steps

  // While step n is computed, later ones are made ready. What one step requests or writes, the next may read: it begins
  // by waiting for all copies, and for all threads.
  //
  //   step    in step n                                                              slot
  //   n + 3   warp 0 notes its head and tile of rows                                 steps[(n + 3) % 4]
  //   n + 2   its row facts are requested                                            row_facts[(n + 2) % 3]
  //   n + 1   its row facts are there and say which rows see a key:
  //           its queries and output gradients are requested                         stage (n + 1) % 2
  //           its words are made (in a plan)                                         words[(n + 1) % 2]
  //   n       its scores, probabilities and gradients are computed                   reads all of the above, of n
  //
  // So a ring has as many slots as the rows of this table from its own down to that of n. Where shared memory is short
  // there is one stage (kStages 1): queries and output gradients of step n + 1 are requested when step n is done with
  // its own, and nothing hides the time that they take.
  __device__ void run() {
    clear(dkeys);
    clear(dvalues);
    if (threadIdx.x < 32) shared.walk.start(params, block, existing());
    for (int number = 0; number < 3; ++number) this->note_step(number);
    this->read_key_facts();
    __syncthreads();
    if (!shared.steps[0].exists() && !block.stores) return;  // nothing to add
    this->load_row_facts(shared.steps[0], 0);
    this->load_row_facts(shared.steps[1], 1);
    // Which rows of the first step see no key need not be known if all of the call's see some.
    const bool exists = shared.steps[0].exists(), waits_for_facts = shared.has_unseen_row;
    if (exists && !waits_for_facts) {
      this->load_rows(shared.steps[0], 0, [&](int row) { return shared.steps[0].first_row() + row < params.rows; });
    }
    commit_copies();
    const int first_head = exists ? shared.steps[0].head : block.first_head;
    if (threadIdx.x == 0) shared.head = first_head;
    this->read_key_bias(first_head);
    this->load_keys();
    commit_copies();
    if (waits_for_facts) {
      wait_copies<1>();
      __syncthreads();
      if (exists) this->load_step(shared.steps[0], 0, 0);
      commit_copies();
    }
    if constexpr (kPlanned) {
      if (exists) this->make_words(shared.steps[0], 0);
    }
    for (int number = 0; shared.steps[number % kStepSlots].exists(); ++number) {
      const int word_slot = number % 2, stage = Config::kStages == 2 ? word_slot : 0;
      const auto slot_of = [&](int of) { return static_cast<int>(static_cast<unsigned>(of) % kFactSlots); };
      wait_copies<0>();
      __syncthreads();
      this->note_step(number + 3);
      if (kStoresQueries && threadIdx.x == 0) shared.is_met_once = shared.steps[number % kStepSlots].is_met_once;
      if constexpr (!kRowBias) {
        const int head = shared.head, next_head = shared.steps[number % kStepSlots].head;
        if (next_head != head) {
          if (params.dbias_sums != nullptr &&
              params.dbias.offset(block.batch, head) != params.dbias.offset(block.batch, next_head)) {
            flush_key_bias_gradients(head);
          }
          this->read_key_bias(next_head);
          __syncthreads();
          if (threadIdx.x == 0) shared.head = next_head;  // nobody reads it before the next step's barrier
        }
      }
      this->load_row_facts(shared.steps[(number + 2) % kStepSlots], slot_of(number + 2));
      if (Config::kStages == 2 && shared.steps[(number + 1) % kStepSlots].exists()) {
        this->load_step(shared.steps[(number + 1) % kStepSlots], stage ^ 1, slot_of(number + 1));
      }
      commit_copies();
      if constexpr (kPlanned) {
        if (shared.steps[(number + 1) % kStepSlots].exists())
          this->make_words(shared.steps[(number + 1) % kStepSlots], word_slot ^ 1);
      }
      run_step(shared.steps[number % kStepSlots], stage, slot_of(number), word_slot);
      if (Config::kStages == 1) {
        __syncthreads();
        if (shared.steps[(number + 1) % kStepSlots].exists())
          this->load_step(shared.steps[(number + 1) % kStepSlots], 0, slot_of(number + 1));
        commit_copies();
      }
    }
    wait_copies<0>();
    if (!kRowBias && params.dbias_sums != nullptr) flush_key_bias_gradients(shared.head);
    store_results();
  }
};

template <typename Element, int kHeadDim, int kValueDim, bool kPlanned, bool kRowBias, bool kNarrow, bool kLargeRows,
          bool kStoresQueries>
__global__ void __launch_bounds__(BackwardConfig<kHeadDim, kValueDim, kNarrow>::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams params) {
  unsigned char* shared = dynamic_shared_panels();
  using Block = BackwardBlock<Element, kHeadDim, kValueDim, kPlanned, kRowBias, kNarrow, kLargeRows, kStoresQueries>;
  // Of the kernels that are launched for a call, all but one end at once.
  if (Block::Config::kLargeRowsApart && kLargeRows != (params.row_flags->has_large_row != 0)) return;
  if (Block::kMayStoreQueries && !kLargeRows && kStoresQueries != stores_queries(params.met_once)) return;
  if constexpr (kPlanned) {
    bool first = true;
    do {
      const auto& next = Block::next_work(params, shared, first);
      if (next.number == kNoMoreWorks) return;
      Block(params, next.block, shared).run();
      first = false;
    } while (Block::kStays);
  } else {
    Block(params, key_block<Block::kTileKeys, false>(params, blockIdx.x), shared).run();
  }
}

}  // namespace flash_dmattn::internal::cuda

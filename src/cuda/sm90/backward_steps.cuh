// What consumers of the sm90 backward have in common, whichever gradients they own: a step of rows, its scores and
// their gradients.
#pragma once

#include <cstdint>

#include "cuda/attention/large_rows.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/scores.cuh"
#include "cuda/plan/entry_offset.cuh"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/backward_results.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/step_facts.cuh"

namespace flash_dmattn::internal::cuda::sm90 {

template <typename Block, std::uint32_t kAbsent>
struct BackwardSteps {
  using BlockType = Block;
  using Config = typename Block::Config;
  using Element = typename Block::Element;
  using Facts = typename Block::Facts;
  static constexpr int kHeadDim = Config::kHeadDim, kTileRows = Config::kTileRows, kStages = Config::kStages;
  static constexpr int kRowNTiles = kTileRows / 8, kKeyNTiles = kHeadDim / 8, kValueNTiles = Config::kValueDim / 8,
                       kQueryNTiles = Config::kQueryColumns / 8;
  static constexpr std::uint32_t kKeyPanel = Block::kKeyPanel, kRowPanel = Block::kRowPanel;
  // A fragment of A for each 16 rows of the step: what the products for keys and values take from registers.
  using Fragments = std::uint32_t[kRowNTiles / 2][4];

  Block& block;
  int group;                    // number of the consumer
  std::uint32_t mark;           // of the step (StepFacts), the same in all lanes
  float scores[kRowNTiles][4];  // of the thread's two keys, 8 apart
  float key_bias_gradient[2] = {0, 0};
  int thread_;

  __device__ explicit BackwardSteps(Block& block)
      : block(block),
        group(static_cast<int>(__reduce_max_sync(~0u, threadIdx.x / kWarpGroup)) - 1),
        thread_(static_cast<int>(threadIdx.x)) {}

  // Made anew wherever they are needed: kept, what follows from them would take registers.
  __device__ unsigned thread() const { return static_cast<unsigned>(recomputed(thread_)); }
  __device__ int lane() const { return static_cast<int>(thread() % 32); }
  __device__ int warp() const { return static_cast<int>(thread() / 32 % 4); }
  // The consumer's first key in the tile, the warp's and the thread's, and its first row of a step.
  __device__ int consumer_key() const { return Config::kSplitsGradients ? 0 : Config::kConsumerKeys * group; }
  __device__ int warp_key() const { return consumer_key() + warp() * 16; }
  __device__ int key_column() const { return warp_key() + lane() / 4; }
  __device__ int first_row() const { return 2 * (lane() % 4); }
  // For what is seldom needed: the compiler would hold on to it in registers over all steps.
  __device__ const BackwardParams& rare_params() const { return *recomputed(&block.params); }
  __device__ bool has(typename Facts::Mark bit) const { return (mark & bit & ~kAbsent) != 0; }
  // Whether there is a step, whose rows are met once or not, as is said.
  __device__ bool is_step(bool met_once) const {
    if (!Block::kStoresQueries) return has(Facts::kExists);
    return (mark & (Facts::kExists | Facts::kMetOnce)) == (Facts::kExists | (met_once ? Facts::kMetOnce : 0));
  }
  __device__ int stage() const { return static_cast<int>(mark >> Facts::kStageShift & Facts::kStageMask); }
  // Where the step's rows are in shared memory.
  __device__ std::uint32_t queries() const { return (mark >> Facts::kAddressShift) * Facts::kAddressUnits; }
  __device__ std::uint32_t output_gradients() const {
    return queries() + static_cast<std::uint32_t>(Config::kQueryBytes);
  }
  __device__ const Facts& facts() const { return block.shared.facts[stage()]; }
  __device__ const typename Block::Work& work() const { return block.shared.works[has(Facts::kOddWork) ? 1 : 0]; }

  // The same address, but one that is worked out anew at every step, and with it the operands' descriptors: kept over
  // all steps, as the compiler would have it, these take more registers than there are. Where they come from, the mark,
  // also tells it that they are the same in all lanes.
  __device__ std::uint32_t anew(std::uint32_t address) const { return address + (mark & Facts::kNever); }
  // An operand's descriptor, worked out anew likewise. It is its upper half that comes from the mark, which the
  // compiler would else know: it then advances most of them in one addition, not in two with a carry, and tensor cores
  // wait for these. Wide heads gain nothing by it.
  __device__ std::uint64_t descriptor(std::uint32_t address, std::uint32_t panel) const {
    if constexpr (Config::kSplitsGradients) return matrix_descriptor(anew(address), panel, 1024);
    return brief_matrix_descriptor(address, panel, 1024) | std::uint64_t{mark & Facts::kNever} << 32;
  }

  // ---- Products, all under way until they are waited for

  // sum = a b or, if `adds`, sum += a b
  template <BRows kB, ARows kA, int kNTiles>
  __device__ static void begin_or_add(float (&sum)[kNTiles][4], std::uint64_t a, std::uint64_t b, bool adds) {
    if (adds) {
      wgmma<Element, kB, kA>(sum, a, b, true);
    } else {
      wgmma<Element, kB, kA, true>(sum, a, b, false);
    }
  }

  // scores = keys times queries, transposed
  __device__ void multiply_queries() { multiply<kHeadDim>(scores, block.keys, queries()); }
  // gradients, of probabilities, = values times gradients of the output, transposed
  __device__ void multiply_output_gradients(float (&gradients)[kRowNTiles][4]) const {
    multiply<Config::kValueDim>(gradients, block.values, output_gradients());
  }
  // sum = `own`, rows of keys or values of kDims columns, times rows of a stage, transposed
  template <int kDims>
  __device__ void multiply(float (&sum)[kRowNTiles][4], std::uint32_t own, std::uint32_t rows) const {
    const std::uint64_t a = descriptor(own + consumer_key() * 128, 16);
    const std::uint64_t b = descriptor(rows, 16);
    wgmma_fence();
#pragma unroll
    for (int depth = 0; depth < kDims / 16; ++depth) {
      begin_or_add<BRows::kColumns, ARows::kRows>(sum, advanced(a, depth / 4 * kKeyPanel + depth % 4 * 32),
                                                  advanced(b, depth / 4 * kRowPanel + depth % 4 * 32), depth != 0);
    }
    wgmma_commit();
  }

  // sum += `fragments` times rows of a stage
  template <int kNTiles>
  __device__ void add_products(float (&sum)[1][kNTiles][4], const Fragments& fragments, std::uint32_t rows) const {
    const std::uint64_t b = descriptor(rows, kRowPanel);
    wgmma_fence();
#pragma unroll
    for (int depth = 0; depth < kTileRows / 16; ++depth) {
      wgmma<Element, BRows::kDepth>(sum[0], fragments[depth], advanced(b, depth * 16 * 128), true);
    }
    wgmma_commit();
  }

  // Part `part` of dquery = dS K: columns or, where steps have rows for all consumers, rows. With kReuses in the
  // registers of the part before, for which the compiler would take others while those are still being read.
  template <bool kReuses = false>
  __device__ void multiply_score_gradients(std::uint32_t step, int part, float (&dqueries)[kQueryNTiles][4]) const {
    const int column = Config::kSplitsRows ? 0 : part * Config::kQueryColumns;
    const std::uint32_t rows = Config::kSplitsRows ? part * kKeyPanel : 0;
    const std::uint32_t place = score_place(step);
    std::uint64_t a;
    if constexpr (Config::kSplitsGradients) {
      a = matrix_descriptor(score_gradients_at(place) + rows, 16, 1024);
    } else {
      a = advanced(descriptor(block.score_gradients + rows, 16),
                   place * static_cast<std::uint32_t>(Config::kScoreBytes));
    }
    const std::uint64_t b = descriptor(block.keys + column / 64 * kKeyPanel, kKeyPanel);
    wgmma_fence();
#pragma unroll
    for (int depth = 0; depth < Config::kTileKeys / 16; ++depth) {
      const std::uint64_t own_b = advanced(b, depth * 16 * 128);
      if constexpr (Config::kRowBiased) {  // a row of the step after the other, not a key
        begin_or_add<BRows::kDepth, ARows::kRows>(dqueries, advanced(a, depth / 4 * kRowPanel + depth % 4 * 32), own_b,
                                                  depth != 0);
        continue;
      }
      const std::uint64_t own_a = advanced(a, depth * 16 * 128);
      if constexpr (kReuses) {
        wgmma<Element, BRows::kDepth, ARows::kDepth>(dqueries, own_a, own_b, depth != 0);
      } else {
        begin_or_add<BRows::kDepth, ARows::kDepth>(dqueries, own_a, own_b, depth != 0);
      }
    }
    wgmma_commit();
  }

  // Gradients of scores have kScoreStages places, which steps take by turns.
  __device__ std::uint32_t number() const { return mark >> Facts::kNumberShift & 7; }
  __device__ std::uint32_t last_number() const { return mark >> Facts::kLastNumberShift & 7; }
  __device__ static std::uint32_t score_place(std::uint32_t step) {
    return Facts::template place_of<Config::kScoreStages>(step);
  }
  __device__ std::uint32_t score_gradients_at(std::uint32_t place) const {
    const std::uint32_t first = Config::kSplitsGradients ? anew(block.score_gradients) : block.score_gradients;
    return first + place * static_cast<std::uint32_t>(Config::kScoreBytes);
  }
  __device__ std::uint32_t score_gradients_full(std::uint32_t step) const {
    return shared_address(&block.shared.score_gradients_full[score_place(step)]);
  }
  // Before the first step of all there are none, and nothing is waited for.
  __device__ void wait_for_score_gradients(std::uint32_t step) const {
    wait(score_gradients_full(step), Facts::template parity_of<Config::kScoreStages>(step));
  }
  // Around what adds a step's gradients of queries: until they may be added, and when they have been.
  __device__ static std::uint32_t turn_place(std::uint32_t step) {
    return Facts::template place_of<Config::kTurnPlaces>(step);
  }
  __device__ void wait_for_turn(std::uint32_t step) const {
    if (!has(Facts::kTakesTurns)) return;
    block.shared.turns.wait_for_turn(turn_place(step), Facts::template parity_of<Config::kTurnPlaces>(step));
  }
  __device__ void pass_turn(std::uint32_t step) const {
    if (has(Facts::kTakesTurns)) block.shared.turns.pass_turn(turn_place(step));
  }

  // ---- Scores

  // visit(n, i, element): row first_row() + 8 n + i % 2 of the step, key i / 2 of the thread.
  template <typename Visit>
  __device__ static void for_each(float (&fragment)[kRowNTiles][4], Visit visit) {
#pragma unroll
    for (int n = 0; n < kRowNTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) visit(n, i, fragment[n][i]);
  }

  // Of the step's head; each warp for its own keys.
  __device__ void read_key_bias() {
    const BackwardParams& params = rare_params();
    const int column = warp_key() + lane();
    __syncwarp();
    if (lane() < 16) {
      const std::int32_t key = work().key[column];
      const std::int64_t entry = entry_offset(params.bias, work().block.batch, facts().head);
      block.shared.bias[column] = key < 0 ? 0 : load_bias<Element>(params.bias, entry + key * params.bias.key_stride);
    }
    __syncwarp();
  }

  // Where the lane's row of a matrix of 8 x 8 lies, of four that are, transposed, the fragment of the step's first 16
  // rows, and bytes from there to those of the next 16: of a bias that differs by row, or of scores' gradients.
  __device__ std::uint32_t transposed_piece(std::uint32_t panels) const {
    const int matrix = lane() / 8, row = lane() % 8, piece = warp() * 2 + matrix % 2;
    return panels + group * kRowPanel + (matrix / 2 * 8 + row) * 128 + (piece ^ row) * 16;
  }
  static constexpr std::uint32_t kTransposedDepth = 16 * 128;

  // With the roundings of add_row_bias (scores.cuh). The place of the bias is handed back once it has been read, so
  // that the next step's has the time of a step to arrive.
  __device__ void add_row_bias() {
    const float scale = block.params.score.scale;
    const auto& pipeline = block.shared.row_bias.consumers[group];
    wait(shared_address(&pipeline.full[0]), number() % 2);
    const std::uint32_t own = transposed_piece(block.biases);
#pragma unroll
    for (int depth = 0; depth < kRowNTiles / 2; ++depth) {
      std::uint32_t bias[4];
      load_matrices_transposed(bias, own + depth * kTransposedDepth);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack<Element>(bias[i]);
        float* score = scores[2 * depth + i / 2] + i % 2 * 2;
        score[0] = __fadd_rn(__fmul_rn(score[0], scale), pair.x);
        score[1] = __fadd_rn(__fmul_rn(score[1], scale), pair.y);
      }
    }
    __syncwarp();
    if (lane() == 0) arrive(shared_address(&pipeline.empty[0]));
  }
  // Of the step with that number, whose gradients of scores all warps have stored: those of the consumer's keys. One
  // thread has the copy engine store them.
  __device__ void store_row_bias_gradients(std::uint32_t step) const {
    if constexpr (Config::kRowBiased) {
      if (!has(Facts::kStoresRowBias) || thread() % kWarpGroup != 0) return;
      const auto& place = block.shared.row_bias.places[step];
      const int first_key = Block::first_position(work().block) + consumer_key();
      store_box(block.maps.dbias, first_key, place.first_row, place.head, work().block.batch,
                score_gradients_at(score_place(step)) + group * kRowPanel);
      commit_boxes();
      wait_boxes_read<1>();  // of the step before that, whose place this one's will take
    }
  }

  // Makes scores of products; with the roundings of add_key_bias and scale_by (scores.cuh).
  __device__ void make_scores() {
    if constexpr (Config::kRowBiased) return add_row_bias();
    const float scale = block.params.score.outer_scale;
    if (has(Facts::kBiased)) {
      const float* bias = block.shared.bias + key_column();
      const float own[2] = {bias[0], bias[8]};
      for_each(scores, [&](int, int i, float& score) { score = __fmaf_rn(score, scale, own[i / 2]); });
    } else {
      for_each(scores, [&](int, int, float& score) { score = __fmul_rn(score, scale); });
    }
  }

  // Scores of large rows become their distances from lse. One row after another, as there are few registers.
  __device__ void subtract_large_rows() {
    const BackwardParams& params = rare_params();
    const std::uint32_t lse_of_rows = shared_address(&facts().rows.lse[first_row()]);
    const RowStats* stats =
        params.row_stats + (static_cast<std::int64_t>(work().block.batch) * params.heads + facts().head) * params.rows +
        facts().first_row + first_row();
#pragma unroll
    for (int n = 0; n < kRowNTiles; ++n)
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        if (!is_large_row(__uint_as_float(load_shared(lse_of_rows + (8 * n + pair) * 4)))) continue;
        const LargeLse lse(params.score, stats[8 * n + pair]);
        scores[n][pair] = lse.distance(params.score, scores[n][pair]);
        scores[n][pair + 2] = lse.distance(params.score, scores[n][pair + 2]);
      }
  }

  // Of the thread's rows 8 n and the next one.
  __device__ float2 pair_of(const float (&row_facts)[kTileRows], int n) const {
    return *reinterpret_cast<const float2*>(&row_facts[first_row() + 8 * n]);
  }

  // The first kCount of these, read at one place of the program.
  template <int kCount>
  struct Pairs {
    float2 first[kCount > 0 ? kCount : 1];
  };
  template <int kCount>
  __device__ void read_pairs(Pairs<kCount>& pairs, const float (&row_facts)[kTileRows]) const {
    const std::uint32_t address = shared_address(&row_facts[first_row()]);
#pragma unroll
    for (int n = 0; n < kCount; ++n) pairs.first[n] = load_shared_float2(address + n * 8 * sizeof(float));
  }
  template <int kCount>
  __device__ float2 pair_of(const Pairs<kCount>& pairs, const float (&row_facts)[kTileRows], int n) const {
    return n < kCount ? pairs.first[n] : pair_of(row_facts, n);
  }

  // Scores become probabilities.
  template <int kPairs>
  __device__ void exponentiate(const Pairs<kPairs>& lse_pairs) {
    const float multiplier = block.params.score.multiplier;
#pragma unroll
    for (int n = 0; n < kRowNTiles; ++n) {
      const float2 lse = pair_of(lse_pairs, facts().rows.lse, n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[n][i] = exp2_fast(fmaf(scores[n][i], multiplier, -(i % 2 == 0 ? lse.x : lse.y)));
      }
    }
  }

  // What the thread sees of the step, a bit a score. A word has eight bits for the thread, two neighbours of every
  // eight. Turned, those of four words, two of each key, stand side by side.
  using Seen = std::uint32_t[Config::kWords / 2];
  __device__ void read_seen(Seen& seen) const {
    static_assert(Config::kWords % 2 == 0);
    const std::uint32_t words = shared_address(&facts().words[key_column()]);
#pragma unroll
    for (int pair = 0; pair < Config::kWords / 2; ++pair) {
      seen[pair] = 0;
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const int key = part / 2, word = 2 * pair + part % 2;
        // One after another: these loads stay in order, and take less registers.
        const std::uint32_t bits =
            load_shared(words + (key * 8 * Config::kWords + word) * static_cast<std::uint32_t>(sizeof(word)));
        const std::uint32_t own = 0x03030303u << (2 * part);
        seen[pair] = (seen[pair] & ~own) | (__funnelshift_r(bits, bits, first_row() - 2 * part) & own);
      }
    }
  }

  // Overwrites what belongs to hidden scores by 0.
  __device__ void hide(float (&fragment)[kRowNTiles][4]) const {
    Seen seen;
    read_seen(seen);
#pragma unroll
    for (int pair = 0; pair < Config::kWords / 2; ++pair) {
      const std::uint32_t bits = recomputed(seen[pair]);  // as in the forward's hide_listed
#pragma unroll
      for (int bit = 0; bit < 32; ++bit) {
        const int n = bit / 8, part = bit % 8 / 2, word = 2 * pair + part % 2;
        if ((bits & (1u << bit)) == 0) fragment[4 * word + n][2 * (part / 2) + bit % 2] = 0;
      }
    }
  }
  // The same once these are packed, two neighbouring rows at a time. Shifted, what is seen has the first row of each
  // eight, or the second, as the sign of a byte, which a permutation of bytes (PTX: prmt) spreads over half a word.
  __device__ static void hide_packed(Fragments& packed, const Seen& seen) {
#pragma unroll
    for (int word = 0; word < Config::kWords; ++word)
#pragma unroll
      for (int key = 0; key < 2; ++key) {
        const int first_bit = 2 * (2 * key + word % 2);
        const std::uint32_t first = seen[word / 2] << (7 - first_bit), second = seen[word / 2] << (6 - first_bit);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          packed[2 * word + n / 2][n % 2 * 2 + key] &= signs_of_bytes(first, second, n);
        }
      }
  }
  __device__ void hide_packed(Fragments& packed) const {
    Seen seen;
    read_seen(seen);
    hide_packed(packed, seen);
  }

  __device__ static void pack_fragments(const float (&fragment)[kRowNTiles][4], Fragments& packed) {
#pragma unroll
    for (int n = 0; n < kRowNTiles; ++n) {
      packed[n / 2][n % 2 * 2] = pack<Element>(fragment[n][0], fragment[n][1]);
      packed[n / 2][n % 2 * 2 + 1] = pack<Element>(fragment[n][2], fragment[n][3]);
    }
  }

  // `gradients` are those of the probabilities and become those of the scores. Where registers are short, from
  // probabilities as they were rounded for the product.
  template <int kDeltas>
  __device__ void make_score_gradients(const Fragments& probabilities, const Pairs<kDeltas>& deltas,
                                       float (&gradients)[kRowNTiles][4]) {
#pragma unroll
    for (int n = 0; n < kRowNTiles; ++n) {
      const float2 delta = pair_of(deltas, facts().rows.delta, n);
#pragma unroll
      for (int key = 0; key < 2; ++key) {
        float2 pair = {scores[n][2 * key], scores[n][2 * key + 1]};
        if constexpr (Config::kUnpacksProbabilities) pair = unpack<Element>(probabilities[n / 2][n % 2 * 2 + key]);
        gradients[n][2 * key] = pair.x * (gradients[n][2 * key] - delta.x);
        gradients[n][2 * key + 1] = pair.y * (gradients[n][2 * key + 1] - delta.y);
      }
    }
    if (!kHiddenAreZeros && !has(Facts::kFull)) hide(gradients);
    if (has(Facts::kSumsKeyBias)) add_key_bias_gradients(gradients);
  }

  // Hidden probabilities are zeros, and so are the gradients of hidden scores that are products of these, unless the
  // gradient of such a probability is infinite or NaN, as hidden values may be: few tiles have to be hidden once more.
  // Without a plan few tiles have hidden scores at all, and this costs others more than it saves (1 %).
  static constexpr bool kHiddenAreZeros =
      Block::kPlanned && Config::kUnpacksProbabilities && (kAbsent & Facts::kSumsKeyBias) != 0;

  __device__ void pack_score_gradients(const float (&gradients)[kRowNTiles][4], Fragments& packed) const {
    pack_fragments(gradients, packed);
    if (kHiddenAreZeros && !has(Facts::kFull) && !is_finite(packed)) hide_packed(packed);
  }
  // Whether all numbers are finite: times 0 the others are NaN, and so are sums with these.
  __device__ static bool is_finite(const Fragments& packed) {
    std::uint32_t sums[4] = {};
#pragma unroll
    for (int depth = 0; depth < kRowNTiles / 2; ++depth)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] = multiply_add<Element>(packed[depth][i], 0, sums[i]);
    // What is not NaN is 0 by now, and a NaN stays one.
    const float2 pair = unpack<Element>(multiply_add<Element>(multiply_add<Element>(sums[0], 0, sums[1]), 0,
                                                              multiply_add<Element>(sums[2], 0, sums[3])));
    return pair.x + pair.y == 0;
  }

  // For the product with keys, which reads them as kTileKeys rows, and panels of 64 of the step's rows as columns.
  __device__ void store_score_gradients(const Fragments& packed) const {
    if constexpr (Config::kRowBiased) {
      const std::uint32_t own = transposed_piece(score_gradients_at(score_place(number())));
#pragma unroll
      for (int depth = 0; depth < kRowNTiles / 2; ++depth) {
        store_matrices_transposed(own + depth * kTransposedDepth, packed[depth]);
      }
      return;
    }
    // Matrices 0 and 1 of a fragment are neighbouring keys, 2 and 3 the next eight rows.
    const int matrix = lane() / 8, row = lane() % 8;
    const std::uint32_t own_row = score_gradients_at(score_place(number())) + (warp_key() + matrix % 2 * 8 + row) * 128;
#pragma unroll
    for (int depth = 0; depth < kRowNTiles / 2; ++depth) {
      // The same piece of 16 bytes, worked out from the first one or by itself; measured.
      const std::uint32_t piece = Config::finds_pieces_together(Block::kPlanned)
                                      ? (own_row + (matrix / 2 ^ row) * 16) ^ depth % 4 * 32
                                      : own_row + ((depth % 4 * 2 + matrix / 2) ^ row) * 16;
      store_matrices(piece + depth / 4 * kKeyPanel, packed[depth]);
    }
  }
  // Tells the consumers that take them.
  __device__ void publish_score_gradients() const {
    fence_async_proxy();
    __syncwarp();
    if (Config::kSplitsGradients || lane() == 0) arrive(score_gradients_full(number()));
  }

  __device__ void add_key_bias_gradients(const float (&gradients)[kRowNTiles][4]) {
#pragma unroll
    for (int n = 0; n < kRowNTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) key_bias_gradient[i / 2] += gradients[n][i];
  }

  // ---- Steps

  // Once it is there. The mark is read by one lane and handed out by a reduction, so that the compiler knows it, and
  // the stage that products read, to be the same in all lanes.
  __device__ void wait_for_step(int stage, std::uint32_t parity) {
    wait(shared_address(&block.shared.steps.full[stage]), parity);
    mark = __reduce_or_sync(~0u, lane() == 0 ? block.shared.facts[stage].mark : 0);
  }
  __device__ void wait_for_next_step() { wait_for_step(next_stage(), next_parity()); }
  // The same, but of the mark what each lane has read: a reduction hands it out.
  __device__ std::uint32_t next_mark() const {
    wait(shared_address(&block.shared.steps.full[next_stage()]), next_parity());
    return lane() == 0 ? load_shared(shared_address(&block.shared.facts[next_stage()].mark)) : 0;
  }
  __device__ int next_stage() const { return stage() == kStages - 1 ? 0 : stage() + 1; }
  __device__ std::uint32_t next_parity() const {
    const std::uint32_t parity = has(Facts::kOddRound) ? 1 : 0;
    return stage() == kStages - 1 ? parity ^ 1 : parity;
  }

  // Once keys and values of the work are there.
  __device__ void wait_for_keys() const {
    wait(shared_address(&block.shared.keys.full[0]), has(Facts::kOddWork) ? 1 : 0);
    fence_async_proxy();  // they were not copied by the products' proxy
  }
  // At the end of the work's steps, whose products have all ended.
  __device__ void release_keys() const {
    release(stage());
    if (lane() == 0) arrive(shared_address(&block.shared.keys.empty[0]));
  }
  // Its results are stored, too.
  __device__ void release_work() const {
    arrive(shared_address(&block.shared.works_empty[has(Facts::kOddWork) ? 1 : 0]));
  }

  // Of the step whose products have all ended.
  __device__ void release(int stage) const {
    __syncwarp();
    arrive(shared_address(&block.shared.steps.empty[stage]));
  }

  // What is read of a step before products that later reads would wait for: lse of kPairs pairs of the thread's rows
  // and, as registers allow, what the thread sees.
  static constexpr bool kReadsSeenAhead = Config::reads_seen_ahead(Block::kPlanned, Block::kIsPlain);
  template <int kPairs>
  struct Ahead {
    Pairs<kPairs> lse;
    Seen seen;
  };
  template <int kPairs>
  __device__ void read_ahead(Ahead<kPairs>& ahead) const {
    read_pairs(ahead.lse, facts().rows.lse);
    if (kReadsSeenAhead && !has(Facts::kFull)) read_seen(ahead.seen);
  }

  template <int kPairs>
  __device__ void make_probabilities(Fragments& packed, Ahead<kPairs>& ahead) {
    if (has(Facts::kTransforms)) make_scores();
    if (has(Facts::kLargeRows)) {
      subtract_large_rows();
      read_ahead(ahead);  // again: there are no registers for both
    }
    exponentiate(ahead.lse);
    if (!Config::kHidesPacked && !has(Facts::kFull)) hide(scores);
    pack_fragments(scores, packed);
    if (!Config::kHidesPacked || has(Facts::kFull)) return;
    if (!kReadsSeenAhead) read_seen(ahead.seen);
    hide_packed(packed, ahead.seen);
  }

  __device__ BackwardResults<Block, BackwardSteps> results() { return {*this}; }

  __device__ void start_head() {
    results().start_sums_of_head();
    if (has(Facts::kBiased)) read_key_bias();
  }
};

}  // namespace flash_dmattn::internal::cuda::sm90

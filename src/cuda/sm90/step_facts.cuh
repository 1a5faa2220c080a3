// What producers of the sm90 backward tell consumers of a step.
#pragma once

#include <bit>
#include <cstdint>

#include "cuda/attention/params.h"

namespace flash_dmattn::internal::cuda::sm90 {

// As StepFacts has it: the call has a bias that differs by row, which takes kernels of its own.
constexpr std::uint32_t kRowBiasMark = 1u << 21;

// In shared memory, one for each stage.
template <typename Config>
struct alignas(16) StepFacts {
  // Of `mark`, which has all that consumers ask for at every step, since one number for all lanes takes a register that
  // they have, and many do not.
  enum Mark : std::uint32_t {
    kExists = 1,          // there is a step; else it is the end of the work
    kFull = 2,            // every row sees every key; there are no words
    kStartsHead = 4,      // it is the first of a head
    kOddRound = 8,        // the pipeline's round is odd; from kStageShift on its stage
    kTransforms = 16,     // of the call: anything is done to scores before the exponent
    kBiased = 32,         // there is a bias
    kSumsKeyBias = 64,    // its gradient is asked for
    kLargeRows = 128,     // there are large rows
    kTakesTurns = 256,    // sums of queries are added to in turn
    kNever = 1u << 15,    // is not set, which the compiler does not know
    kOddWork = 1u << 18,  // the work's number is odd
    kDone = 1u << 19,     // there is no work, either
    kMetOnce = 1u << 20,  // the rows are met once (MetOnceTiles): their dquery is stored, and there are no sums of it
    kRowBiased = kRowBiasMark,
    kStoresRowBias = 1u << 22,  // and its gradient is asked for
  };
  // Besides the number of the step, and of the one before.
  static constexpr int kNumberShift = 9, kLastNumberShift = 12, kStageShift = 16, kAddressShift = 24;
  // Steps are numbered modulo kNumbers, so that a number says which of kScoreStages places, and of kTurnPlaces, the
  // step has, and the parity of its round at either (place_of, parity_of). A power of two is divided by at no cost,
  // and consumers wait for what these cost: of three places in a round, the number that would be the fourth is left
  // out.
  static constexpr std::uint32_t kNumbers = 8;
  static_assert(Config::kScoreStages == 3
                    ? Config::kTurnPlaces == 3
                    : kNumbers % (2 * Config::kScoreStages) == 0 && kNumbers == 2 * Config::kTurnPlaces);
  template <int kPlaces>
  __device__ static std::uint32_t place_of(std::uint32_t number) {
    return number % std::bit_ceil(static_cast<unsigned>(kPlaces));
  }
  template <int kPlaces>
  __device__ static std::uint32_t parity_of(std::uint32_t number) {
    return number / std::bit_ceil(static_cast<unsigned>(kPlaces)) % 2;
  }
  static constexpr std::uint32_t kLeftOut = Config::kScoreStages == 3 ? 1 : 0;  // of every four
  __device__ static std::uint32_t number_after(std::uint32_t number) {
    return (number + (number % 4 == 3 - kLeftOut ? 1 + kLeftOut : 1)) % kNumbers;
  }
  __device__ static std::uint32_t number_before(std::uint32_t number) {
    return (number + kNumbers - (number % 4 == 0 ? 1 + kLeftOut : 1)) % kNumbers;
  }
  static constexpr std::uint32_t kStageMask = 3, kAddressUnits = 1024;
  static_assert(Config::kStages <= kStageMask);

  // Those of the call, but for kLargeRows: the host does not know of these.
  __host__ __device__ static std::uint32_t marks_of(const BackwardParams& params) {
    return (params.score.transforms ? kTransforms : 0) | (params.bias.defined() ? kBiased : 0) |
           (params.dbias_sums != nullptr ? kSumsKeyBias : 0) | (params.turns.queries != nullptr ? kTakesTurns : 0);
  }

  struct {
    RowFacts lse[Config::kTileRows], delta[Config::kTileRows];
  } rows;
  std::uint32_t words[Config::kTileKeys][Config::kWords];  // of the step's rows, 32 at a time
  int head, first_row;
  int tile;  // of all tiles of rows, in all colors: where sums of dquery lie
  std::uint32_t mark;
};

// Where the dquery of a step's rows goes that no other step adds to.
struct StepRows {
  std::uint16_t* first;
  int count;
};

}  // namespace flash_dmattn::internal::cuda::sm90

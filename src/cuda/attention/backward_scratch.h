// Scratch memory of a backward, and how its work is cut.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/arena.h"
#include "core/problem.h"
#include "cuda/attention/gradient_passes.h"
#include "cuda/attention/params.h"
#include "cuda/plan/prepared_visibility.h"

namespace flash_dmattn::internal::cuda {

// Of a family: rows of a step and keys of a block of its backward, and on how many multiprocessors blocks stay, one on
// each, for many tiles of keys whether there is a plan or not (0: they stay with a plan alone). Facts of rows, and sums
// of dquery, are padded to whole tiles of rows.
struct BackwardTiles {
  int rows, keys;
  int stays_on = 0;
  int stored_share = 0;       // as MetOnceTiles::least_share; 0: there are no kernels that store them
  int value_columns = 0;      // of sums of dvalue
  int own_blocks = 1;         // so many blocks, each on its multiprocessor, own a tile of keys together
  bool stores_dbias = false;  // the gradient of a bias that every score has to itself is stored, not added up
  bool stays() const { return stays_on > 0; }
};

struct BackwardCounters {
  RowFlags row_flags;
  std::int32_t taken_works;
  unsigned long long visits[2];  // as in MetOnceTiles
};

// Where the gradient of a bias is summed.
enum class BiasSums : std::uint8_t {
  kNone,     // it is not asked for
  kInPlace,  // in the gradient itself, which is float32
  kRounded,  // in fp32 of its shape; launch_bias_gradients rounds it
  kStored,   // nowhere: every score has its own, and what no row sees is cleared before
  kByHead,   // one part for every color, query head and key, added up in one order by launch_reduced_bias_gradients
};

struct BackwardScratch {
  PreparedVisibility prepared;
  BackwardTiles tiles = {};
  RowFacts* row_facts = nullptr;
  // From `counters` on so many bytes are cleared before all else: counters, turns, sums of tiles of keys that are cut,
  // marks of keys and sums of the bias, if these are not in the gradient itself.
  BackwardCounters* counters = nullptr;
  std::size_t cleared_bytes = 0;
  RowStats* row_stats = nullptr;  // with a sink: as in RowPass
  float* sink_parts = nullptr;    // likewise
  float *dquery_sums = nullptr, *dbias_sums = nullptr;
  MetOnceTiles met_once;
  KeyGradientSums key_sums;       // its `stored` as in BackwardParams
  std::int32_t* order = nullptr;  // as in KeyWorks::last
  KeyWorks works;                 // without its `last` and `taken`
  KeyTileOrder tile_order;
  std::size_t key_bytes = 0, value_bytes = 0, dbias_count = 0, dbias_bytes = 0;
  std::int32_t splits = 1, launch_chunks = 0;
  bool wants_sums = false;
  bool deterministic = false;
  SumTurns turns;  // if it takes them
  std::int32_t dquery_colors = 1;
  BroadcastView dbias;  // of dbias_sums
  BiasSums bias_sums = BiasSums::kNone;

  // `tiles`: of the family's backward. The same arrays whether the arena has memory or only measures.
  void arrange(const BackwardProblem& problem, BackwardTiles tiles, Arena* arena);

  // Whether blocks wait for their turn to add to sums (SumTurns). Else a deterministic backward has passes of its own.
  bool takes_turns() const { return deterministic && tiles.stays(); }
  // Whether launches follow one another, none of which adds to a sum of keys more than once: first of the lists of
  // launch_chunks chunks each, then of ranges.
  bool adds_by_launches() const { return deterministic && prepared.planned && !takes_turns(); }

  // That no launch has more blocks of keys than a grid may.
  Status check_key_blocks(const BackwardProblem& problem) const;

 private:
  void arrange_turns(const BackwardProblem& problem, std::int64_t row_tiles, Arena* arena);
  void arrange_order(const BackwardProblem& problem, Arena* arena);
  void arrange_tile_order(const BackwardProblem& problem, Arena* arena);
  // Of a launch that takes the lists of so many chunks.
  std::int64_t count_key_blocks(const BackwardProblem& problem, std::int64_t chunks) const;
  void arrange_bias(const BackwardProblem& problem, Arena* arena);
};

}  // namespace flash_dmattn::internal::cuda

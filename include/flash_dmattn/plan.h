// What attention would do, without doing it: how the visible keys are planned and how much work is left. And
// the reverse of a dense mask: the intervals that say the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "flash_dmattn/attention.h"
#include "flash_dmattn/executor.h"
#include "flash_dmattn/export.h"
#include "flash_dmattn/selection.h"
#include "flash_dmattn/status.h"
#include "flash_dmattn/tensor.h"

namespace FLASH_DMATTN_API flash_dmattn {

// The plan of a forward call.
struct PlanReport {
  AttentionCounters counters;  // what attention_forward would count
  std::size_t plan_bytes = 0;  // of plans and indices, of all workers; without packed tiles
  std::string backend;         // "cpu/avx512"
  std::string rule;            // how keys are listed and told apart, and why
  // Tiles and chunks; all 0 where no tiles are planned (float64, or nothing to compute).
  int chunk_rows = 0;    // query rows that are planned together
  int row_tile = 0;      // rows of a score tile
  int key_tile = 0;      // listed keys of a score tile
  int shared_heads = 0;  // query heads that share a plan and copied keys
};

// Plans the call that attention_forward would run with the same arguments. Only the sizes and dtypes of query,
// key and value count; their elements are not read, and value may be left out. O(planning) time, which for a mask
// with an entry for every score means reading it once.
//
// On CUDA `workspace` holds the bytes that the query gives, aligned to kMemoryAlignment, and the call waits for the
// stream, since it answers on the host; it looks at every visited score. The CPU needs none and allocates for the
// call's duration.
Status plan_report_workspace(const AttentionInputs&, const AttentionOptions&, const AttentionContext&,
                             std::size_t* bytes);
Status plan_report(const AttentionInputs&, const AttentionOptions&, PlanReport*, void* workspace,
                   std::size_t workspace_bytes, const AttentionContext& = {});
Status plan_report(const AttentionInputs&, const AttentionOptions&, PlanReport*, const AttentionContext& = {});

// The plan of one chunk of query rows, written out to be looked at.
struct PlannedChunk {
  enum class Tile : std::uint8_t { kEmpty, kPartial, kFull };

  std::int64_t row_begin = 0;
  int rows = 0;
  int row_tile = 1, key_tile = 1;
  bool is_list = false;               // the keys are gathered; false: neighbours, read where they are
  bool has_bitmap = false;            // a bit for every row and listed key; false: every row sees a prefix of the keys
  std::vector<std::int32_t> keys;     // in the order of the plan; each is visible to some row
  std::vector<std::uint8_t> visible;  // (rows, keys): 1 where the row sees the listed key
  std::vector<Tile> tiles;            // (row tiles, key tiles)
};

// The plan of one query head of one batch element, in order of rows; a call of few rows makes it for some keys at a
// time. It holds rows x listed keys bytes for every chunk. CPU only, and not for float64, which plans nothing.
Status plan_chunks(const AttentionInputs&, const AttentionOptions&, std::int64_t batch, std::int64_t head,
                   std::vector<PlannedChunk>*, const AttentionContext& = {});

// Whether in every (batch, head) the rows that see a key follow one another, for every key, and which they are.
//   mask        bool (B, heads, Sq, Sk), any strides; no dimension is broadcast
//   is_causal   rows that the causal rule hides from a key (i < j - (Sk - Sq)) count as not seeing it, so that
//               the intervals are right for calls with that rule only
//   intervals   contiguous (B, heads, Sk); their contents mean nothing if *exact comes out false. The query below may
//               be made without them
// One pass over the mask, at most; O(Sk) memory beside it, which on CUDA is the workspace. There the call waits for the
// stream, since *exact is on the host: a mask is looked at once and used many times.
Status mask_intervals_workspace(const TensorView& mask, const KeyIntervals& intervals, const SelectionContext&,
                                std::size_t* bytes);
Status mask_intervals(const TensorView& mask, bool is_causal, const KeyIntervals& intervals, bool* exact,
                      void* workspace, std::size_t workspace_bytes, const SelectionContext& = {});
Status mask_intervals(const TensorView& mask, bool is_causal, const KeyIntervals& intervals, bool* exact,
                      const SelectionContext& = {});

}  // namespace FLASH_DMATTN_API flash_dmattn

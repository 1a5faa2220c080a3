// The plan of a chunk: which keys a few hundred neighbouring query rows see. Everything that hides keys
// (mask, intervals, lists, causal rule, lengths) becomes one list of keys that some row of the chunk sees, and per
// row either a prefix of that list or a bitmap over it. Kernels know nothing else about masks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/problem.h"
#include "plan/bits.h"
#include "plan/index_rows.h"
#include "plan/interval_index.h"

namespace flash_dmattn::internal {

// Keys are classified, skipped and masked in tiles of one bitmap word.
constexpr int kTileKeys = kWordBits;

enum class TileClass : std::uint8_t { kEmpty, kPartial, kFull };

struct ChunkPlan {
  std::int64_t row_begin = 0;
  int rows = 0;      // rows of the chunk
  int row_tile = 1;  // rows of a tile; the last tile may be shorter

  // Listed keys: keys[i], or key_begin + i when `keys` is null (a range: nothing is gathered). Each is
  // visible to at least one row. Ascending, except that intervals put the keys that the chunk's first row
  // sees in front, those that stay longest first, so that what a row tile sees lies together.
  std::int64_t key_begin = 0;
  std::int32_t key_count = 0;
  const std::int32_t* keys = nullptr;

  // Row r sees the first prefix[r] listed keys; or, when `bits` is set, those whose bits are set.
  const std::int32_t* prefix = nullptr;
  const std::uint64_t* bits = nullptr;
  std::int64_t bits_pitch = 0;  // words from row to row

  const TileClass* classes = nullptr;  // (row tiles, key tiles)

  int row_tiles() const { return (rows + row_tile - 1) / row_tile; }
  int key_tiles() const { return static_cast<int>(words_for(key_count)); }
  std::int64_t key(std::int64_t listed) const { return keys != nullptr ? keys[listed] : key_begin + listed; }
  TileClass tile_class(int row_tile_index, int key_tile) const {
    return classes[static_cast<std::int64_t>(row_tile_index) * key_tiles() + key_tile];
  }
  // Which of the tile's keys row r sees.
  std::uint64_t visible(int row, int key_tile) const {
    if (bits != nullptr) return bits[row * bits_pitch + key_tile];
    return low_bits(prefix[row] - static_cast<std::int64_t>(key_tile) * kTileKeys);
  }
};

// Number of visible scores of the chunk, for one head.
std::int64_t count_visible(const ChunkPlan&);

// Adds the plan and the scores that `heads` query heads keep under it. Tiles are counted where they are walked.
void count_plan(const ChunkPlan&, int heads, AttentionCounters*);

// Adds the tiles that `heads` query heads visit, if they walk over the whole plan.
void count_visited_tiles(const ChunkPlan&, int heads, AttentionCounters*);

// How keys are listed and rows told apart, in words.
const char* plan_rule(const VisibilityViews&);

// Whether there is a mask with an entry of its own for every row and key, or a list for every row, so that planning
// reads something of each row.
bool differs_by_row_and_key(const VisibilityViews&);

// Whether query heads have different masks or lists.
bool differs_by_head(const VisibilityViews&);

// Whether rows may differ in more than the length of a prefix.
bool needs_bitmap(const VisibilityViews&);

// Makes plans of one problem in scratch memory of its own; one planner per worker.
class ChunkPlanner {
 public:
  // Bytes of scratch for chunks of up to `chunk_rows` rows: O(chunk_rows * Sk / 8).
  static std::size_t scratch_bytes(const AttentionProblem&, int chunk_rows, int row_tile);

  // `indices`: built, one for every head that the problem's intervals tell apart.
  ChunkPlanner(const AttentionProblem&, const IntervalIndices& indices, int chunk_rows, int row_tile, void* scratch);

  // The same for plans of at most `span_keys` neighbouring keys. Few rows make many of them, by workers that share
  // nothing: instead of indices for all keys, each plan indexes the intervals of its own. `lists`: built.
  static std::size_t span_scratch_bytes(const AttentionProblem&, int chunk_rows, int row_tile, std::int64_t span_keys);
  ChunkPlanner(const AttentionProblem&, const IndexRows& lists, int chunk_rows, int row_tile, std::int64_t span_keys,
               void* scratch);

  // The plan of rows [row_begin, row_begin + rows) of query head `head`, for all keys or those of a span; valid until
  // the next call. Asking for the same plan again, or for that of a head with the same mask, costs nothing.
  const ChunkPlan& plan(std::int64_t batch, std::int64_t head, std::int64_t row_begin, int rows);
  const ChunkPlan& plan(std::int64_t batch, std::int64_t head, std::int64_t row_begin, int rows, KeySpan span);

 private:
  // What a plan depends on beside the problem.
  struct Source {
    const std::uint8_t* mask = nullptr;  // of the chunk's first row and the span's first key
    const std::int32_t *begins = nullptr, *ends = nullptr;
    RowLists lists;                               // of the chunk's first row
    const std::uint64_t* packed_lists = nullptr;  // the same, read instead where all lists are packed
    std::int64_t key_limit = -1, row_begin = -1;
    KeySpan span;
    int rows = 0;
    bool operator==(const Source&) const = default;
  };

  ChunkPlanner(const AttentionProblem&, const IntervalIndices* indices, const IndexRows* lists, int chunk_rows,
               int row_tile, std::int64_t keys, void* scratch);

  IntervalIndex index_of(std::int64_t batch, std::int64_t head, KeySpan span) const;
  std::int64_t allowed_keys(std::int64_t row) const;  // so many of the span, the first ones, by length and causal rule
  // Of the first `limit` keys of the span those that mask and list show a row of the chunk.
  void load_row(int row, std::int64_t limit, std::uint64_t* words);
  void load_mask_row(int row, std::int64_t limit, std::uint64_t* words) const;
  void load_list(int row, std::int64_t limit, std::uint64_t* words) const;
  void plan_prefixes();  // no mask, or one that hides whole rows
  void plan_key_list();  // a mask or list that is the same for every row
  void plan_bitmap(const IntervalIndex* index);
  void plan_intervals(const IntervalIndex& index);
  void spread_intervals(const IntervalIndex& index, const std::int32_t* entries, std::int64_t count, bool by_key,
                        std::int64_t words);
  void list_keys(const std::uint64_t* seen, std::int64_t words);
  void classify();

  const AttentionProblem& problem_;
  const IntervalIndices* indices_;  // null: a plan makes `index_` of its own keys
  const IndexRows* lists_;          // null: lists are read where they are
  Source source_;
  ChunkPlan plan_;
  std::int32_t* prefix_;
  std::int32_t* keys_;
  std::int32_t* entries_;  // listed entries of an interval index
  IntervalIndex index_;
  std::uint64_t* union_;
  std::uint64_t* row_bits_;
  std::uint64_t* mask_bits_;  // of a row, where there are lists beside the mask
  std::uint64_t* bits_;
  TileClass* classes_;
};

}  // namespace flash_dmattn::internal

// How the keys of a head are cut and where their sorted lists lie in the workspace.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/problem.h"

namespace flash_dmattn::internal::cuda {

// Lists that one block merges at a time: a lane for each.
constexpr int kMaxLists = 32;

// Level 0 holds every chunk's keys, sorted. If a head has more than kMaxLists chunks, list i of level l holds the best
// `window` keys of the chunks [i << l, (i + 1) << l), so that the keys before any chunk are one list per set bit of the
// chunk's number. A level has only the lists that some chunk comes after.
struct ListLayout {
  static constexpr int kMaxLevels = 24;

  std::int64_t chunk_keys = 0, chunks = 0, window = 0;
  int levels = 0;
  std::int64_t offsets[kMaxLevels] = {};  // of a level in its head's keys
  std::int64_t head_keys = 0;

  ListLayout(const SelectionProblem& problem, int keys_per_chunk) {
    chunk_keys = keys_per_chunk;
    chunks = (problem.keys + keys_per_chunk - 1) / keys_per_chunk;
    window = std::min(problem.window, problem.keys);
    levels = 1;
    head_keys = chunks * keys_per_chunk;
    if (chunks <= kMaxLists) return;
    for (; lists_at(levels) > 0; ++levels) {
      offsets[levels] = head_keys;
      head_keys += lists_at(levels) * best_at(levels);
    }
  }

  constexpr std::int64_t lists_at(int level) const { return (chunks - 1) >> level; }

  // Keys of a list that can be among the window's: its highest.
  constexpr std::int64_t best_at(int level) const {
    const std::int64_t covered = chunk_keys << level;
    return window < covered ? window : covered;
  }

  // Where the best keys of a list begin, counted from the head's first key of the workspace.
  constexpr std::int64_t list_at(int level, std::int64_t list) const {
    const std::int64_t skipped = level == 0 ? chunk_keys - best_at(0) : 0;
    return offsets[level] + list * (best_at(level) + skipped) + skipped;
  }
};

}  // namespace flash_dmattn::internal::cuda

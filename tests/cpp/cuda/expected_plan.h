// What a plan must be, by the rules of its order written out key by key.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "cuda/plan/make_plan.h"
#include "plan_testing.h"

namespace flash_dmattn::internal::cuda {

// What a plan must be for one chunk of one query head.
struct ExpectedChunk {
  ChunkKeys keys = {0, -1};
  std::vector<std::int32_t> list;
  std::vector<std::uint16_t> tile_units, tile_full;
  std::int64_t kept = 0, computed = 0, visited = 0, full = 0;
};

// Where a set of `count` units stands in the Gray code whose bits are the units with the bits of their numbers
// reversed.
inline unsigned place_in_code(unsigned units, unsigned count) {
  unsigned set = 0, place = 0;
  for (unsigned bit = 0; bit < count; ++bit) {
    unsigned unit = 0;
    for (unsigned low = 1, high = count / 2; high > 0; low *= 2, high /= 2) unit |= (bit & low) != 0 ? high : 0;
    set |= (units >> unit & 1) << bit;
  }
  // The n-th set of the Gray code is n ^ (n >> 1).
  for (unsigned bit = count; bit-- > 0;) place |= ((place >> (bit + 1) ^ set >> bit) & 1u) << bit;
  return place;
}

// Where the list of ListOrder::kFirstUnit has the keys that these units see: survivors by their last unit, then the
// others.
inline unsigned rank_by_first_unit(unsigned units) {
  if ((units & 1) == 0) return kChunkUnits;
  unsigned last = 0;
  while ((units >> last) > 1) ++last;
  return kChunkUnits - 1 - last;
}

// An entry of a list: a key, and the units for which it stands there.
struct Entry {
  std::int32_t key;
  unsigned units;
};

inline std::vector<Entry> sorted_by(std::vector<Entry> entries, const std::function<unsigned(unsigned)>& rank) {
  std::stable_sort(entries.begin(), entries.end(), [&](auto a, auto b) { return rank(a.units) < rank(b.units); });
  return entries;
}

// ListOrder::kUnits.
inline std::vector<Entry> in_parts(const std::vector<Entry>& entries, const PlanShape& shape) {
  constexpr std::size_t kPair = 2 * kPlanTileKeys;
  std::vector<Entry> list;
  // Of each part the entries, those that the same units see side by side.
  const bool has_parts = shape.part_units < kChunkUnits;
  std::vector<std::vector<Entry>> parts = {
      sorted_by(entries, [&](unsigned units) { return has_parts ? units : place_in_code(units, kChunkUnits); })};
  for (unsigned units = kChunkUnits; units > static_cast<unsigned>(shape.part_units); units /= 2) {
    std::size_t left = 0;
    for (const std::vector<Entry>& part : parts) left += part.size();
    if (list.size() + 2 * (left + parts.size() * kPair) > static_cast<std::size_t>(shape.capacity)) break;
    // Halves are sorted by what their units see, first the first ones of all parts.
    std::vector<std::vector<Entry>> halves(2 * parts.size());
    std::vector<std::vector<Entry>> whole(2);  // of parts that were first halves, and second ones
    for (std::size_t number = 0; number < parts.size(); ++number) {
      const std::vector<Entry>& part = parts[number];
      for (std::size_t run = 0, end; run < part.size(); run = end) {
        for (end = run; end < part.size() && part[end].units == part[run].units;) ++end;
        for (std::size_t i = run; i < end; ++i) {
          if (i < run + (end - run) / kPair * kPair) {
            whole[number % 2].push_back(part[i]);
            continue;
          }
          for (unsigned side = 0; side < 2; ++side) {
            const std::size_t half = 2 * number + side;
            const unsigned set = part[i].units & ((1u << units / 2) - 1) << (half * units / 2);
            if (set != 0) halves[half].push_back({part[i].key, set});
          }
        }
      }
    }
    for (const std::vector<Entry>& kept : whole) list.insert(list.end(), kept.begin(), kept.end());
    for (std::size_t half = 0; half < halves.size(); ++half) {
      halves[half] =
          sorted_by(halves[half], [&](unsigned set) { return place_in_code(set >> (half * units / 2), units / 2); });
    }
    parts = std::move(halves);
  }
  for (const std::vector<Entry>& part : parts) {
    if (part.empty()) continue;
    list.resize((list.size() + kPair - 1) / kPair * kPair, {-1, 0});
    list.insert(list.end(), part.begin(), part.end());
  }
  return list;
}

inline bool is_worth_a_list(ListOrder order, const std::vector<unsigned>& units,
                            const std::vector<std::int32_t>& listed) {
  const auto bits = [](unsigned word) { return static_cast<std::int64_t>(std::popcount(word)); };
  if (order == ListOrder::kFirstUnit) {
    const std::int64_t span = listed.back() - listed.front() + 1;
    return 4 * static_cast<std::int64_t>(listed.size()) <= 3 * span;
  }
  std::vector<unsigned> range_tiles(units.size() / kPlanTileKeys + 1);
  std::int64_t unit_keys = 0, visits = 0;
  for (const std::int32_t key : listed) {
    const unsigned seen = units[static_cast<std::size_t>(key)];
    range_tiles[static_cast<std::size_t>(key / kPlanTileKeys)] |= seen;
    unit_keys += bits(seen);
  }
  for (const unsigned seen : range_tiles) visits += bits(seen);
  return 3 * unit_keys <= 2 * kPlanTileKeys * visits;
}

inline ExpectedChunk expected_chunk(Problem& problem, const PlanShape& shape, std::int64_t b, std::int64_t h,
                                    int chunk) {
  const std::int64_t first_row = std::int64_t{chunk} * kChunkRows;
  const std::int64_t end_row = std::min(first_row + kChunkRows, problem.sizes.rows);
  const auto keys = static_cast<std::size_t>(problem.sizes.keys);
  std::vector<unsigned> units(keys);                                    // as the plan may know them
  std::vector<std::array<std::int16_t, kChunkUnits>> kept(keys, {{}});  // visible rows of each unit
  std::vector<std::int32_t> listed;
  for (std::size_t key = 0; key < keys; ++key) {
    unsigned by_rules = 0, by_mask = 0, seen = 0;
    for (std::int64_t row = first_row; row < end_row; ++row) {
      const int unit = static_cast<int>(row - first_row) / kUnitRows;
      const bool rules = problem.rules_show(b, h, row, static_cast<std::int64_t>(key));
      const bool mask = problem.mask_shows(b, h, row, static_cast<std::int64_t>(key));
      by_rules |= unsigned{rules} << unit;
      by_mask |= unsigned{mask} << unit;
      seen |= unsigned{rules && mask} << unit;
      kept[key][static_cast<std::size_t>(unit)] += rules && mask;
    }
    units[key] = by_rules & by_mask;
    EXPECT_EQ(seen & ~units[key], 0u);
    if (units[key] != 0) listed.push_back(static_cast<std::int32_t>(key));
  }
  ExpectedChunk expected;
  expected.tile_units.resize(static_cast<std::size_t>(shape.tiles));
  expected.tile_full.resize(static_cast<std::size_t>(shape.tiles));
  if (listed.empty()) return expected;
  const std::int64_t count = static_cast<std::int64_t>(listed.size());
  expected.keys.first = listed.front() / kPlanTileKeys * kPlanTileKeys;
  std::vector<Entry> entries;
  if (count <= shape.capacity && is_worth_a_list(problem.order, units, listed)) {
    for (const std::int32_t key : listed) entries.push_back({key, units[static_cast<std::size_t>(key)]});
    entries = problem.order == ListOrder::kUnits ? in_parts(entries, shape)
                                                 : sorted_by(std::move(entries), rank_by_first_unit);
    expected.keys.first = -1;
  } else {
    for (std::int32_t key = expected.keys.first; key <= listed.back(); ++key) {
      entries.push_back({key, units[static_cast<std::size_t>(key)]});
    }
  }
  expected.keys.count = static_cast<std::int32_t>(entries.size());
  for (std::size_t i = 0; i < entries.size(); ++i) {
    expected.tile_units[i / kPlanTileKeys] |= static_cast<std::uint16_t>(entries[i].units);
  }
  for (std::size_t tile = 0; tile * kPlanTileKeys < entries.size(); ++tile) {
    for (int unit = 0; unit < kChunkUnits; ++unit) {
      if ((expected.tile_units[tile] >> unit & 1) == 0) continue;
      const std::int64_t rows = std::min<std::int64_t>(kUnitRows, end_row - first_row - unit * kUnitRows);
      std::int64_t scores = 0;
      for (std::size_t i = tile * kPlanTileKeys; i < std::min(entries.size(), (tile + 1) * kPlanTileKeys); ++i) {
        if ((entries[i].units >> unit & 1) == 0) continue;
        scores += kept[static_cast<std::size_t>(entries[i].key)][static_cast<std::size_t>(unit)];
      }
      expected.kept += scores;
      expected.computed += rows * kPlanTileKeys;
      expected.visited += 1;
      if (scores != rows * kPlanTileKeys) continue;
      expected.full += 1;
      expected.tile_full[tile] |= static_cast<std::uint16_t>(1u << unit);
    }
  }
  if (expected.keys.first < 0) {
    for (const Entry& entry : entries) expected.list.push_back(entry.key);
  }
  return expected;
}

}  // namespace flash_dmattn::internal::cuda

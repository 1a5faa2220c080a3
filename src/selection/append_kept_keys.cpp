#include "selection/append_kept_keys.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>

#include "selection/live_key.h"
#include "selection/rank.h"

namespace flash_dmattn::internal {
namespace {

// A place of the kept keys, and what is there: 0 in an empty place, which is lower than any key that may be kept.
template <typename Format>
struct Place {
  std::int64_t index = 0;
  LiveKey<typename Format::Bits> key = 0;
};

// Of at least one place. The first one if several are empty.
template <typename Format>
Place<Format> lowest_place(const std::int32_t* indices, const typename Format::Bits* scores, std::int64_t count) {
  Place<Format> lowest;
  for (std::int64_t place = 0; place < count; ++place) {
    if (indices[place] < 0) return {place, 0};
    const auto key = live_key(rank_of<Format>(scores[place]), indices[place]);
    if (place == 0 || key < lowest.key) lowest = {place, key};
  }
  return lowest;
}

// The scores of a cache's first keys, for one (batch, head).
template <typename Format>
struct CacheScores {
  const typename Format::Bits* scores;
  std::int64_t stride, keys;

  // 0: never kept.
  LiveKey<typename Format::Bits> key(std::int64_t index) const {
    const auto rank = rank_of<Format>(scores[index * stride]);
    return rank == 0 ? 0 : live_key(rank, index);
  }
};

// The lowest of the `window` best keys, or of fewer if there are not so many: digit by digit, from how many keys that
// agree with it so far have each next digit. Needs no memory, whatever the window is.
template <typename Format>
LiveKey<typename Format::Bits> lowest_of_best(const CacheScores<Format>& cache, std::int64_t window) {
  using Key = LiveKey<typename Format::Bits>;
  constexpr int kDigit = 8, kKeyBits = 32 + 8 * sizeof(typename Format::Bits);
  Key prefix = 0, known = 0;  // the digits found, and which bits these are
  std::int64_t wanted = window;
  for (int shift = kKeyBits - kDigit; shift >= 0; shift -= kDigit) {
    std::int64_t counts[1 << kDigit] = {};
    for (std::int64_t index = 0; index < cache.keys; ++index) {
      const Key key = cache.key(index);
      if (key != 0 && (key & known) == prefix) ++counts[static_cast<int>(key >> shift & ((1 << kDigit) - 1))];
    }
    int digit = (1 << kDigit) - 1;
    while (digit > 0 && counts[digit] < wanted) wanted -= counts[digit--];
    prefix |= static_cast<Key>(digit) << shift;
    known |= static_cast<Key>((1 << kDigit) - 1) << shift;
  }
  return prefix;
}

// The best keys of the cache, by index, in the first places.
template <typename Format>
void choose_anew(const CacheScores<Format>& cache, std::int64_t window, std::int32_t* indices,
                 typename Format::Bits* scores) {
  const auto lowest = lowest_of_best(cache, window);
  std::int64_t place = 0;
  for (std::int64_t index = 0; index < cache.keys && place < window; ++index) {
    const auto key = cache.key(index);
    if (key == 0 || key < lowest) continue;
    indices[place] = static_cast<std::int32_t>(index);
    scores[place++] = cache.scores[index * cache.stride];
  }
  std::fill(indices + place, indices + window, -1);
}

// One (batch, head).
template <typename Format>
void append_head(const KeptKeysProblem& problem, std::int64_t batch, std::int64_t head) {
  using Bits = typename Format::Bits;
  const std::int64_t position = batch * problem.heads + head, window = problem.window;
  const auto* new_scores = static_cast<const Bits*>(problem.new_scores) + batch * problem.new_score_strides[0] +
                           head * problem.new_score_strides[1];
  const std::int64_t first = problem.positions[batch * problem.positions_stride];
  std::int32_t* indices = problem.indices + position * window;
  Bits* scores = static_cast<Bits*>(problem.scores) + position * window;
  std::int32_t* list = problem.lists;
  if (list != nullptr) list += position * problem.new_keys * window;
  bool is_known = true;
  if (problem.lengths != nullptr) {
    is_known = problem.lengths[position] == keys_before(first);
    problem.lengths[position] = length_after(first, problem.new_keys);
  }
  if (window == 0) return;
  if (!is_known && problem.cache_scores != nullptr) {
    const auto* of_head = static_cast<const Bits*>(problem.cache_scores) + batch * problem.cache_score_strides[0] +
                          head * problem.cache_score_strides[1];
    const std::int64_t keys = std::min(keys_before(first), problem.cache_keys);
    choose_anew<Format>({of_head, problem.cache_score_strides[2], keys}, window, indices, scores);
  }

  Place<Format> lowest;
  bool is_lowest_known = false;
  for (std::int64_t row = 0; row < problem.new_keys; ++row) {
    const Bits score = new_scores[row * problem.new_score_strides[2]];
    const Bits rank = rank_of<Format>(score);
    const std::int64_t index = first + row;
    if (rank != 0 && index >= 0 && index <= std::numeric_limits<std::int32_t>::max()) {
      if (!is_lowest_known) lowest = lowest_place<Format>(indices, scores, window);
      is_lowest_known = live_key(rank, index) < lowest.key;  // else its place is taken, and another is the lowest
      if (!is_lowest_known) {
        indices[lowest.index] = static_cast<std::int32_t>(index);
        scores[lowest.index] = score;
      }
    }
    if (list != nullptr) std::copy_n(indices, window, list + row * window);
  }
}

int worker_count(const KeptKeysProblem& problem, const Executor& executor) {
  // Waking a worker costs as much as looking at a few thousand kept keys.
  constexpr std::int64_t kPlacesPerWorker = 8192;
  const std::int64_t tasks = problem.batch * problem.heads;
  const std::int64_t worth = tasks * problem.window / kPlacesPerWorker * problem.new_keys + 1;
  return static_cast<int>(std::min({tasks, worth, static_cast<std::int64_t>(std::max(executor.concurrency(), 1))}));
}

}  // namespace

void append_on_host(const KeptKeysProblem& problem, Executor& executor) {
  const auto append = problem.dtype == DType::kFloat16    ? append_head<Float16Format>
                      : problem.dtype == DType::kBFloat16 ? append_head<BFloat16Format>
                      : problem.dtype == DType::kFloat32  ? append_head<Float32Format>
                                                          : append_head<Float64Format>;
  const std::int64_t tasks = problem.batch * problem.heads;
  if (tasks == 0 || !changes_something(problem)) return;
  std::atomic<std::int64_t> next{0};
  const auto work = [&](int) {
    for (std::int64_t task = next.fetch_add(1); task < tasks; task = next.fetch_add(1)) {
      append(problem, task / problem.heads, task % problem.heads);
    }
  };
  executor.run(worker_count(problem, executor), work);
}

}  // namespace flash_dmattn::internal

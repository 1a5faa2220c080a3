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
  if (tasks == 0 || problem.window == 0 || problem.new_keys == 0) return;
  std::atomic<std::int64_t> next{0};
  const auto work = [&](int) {
    for (std::int64_t task = next.fetch_add(1); task < tasks; task = next.fetch_add(1)) {
      append(problem, task / problem.heads, task % problem.heads);
    }
  };
  executor.run(worker_count(problem, executor), work);
}

}  // namespace flash_dmattn::internal

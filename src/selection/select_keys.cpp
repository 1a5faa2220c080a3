#include "selection/select_keys.h"

#include <algorithm>
#include <atomic>
#include <functional>

#include "core/arena.h"
#include "selection/documents.h"
#include "selection/live_key.h"
#include "selection/rank.h"

namespace flash_dmattn::internal {
namespace {

// Replaces the lowest of a heap (std::make_heap with std::greater) by a higher one.
template <typename Live>
void replace_lowest(Live* heap, std::int64_t count, Live replacement) {
  std::int64_t hole = 0;
  for (std::int64_t child = 1; child < count; child = 2 * hole + 1) {
    if (child + 1 < count && heap[child + 1] < heap[child]) ++child;
    if (heap[child] >= replacement) break;
    heap[hole] = heap[child];
    hole = child;
  }
  heap[hole] = replacement;
}

// The scores of one (batch, head), and what is made of them.
template <typename Format>
struct Head {
  using Bits = typename Format::Bits;

  Head(const SelectionProblem& problem, std::int64_t batch, std::int64_t head)
      : scores(static_cast<const Bits*>(problem.scores) + batch * problem.score_strides[0] +
               head * problem.score_strides[1]),
        mask(problem.key_mask),
        begin(problem.begin + (batch * problem.heads + head) * problem.keys),
        end(problem.end + (batch * problem.heads + head) * problem.keys) {
    if (mask != nullptr) mask += batch * problem.mask_strides[0] + head * problem.mask_strides[1];
  }

  const Bits* scores;
  const std::uint8_t* mask;
  std::int32_t *begin, *end;
};

// Keys come by index; each is seen from its first row on until w higher ones have come, or to the document's last row.
template <typename Format>
void select_in_document(const SelectionProblem& problem, const Head<Format>& head, const Document& document,
                        LiveKey<typename Format::Bits>* heap) {
  using Bits = typename Format::Bits;
  const auto [scores, mask, begin, end] = head;
  const auto last_row = static_cast<std::int32_t>(document.row_end);
  if (document.row_begin == document.row_end) return;  // no row sees anything
  std::int64_t live = 0;
  for (std::int64_t key = document.key_begin; key < document.key_end; ++key) {
    const Bits rank = rank_of<Format>(scores[key * problem.score_strides[2]]);
    if (rank == 0 || (mask != nullptr && mask[key * problem.mask_strides[2]] == 0)) continue;
    const auto row = static_cast<std::int32_t>(document.first_row(key, problem.causal));
    const LiveKey<Bits> arrival = live_key(rank, key);
    if (live < problem.window) {
      heap[live++] = arrival;
      if (live == problem.window) std::make_heap(heap, heap + live, std::greater<>());
    } else if (arrival > heap[0]) {
      const std::int64_t evicted = index_of(heap[0]);
      end[evicted] = row;
      if (begin[evicted] == row) begin[evicted] = end[evicted] = 0;
      replace_lowest(heap, live, arrival);
    } else {
      continue;  // no row ever sees it
    }
    begin[key] = row;
    end[key] = last_row;
  }
}

template <typename Format>
void select_head(const SelectionProblem& problem, std::int64_t batch, std::int64_t head_index, void* workspace) {
  auto* heap = static_cast<LiveKey<typename Format::Bits>*>(workspace);
  const Head<Format> head(problem, batch, head_index);
  std::fill_n(head.begin, problem.keys, 0);
  std::fill_n(head.end, problem.keys, 0);
  if (problem.window == 0) return;
  if (problem.is_packed()) {
    DocumentReader reader(problem.row_bounds, problem.key_bounds, batch, problem.rows, problem.keys);
    for (std::int64_t n = 0; n < problem.documents; ++n) select_in_document(problem, head, reader.next(), heap);
    return;
  }
  std::int64_t existing = problem.keys;
  if (problem.seqlens != nullptr) {
    existing = std::clamp<std::int64_t>(problem.seqlens[batch * problem.seqlens_stride], 0, problem.keys);
  }
  select_in_document(problem, head, {.row_end = problem.rows, .key_end = existing}, heap);
}

std::size_t heap_bytes(const SelectionProblem& problem) {
  const std::size_t key_size = problem.dtype == DType::kFloat64 ? sizeof(Uint128) : sizeof(std::uint64_t);
  return aligned(static_cast<std::size_t>(std::min(problem.window, problem.keys)) * key_size);
}

int worker_count(const SelectionProblem& problem, const Executor& executor) {
  // Waking a worker costs as much as a few thousand keys.
  constexpr std::int64_t kKeysPerWorker = 8192;
  const std::int64_t tasks = problem.batch * problem.heads;
  const std::int64_t worth = tasks * problem.keys / kKeysPerWorker + 1;
  return static_cast<int>(std::min({tasks, worth, static_cast<std::int64_t>(std::max(executor.concurrency(), 1))}));
}

}  // namespace

std::size_t selection_workspace(const SelectionProblem& problem, const Executor& executor) {
  return static_cast<std::size_t>(worker_count(problem, executor)) * heap_bytes(problem);
}

void select_on_host(const SelectionProblem& problem, void* workspace, Executor& executor) {
  const auto select = problem.dtype == DType::kFloat16    ? select_head<Float16Format>
                      : problem.dtype == DType::kBFloat16 ? select_head<BFloat16Format>
                      : problem.dtype == DType::kFloat32  ? select_head<Float32Format>
                                                          : select_head<Float64Format>;
  const std::int64_t tasks = problem.batch * problem.heads;
  if (tasks == 0 || problem.keys == 0) return;  // scores without elements may have no memory to point into
  std::atomic<std::int64_t> next{0};
  const auto work = [&](int worker) {
    auto* heap = static_cast<std::byte*>(workspace) + static_cast<std::size_t>(worker) * heap_bytes(problem);
    for (std::int64_t task = next.fetch_add(1); task < tasks; task = next.fetch_add(1)) {
      select(problem, task / problem.heads, task % problem.heads, heap);
    }
  };
  executor.run(worker_count(problem, executor), work);
}

}  // namespace flash_dmattn::internal

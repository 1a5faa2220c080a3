#include "plan/mask_intervals.h"

#include <algorithm>
#include <atomic>
#include <bit>

#include "plan/bits.h"

namespace flash_dmattn::internal {
namespace {

// Keys that a unit of work reads of every row: a few pages of a row lie together, and what is remembered of
// them stays in the first cache.
constexpr std::int64_t kStripKeys = 4096;
constexpr std::int64_t kStripWords = kStripKeys / kWordBits;
// Reading fewer elements than this is not worth another worker.
constexpr std::int64_t kElementsPerWorker = 1 << 18;

constexpr std::int32_t kUnseen = -1;

// One strip of keys of one (batch, head). A key's visibility changes where its interval begins and where it
// ends; a third change means that there is more than one.
class Strip {
 public:
  Strip(const MaskIntervalsProblem& problem, std::int64_t unit) : p_(problem) {
    const std::int64_t strips = (p_.keys + kStripKeys - 1) / kStripKeys;
    const std::int64_t pair = unit / strips;
    first_ = unit % strips * kStripKeys;
    count_ = std::min(kStripKeys, p_.keys - first_);
    if (p_.rows > 0) {  // a mask without rows may have no memory to point into
      mask_ = p_.mask + pair / p_.heads * p_.strides[0] + pair % p_.heads * p_.strides[1] + first_ * p_.strides[3];
    }
    begin_ = p_.begin + pair * p_.keys + first_;
    end_ = p_.end + pair * p_.keys + first_;
  }

  bool find(const std::atomic<bool>& given_up) {
    std::fill_n(begin_, count_, kUnseen);
    std::fill_n(end_, count_, kUnseen);
    for (std::int64_t row = 0; row < p_.rows; ++row) {
      if (!take_row(row) || given_up.load(std::memory_order_relaxed)) return false;
    }
    for (std::int64_t key = 0; key < count_; ++key) {
      if (begin_[key] == kUnseen) begin_[key] = end_[key] = 0;
      if (end_[key] == kUnseen) end_[key] = static_cast<std::int32_t>(p_.rows);
    }
    return true;
  }

 private:
  bool take_row(std::int64_t row) {
    // The causal rule with every key existing, which hides least: with fewer keys a row sees a part of this.
    const std::int64_t limit = p_.is_causal ? row + p_.keys - p_.rows + 1 - first_ : count_;
    const std::int64_t readable = std::clamp<std::int64_t>(limit, 0, count_);
    std::uint64_t now[kStripWords];
    pack_bools(mask_ + row * p_.strides[2], p_.strides[3], readable, now);
    for (std::int64_t word = 0; word < words_for(readable); ++word) {
      for (std::uint64_t changed = now[word] ^ seen_[word]; changed != 0; changed &= changed - 1) {
        const int bit = std::countr_zero(changed);
        const std::int64_t key = word * kWordBits + bit;
        if (((now[word] >> bit) & 1) == 0) {
          end_[key] = static_cast<std::int32_t>(row);
        } else if (begin_[key] != kUnseen) {
          return false;
        } else {
          begin_[key] = static_cast<std::int32_t>(row);
        }
      }
      seen_[word] = now[word];
    }
    return true;  // later words belong to keys that no row has seen so far: the causal limit only grows
  }

  const MaskIntervalsProblem& p_;
  std::int64_t first_ = 0, count_ = 0;
  const std::uint8_t* mask_ = nullptr;
  std::int32_t *begin_ = nullptr, *end_ = nullptr;
  std::uint64_t seen_[kStripWords] = {};
};

}  // namespace

bool find_intervals(const MaskIntervalsProblem& problem, Executor& executor) {
  const std::int64_t units = problem.batch * problem.heads * ((problem.keys + kStripKeys - 1) / kStripKeys);
  const std::int64_t elements = problem.batch * problem.heads * problem.rows * problem.keys;
  const auto workers = static_cast<int>(
      std::min<std::int64_t>({units, std::max(executor.concurrency(), 1), elements / kElementsPerWorker + 1}));
  if (workers <= 0) return true;
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> given_up{false};
  executor.run(workers, [&](int) {
    for (std::int64_t unit = next.fetch_add(1); unit < units; unit = next.fetch_add(1)) {
      if (!Strip(problem, unit).find(given_up)) given_up.store(true, std::memory_order_relaxed);
      if (given_up.load(std::memory_order_relaxed)) return;
    }
  });
  return !given_up.load();
}

}  // namespace flash_dmattn::internal

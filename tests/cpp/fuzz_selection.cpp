// Small calls of what says which keys are seen without attending: select_keys, document_intervals, append_kept_keys and
// mask_intervals. Whatever scores, bounds and masks hold, results are those of the rules of docs/selection.md, applied
// to every row by itself. Entry point of libFuzzer (`make fuzz`); selection_test feeds the same function with
// pseudo-random bytes.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "attention_testing.h"
#include "flash_dmattn/kept_keys.h"
#include "flash_dmattn/plan.h"
#include "flash_dmattn/selection.h"
#include "fuzzing.h"

namespace flash_dmattn::testing {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64};
constexpr std::int64_t kMaxIndex = std::numeric_limits<std::int32_t>::max();

void require(bool condition, const std::string& what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what.c_str());
  std::abort();
}

void require_ok(const Status& status) { require(status.ok(), status.message()); }

// Scores (B, heads, Sk), whose keys or heads are neighbours in memory. Many are equal, all special values are among
// them, and some are any bits.
class Scores {
 public:
  Scores(Decisions& decisions, DType dtype, std::int64_t batch, std::int64_t heads, std::int64_t keys) {
    const bool by_key = decisions.byte() % 2;
    memory_ = by_key ? Tensor(dtype, {batch, keys, heads}) : Tensor(dtype, {batch, heads, keys});
    view_ = memory_.view();
    if (by_key) {
      std::swap(view_.shape[1], view_.shape[2]);
      std::swap(view_.strides[1], view_.strides[2]);
    }
    const double special[] = {std::nan(""), HUGE_VAL, -HUGE_VAL, lowest_of(dtype), 0.0, -0.0};
    for (std::size_t i = 0; i < memory_.count(); ++i) {
      const std::uint8_t choice = decisions.byte();
      memory_.set(i, choice < 208 ? (choice % 9 - 4) / 2.0 : special[choice % 6]);
      if (choice < 250) continue;
      const auto bits = decisions.raw<std::uint64_t>();
      std::memcpy(static_cast<std::byte*>(view_.data) + i * size_of(dtype), &bits, size_of(dtype));
    }
  }

  const TensorView& view() const { return view_; }
  TensorView slice(std::int64_t begin, std::int64_t end) const {
    TensorView result = view_;
    result.data = static_cast<std::byte*>(result.data) +
                  static_cast<std::size_t>(begin * result.strides[2]) * size_of(result.dtype);
    result.shape[2] = end - begin;
    return result;
  }
  double get(std::int64_t b, std::int64_t h, std::int64_t key) const {
    return memory_.get(static_cast<std::size_t>(b * view_.strides[0] + h * view_.strides[1] + key * view_.strides[2]));
  }
  // Not hidden by what it is: -inf and the lowest finite value are never kept.
  bool may_be_kept(std::int64_t b, std::int64_t h, std::int64_t key) const {
    return !(get(b, h, key) <= lowest_of(view_.dtype));
  }
  // Whether one key goes before another: NaNs first and equal, then by score, then the newer one.
  bool outranks(std::int64_t b, std::int64_t h, std::int64_t key, std::int64_t other) const {
    const double score = get(b, h, key), rival = get(b, h, other);
    if (std::isnan(score) != std::isnan(rival)) return std::isnan(score);
    return std::isnan(score) || score == rival ? key > other : score > rival;
  }

 private:
  Tensor memory_;
  TensorView view_;
};

// Bounds of documents, mostly in order and within `length`.
Tensor make_bounds(Decisions& decisions, std::vector<std::int64_t> shape, std::int64_t length) {
  Tensor bounds(DType::kInt32, std::move(shape));
  const std::int64_t documents = bounds.shape().back();
  for (std::size_t i = 0; i < bounds.count(); ++i) {
    const std::int64_t even = static_cast<std::int64_t>(i) % documents * length / std::max<std::int64_t>(documents, 1);
    std::int64_t bound = even + decisions.byte() % 4 - 1;
    if (decisions.rarely()) bound = decisions.raw<std::int32_t>();
    bounds.set(i, static_cast<double>(bound));
  }
  return bounds;
}

// What the library reads them as: within 0 to `length`, none lower than those before it.
std::vector<std::int64_t> bounds_of(const Tensor& bounds, std::int64_t b, std::int64_t length) {
  const std::int64_t count = bounds.shape().back(), first = bounds.shape().size() == 2 ? b * count : 0;
  std::vector<std::int64_t> result;
  std::int64_t least = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto bound = static_cast<std::int64_t>(bounds.get(static_cast<std::size_t>(first + i)));
    result.push_back(least = std::max(least, std::min(bound, length)));
  }
  return result;
}

struct Documents {
  std::vector<std::int64_t> rows, keys;  // bounds

  // Whether a document shows a key to a row. The causal rule is aligned to the document's end.
  bool show(std::int64_t row, std::int64_t key, bool is_causal) const {
    for (std::size_t d = 0; d + 1 < rows.size(); ++d) {
      if (row < rows[d] || row >= rows[d + 1] || key < keys[d] || key >= keys[d + 1]) continue;
      if (!is_causal || keys[d + 1] - key >= rows[d + 1] - row) return true;
    }
    return false;
  }
};

// (batch and head, key) intervals of rows.
struct Intervals {
  Intervals(std::int64_t batch, std::int64_t heads, std::int64_t keys)
      : begin(DType::kInt32, {batch, heads, keys}), end(begin) {
    for (Tensor* bound : {&begin, &end}) bound->fill([] { return -77.0; });  // every one is written
  }
  KeyIntervals view() const { return {begin.view(), end.view()}; }
  bool show(std::size_t key, std::int64_t row) const {
    return begin.get(key) <= static_cast<double>(row) && static_cast<double>(row) < end.get(key);
  }

  Tensor begin, end;
};

// That key `at` is shown to the rows that `is_seen` says, and to no others.
template <typename IsSeen>
void require_rows(const char* call, const Intervals& intervals, std::size_t at, std::int64_t rows,
                  const IsSeen& is_seen) {
  bool somebody = false;
  for (std::int64_t row = 0; row < rows; ++row) {
    somebody = somebody || is_seen(row);
    require(intervals.show(at, row) == is_seen(row),
            std::string(call) + ": row " + std::to_string(row) + ", key " + std::to_string(at) + " of all heads");
  }
  require(somebody || (intervals.begin.get(at) == 0 && intervals.end.get(at) == 0),
          std::string(call) + ": a hidden key has an interval of another form");
  require(intervals.begin.get(at) >= 0 && intervals.end.get(at) <= static_cast<double>(rows),
          std::string(call) + ": an interval leaves the rows");
}

void selection(Decisions& decisions) {
  const DType dtype = kDTypes[decisions.byte() % 4];
  const std::int64_t batch = 1 + decisions.byte() % 2, heads = 1 + decisions.byte() % 2;
  const std::int64_t rows = decisions.byte() % 20, keys = decisions.byte() % 20;
  const std::int64_t window = decisions.rarely() ? kMaxIndex : decisions.byte() % 8;
  const bool is_causal = decisions.byte() % 4 != 0;
  const Scores scores(decisions, dtype, batch, heads, keys);
  SelectionInputs inputs{scores.view()};
  Tensor mask, seqlens, row_bounds, key_bounds;
  if (decisions.byte() % 2) {
    mask = Tensor(DType::kBool, {decisions.byte() % 2 ? 1 : batch, decisions.byte() % 2 ? 1 : heads, keys});
    mask.fill([&] { return decisions.byte() % 4 != 0 ? 1.0 : 0.0; });
    inputs.key_mask = mask.view();
  }
  const std::uint8_t lengths = decisions.byte() % 4;
  if (lengths == 1) {
    seqlens = Tensor(DType::kInt32, {batch});
    seqlens.fill([&] { return static_cast<double>(decisions.byte() % (keys + 3) - 1); });
    inputs.seqlens_k = seqlens.view();
  }
  if (lengths >= 2) {
    const std::int64_t count = 1 + decisions.byte() % 5;
    const std::vector<std::int64_t> shape =
        decisions.byte() % 2 ? std::vector<std::int64_t>{batch, count} : std::vector<std::int64_t>{count};
    row_bounds = make_bounds(decisions, shape, rows);
    if (lengths == 3) key_bounds = make_bounds(decisions, shape, keys);
    inputs.cu_seqlens_q = row_bounds.view();
    inputs.cu_seqlens_k = key_bounds.view();
  }

  const Intervals intervals(batch, heads, keys);
  SerialExecutor executor(1 + decisions.byte() % 3);
  require_ok(select_keys(inputs, {window, rows, is_causal}, intervals.view(), {&executor}));

  for (std::int64_t b = 0; b < batch; ++b) {
    Documents documents{{0, rows}, {0, keys}};
    if (seqlens.defined()) {
      documents.keys[1] =
          std::clamp<std::int64_t>(static_cast<std::int64_t>(seqlens.get(static_cast<std::size_t>(b))), 0, keys);
    }
    if (row_bounds.defined()) {
      documents.rows = bounds_of(row_bounds, b, rows);
      documents.keys = bounds_of(key_bounds.defined() ? key_bounds : row_bounds, b, keys);
    }
    for (std::int64_t h = 0; h < heads; ++h) {
      std::vector<std::vector<bool>> kept(static_cast<std::size_t>(rows));  // of each row
      for (std::int64_t row = 0; row < rows; ++row) {
        std::vector<std::int64_t> candidates;
        for (std::int64_t key = 0; key < keys; ++key) {
          if (!documents.show(row, key, is_causal) || !scores.may_be_kept(b, h, key)) continue;
          if (mask.defined()) {
            const std::int64_t of_batch = mask.shape()[0] == 1 ? 0 : b, of_head = mask.shape()[1] == 1 ? 0 : h;
            if (mask.get(static_cast<std::size_t>((of_batch * mask.shape()[1] + of_head) * keys + key)) == 0) continue;
          }
          candidates.push_back(key);
        }
        std::sort(candidates.begin(), candidates.end(), [&](std::int64_t key, std::int64_t other) {
          return key != other && scores.outranks(b, h, key, other);
        });
        auto& of_row = kept[static_cast<std::size_t>(row)];
        of_row.resize(static_cast<std::size_t>(keys));
        for (std::size_t i = 0; i < candidates.size() && static_cast<std::int64_t>(i) < window; ++i) {
          of_row[static_cast<std::size_t>(candidates[i])] = true;
        }
      }
      for (std::int64_t key = 0; key < keys; ++key) {
        require_rows("select_keys", intervals, static_cast<std::size_t>((b * heads + h) * keys + key), rows,
                     [&](std::int64_t row) -> bool {
                       return kept[static_cast<std::size_t>(row)][static_cast<std::size_t>(key)];
                     });
      }
    }
  }
}

void packed_documents(Decisions& decisions) {
  const std::int64_t rows = decisions.byte() % 40, keys = decisions.byte() % 40;
  const bool is_causal = decisions.byte() % 2;
  const std::vector<std::int64_t> shape = {1 + decisions.byte() % 8};
  const Tensor row_bounds = make_bounds(decisions, shape, rows);
  const Tensor key_bounds = decisions.byte() % 2 ? make_bounds(decisions, shape, keys) : Tensor();
  const Intervals intervals(1, 1, keys);
  require_ok(document_intervals(row_bounds.view(), key_bounds.view(), rows, is_causal, intervals.view()));
  const Documents documents{bounds_of(row_bounds, 0, rows),
                            bounds_of(key_bounds.defined() ? key_bounds : row_bounds, 0, keys)};
  for (std::int64_t key = 0; key < keys; ++key) {
    require_rows("document_intervals", intervals, static_cast<std::size_t>(key), rows,
                 [&](std::int64_t row) { return documents.show(row, key, is_causal); });
  }
}

// The places of one (batch, head): key numbers among the scores, -1 where empty.
using Places = std::vector<std::int64_t>;

void append(const Scores& scores, std::int64_t b, std::int64_t h, std::int64_t key, Places* places) {
  if (places->empty() || !scores.may_be_kept(b, h, key)) return;
  auto place = std::find(places->begin(), places->end(), -1);
  if (place == places->end()) {
    place = std::min_element(places->begin(), places->end(), [&](std::int64_t one, std::int64_t other) {
      return one != other && scores.outranks(b, h, other, one);
    });
    if (scores.outranks(b, h, *place, key)) return;
  }
  *place = key;
}

void kept_keys(Decisions& decisions) {
  const DType dtype = kDTypes[decisions.byte() % 4];
  const std::int64_t batch = 1 + decisions.byte() % 2, heads = 1 + decisions.byte() % 2;
  const std::int64_t keys = decisions.byte() % 40, window = decisions.byte() % 9;
  const Scores scores(decisions, dtype, batch, heads, keys);
  std::vector<std::int64_t> first(static_cast<std::size_t>(batch));  // index of the first key
  for (std::int64_t& index : first) {
    const std::int64_t starts[] = {0, decisions.byte(), kMaxIndex - keys / 2, -keys / 2};
    index = starts[decisions.byte() % 4];
  }
  Tensor indices(DType::kInt32, {batch, heads, window}), kept_scores(dtype, {batch, heads, window});
  indices.fill([] { return -1.0; });
  kept_scores.fill([] { return std::nan(""); });  // of no meaning where nothing is kept
  std::vector<Places> places(static_cast<std::size_t>(batch * heads), Places(static_cast<std::size_t>(window), -1));
  const auto index_of = [&](std::size_t head, std::int64_t key) {
    return key < 0 ? -1.0 : static_cast<double>(first[head / static_cast<std::size_t>(heads)] + key);
  };
  SerialExecutor executor(1 + decisions.byte() % 3);

  for (std::int64_t done = 0; done < keys;) {
    const std::int64_t added = std::min<std::int64_t>(1 + decisions.byte() % kMaxNewKeys, keys - done);
    Tensor positions(DType::kInt32, {batch}), lists;
    for (std::size_t b = 0; b < first.size(); ++b) {
      if (first[b] + done > kMaxIndex) return;  // no cache is that long
      positions.set(b, static_cast<double>(first[b] + done));
    }
    if (decisions.byte() % 4) lists = Tensor(DType::kInt32, {batch, heads, added, window});
    require_ok(append_kept_keys({scores.slice(done, done + added), positions.view()},
                                {indices.view(), kept_scores.view()}, lists.view(), {&executor}));
    for (std::size_t head = 0; head < places.size(); ++head) {
      const auto b = static_cast<std::int64_t>(head) / heads, h = static_cast<std::int64_t>(head) % heads;
      Places& of_head = places[head];
      for (std::int64_t row = 0; row < added; ++row) {
        const std::int64_t index = first[static_cast<std::size_t>(b)] + done + row;
        if (index >= 0 && index <= kMaxIndex) append(scores, b, h, done + row, &of_head);
        for (std::size_t place = 0; lists.defined() && place < of_head.size(); ++place) {
          const std::size_t list = head * static_cast<std::size_t>(added) + static_cast<std::size_t>(row);
          require(lists.get(list * of_head.size() + place) == index_of(head, of_head[place]),
                  "append_kept_keys: list of row " + std::to_string(row) + ", place " + std::to_string(place));
        }
      }
      for (std::size_t place = 0; place < of_head.size(); ++place) {
        const std::size_t at = head * of_head.size() + place;
        require(
            indices.get(at) == index_of(head, of_head[place]),
            "append_kept_keys: place " + std::to_string(place) + " after " + std::to_string(done + added) + " keys");
        if (of_head[place] < 0) continue;
        const double held = kept_scores.get(at), expected = scores.get(b, h, of_head[place]);
        require(held == expected || (std::isnan(held) && std::isnan(expected)), "append_kept_keys: another score");
      }
    }
    done += added;
  }
}

void intervals_of_masks(Decisions& decisions) {
  const std::int64_t batch = 1 + decisions.byte() % 2, heads = 1 + decisions.byte() % 2;
  const std::int64_t rows = decisions.byte() % 20, keys = decisions.byte() % 4 ? decisions.byte() % 20 : 130;
  const bool is_causal = decisions.byte() % 2, by_key = decisions.byte() % 2;
  Tensor mask(DType::kBool, by_key ? std::vector<std::int64_t>{batch, heads, keys, rows}
                                   : std::vector<std::int64_t>{batch, heads, rows, keys});
  TensorView view = mask.view();
  if (by_key) {
    std::swap(view.shape[2], view.shape[3]);
    std::swap(view.strides[2], view.strides[3]);
  }
  const auto element = [&](std::int64_t head, std::int64_t row, std::int64_t key) {
    return static_cast<std::size_t>(head * rows * keys + row * view.strides[2] + key * view.strides[3]);
  };
  for (std::int64_t head = 0; head < batch * heads; ++head) {
    for (std::int64_t key = 0; key < keys; ++key) {
      const std::int64_t begin = decisions.byte() % (rows + 2) - 1, end = begin + decisions.byte() % (rows + 2);
      for (std::int64_t row = begin; row < end; ++row) {
        if (row >= 0 && row < rows) mask.set(element(head, row, key), 1);
      }
      // Now and then a row more, anywhere.
      if (decisions.rarely() && rows > 0) mask.set(element(head, decisions.byte() % rows, key), 1);
    }
  }
  const auto is_seen = [&](std::int64_t head, std::int64_t row, std::int64_t key) {
    return mask.get(element(head, row, key)) != 0 && (!is_causal || key <= row + keys - rows);
  };
  bool expected = true;
  for (std::int64_t head = 0; head < batch * heads; ++head) {
    for (std::int64_t key = 0; key < keys; ++key) {
      int runs = 0;
      for (std::int64_t row = 0; row < rows; ++row) {
        if (is_seen(head, row, key) && (row == 0 || !is_seen(head, row - 1, key))) ++runs;
      }
      expected = expected && runs <= 1;
    }
  }
  const Intervals intervals(batch, heads, keys);
  SerialExecutor executor(1 + decisions.byte() % 3);
  bool exact = !expected;
  require_ok(mask_intervals(view, is_causal, intervals.view(), &exact, {&executor}));
  require(exact == expected, "mask_intervals: whether rows follow one another");
  for (std::int64_t head = 0; exact && head < batch * heads; ++head) {
    for (std::int64_t key = 0; key < keys; ++key) {
      for (std::int64_t row = 0; row < rows; ++row) {
        const bool shown = intervals.show(static_cast<std::size_t>(head * keys + key), row);
        require((shown && (!is_causal || key <= row + keys - rows)) == is_seen(head, row, key),
                "mask_intervals: row " + std::to_string(row) + ", key " + std::to_string(key));
      }
    }
  }
}

}  // namespace
}  // namespace flash_dmattn::testing

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace flash_dmattn::testing;
  Decisions decisions(data, size);
  constexpr void (*kCalls[])(Decisions&) = {selection, packed_documents, kept_keys, intervals_of_masks};
  kCalls[decisions.byte() % 4](decisions);
  return 0;
}

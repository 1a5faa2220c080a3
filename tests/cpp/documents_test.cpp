// Packed documents: selection that restarts in each of them and their intervals, against one call for every document.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "attention_testing.h"
#include "core/thread_pool.h"
#include "flash_dmattn/attention.h"
#include "flash_dmattn/selection.h"

namespace flash_dmattn {
namespace {

using testing::Tensor;
using Bounds = std::vector<std::int32_t>;

Tensor tensor_of(const Bounds& bounds) {
  Tensor tensor(DType::kInt32, {static_cast<std::int64_t>(bounds.size())});
  for (std::size_t i = 0; i < bounds.size(); ++i) tensor.set(i, bounds[i]);
  return tensor;
}

// As they are read: within 0 to length, and none lower than those before it.
std::vector<std::int64_t> clamped(const Bounds& bounds, std::int64_t length) {
  std::vector<std::int64_t> result;
  std::int64_t least = 0;
  for (const std::int64_t bound : bounds) result.push_back(least = std::max(least, std::min(bound, length)));
  return result;
}

Bounds random_bounds(std::mt19937& rng, std::size_t documents, std::int64_t length) {
  Bounds bounds;
  for (std::size_t i = 0; i <= documents; ++i) bounds.push_back(static_cast<std::int32_t>(rng() % (length + 1)));
  if (rng() % 4 != 0) std::sort(bounds.begin(), bounds.end());  // else wrong
  if (rng() % 3 != 0) bounds[0] = 0;
  if (rng() % 5 == 0) bounds[rng() % bounds.size()] = std::numeric_limits<std::int32_t>::max();
  if (rng() % 5 == 0) bounds[rng() % bounds.size()] = std::numeric_limits<std::int32_t>::min();
  return bounds;
}

// What a row of a document sees, from a selection of the document's keys alone.
void expect_selection(const Tensor& scores, const Tensor& mask, const std::vector<std::int64_t>& rows,
                      const std::vector<std::int64_t>& keys, std::int64_t window, bool causal, const Tensor& begin,
                      const Tensor& end, std::size_t head) {
  const auto count = static_cast<std::size_t>(scores.shape()[2]);
  std::vector<double> first(count), last(count);
  for (std::size_t d = 0; d + 1 < rows.size(); ++d) {
    const std::int64_t own = keys[d + 1] - keys[d];
    if (own == 0) continue;
    Tensor part(scores.dtype(), {1, 1, own}), part_mask(DType::kBool, {1, 1, own});
    Tensor part_begin(DType::kInt32, {1, 1, own}), part_end = part_begin;
    for (std::int64_t key = 0; key < own; ++key) {
      const auto at = static_cast<std::size_t>(keys[d] + key), to = static_cast<std::size_t>(key);
      part.set(to, scores.get(head * count + at));
      part_mask.set(to, mask.get(at));
    }
    const SelectionInputs inputs{part.view(), part_mask.view()};
    ASSERT_TRUE(
        select_keys(inputs, {window, rows[d + 1] - rows[d], causal}, {part_begin.view(), part_end.view()}).ok());
    for (std::int64_t key = 0; key < own; ++key) {
      const auto at = static_cast<std::size_t>(keys[d] + key), from = static_cast<std::size_t>(key);
      if (part_begin.get(from) >= part_end.get(from)) continue;
      first[at] = part_begin.get(from) + static_cast<double>(rows[d]);
      last[at] = part_end.get(from) + static_cast<double>(rows[d]);
    }
  }
  for (std::size_t key = 0; key < count; ++key) {
    ASSERT_EQ(begin.get(head * count + key), first[key]) << "head " << head << " key " << key;
    ASSERT_EQ(end.get(head * count + key), last[key]) << "head " << head << " key " << key;
  }
}

TEST(Documents, SelectionIsThatOfEveryDocumentAlone) {
  std::mt19937 rng(1);
  const DType dtypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64};
  for (int round = 0; round < 2000; ++round) {
    const auto rows = static_cast<std::int64_t>(rng() % 30), keys = 1 + static_cast<std::int64_t>(rng() % 40);
    const auto window = static_cast<std::int64_t>(rng() % 6);
    const bool causal = rng() % 3 != 0, equal = rng() % 2 == 0;
    Tensor scores(dtypes[round % 4], {1, 2, keys}), mask(DType::kBool, {1, 1, keys});
    scores.fill([&] { return static_cast<double>(static_cast<int>(rng() % 9) - 4) / 2; });
    mask.fill([&] { return rng() % 4 != 0 ? 1.0 : 0.0; });
    const std::size_t documents = rng() % 7;
    const Bounds row_bounds = random_bounds(rng, documents, rows);
    const Bounds key_bounds = equal ? row_bounds : random_bounds(rng, documents, keys);
    const Tensor cu_seqlens_q = tensor_of(row_bounds), cu_seqlens_k = equal ? Tensor() : tensor_of(key_bounds);
    Tensor begin(DType::kInt32, {1, 2, keys}), end = begin;
    SelectionInputs inputs{scores.view(), mask.view()};
    inputs.cu_seqlens_q = cu_seqlens_q.view();
    inputs.cu_seqlens_k = cu_seqlens_k.view();
    internal::ThreadPool pool(1 + round % 3);
    const Status status = select_keys(inputs, {window, rows, causal}, {begin.view(), end.view()}, {&pool});
    ASSERT_TRUE(status.ok()) << status.message();
    for (std::size_t head = 0; head < 2; ++head) {
      expect_selection(scores, mask, clamped(row_bounds, rows), clamped(key_bounds, keys), window, causal, begin, end,
                       head);
    }
  }
}

TEST(Documents, EveryBatchElementMayHaveItsOwn) {
  std::mt19937 rng(2);
  constexpr std::int64_t kKeys = 20;
  Tensor scores(DType::kFloat32, {2, 1, kKeys}), bounds(DType::kInt32, {2, 4});
  scores.fill([&] { return static_cast<double>(rng() % 9); });
  const Bounds own[] = {{0, 3, 3, 20}, {0, 7, 11, 15}};
  for (std::size_t i = 0; i < 8; ++i) bounds.set(i, own[i / 4][i % 4]);
  Tensor begin(DType::kInt32, {2, 1, kKeys}), end = begin;
  SelectionInputs inputs{scores.view()};
  inputs.cu_seqlens_q = bounds.view();
  ASSERT_TRUE(select_keys(inputs, {3, kKeys, true}, {begin.view(), end.view()}).ok());
  for (std::size_t batch = 0; batch < 2; ++batch) {
    Tensor one(DType::kFloat32, {1, 1, kKeys}), one_begin(DType::kInt32, {1, 1, kKeys}), one_end = one_begin;
    for (std::size_t key = 0; key < kKeys; ++key) one.set(key, scores.get(batch * kKeys + key));
    const Tensor one_bounds = tensor_of(own[batch]);
    SelectionInputs alone{one.view()};
    alone.cu_seqlens_q = one_bounds.view();
    ASSERT_TRUE(select_keys(alone, {3, kKeys, true}, {one_begin.view(), one_end.view()}).ok());
    for (std::size_t key = 0; key < kKeys; ++key) {
      EXPECT_EQ(begin.get(batch * kKeys + key), one_begin.get(key));
      EXPECT_EQ(end.get(batch * kKeys + key), one_end.get(key));
    }
  }
}

TEST(Documents, IntervalsShowEveryRowItsOwnDocument) {
  std::mt19937 rng(3);
  for (int round = 0; round < 2000; ++round) {
    const auto rows = static_cast<std::int64_t>(rng() % 30), keys = 1 + static_cast<std::int64_t>(rng() % 30);
    const bool causal = rng() % 2 == 0, equal = rng() % 2 == 0;
    const std::size_t documents = rng() % 7;
    const Bounds row_bounds = random_bounds(rng, documents, rows);
    const Bounds key_bounds = equal ? row_bounds : random_bounds(rng, documents, keys);
    const Tensor cu_seqlens_q = tensor_of(row_bounds), cu_seqlens_k = equal ? Tensor() : tensor_of(key_bounds);
    Tensor begin(DType::kInt32, {1, 1, keys}), end = begin;
    const Status status =
        document_intervals(cu_seqlens_q.view(), cu_seqlens_k.view(), rows, causal, {begin.view(), end.view()});
    ASSERT_TRUE(status.ok()) << status.message();
    const std::vector<std::int64_t> first_row = clamped(row_bounds, rows), first_key = clamped(key_bounds, keys);
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t key = 0; key < keys; ++key) {
        bool expected = false;
        for (std::size_t d = 0; d < documents; ++d) {
          const bool together =
              row >= first_row[d] && row < first_row[d + 1] && key >= first_key[d] && key < first_key[d + 1];
          expected = expected || (together && (!causal || first_key[d + 1] - key >= first_row[d + 1] - row));
        }
        const auto at = static_cast<std::size_t>(key);
        const auto number = static_cast<double>(row);
        ASSERT_EQ(number >= begin.get(at) && number < end.get(at), expected)
            << "round " << round << " row " << row << " key " << key;
      }
    }
  }
}

TEST(Documents, RefusesBadArguments) {
  const Tensor scores(DType::kFloat32, {2, 1, 8}), bounds = tensor_of({0, 3, 8}), wide(DType::kInt32, {3, 3});
  Tensor begin(DType::kInt32, {2, 1, 8}), end = begin;
  const auto message = [&](const TensorView& rows, const TensorView& keys, const TensorView& lengths) {
    SelectionInputs inputs{scores.view(), {}, lengths};
    inputs.cu_seqlens_q = rows;
    inputs.cu_seqlens_k = keys;
    return select_keys(inputs, {2, 8, true}, {begin.view(), end.view()}).message();
  };
  EXPECT_EQ(message(bounds.view(), {}, {}), "ok");
  EXPECT_EQ(message({}, bounds.view(), {}),
            "cu_seqlens_k needs cu_seqlens_q, where the documents' rows begin; got cu_seqlens_q without a tensor");
  EXPECT_EQ(message(scores.view(), {}, {}), "cu_seqlens_q must have 1 or 2 dimensions; got cu_seqlens_q (2, 1, 8)");
  EXPECT_EQ(message(wide.view(), {}, {}),
            "cu_seqlens_q must be (documents + 1) or (B, documents + 1) with B = 2; got cu_seqlens_q (3, 3)");
  EXPECT_EQ(message(bounds.view(), wide.view(), {}), "cu_seqlens_k must have 1 dimension; got cu_seqlens_k (3, 3)");
  const Tensor lengths = tensor_of({1, 2}), none(DType::kInt32, {0}), floats(DType::kFloat32, {3});
  EXPECT_EQ(message(bounds.view(), lengths.view(), {}),
            "cu_seqlens_k must have the shape of cu_seqlens_q = (3); got cu_seqlens_k (2)");
  EXPECT_EQ(message(none.view(), {}, {}), "cu_seqlens_q must have at least one bound; got cu_seqlens_q (0)");
  EXPECT_EQ(message(floats.view(), {}, {}), "cu_seqlens_q must be int32; got cu_seqlens_q float32");
  EXPECT_EQ(message(bounds.view(), {}, lengths.view()),
            "seqlens_k must not be given beside cu_seqlens_q, which says where keys end; "
            "got seqlens_k (2), cu_seqlens_q (3)");

  Tensor one(DType::kInt32, {1, 1, 8});
  const auto argument = [](const TensorView& rows, const TensorView& keys, std::int64_t count,
                           const KeyIntervals& intervals) {
    return document_intervals(rows, keys, count, true, intervals).argument();
  };
  EXPECT_EQ(argument(bounds.view(), {}, 8, {one.view(), one.view()}), "");
  EXPECT_EQ(argument({}, {}, 8, {one.view(), one.view()}), "cu_seqlens_q");
  EXPECT_EQ(argument(wide.view(), {}, 8, {one.view(), one.view()}), "cu_seqlens_q");
  EXPECT_EQ(argument(bounds.view(), lengths.view(), 8, {one.view(), one.view()}), "cu_seqlens_k");
  EXPECT_EQ(argument(bounds.view(), {}, -1, {one.view(), one.view()}), "seqlen_q");
  EXPECT_EQ(argument(bounds.view(), {}, 8, {}), "intervals.begin");
  EXPECT_EQ(argument(bounds.view(), {}, 8, {begin.view(), end.view()}), "intervals.begin");
  EXPECT_EQ(argument(bounds.view(), {}, 8, {one.view(), scores.view()}), "intervals.end");
}

}  // namespace
}  // namespace flash_dmattn

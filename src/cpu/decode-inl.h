// The forward of few query rows: each unit streams the visible keys of one split once, for all query heads that share
// them, and the parts of a key head's splits are merged by their log-sum-exp (Flash-Decoding; Dao et al. 2023).
#pragma once

#include <utility>

#include "core/arena.h"
#include "core/rounding.h"
#include "cpu/decode_schedule.h"
#include "cpu/products_vector-inl.h"
#include "cpu/softmax-inl.h"
#include "cpu/streamed_products-inl.h"

namespace flash_dmattn::internal::cpu {
namespace {

// `Products` are those of the backward, which large scores have to agree with.
template <typename Products, typename T>
class DecodeUnit {
 public:
  static std::size_t scratch_bytes(const AttentionProblem& problem, const DecodeSchedule& schedule) {
    return DecodeUnit(problem, schedule, nullptr).arena_.used();
  }

  DecodeUnit(const AttentionProblem& problem, const DecodeSchedule& schedule, void* scratch)
      : arena_(scratch),
        schedule_(schedule),
        rule_(problem),
        head_dim_(static_cast<int>(problem.head_dim)),
        value_dim_(static_cast<int>(problem.value_dim)),
        rows_(static_cast<int>(problem.rows)),
        pass_rows_(schedule.pass_heads * rows_),
        query_stride_(static_cast<int>(round_up(problem.head_dim, Streamed<T>::kWidth))) {
    plans_ = arena_.take<std::byte>(DecodePlans::scratch_bytes(problem, schedule));
    queries_ = arena_.take<Query>(
        static_cast<std::size_t>(static_cast<std::int64_t>(schedule.passes(problem)) * pass_rows_ * query_stride_));
    scores_ = arena_.take<float>(kForwardRowTile * kScoreStride);
    block_maxima_ = arena_.take<float>(kForwardRowTile);
    bias_block_ = arena_.take<float>(problem.bias.defined() ? kDecodeBlock : 0);
    packed_queries_ = arena_.take<Packed>(Products::left_size(kForwardRowTile, head_dim_));
    packed_keys_ = arena_.take<Packed>(Products::columns_size(kTileKeys, head_dim_));
    packed_scores_ = arena_.take<float>(kForwardRowTile * kScoreStride);
  }

  void run(const ForwardProblem& problem, const IndexRows& lists, const DecodeParts& parts, std::int64_t index,
           AttentionCounters* counters) {
    problem_ = &problem;
    parts_ = &parts;
    unit_ = schedule_.unit(problem, index);
    for (std::int64_t key_head = unit_.key_head_begin; key_head < unit_.key_head_end; ++key_head) {
      const DecodePart part = parts.of(pair(key_head), unit_.split);
      fill_floats(part.maxima, parts.rows(), kMinusInfinity);
      fill_floats(part.sums, parts.rows(), 0.0f);
      fill_floats(part.out, parts.rows() * parts.out_stride(), 0.0f);
    }
    load_queries();
    DecodePlans plans(problem, lists, schedule_, unit_, plans_, counters);
    while (plans.next()) attend(plans);
    for (std::int64_t key_head = unit_.key_head_begin; key_head < unit_.key_head_end; ++key_head) {
      if (parts.complete(pair(key_head))) merge(key_head);
    }
  }

 private:
  using Packed = typename Products::Packed;
  using Query = typename Streamed<T>::Query;

  // One of the passes over the planned keys: its query rows, which are those of some query heads of one key head.
  struct Pass {
    const ChunkPlan* plan = nullptr;
    std::int64_t head = 0;                       // the first query head
    const T *keys = nullptr, *values = nullptr;  // key 0
    const Query* queries = nullptr;
    DecodePart part{};
  };

  std::int64_t pair(std::int64_t key_head) const { return unit_.batch * problem_->key_heads + key_head; }

  // All query rows of the unit, head by head, padded with zeros to whole vectors.
  void load_queries() {
    Query* to = queries_;
    const std::int64_t group = problem_->group();
    for (std::int64_t head = unit_.key_head_begin * group; head < unit_.key_head_end * group; ++head) {
      const T* from = head_tokens<T>(problem_->query, unit_.batch, head);
      for (int row = 0; row < rows_; ++row, to += query_stride_) {
        Streamed<T>::load_query(from + row * problem_->query.token_stride, head_dim_, to);
        std::memset(to + head_dim_, 0, static_cast<std::size_t>(query_stride_ - head_dim_) * sizeof(Query));
      }
    }
  }

  Pass make_pass(const DecodePlans& plans, int index) const {
    const std::int64_t first_row = static_cast<std::int64_t>(index) * pass_rows_;  // of the unit's query rows
    const std::int64_t head = unit_.key_head_begin * problem_->group() + index * schedule_.pass_heads;
    const std::int64_t key_head = head / problem_->group();
    const std::int64_t row = head % problem_->group() * rows_;  // of the key head's query rows
    DecodePart part = parts_->of(pair(key_head), unit_.split);
    part.maxima += row, part.sums += row, part.out += row * parts_->out_stride();
    return {&plans.plan(index),
            head,
            head_tokens<T>(problem_->key, unit_.batch, key_head),
            head_tokens<T>(problem_->value, unit_.batch, key_head),
            queries_ + first_row * query_stride_,
            part};
  }

  // A block of listed keys of one pass. Steps go over a block with all passes, then over the next one: neighbouring
  // heads' rows of the same keys are neighbours in memory, too.
  struct Step {
    int pass = -1, first = 0;

    // To the next step; false after the last one.
    bool advance(const DecodePlans& plans) {
      for (bool any_left = true; any_left; first += kDecodeBlock) {
        for (++pass; pass < plans.passes(); ++pass) {
          if (first < plans.plan(pass).key_count) return true;
        }
        any_left = false;
        for (pass = 0; pass < plans.passes(); ++pass) any_left |= first + kDecodeBlock < plans.plan(pass).key_count;
        pass = -1;
      }
      return false;
    }
  };

  void attend(const DecodePlans& plans) {
    Step step;
    if (!step.advance(plans)) return;
    Block blocks[2], *own = &blocks[0], *later = &blocks[1];
    list_rows(plans, step, own);
    own->fetch(head_dim_, value_dim_);
    for (bool more = true; more;) {
      more = step.advance(plans);
      if (more) list_rows(plans, step, later);
      attend_block(own, more ? later : nullptr);
      std::swap(own, later);
    }
  }

  // A step's pass, the first of its listed keys, and where these keys and their values lie.
  struct Block {
    Pass pass;
    int first = 0, count = 0;
    const T *keys[kDecodeBlock], *values[kDecodeBlock];

    // At once: nothing runs beside it.
    void fetch(int head_dim, int value_dim) const {
      for (int i = 0; i < count; ++i) prefetch_row<0, 2>(keys[i], head_dim);
      for (int i = 0; i < count; ++i) prefetch_row<0, 2>(values[i], value_dim);
    }
  };
  void list_rows(const DecodePlans& plans, const Step& step, Block* block) const {
    const Pass pass = block->pass = make_pass(plans, step.pass);
    const int left = pass.plan->key_count - step.first;
    block->first = step.first, block->count = left < kDecodeBlock ? left : kDecodeBlock;
    for (int i = 0; i < block->count; ++i) {
      const std::int64_t key = pass.plan->key(step.first + i);
      block->keys[i] = pass.keys + key * problem_->key.token_stride;
      block->values[i] = pass.values + key * problem_->value.token_stride;
    }
  }

  // `later`: the block whose rows are fetched on the way, null if there is none. As many as there are of the block's
  // own, of which the last one stands in for those that are missing.
  void attend_block(Block* own, Block* later) {
    const Pass& pass = own->pass;
    const int first = own->first, count = own->count;
    const T *const *keys_ahead = nullptr, *const *values_ahead = nullptr;
    if (later != nullptr) {
      for (int i = later->count; i < round_up(count, kKeyGroup); ++i) {
        later->keys[i] = own->keys[count - 1], later->values[i] = own->values[count - 1];
      }
      keys_ahead = later->keys, values_ahead = later->values;
    }
    for (int row = 0; row < pass_rows_; row += kForwardRowTile) {
      const int rows = pass_rows_ - row < kForwardRowTile ? pass_rows_ - row : kForwardRowTile;
      multiply_scores_in_place(pass.queries + static_cast<std::int64_t>(row) * query_stride_, query_stride_, rows,
                               own->keys, keys_ahead, count, head_dim_, scores_);
      exponentiate_rows(pass, row, rows, first, count);
      accumulate_rows_in_place(scores_, rows, own->values, values_ahead, count, value_dim_,
                               pass.part.out + static_cast<std::int64_t>(row) * parts_->out_stride(),
                               parts_->out_stride());
      keys_ahead = values_ahead = nullptr;  // once is enough
    }
  }

  // Products in scores_, of `rows` of the pass from `begin` on, become probabilities.
  void exponentiate_rows(const Pass& pass, int begin, int rows, int first, int count) {
    if (make_block_scores(pass, begin, rows, first, count)) {
      multiply_as_backward(pass, begin, rows, first, count);
      make_block_scores(pass, begin, rows, first, count);
    }
    const int key_tiles = static_cast<int>(words_for(count));
    for (int i = 0; i < rows; ++i) {
      float *maximum = pass.part.maxima + begin + i, *sum = pass.part.sums + begin + i;
      raise_maximum(block_maxima_[i], parts_->out_stride(), maximum, sum,
                    pass.part.out + static_cast<std::int64_t>(begin + i) * parts_->out_stride());
      exponentiate<Fp32Math>(rule_, problem_->bias.defined(), pass.plan->classes + first / kTileKeys, key_tiles,
                             *maximum, scores_ + i * kScoreStride, sum);
    }
  }

  // Products become scores; true if those of some row are large.
  bool make_block_scores(const Pass& pass, int begin, int rows, int first, int count) {
    bool any_large = false;
    BiasReader<T> bias;
    for (int i = 0; i < rows; ++i) {
      const int h = (begin + i) / rows_, row = (begin + i) % rows_;
      if (problem_->bias.defined() && (i == 0 || row == 0)) {
        bias = BiasReader<T>(problem_->bias, unit_.batch, pass.head + h, *pass.plan);
        bias.load_block(first, count, bias_block_);
      }
      block_maxima_[i] = make_scores(rule_, *pass.plan, row, pass.plan->classes + first / kTileKeys,
                                     static_cast<int>(words_for(count)), first, bias, scores_ + i * kScoreStride);
      const float running = pass.part.maxima[begin + i];
      any_large = any_large || is_large(block_maxima_[i] > running ? block_maxima_[i] : running);
    }
    return any_large;
  }

  // The same products once more, by the backward's instructions in its order. Where scores are large their last bits
  // decide between keys, and the backward has to find those that the forward found.
  HWY_NOINLINE void multiply_as_backward(const Pass& pass, int begin, int rows, int first, int count) {
    for (int i = 0; i < rows;) {
      const int h = (begin + i) / rows_, row = (begin + i) % rows_;
      RowSource<T> source;
      source.head = head_tokens<T>(problem_->query, unit_.batch, pass.head + h);
      source.stride = problem_->query.token_stride;
      source.begin = row;
      source.count = rows - i < rows_ - row ? rows - i : rows_ - row;
      source.head_dim = head_dim_;
      Products::template pack_left<kForwardRowTile>(source, kForwardRowTile, packed_queries_);
      for (int key = 0; key < count; key += kTileKeys) {
        const int left = count - key < kTileKeys ? count - key : kTileKeys;
        Products::pack_columns(
            key_rows(*pass.plan, pass.keys, problem_->key.token_stride, head_dim_, first + key, left), kTileKeys,
            packed_keys_);
        Products::template multiply_scores<kForwardRowTile>(packed_queries_, 0, source.count, packed_keys_, head_dim_,
                                                            0, kTileKeys, packed_scores_);
        for (int r = 0; r < source.count; ++r) {
          std::memcpy(scores_ + (i + r) * kScoreStride + key, packed_scores_ + r * kScoreStride,
                      kTileKeys * sizeof(float));
        }
      }
      i += source.count;
    }
  }

  // The parts of all splits become the results, always in the same order.
  void merge(std::int64_t key_head) {
    for (std::int64_t at = 0; at < parts_->rows(); ++at) {
      float maximum = kMinusInfinity;
      for (std::int64_t split = 0; split < schedule_.splits; ++split) {
        const float highest = parts_->of(pair(key_head), split).maxima[at];
        if (highest > maximum) maximum = highest;
      }
      const DecodePart first = parts_->of(pair(key_head), 0);
      float* out = first.out + at * parts_->out_stride();
      for (std::int64_t split = 0; split < schedule_.splits; ++split) {
        const DecodePart part = parts_->of(pair(key_head), split);
        const Vec weight = exponential<6>(hn::Set(kFloats, part.maxima[at] - reference_of(maximum)));
        add_part(split == 0, weight, part.sums[at], part.out + at * parts_->out_stride(), &first.sums[at], out);
      }
      write_row<T>(*problem_, unit_.batch, key_head * problem_->group() + at / rows_, at % rows_, maximum,
                   first.sums[at], out);
    }
  }

  // sum and out become a part's, multiplied by its weight, or grow by it.
  void add_part(bool is_first, Vec weight, float part_sum, const float* part_out, float* sum, float* out) const {
    *sum = (is_first ? 0.0f : *sum) + part_sum * hn::GetLane(weight);
    for (int i = 0; i < parts_->out_stride(); i += kLanes) {
      const Vec before = is_first ? hn::Zero(kFloats) : hn::Load(kFloats, out + i);
      hn::Store(hn::MulAdd(hn::Load(kFloats, part_out + i), weight, before), kFloats, out + i);
    }
  }

  Arena arena_;
  const DecodeSchedule& schedule_;
  ScoreRule rule_;
  int head_dim_, value_dim_, rows_, pass_rows_, query_stride_;
  const ForwardProblem* problem_ = nullptr;
  const DecodeParts* parts_ = nullptr;
  DecodeSchedule::Unit unit_{};
  std::byte* plans_;
  Query* queries_;
  float *scores_, *block_maxima_, *bias_block_, *packed_scores_;
  Packed *packed_queries_, *packed_keys_;
};

}  // namespace
}  // namespace flash_dmattn::internal::cpu

// The backward, by the formulas of Dao et al. 2022 (FlashAttention, appendix B), over the same plans as the
// forward: P = e^(score - lse), dS = P (dO V^T - delta), delta = rowsum(dO * O) - dlse. Of lse the row's maximum and
// the logarithm of its sum are subtracted one after the other: where scores are large their sum would lose the second.
// With a sink the keys have a share of the softmax sum: dV takes share * P, dS = P (share * (dO V^T - delta) + dlse).
#pragma once

#include "cpu/bias_gradient-inl.h"
#include "cpu/gradient_sums-inl.h"
#include "cpu/kernel_set.h"
#include "cpu/scores-inl.h"
#include "cpu/sink-inl.h"

namespace flash_dmattn::internal::cpu {
namespace {

template <typename Products, typename T>
class BackwardUnit {
 public:
  static std::size_t scratch_bytes(const BackwardProblem& problem, const BackwardSchedule& schedule) {
    return BackwardUnit(problem, schedule, IntervalIndices(problem, nullptr), nullptr).arena_.used();
  }

  BackwardUnit(const BackwardProblem& problem, const BackwardSchedule& schedule, const IntervalIndices& indices,
               void* scratch)
      : problem_(problem),
        schedule_(schedule),
        arena_(scratch),
        planner_(problem, indices, schedule.chunk_rows, kBackwardRowTile,
                 arena_.take<std::byte>(ChunkPlanner::scratch_bytes(problem, schedule.chunk_rows, kBackwardRowTile))),
        rule_(problem),
        dbias_(problem, schedule, arena_),
        head_dim_(static_cast<int>(problem.head_dim)),
        value_dim_(static_cast<int>(problem.value_dim)),
        out_stride_(Products::out_stride(head_dim_)),
        padded_rows_(static_cast<int>(round_up(schedule.chunk_rows, kBackwardRowTile))),
        need_score_gradient_(problem.dquery.defined() || problem.dkey.defined() || problem.dbias.defined()) {
    const std::int64_t rows = static_cast<std::int64_t>(schedule.pass_heads) * padded_rows_;
    const int block_keys = static_cast<int>(problem.keys < kKeyBlock ? round_up(problem.keys, kTileKeys) : kKeyBlock);
    queries_ = arena_.take<Packed>(Products::left_size(rows, head_dim_));
    key_columns_ = arena_.take<Packed>(Products::columns_size(block_keys, head_dim_));
    maxima_ = arena_.take<float>(static_cast<std::size_t>(rows));
    log_sums_ = arena_.take<float>(static_cast<std::size_t>(rows));
    shares_ = arena_.take<float>(static_cast<std::size_t>(rows));
    delta_ = arena_.take<float>(static_cast<std::size_t>(rows));
    present_ = arena_.take<std::uint8_t>(static_cast<std::size_t>(rows));
    scores_ = arena_.take<float>(kBackwardRowTile * kScoreStride);
    if (problem.bias.defined()) bias_block_ = arena_.take<float>(kKeyBlock);
    if (need_score_gradient_) {
      douts_ = arena_.take<Packed>(Products::left_size(rows, value_dim_));
      value_columns_ = arena_.take<Packed>(Products::columns_size(block_keys, value_dim_));
      gradients_ = arena_.take<float>(kBackwardRowTile * kScoreStride);
    }
    if (problem.dquery.defined()) {
      key_depth_ = arena_.take<Packed>(Products::depth_size(block_keys, head_dim_));
      dquery_ = arena_.take<float>(static_cast<std::size_t>(rows * out_stride_));
    }
    const GradientSums layout(problem, schedule, nullptr);
    const std::size_t own_pairs = schedule.splits > 1 ? 0 : static_cast<std::size_t>(layout.pairs_per_unit());
    if (problem.dkey.defined()) {
      query_rows_ = arena_.take<Packed>(Products::rows_size(rows, head_dim_));
      dkey_block_ = arena_.take<float>(Products::block_size(head_dim_));
      own_dkey_ = arena_.take<float>(own_pairs * layout.dkey_size());
    }
    if (problem.dvalue.defined()) {
      dout_rows_ = arena_.take<Packed>(Products::rows_size(rows, value_dim_));
      dvalue_block_ = arena_.take<float>(Products::block_size(value_dim_));
      own_dvalue_ = arena_.take<float>(own_pairs * layout.dvalue_size());
    }
  }

  void run(const BackwardProblem& problem, const BackwardSchedule& schedule, std::int64_t index, void* sums_memory,
           AttentionCounters* counters) {
    counters_ = counters;
    const GradientSums sums(problem, schedule, sums_memory);
    const BackwardSchedule::Unit unit = schedule.unit(index);
    begin_sums(sums, index);
    first_head_ = unit.key_head_begin * problem.group();
    for (std::int64_t step = 0;; ++step) {
      const std::int64_t chunk = schedule.chunk(unit.split, step);
      if (chunk < 0) break;
      const std::int64_t row_begin = chunk * schedule.chunk_rows;
      const std::int64_t rows_left = problem.rows - row_begin;
      walk_chunk(unit, sums, row_begin,
                 static_cast<int>(rows_left < schedule.chunk_rows ? rows_left : schedule.chunk_rows));
    }
    if (schedule.splits == 1) finish_own_sums(unit, sums);
  }

 private:
  using Packed = typename Products::Packed;

  void begin_sums(const GradientSums& sums, std::int64_t index) {
    const bool own = schedule_.splits == 1;
    dkey_sums_ = own ? own_dkey_ : sums.dkey(index, 0);
    dvalue_sums_ = own ? own_dvalue_ : sums.dvalue(index, 0);
    const std::int64_t pairs = sums.pairs_per_unit();
    if (problem_.dkey.defined()) fill_floats(dkey_sums_, pairs * static_cast<std::int64_t>(sums.dkey_size()), 0.0f);
    if (problem_.dvalue.defined()) {
      fill_floats(dvalue_sums_, pairs * static_cast<std::int64_t>(sums.dvalue_size()), 0.0f);
    }
    dsinks_ = sums.dsinks(index);
    if (dsinks_ != nullptr) std::memset(dsinks_, 0, static_cast<std::size_t>(sums.sink_heads()) * sizeof(double));
    if (problem_.dbias.defined()) dbias_.begin_unit(sums.columns(index), sums.columns_size());
  }

  void finish_own_sums(const BackwardSchedule::Unit& unit, const GradientSums& sums) {
    for (std::int64_t pair = 0; pair < sums.pairs_per_unit(); ++pair) {
      const std::int64_t batch = unit.batch_begin + pair / schedule_.group_key_heads;
      const std::int64_t key_head = unit.key_head_begin + pair % schedule_.group_key_heads;
      const auto index = static_cast<std::size_t>(pair);
      if (problem_.dkey.defined()) {
        finish_rows(own_dkey_ + index * sums.dkey_size(), 1, 0, sums.dkey_stride(), 0, problem_.keys, head_dim_,
                    static_cast<float>(problem_.scale), head_tokens<T>(problem_.dkey, batch, key_head),
                    problem_.dkey.token_stride);
      }
      if (problem_.dvalue.defined()) {
        finish_rows(own_dvalue_ + index * sums.dvalue_size(), 1, 0, sums.dvalue_stride(), 0, problem_.keys, value_dim_,
                    1.0f, head_tokens<T>(problem_.dvalue, batch, key_head), problem_.dvalue.token_stride);
      }
    }
  }

  // All pairs of the share group over the rows of one chunk, those that share a head of the bias together.
  void walk_chunk(const BackwardSchedule::Unit& unit, const GradientSums& sums, std::int64_t row_begin, int rows) {
    const std::int64_t group = problem_.group();
    const std::int64_t bias_heads = problem_.dbias.head_divisor;  // query heads to a head of the bias
    const std::int64_t first_head = unit.key_head_begin * group;
    const std::int64_t heads = schedule_.group_key_heads * group;
    for (std::int64_t head = first_head; head < first_head + heads; head += schedule_.pass_heads) {
      if (head == first_head || head % bias_heads == 0) dbias_.begin_strip(rows);
      for (std::int64_t i = 0; i < schedule_.group_batches; ++i) {
        const std::int64_t batch = unit.batch_begin + i;
        const ChunkPlan& plan = planner_.plan(batch, head, row_begin, rows);
        if (counters_ != nullptr) count_plan(plan, schedule_.pass_heads, counters_);
        const std::int64_t key_head = head / group;
        const std::int64_t pair = i * schedule_.group_key_heads + key_head - unit.key_head_begin;
        attend(plan, batch, key_head, head, sums, static_cast<std::size_t>(pair));
      }
      const std::int64_t next = head + schedule_.pass_heads;
      if (next == first_head + heads || next % bias_heads == 0) {
        dbias_.end_strip(unit.batch_begin, head, row_begin, rows);
      }
    }
  }

  // The pass's query heads from `head` on over one chunk. `pair`: their key head's, of the unit's.
  void attend(const ChunkPlan& plan, std::int64_t batch, std::int64_t key_head, std::int64_t head,
              const GradientSums& sums, std::size_t pair) {
    for (int h = 0; h < schedule_.pass_heads; ++h) begin_rows(plan, batch, head + h, h);
    if (!need_score_gradient_ && !problem_.dvalue.defined()) return;  // the sink's is all that is asked for
    const T* keys = head_tokens<T>(problem_.key, batch, key_head);
    const T* values = head_tokens<T>(problem_.value, batch, key_head);
    for (int first = 0; first < plan.key_count; first += kKeyBlock) {
      const int count = plan.key_count - first < kKeyBlock ? plan.key_count - first : kKeyBlock;
      const int padded = static_cast<int>(round_up(count, kTileKeys));
      const auto key_source = key_rows(plan, keys, problem_.key.token_stride, head_dim_, first, count);
      Products::pack_columns(key_source, padded, key_columns_);
      if (need_score_gradient_) {
        Products::pack_columns(key_rows(plan, values, problem_.value.token_stride, value_dim_, first, count), padded,
                               value_columns_);
      }
      if (problem_.dquery.defined()) Products::pack_depth(key_source, padded, key_depth_);
      if (counters_ != nullptr) counters_->copied_keys += count;
      if (problem_.dkey.defined()) Products::clear_block(head_dim_, padded, dkey_block_);
      if (problem_.dvalue.defined()) Products::clear_block(value_dim_, padded, dvalue_block_);
      for (int h = 0; h < schedule_.pass_heads; ++h) {
        BiasReader<T> bias;
        if (problem_.bias.defined()) {
          bias = BiasReader<T>(problem_.bias, batch, head + h, plan);
          bias.load_block(first, count, bias_block_);
        }
        dbias_.begin_head(plan, batch, head + h, (head + h) % problem_.group());
        dbias_.begin_block();
        for (int tile = 0; tile < plan.row_tiles(); ++tile) attend_tile(plan, h, tile, first, padded, bias);
        dbias_.end_block(first, count);
      }
      const auto listed_key = [&](int key) { return plan.key(first + key); };
      if (problem_.dkey.defined()) {
        Products::scatter_block(dkey_block_, head_dim_, count, listed_key, sums.dkey_stride(),
                                dkey_sums_ + pair * sums.dkey_size());
      }
      if (problem_.dvalue.defined()) {
        Products::scatter_block(dvalue_block_, value_dim_, count, listed_key, sums.dvalue_stride(),
                                dvalue_sums_ + pair * sums.dvalue_size());
      }
    }
    if (!problem_.dquery.defined()) return;
    for (int h = 0; h < schedule_.pass_heads; ++h) {
      T* dquery = head_tokens<T>(problem_.dquery, batch, head + h);
      for (int row = 0; row < plan.rows; ++row) {
        store_row(dquery_ + static_cast<std::int64_t>(h * padded_rows_ + row) * out_stride_,
                  static_cast<float>(problem_.scale), head_dim_,
                  dquery + (plan.row_begin + row) * problem_.dquery.token_stride);
      }
    }
  }

  // Packs the chunk's rows of one head and what the softmax's derivative needs of them.
  void begin_rows(const ChunkPlan& plan, std::int64_t batch, std::int64_t head, int h) {
    const int at = h * padded_rows_;
    const std::int64_t first = (batch * problem_.heads + head) * problem_.rows + plan.row_begin;
    const auto* lse = static_cast<const float*>(problem_.lse) + first;
    const auto* stats = static_cast<const float*>(problem_.row_stats);
    for (int row = 0; row < plan.rows; ++row) {
      maxima_[at + row] = stats == nullptr ? lse[row] : stats[2 * (first + row)];
      log_sums_[at + row] = stats == nullptr ? 0.0f : stats[2 * (first + row) + 1];
      // A row that sees nothing touches no gradient, whatever its query and dout hold.
      present_[at + row] = lse[row] != kMinusInfinity;
    }
    RowSource<T> queries = chunk_rows(plan, problem_.query, head_dim_, batch, head, h);
    RowSource<T> douts = chunk_rows(plan, problem_.dout, value_dim_, batch, head, h);
    RowSource<T> outs = chunk_rows(plan, problem_.out, value_dim_, batch, head, h);
    const int padded = static_cast<int>(round_up(plan.rows, kBackwardRowTile));
    Products::template pack_left<kBackwardRowTile>(queries, padded, queries_ + Products::left_size(at, head_dim_));
    if (problem_.dkey.defined()) {
      Products::template pack_row_operand<kBackwardRowTile>(queries, padded_rows_,
                                                            query_rows_ + Products::rows_size(at, head_dim_));
    }
    if (problem_.dvalue.defined()) {
      Products::template pack_row_operand<kBackwardRowTile>(douts, padded_rows_,
                                                            dout_rows_ + Products::rows_size(at, value_dim_));
    }
    if (problem_.dquery.defined()) {
      fill_floats(dquery_ + static_cast<std::int64_t>(at) * out_stride_,
                  static_cast<std::int64_t>(plan.rows) * out_stride_, 0.0f);
    }
    if (need_score_gradient_) {
      Products::template pack_left<kBackwardRowTile>(douts, padded, douts_ + Products::left_size(at, value_dim_));
      dbias_.clear_rows(plan, batch, head);
    }
    begin_row_facts(plan, batch, head, at, douts, outs);
  }

  // Of each row the keys' share of the softmax sum, and delta; of the head the sink's gradient.
  void begin_row_facts(const ChunkPlan& plan, std::int64_t batch, std::int64_t head, int at, const RowSource<T>& douts,
                       const RowSource<T>& outs) {
    const auto* dlse = static_cast<const float*>(problem_.dlse);
    if (dlse != nullptr) dlse += batch * problem_.dlse_batch_stride + head * problem_.dlse_head_stride;
    const bool needs_delta = need_score_gradient_ || dsinks_ != nullptr;
    const float sink = problem_.sink.defined() ? sink_of<T>(problem_, head) : kMinusInfinity;
    const bool has_sink = sink != kMinusInfinity;
    double dsink = 0;
    for (int row = 0; row < plan.rows; ++row) {
      shares_[at + row] = 1.0f, delta_[at + row] = 0.0f;
      if (present_[at + row] == 0) continue;
      float delta = needs_delta ? dot_rows(douts.row(row), outs.row(row)) : 0.0f;
      if (has_sink) {
        const SinkShares shares = shares_of_sum(sink, maxima_[at + row], log_sums_[at + row]);
        dsink -= shares.sink * delta;
        shares_[at + row] = static_cast<float>(shares.keys);
        delta *= shares_[at + row];
      }
      delta_[at + row] = dlse == nullptr ? delta : delta - dlse[(plan.row_begin + row) * problem_.dlse_row_stride];
    }
    if (dsinks_ != nullptr) dsinks_[head - first_head_] += dsink;
  }

  RowSource<T> chunk_rows(const ChunkPlan& plan, const TokenView& view, int head_dim, std::int64_t batch,
                          std::int64_t head, int h) {
    RowSource<T> rows;
    rows.head = head_tokens<T>(view, batch, head);
    rows.stride = view.token_stride;
    rows.begin = plan.row_begin;
    rows.count = plan.rows;
    rows.head_dim = head_dim;
    rows.present = present_ + h * padded_rows_;
    return rows;
  }

  // Of rows of out.
  float dot_rows(const T* a, const T* b) const {
    Vec sum = hn::Zero(kFloats);
    int i = 0;
    for (; i + kLanes <= value_dim_; i += kLanes) sum = hn::MulAdd(load_floats(a + i), load_floats(b + i), sum);
    if (i < value_dim_) sum = hn::MulAdd(load_first(a + i, value_dim_ - i), load_first(b + i, value_dim_ - i), sum);
    return hn::GetLane(hn::SumOfLanes(kFloats, sum));
  }

  void attend_tile(const ChunkPlan& plan, int h, int row_tile, int first, int padded, const BiasReader<T>& bias) {
    const int row_begin = row_tile * kBackwardRowTile;
    const int rows = plan.rows - row_begin < kBackwardRowTile ? plan.rows - row_begin : kBackwardRowTile;
    const int key_tiles = padded / kTileKeys;
    const TileClass* classes =
        plan.classes + static_cast<std::int64_t>(row_tile) * plan.key_tiles() + first / kTileKeys;
    const int at = h * padded_rows_;
    const std::size_t query_at = Products::left_size(at, head_dim_), dout_at = Products::left_size(at, value_dim_);
    const bool any = for_each_run(classes, key_tiles, [&](int begin, int end) {
      Products::template multiply_scores<kBackwardRowTile>(queries_ + query_at, row_tile, rows, key_columns_, head_dim_,
                                                           begin * kTileKeys, end * kTileKeys, scores_);
      if (!need_score_gradient_) return;
      Products::template multiply_scores<kBackwardRowTile>(douts_ + dout_at, row_tile, rows, value_columns_, value_dim_,
                                                           begin * kTileKeys, end * kTileKeys, gradients_);
    });
    if (!any) return;
    if (counters_ != nullptr) count_tiles(classes, key_tiles, rows, counters_);
    for (int row = 0; row < rows; ++row) {
      differentiate_row(plan, row_begin + row, at + row_begin + row, classes, key_tiles, first, bias,
                        scores_ + row * kScoreStride, gradients_ + row * kScoreStride);
    }
    const Packed* dout_rows = dout_rows_ + Products::rows_size(at, value_dim_);
    const Packed* query_rows = query_rows_ + Products::rows_size(at, head_dim_);
    for_each_run(classes, key_tiles, [&](int begin_tile, int end_tile) {
      const int begin = begin_tile * kTileKeys, end = end_tile * kTileKeys;
      if (problem_.dvalue.defined()) {
        Products::template accumulate_columns<kBackwardRowTile>(scores_, row_tile, rows, dout_rows, padded_rows_,
                                                                value_dim_, begin, end, dvalue_block_);
      }
      if (problem_.dkey.defined()) {
        Products::template accumulate_columns<kBackwardRowTile>(gradients_, row_tile, rows, query_rows, padded_rows_,
                                                                head_dim_, begin, end, dkey_block_);
      }
      if (problem_.dquery.defined()) {
        Products::accumulate_rows(gradients_, rows, key_depth_, padded, head_dim_, begin, end,
                                  dquery_ + static_cast<std::int64_t>(at + row_begin) * out_stride_);
      }
    });
  }

  // Products become probabilities, and their gradients d loss / d product / scale, in place.
  HWY_INLINE void differentiate_row(const ChunkPlan& plan, int row, int at, const TileClass* classes, int key_tiles,
                                    int first, const BiasReader<T>& bias, float* scores, float* gradients) {
    const bool scales_first = rule_.is_plain(bias.defined()) && is_large(maxima_[at]);
    if (scales_first) rule_.scale_products(classes, key_tiles, scores);
    RowTerms terms = {rule_.is_linear() && !scales_first ? rule_.scale : 1.0f,
                      maxima_[at],
                      log_sums_[at],
                      shares_[at],
                      delta_[at],
                      nullptr};
    const bool bent = dbias_.wanted() || rule_.softcap > 0.0f;
    for (int tile = 0; tile < key_tiles; ++tile) {
      if (classes[tile] == TileClass::kEmpty) continue;
      const int in_block = tile * kTileKeys, listed = first + in_block;
      std::uint64_t visible = classes[tile] == TileClass::kFull ? kAllVisible : plan.visible(row, listed / kTileKeys);
      if (present_[at] == 0) visible = 0;
      HWY_ALIGN float slopes[kTileKeys];
      float buffer[kTileKeys];
      terms.bias = bias.tile(row, listed, buffer);
      if (!rule_.is_linear()) {
        rule_.apply_to_tile(scores + in_block, terms.bias, slopes);
        terms.bias = nullptr;
      }
      if (!need_score_gradient_) {
        differentiate_tile(terms, visible, scores, nullptr, in_block, [](Vec, int) {});
      } else if (!bent) {
        differentiate_tile(terms, visible, scores, gradients, in_block,
                           [&](Vec gradient, int key) { Products::store_probabilities(gradient, gradients, key); });
      } else if (dbias_.wants_columns() && rule_.softcap == 0.0f) {
        differentiate_tile(terms, visible, scores, gradients, in_block, [&](Vec gradient, int key) {
          dbias_.add_to_columns(gradient, key);
          Products::store_probabilities(gradient, gradients, key);
        });
      } else {
        HWY_ALIGN float tile_gradients[kTileKeys];
        differentiate_tile(terms, visible, scores, gradients, in_block, [&](Vec gradient, int key) {
          hn::Store(gradient, kFloats, tile_gradients + (key - in_block));
        });
        if (dbias_.wanted()) dbias_.add_tile(row, listed, in_block, tile_gradients);
        for (int key = 0; key < kTileKeys; key += kLanes) {
          Vec gradient = hn::Load(kFloats, tile_gradients + key);
          if (rule_.softcap > 0.0f) gradient = hn::Mul(gradient, hn::Load(kFloats, slopes + key));
          Products::store_probabilities(gradient, gradients, in_block + key);
        }
      }
    }
  }

  // score = factor * (what is stored of it) + bias, if there is one.
  struct RowTerms {
    float factor, maximum, log_sum, share, delta;
    const float* bias;
  };

  // Probabilities of one tile in place, with the sink; `use` takes the gradients of the scores. With `gradients` null
  // nobody wants them.
  template <typename Use>
  static HWY_INLINE void differentiate_tile(const RowTerms& terms, std::uint64_t visible, float* scores,
                                            const float* gradients, int in_block, Use use) {
    const Vec factor = hn::Set(kFloats, terms.factor), maximum = hn::Set(kFloats, terms.maximum);
    const Vec log_sum = hn::Set(kFloats, terms.log_sum);
    const Vec share = hn::Set(kFloats, terms.share), delta = hn::Set(kFloats, terms.delta);
    const auto vector_at = [&](int key, auto select) HWY_ATTR {
      const Vec stored = hn::Load(kFloats, scores + key);
      // With a bias the score is rounded first, as by the forward.
      const Vec distance =
          terms.bias != nullptr
              ? hn::Sub(hn::MulAdd(stored, factor, hn::LoadU(kFloats, terms.bias + (key - in_block))), maximum)
              : hn::MulSub(stored, factor, maximum);
      const Vec p = exponential<Products::kExpDegree>(hn::Sub(distance, log_sum));  // of the keys among themselves
      if (gradients != nullptr) {
        use(select(hn::Mul(p, hn::MulSub(hn::Load(kFloats, gradients + key), share, delta))), key);
      }
      Products::store_probabilities(select(hn::Mul(p, share)), scores, key);
    };
    if (visible == kAllVisible) {
      HWY_UNROLL(4)
      for (int v = 0; v < kTileVectors; ++v) vector_at(in_block + v * kLanes, [](Vec value) { return value; });
    } else {
      for (int v = 0; v < kTileVectors; ++v, visible >>= kLanes) {
        const Mask seen = mask_from_bits(visible);
        vector_at(in_block + v * kLanes, [&](Vec value) HWY_ATTR { return hn::IfThenElseZero(seen, value); });
      }
    }
  }

  const BackwardProblem& problem_;
  const BackwardSchedule& schedule_;
  Arena arena_;
  ChunkPlanner planner_;
  ScoreRule rule_;
  BiasGradientSink<T> dbias_;
  int head_dim_, value_dim_, out_stride_, padded_rows_;
  bool need_score_gradient_;
  AttentionCounters* counters_ = nullptr;
  // The chunk's rows, packed once.
  Packed *queries_ = nullptr, *douts_ = nullptr, *query_rows_ = nullptr, *dout_rows_ = nullptr;
  float *maxima_ = nullptr, *log_sums_ = nullptr, *shares_ = nullptr, *delta_ = nullptr, *dquery_ = nullptr;
  std::uint8_t* present_ = nullptr;
  // One block of listed keys.
  Packed *key_columns_ = nullptr, *value_columns_ = nullptr, *key_depth_ = nullptr;
  float *dkey_block_ = nullptr, *dvalue_block_ = nullptr, *bias_block_ = nullptr;
  // One tile.
  float *scores_ = nullptr, *gradients_ = nullptr;
  // The unit's sums.
  double* dsinks_ = nullptr;  // of its heads, from first_head_ on
  std::int64_t first_head_ = 0;
  float *dkey_sums_ = nullptr, *dvalue_sums_ = nullptr, *own_dkey_ = nullptr, *own_dvalue_ = nullptr;
};

}  // namespace
}  // namespace flash_dmattn::internal::cpu

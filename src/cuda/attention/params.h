// What the attention kernels take: validated arguments (api/problem.h) with everything derived on the host.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>

#include "core/problem.h"
#include "cuda/plan/device_plan.h"
#include "cuda/plan/visibility.h"

namespace flash_dmattn::internal::cuda {

// Shared memory that a block may have, in bytes: on every GPU from sm_80 on, and what tiles are made for on those with
// the most. GPUs with less than the latter get narrow tiles.
constexpr std::size_t kLeastSharedBytes = 99 * 1024;
constexpr std::size_t kWideSharedBytes = 227 * 1024;
constexpr bool is_narrow(std::size_t shared_limit) { return shared_limit < kWideSharedBytes; }

// From natural units to those of log2, in which exponents are, and back.
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// How scores are made from products.
struct ScoreRule {
  // Whether scores are made before the softmax: with a softcap, a bias, or a scale that is not positive or of unusual
  // size. Else the softmax takes products of queries and keys as they are ("products stand for scores"), and the scale
  // is applied inside the exponent only.
  bool transforms = false;
  float multiplier = 1;  // inside the exponent, of base 2: log2(e), or scale * log2(e) if products stand there
  // Half of the multiplier, and the inverse of that: products with large scores then stay in float's range.
  float half_multiplier = 0.5f, inverse_half = 2;
  float natural = 1;  // what turns that which stands for a score into the score: 1, or scale
  float scale = 1;
  float outer_scale = 1;      // what is left of it after a softcap, if there is one: 1; else scale
  float softcap = 0;          // 0: none
  float inverse_softcap = 0;  // 1 / softcap, 0: none
  float inner_scale = 0;      // 2 * log2(e) * scale / softcap: tanh(x) = 1 - 2 / (2^(2 x log2 e) + 1)
};

// A row's lse, in units of log2, is large from here on: rounding it to one number changes the row's probabilities by
// more than 2^-14, a quarter of what rounding them to float16 does. The backward then computes from RowStats
// (large_rows.cuh).
constexpr float kLargeScore = 1024;
// A row's maximum, likewise, is huge from here on: relative to its rounding probabilities are no longer near 1 and may
// leave float's range. A block of the forward that ends with such a row starts again and makes exponents in more steps
// (softmax.cuh).
constexpr float kHugeScore = 0x1p14f;

// The last `count` blocks of a launch, in the order in which they start (attention/block_order.cuh).
constexpr int kMostOrderedBlocks = 1024;
struct BlockOrder {
  std::int32_t* blocks = nullptr;  // scratch of kMostOrderedBlocks; null: they start as they are numbered
  std::int32_t count = 0;
  // Two numbers of blocks that stay for more than one: they count which is next and, where some are put in order, learn
  // that these are. Set to 0 where they are put in order, else the first one by the launcher. Null: they do not count.
  std::int32_t* taken = nullptr;
};

struct KeyBlock;

// What blocks of a backward take one after another where they stay for more than one tile of keys (key_works.h). With a
// plan, entries are (batch, key heads, splits, 1 + chunks of the launch), and one more:
struct KeyWorks {
  std::int32_t* starts = nullptr;       // where the works of each entry begin
  std::int32_t* first_tiles = nullptr;  // the first tile of each entry that is a work
  KeyBlock* blocks = nullptr;           // of all works, in the order in which they come
  std::int32_t* last = nullptr;  // scratch of kMostOrderedBlocks: the order of the last works; null: as they are listed
  std::int32_t* taken = nullptr;  // counts works that are taken; of sm90, besides the first one of each block
};

// How a backward without a plan or turns deals its tiles of keys, which are numbered head by head, to blocks that stay
// (key_tile_order.h).
struct KeyTileOrder {
  // The last tiles, of so many key heads (or shares of their query heads), come by turns, a tile of each, those that
  // the most rows see first.
  std::int32_t woven_heads = 0;
  // The steps of tiles from this one on, in the order of the above, are divided among so many works each: segments.
  std::int32_t first_cut = 0x7fffffff, segments = 1;
  // Sums of the segments of tiles that are cut, (tiles, 2, tile in the order of the kernel's registers), and how many
  // of them each warp has added, (tiles, kMostTileWarps): 0 at first.
  float* sums = nullptr;
  std::int32_t* added = nullptr;
};
constexpr int kMostTileWarps = 16;  // consumers' warps of the blocks that divide a tile

// Whose turn it is to add to sums, in a deterministic backward whose blocks stay. The arrays are 0 at first.
struct SumTurns {
  // (dquery colors, B, H, row tiles): the last tile of keys of its entry (key_works.cuh) that has added its part,
  // plus 1. Null: there are no turns.
  std::int32_t* queries = nullptr;
  // Warps of works that have added theirs: (B, Hkv), to sums of keys and values; (B, H), to those of the head's bias.
  std::int32_t *keys = nullptr, *bias = nullptr;
  std::int32_t tracks = 1;  // from how many key heads blocks take works by turns (key_works.h)
};

// Tiles of rows that a single tile of keys meets: its step has all of their dquery, which it may store, so that there
// are no sums of it (met_once.cuh).
struct MetOnceTiles {
  std::uint32_t* tiles = nullptr;  // (plan batches, plan heads, chunks): a bit a tile of rows; null: not wanted
  // How often any tile of rows is met by a tile of keys, and how many are met once; were 0.
  unsigned long long* visits = nullptr;
  std::int32_t row_tile = 0, tile_keys = 0;
  std::int32_t least_share = 0;  // blocks store them if at least one visit in so many is to one that is met once
};

struct AttentionParams {
  TokenView query, key, value;  // (B, Sq, H, D), (B, Sk, Hkv, D), (B, Sk, Hkv, Dv)
  BroadcastView bias;           // data null: none
  bool bias_by_row = false;     // it has, or its gradient has, rows of its own
  std::int32_t batch = 0, rows = 0, keys = 0, heads = 0, key_heads = 0;
  std::int32_t head_dim = 0, value_dim = 0;  // D and Dv
  ScoreRule score;                           // at a multiple of 8 bytes: kernels read some of its numbers in pairs
  std::int32_t group = 1;                    // query heads of a key head
  // Every row of query, key, value (and out, dout) is whole pieces of 16 aligned bytes. Else they are read by element.
  bool aligned = false;
  std::size_t shared_limit = kWideSharedBytes;  // bytes of shared memory that a block may have
  Visibility visibility;
  DevicePlan plan;  // unset for what the causal rule and lengths alone hide
  std::int32_t processors = 1;
  BlockOrder order;
  // bool, as given, whether it differs by row or not; data null: none. For decode, which needs no plan: only it reads
  // this, and not visibility.key_mask or visibility.packed.
  BroadcastView mask;
};

// A row's lse in two numbers, for rows whose lse one number would round too coarsely: x is the row's highest score, or
// product where products stand for scores (ScoreRule), y the natural logarithm of the sum of its probabilities relative
// to x.
using RowStats = float2;

struct ForwardParams : AttentionParams {
  TokenView out;                  // (B, Sq, H, Dv) contiguous
  float* lse = nullptr;           // (B, H, Sq) contiguous
  RowStats* row_stats = nullptr;  // likewise; null: not wanted
  HeadView sink;                  // of out alone, lse and row_stats leave it out; data null: none
};

// What the backward knows of rows, (B, H, tiles of rows, 2, rows of a tile): of every tile first what lse says of its
// rows, in units of log2: +inf for a row that sees no key or does not exist, so that its probabilities come out as 0,
// and kLargeRow where the lse is large (large_rows.cuh). Then each row's delta, the sum over Dv of dout * out, less
// dlse; 0 for a row without keys. With a sink both are what they have to be for probabilities that the sink has a part
// of (row_facts.cu).
using RowFacts = float;
// Where the facts of a row begin, of rows padded to whole tiles; its delta comes `row_tile` later.
constexpr std::int64_t row_fact(std::int64_t row, int row_tile) { return row / row_tile * row_tile + row; }
// What is known of all rows of a call; 0 where it is false.
struct RowFlags {
  std::int32_t has_large_row;   // (large_rows.cuh)
  std::int32_t has_unseen_row;  // one that sees no key; rows past the last do not count
};

// Gradients are added up in fp32 and rounded afterwards, except where a block alone owns a result. A mode that repeats
// bit by bit (deterministic) gives every sum one order. Gradients of a per-key bias are kept apart by query head. Where
// blocks stay, they wait for their turn to add (SumTurns). Else
//   - queries get theirs from a pass of their own (query_backward.cuh);
//   - of keys whose chunks' lists overlap, launches take a few chunks at a time, each with sums (a color) of its own.
struct BackwardParams : AttentionParams {
  TokenView dout;
  const RowFacts* row_facts = nullptr;  // of tiles of row_tile rows
  // (B, H, Sq) contiguous, the sink in the sum; read where lse is large; null: no row counts as large.
  const RowStats* row_stats = nullptr;
  const RowFlags* row_flags = nullptr;
  std::int32_t row_tile = 0;
  // (dquery colors, B, H, row tiles, tile in the order of the kernel's registers); null: not wanted
  float* dquery_sums = nullptr;
  std::int32_t dquery_colors = 1;                      // tile n of keys adds to color n % dquery_colors
  TokenView dquery;                                    // contiguous, for query_backward.cuh; data null: not wanted
  TokenView dkey, dvalue;                              // contiguous, written unless uses_sums; data null: not wanted
  float *dkey_sums = nullptr, *dvalue_sums = nullptr;  // (colors, B, Sk, Hkv, bucket), added to if uses_sums
  float* dbias_sums = nullptr;                         // (colors, as `dbias` says), added to; null: not wanted
  BroadcastView dbias;                                 // strides of dbias_sums
  bool wants_dkey = false, wants_dvalue = false;
  bool uses_sums = false;
  // (B, Hkv): whether dkey and dvalue are stored all the same, since no chunk of that head has a list and every key has
  // one owner; null: never.
  const std::uint8_t* stored = nullptr;
  std::int32_t splits = 1;  // blocks of one tile of keys, each with some of the group's heads
  KeyWorks works;           // with a plan, or of families whose blocks stay without one (BackwardTiles)
  SumTurns turns;           // of such families
  KeyTileOrder tile_order;  // likewise

  // The chunks whose lists this launch takes, and whether it takes the keys that chunks have as ranges.
  std::int32_t first_chunk = 0, chunk_limit = 0;
  bool takes_ranges = true;
  // If colors > 1, chunk c and share s of the splits add to sums of color (c - first_chunk) * splits + s.
  std::int32_t colors = 1;
  std::int64_t key_color_stride = 0, bias_color_stride = 0;  // in rows of sums of keys; in elements

  MetOnceTiles met_once;  // of families that store these (BackwardTiles)
};

}  // namespace flash_dmattn::internal::cuda

// What a block of the backward owns.
#pragma once

namespace flash_dmattn::internal::cuda {

// Which keys a block owns, and which rows may see them.
struct alignas(8) KeyBlock {
  int batch, key_head, first_head, end_head;  // query heads, absolute
  int first_chunk, end_chunk;                 // planned: chunks of rows that the block meets
  int plan_chunk;                             // planned: the first of them, in the plan
  int tile;                                   // of kTileKeys: in the chunk's list, or of all keys
  int color;                                  // of the sums it adds to
  int cut = -1, segment = 0;                  // which of the tiles that are cut, -1: not one, and its segment
  bool listed;                                // tile of a list
  bool stores;                                // results, instead of adding to sums
  bool exists;
  bool filler = false;  // blocks are copied in whole words (KeyWorks), of which every byte is to have a value

  constexpr bool operator==(const KeyBlock&) const = default;
};

}  // namespace flash_dmattn::internal::cuda

// Causal attention over the paged KV pool: decode rows and prefill chunks in one design.
//
// Work is cut into items (row, kv heads, query tile). All query heads of a kv head go together: a matrix of
// M = query tokens x group query vectors. Keys are visited in tiles of kTile, at fixed multiples of kTile from position
// 0. A tile gives per query vector (maximum, sum, weighted values); the results of tiles are merged in the order of
// keys (Milakov & Gimelshein 2018). So a token's result is the same bits whatever batch, chunk or number of threads
// computes it. Items with few queries have several kv heads: these lie side by side in memory and are read together.
// When there are too few items for the team, the tiles of an item are shared out and merged at the end.
//
//   pool, one layer:   block -> [2, block_size, kv_head, head_dim]       (strides in elements are the caller's)
//   q, out:            [tokens, heads, head_dim]
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

#include "team.h"

namespace quire {

struct AttentionArgs {
  const void* q;
  void* out;
  const void* kv;                // element (0, 0, 0, 0, 0) of the layer
  const int32_t* block_tables;   // [rows, table_stride]
  const int32_t* query_starts;   // [rows + 1], into q's tokens
  const int32_t* context_lens;   // [rows], keys including this step's
  int64_t q_token_stride, out_token_stride, block_stride, value_offset, token_stride, head_stride, table_stride;
  int32_t num_rows, num_heads, num_kv_heads, head_dim, block_size, window, q_dtype, kv_dtype;  // window 0: none
  float scale;
  int32_t num_threads;

  int group() const { return num_heads / num_kv_heads; }
};

struct AttentionItem {
  int row, first_head, end_head, first_query, num_queries, first_tile, end_tile;  // heads: of keys and values
  int64_t partial;  // where its tiles' states go in `partials`, or -1: it writes the output itself
  int join;         // which of `joins` it is a piece of

  int num_heads() const { return end_head - first_head; }
};

// How a step is cut up; the same for every layer with the same window.
struct AttentionPlan {
  std::vector<AttentionItem> items;
  std::vector<AttentionItem> joins;  // items that were shared out, whole
  std::vector<std::atomic<int>> missing;  // pieces that each of them still waits for
  std::vector<float> partials;
  int num_threads;
  int num_pieces = 1;  // that they are shared out in, at most one a tile

  AttentionPlan(const AttentionArgs& args, int num_threads);
  int pieces_of(const AttentionItem& whole) const;

 private:
  std::vector<AttentionItem> whole_items(const AttentionArgs& args) const;
  void share_out(const AttentionArgs& args, const std::vector<AttentionItem>& whole);
};

// One thread's memory.
struct AttentionScratch {
  std::vector<float> queries, scores, columns, rows, values, total, tile, key_scales, value_scales;
  const void* value_rows[64];

  explicit AttentionScratch(const AttentionArgs& args);
};

bool is_known(const AttentionArgs& args);

// This member's share. `next` starts at 0, one for each call of the whole team. The caller waits before reading `out`.
void attend(const AttentionArgs& args, AttentionPlan& plan, std::atomic<int>& next, AttentionScratch& scratch);

}  // namespace quire

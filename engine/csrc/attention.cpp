#include "attention.h"

#include <algorithm>
#include <type_traits>

#include "attention_tile.h"

namespace quire {

constexpr int kMaxQueries = 128;  // query vectors per item
constexpr int kMaxWidth = 512;    // elements of a token's keys that are read together
constexpr int kItemsPerThread = 4;
constexpr int kDirectQueries = 2 * kQueryRows;  // so few that values are widened where they are used

static_assert(sizeof(AttentionScratch::value_rows) == kTile * sizeof(void*), "a row pointer for each key of a tile");

static int queries_per_item(const AttentionArgs& a) { return std::max(1, kMaxQueries / a.group()); }
static int max_vectors(const AttentionArgs& a) { return queries_per_item(a) * a.group(); }

// With so many queries, at most queries_per_item.
static int heads_per_item(const AttentionArgs& a, int queries) {
  const int heads = std::min(max_vectors(a) / (a.group() * queries), kMaxWidth / a.head_dim);
  return std::clamp(heads, 1, a.num_kv_heads);
}

static int first_position(const AttentionArgs& a, const AttentionItem& it) {
  const int queries = a.query_starts[it.row + 1] - a.query_starts[it.row];
  return a.context_lens[it.row] - queries + it.first_query;
}

// Of each kv head of an item.
static int num_vectors(const AttentionArgs& a, const AttentionItem& it) { return it.num_queries * a.group(); }

// One tile of keys for an item.
struct Work {
  const AttentionArgs& a;
  const AttentionItem& it;
  const int tile;

  int count() const { return num_vectors(a, it); }
  // Where the query token of a vector stands, counted from the tile's first key.
  int position_of(int vector) const { return first_position(a, it) + vector / a.group() - tile * kTile; }
  // Keys that the first so many query vectors see some of.
  int num_keys(int vectors) const { return std::clamp(position_of(vectors - 1) + 1, 0, kTile); }
  int num_keys() const { return num_keys(count()); }
};

// Calls visit(j, keys) for the tile's tokens: where the keys of the item's first head lie.
template <typename KV, typename Visit>
static void for_tokens(const Work& w, Visit&& visit) {
  const AttentionArgs& a = w.a;
  const KV* pool = static_cast<const KV*>(a.kv) + w.it.first_head * a.head_stride;
  const int32_t* table = a.block_tables + w.it.row * a.table_stride;
  int block = w.tile * kTile / a.block_size, offset = w.tile * kTile % a.block_size;
  for (int j = 0, n = w.num_keys(); j < n; ++j) {
    visit(j, pool + table[block] * a.block_stride + offset * a.token_stride);
    if (++offset == a.block_size) offset = 0, ++block;
  }
}

// What the codes of key j, or of its value, are multiplied with, by head; `row` is where those of the first head lie.
template <typename KV>
static void gather_scales(const Work& w, int j, const KV* row, std::vector<float>& scales) {
  if constexpr (is_code<KV>) {
    const AttentionItem& it = w.it;
    const KV* cell = row - it.first_head * w.a.head_stride;
    for (int h = 0; h < it.num_heads(); ++h)
      scales[h * kTile + j] =
          kUnit<KV> * to_float(*scale_of(cell, w.a.num_kv_heads, w.a.head_dim, it.first_head + h));
  }
}

// Keys as columns, by head; pointers to values.
template <typename KV>
static void gather(const Work& w, AttentionScratch& s, Ahead& ahead) {
  const AttentionArgs& a = w.a;
  const int dim = a.head_dim, n = w.num_keys();
  const KV* keys[kTile];
  for_tokens<KV>(w, [&](int j, const KV* token) {
    keys[j] = token;
    s.value_rows[j] = token + a.value_offset;
    ahead.add(s.value_rows[j]);
  });
  for (int j = 0; j < n; j += kLanes) {
    for (int h = 0; h < w.it.num_heads(); ++h) {
      const float* rows[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const KV* key = keys[std::min(j + i, n - 1)] + h * a.head_stride;
        if constexpr (std::is_same_v<KV, float>) {
          rows[i] = key;
        } else {
          widen(key, &s.rows[i * dim], dim);
          rows[i] = &s.rows[i * dim];
        }
      }
      turn_keys(rows, dim, &s.columns[(h * kTile + j) * dim]);
      ahead.fetch(2 * kLanes);
    }
    for (int i = j; i < std::min(j + kLanes, n); ++i) gather_scales(w, i, keys[i], s.key_scales);
  }
  for (int j = 0; j < n; ++j) gather_scales(w, j, keys[j] + a.value_offset, s.value_scales);
}

// The keys of what is computed next: here, or in the item that this thread probably takes next.
template <typename KV>
static void look_ahead(const Work& w, const AttentionItem* next, Ahead& ahead) {
  const auto add = [&](int, const KV* token) { ahead.add(token); };
  if (w.tile + 1 < w.it.end_tile)
    for_tokens<KV>({w.a, w.it, w.tile + 1}, add);
  else if (next)
    for_tokens<KV>({w.a, *next, next->first_tile}, add);
}

// The states of an item's heads side by side.
struct States {
  float* memory;
  int count, dim;

  State operator[](int head) const { return {memory + State::size(count, dim) * head, count, dim}; }
};

// Softmax weights of one head, from its columns; maxima and sums to `out`.
template <typename KV>
static void weigh_keys(const Work& w, int head, AttentionScratch& s, const State& out, Ahead& ahead) {
  const int count = w.count(), dim = w.a.head_dim;
  const float* queries = &s.queries[head * count * dim];
  const float* columns = &s.columns[head * kTile * dim];
  float* scores = &s.scores[head * count * kTile];
  in_row_blocks(count, [&](auto rows, int first) {
    score_rows<rows>(queries + first * dim, columns, w.num_keys(first + rows), dim, scores + first * kTile,
                     ahead.rest());
    for (int m = first; m < first + rows; ++m) {
      const int own = w.position_of(m);  // it sees keys up to its own, within the window
      const int low = w.a.window > 0 ? std::max(0, own - w.a.window + 1) : 0;
      const TileView view{low, own + 1, is_code<KV> ? &s.key_scales[head * kTile] : nullptr,
                          is_code<KV> ? &s.value_scales[head * kTile] : nullptr};
      softmax_row(scores + m * kTile, view, out.max + m, out.sum + m);
    }
  });
}

// Outputs of one head, whose values begin at `offset` of each row.
template <typename E>
static void weigh_values(const Work& w, int head, int64_t offset, AttentionScratch& s, float* out, Ahead& ahead) {
  const int dim = w.a.head_dim;
  const float* weights = &s.scores[head * w.count() * kTile];
  in_row_blocks(w.count(), [&](auto rows, int first) {
    const Values values{s.value_rows, offset, w.num_keys(first + rows), dim};
    value_rows<rows, E>(weights + first * kTile, values, out + first * dim, ahead.rest());
  });
}

template <typename KV>
static void widen_values(const Work& w, AttentionScratch& s) {
  const int dim = w.a.head_dim, heads = w.it.num_heads(), width = heads * dim, n = w.num_keys();
  for (int j = 0; j < n; ++j) {
    for (int h = 0; h < heads; ++h)
      widen(static_cast<const KV*>(s.value_rows[j]) + h * w.a.head_stride, &s.values[j * width + h * dim], dim);
    s.value_rows[j] = &s.values[j * width];
  }
}

template <typename KV>
static void run_tile(const Work& w, const AttentionItem* next, AttentionScratch& s, const States& out) {
  const int heads = w.it.num_heads();
  Ahead ahead(static_cast<int>(((heads - 1) * w.a.head_stride + w.a.head_dim) * sizeof(KV)));
  gather<KV>(w, s, ahead);
  look_ahead<KV>(w, next, ahead);
  for (int h = 0; h < heads; ++h) weigh_keys<KV>(w, h, s, out[h], ahead);
  if (std::is_same_v<KV, float> || w.count() <= kDirectQueries) {
    for (int h = 0; h < heads; ++h) weigh_values<KV>(w, h, h * w.a.head_stride, s, out[h].acc, ahead);
  } else {
    widen_values<KV>(w, s);
    for (int h = 0; h < heads; ++h) weigh_values<float>(w, h, h * w.a.head_dim, s, out[h].acc, ahead);
  }
}

template <typename Q>
static void load_queries(const AttentionArgs& a, const AttentionItem& it, AttentionScratch& s) {
  const int width = a.group() * a.head_dim;
  float* target = s.queries.data();
  for (int head = it.first_head; head < it.end_head; ++head)
    for (int i = 0; i < it.num_queries; ++i, target += width) {
      const int64_t token = a.query_starts[it.row] + it.first_query + i;
      widen(static_cast<const Q*>(a.q) + token * a.q_token_stride + head * width, target, width);
      for (int d = 0; d < width; ++d) target[d] *= a.scale;
    }
}

template <typename Q>
static void store_output(const AttentionArgs& a, const AttentionItem& it, const States& states) {
  const int group = a.group(), dim = a.head_dim;
  for (int head = it.first_head; head < it.end_head; ++head) {
    const State state = states[head - it.first_head];
    for (int m = 0; m < it.num_queries * group; ++m) {
      const int64_t token = a.query_starts[it.row] + it.first_query + m / group;
      Q* out = static_cast<Q*>(a.out) + token * a.out_token_stride + (head * group + m % group) * dim;
      const float inverse = 1.0f / state.sum[m];
      for (int d = 0; d < dim; ++d) from_float(state.acc[static_cast<int64_t>(m) * dim + d] * inverse, out + d);
    }
  }
}

static States cleared_total(const AttentionArgs& a, const AttentionItem& it, AttentionScratch& s) {
  const States total{s.total.data(), num_vectors(a, it), a.head_dim};
  for (int h = 0; h < it.num_heads(); ++h) clear(total[h], total.count, total.dim);
  return total;
}

static void merge_heads(const AttentionItem& it, const States& into, const States& from) {
  for (int h = 0; h < it.num_heads(); ++h) merge(into[h], from[h], into.count, into.dim);
}

// A tile's states in `partials`.
static States partial_states(const AttentionArgs& a, const AttentionItem& it, int tile, AttentionPlan& plan) {
  const int count = num_vectors(a, it);
  const int64_t size = State::size(count, a.head_dim) * it.num_heads();
  return {&plan.partials[it.partial + size * (tile - it.first_tile)], count, a.head_dim};
}

// Whoever finishes the last piece of a shared item merges the tiles of all pieces.
template <typename Q>
static void join(const AttentionArgs& a, const AttentionItem& it, AttentionPlan& plan, AttentionScratch& s) {
  const States total = cleared_total(a, it, s);
  for (int tile = it.first_tile; tile < it.end_tile; ++tile)
    merge_heads(it, total, partial_states(a, it, tile, plan));
  store_output<Q>(a, it, total);
}

template <typename Q, typename KV>
static void run_piece(const AttentionArgs& a, const AttentionItem& it, const AttentionItem* next, AttentionPlan& plan,
                      AttentionScratch& s) {
  for (int tile = it.first_tile; tile < it.end_tile; ++tile)
    run_tile<KV>({a, it, tile}, next, s, partial_states(a, it, tile, plan));
  if (plan.missing[it.join].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  plan.missing[it.join].store(plan.pieces_of(plan.joins[it.join]), std::memory_order_relaxed);  // for the next layer
  join<Q>(a, plan.joins[it.join], plan, s);
}

template <typename Q, typename KV>
static void run_item(const AttentionArgs& a, const AttentionItem& it, const AttentionItem* next, AttentionPlan& plan,
                     AttentionScratch& s) {
  load_queries<Q>(a, it, s);
  if (it.partial >= 0) return run_piece<Q, KV>(a, it, next, plan, s);
  const States total = cleared_total(a, it, s), part{s.tile.data(), total.count, total.dim};
  for (int tile = it.first_tile; tile < it.end_tile; ++tile) {
    run_tile<KV>({a, it, tile}, next, s, part);
    merge_heads(it, total, part);
  }
  store_output<Q>(a, it, total);
}

template <typename Q, typename KV>
static void attend_as(const AttentionArgs& a, AttentionPlan& plan, std::atomic<int>& next, AttentionScratch& s) {
  const int num_items = static_cast<int>(plan.items.size());
  for (int i = next.fetch_add(1); i < num_items; i = next.fetch_add(1)) {
    const int later = i + plan.num_threads;  // if the others are as fast
    run_item<Q, KV>(a, plan.items[i], later < num_items ? &plan.items[later] : nullptr, plan, s);
  }
}

using AttendFunction = void (*)(const AttentionArgs&, AttentionPlan&, std::atomic<int>&, AttentionScratch&);

template <typename Q>
static AttendFunction function_for_kv(int32_t kv_dtype) {
  switch (kv_dtype) {
    case kFloat32: return attend_as<Q, float>;
    case kBFloat16: return attend_as<Q, BFloat16>;
    case kFloat16: return attend_as<Q, Float16>;
    case kInt8: return attend_as<Q, Int8Code>;
    case kFloat8E4M3: return attend_as<Q, Float8Code>;
    default: return nullptr;
  }
}

static AttendFunction function_for(const AttentionArgs& a) {
  switch (a.q_dtype) {
    case kFloat32: return function_for_kv<float>(a.kv_dtype);
    case kBFloat16: return function_for_kv<BFloat16>(a.kv_dtype);
    case kFloat16: return function_for_kv<Float16>(a.kv_dtype);
    default: return nullptr;
  }
}

AttentionPlan::AttentionPlan(const AttentionArgs& a, int num_threads) : num_threads(num_threads) {
  std::vector<AttentionItem> whole = whole_items(a);
  const int enough = kItemsPerThread * num_threads, have = static_cast<int>(whole.size());
  if (num_threads == 1 || have == 0 || have >= enough) {
    items = std::move(whole);
    return;
  }
  num_pieces = (enough + have - 1) / have;
  share_out(a, whole);
}

std::vector<AttentionItem> AttentionPlan::whole_items(const AttentionArgs& a) const {
  const int step = queries_per_item(a);
  std::vector<AttentionItem> whole;
  for (int r = 0; r < a.num_rows; ++r) {
    const int queries = a.query_starts[r + 1] - a.query_starts[r];
    if (queries == 0) continue;
    const int heads = heads_per_item(a, std::min(step, queries));
    for (int h = 0; h < a.num_kv_heads; h += heads)
      for (int q = 0; q < queries; q += step) {
        AttentionItem it{r, h, std::min(h + heads, a.num_kv_heads), q, std::min(step, queries - q), 0, 0, -1, 0};
        const int position = first_position(a, it), end = position + it.num_queries;
        it.first_tile = a.window > 0 ? std::max(0, position - a.window + 1) / kTile : 0;
        it.end_tile = (end + kTile - 1) / kTile;
        whole.push_back(it);
      }
  }
  return whole;
}

void AttentionPlan::share_out(const AttentionArgs& a, const std::vector<AttentionItem>& whole) {
  int64_t floats = 0;
  for (AttentionItem it : whole) {
    const int tiles = it.end_tile - it.first_tile, pieces = pieces_of(it);
    if (pieces <= 1) {
      items.push_back(it);
      continue;
    }
    const int64_t state = State::size(it.num_queries * a.group(), a.head_dim) * it.num_heads();
    it.partial = floats, it.join = static_cast<int>(joins.size());
    joins.push_back(it);
    for (int piece = 0; piece < pieces; ++piece) {
      AttentionItem part = it;
      part.first_tile = it.first_tile + tiles * piece / pieces;
      part.end_tile = it.first_tile + tiles * (piece + 1) / pieces;
      part.partial = floats + state * (part.first_tile - it.first_tile);
      items.push_back(part);
    }
    floats += state * tiles;
  }
  partials.resize(floats);
  missing = std::vector<std::atomic<int>>(joins.size());
  for (const AttentionItem& it : joins) missing[it.join].store(pieces_of(it));
}

int AttentionPlan::pieces_of(const AttentionItem& whole) const {
  return std::min(whole.end_tile - whole.first_tile, num_pieces);
}

AttentionScratch::AttentionScratch(const AttentionArgs& a) {
  const int count = max_vectors(a), dim = a.head_dim, heads = heads_per_item(a, 1), width = heads * dim;
  const int64_t states = State::size(count, dim) + 2 * heads * kLanes;  // each head's is padded
  queries.resize(count * dim);
  scores.resize(count * kTile);
  columns.resize(width * kTile);
  total.resize(states);
  tile.resize(states);
  if (a.kv_dtype == kFloat32) return;
  rows.resize(kLanes * dim), values.resize(kTile * width);
  key_scales.resize(heads * kTile), value_scales.resize(heads * kTile);
}

bool is_known(const AttentionArgs& args) { return function_for(args) != nullptr; }

void attend(const AttentionArgs& args, AttentionPlan& plan, std::atomic<int>& next, AttentionScratch& scratch) {
  function_for(args)(args, plan, next, scratch);
}

}  // namespace quire

// Returns 0, or 1 for a dtype it does not know. Rows may be empty (no queries).
extern "C" int quire_paged_attention(const quire::AttentionArgs* args) {
  using namespace quire;
  if (!is_known(*args)) return 1;
  AttentionPlan plan(*args, args->num_threads);
  std::atomic<int> next{0};
  run_team(args->num_threads, [&](const Team&) {
    AttentionScratch scratch(*args);
    attend(*args, plan, next, scratch);
  });
  return 0;
}

#include "attention.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "kv_codes.h"
#include "simd.h"

namespace quire {

constexpr int kTile = 64;        // keys per tile
constexpr int kMaxQueries = 64;  // query vectors per item
constexpr int kItemsPerThread = 4;
constexpr float kMinusInf = -INFINITY;

static_assert(sizeof(AttentionScratch::key_rows) == kTile * sizeof(float*), "a row pointer for each key of a tile");

static int queries_per_item(const AttentionArgs& a) { return std::max(1, kMaxQueries / a.group()); }
static int max_vectors(const AttentionArgs& a) { return queries_per_item(a) * a.group(); }

// Softmax state of some query vectors: unnormalised outputs, maxima, sums. A view of size(count, dim) floats.
struct State {
  float *acc, *max, *sum;

  State(float* memory, int count, int dim) : acc(memory), max(memory + count * dim), sum(max + count) {}
  static int64_t size(int64_t count, int64_t dim) { return count * (dim + 2); }
};

// scores[m][j] = q[m] . k[j] for M query vectors and four keys.
template <int M>
static void score_block(const float* const* q, const float* const* k, int dim, float* const* scores) {
  vfloat sum[M][4] = {};
  int d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    vfloat key[4];
#pragma GCC unroll 16
    for (int j = 0; j < 4; ++j) key[j] = load(k[j] + d);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const vfloat x = load(q[m] + d);
#pragma GCC unroll 16
      for (int j = 0; j < 4; ++j) sum[m][j] += x * key[j];
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    reduce_add4(sum[m], scores[m]);
    for (int rest = d; rest < dim; ++rest)
#pragma GCC unroll 16
      for (int j = 0; j < 4; ++j) scores[m][j] += q[m][rest] * k[j][rest];
  }
}

static void score_tile(const float* q, int count, AttentionScratch& s, int n, int dim) {
  for (int j = 0; j < n; j += 4) {
    const float* keys[4];
#pragma GCC unroll 16
    for (int i = 0; i < 4; ++i) keys[i] = s.key_rows[std::min(j + i, n - 1)];
    int m = 0;
    for (; m + 2 <= count; m += 2) {
      const float* queries[2] = {q + m * dim, q + (m + 1) * dim};
      float* scores[2] = {&s.scores[m * kTile + j], &s.scores[(m + 1) * kTile + j]};
      score_block<2>(queries, keys, dim, scores);
    }
    if (m < count) {
      const float* query = q + m * dim;
      float* scores = &s.scores[m * kTile + j];
      score_block<1>(&query, keys, dim, &scores);
    }
  }
}

// Scores of one query vector to softmax weights relative to the tile's maximum; it sees keys [first, last) of the tile.
static void softmax_tile(float* row, int first, int last, float scale, float* max, float* sum) {
  vint index;
  for (int i = 0; i < kLanes; ++i) index[i] = i;
  vfloat top = splat(kMinusInf);
  for (int j = 0; j < kTile; j += kLanes) {
    const vint hidden = (index < first - j) | (index >= last - j);
    const vfloat score = hidden ? splat(kMinusInf) : load(row + j) * splat(scale);
    store(row + j, score);
    top = quire::max(score, top);
  }
  *max = reduce_max(top);
  *sum = 0.0f;
  if (*max == kMinusInf) {
    std::fill(row, row + kTile, 0.0f);
    return;
  }
  vfloat total{};
  for (int j = 0; j < kTile; j += kLanes) {
    const vfloat weight = exp_nonpositive(load(row + j) - splat(*max));
    store(row + j, weight);
    total += weight;
  }
  *sum = reduce_add(total);
}

// Vectors kWide * kLanes wide of M outputs: out[m] = sum over j of weights[m][j] * v[j].
template <int M, int kWide>
static void value_block(const float* const* weights, const float* const* v, int n, int d, float* const* out) {
  vfloat acc[M][kWide] = {};
  for (int j = 0; j < n; ++j) {
    vfloat value[kWide];
#pragma GCC unroll 16
    for (int i = 0; i < kWide; ++i) value[i] = load(v[j] + d + i * kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
      for (int i = 0; i < kWide; ++i) acc[m][i] += splat(weights[m][j]) * value[i];
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
    for (int i = 0; i < kWide; ++i) store(out[m] + d + i * kLanes, acc[m][i]);
}

template <int M>
static void value_rows(const float* const* weights, const float* const* v, int n, int dim, float* const* out) {
  int d = 0;
  for (; d + 4 * kLanes <= dim; d += 4 * kLanes) value_block<M, 4>(weights, v, n, d, out);
  for (; d + kLanes <= dim; d += kLanes) value_block<M, 1>(weights, v, n, d, out);
  for (; d < dim; ++d)
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      float sum = 0.0f;
      for (int j = 0; j < n; ++j) sum += weights[m][j] * v[j][d];
      out[m][d] = sum;
    }
}

static void value_tile(AttentionScratch& s, float* out, int count, int n, int dim) {
  int m = 0;
  for (; m + 2 <= count; m += 2) {
    const float* weights[2] = {&s.scores[m * kTile], &s.scores[(m + 1) * kTile]};
    float* rows[2] = {out + m * dim, out + (m + 1) * dim};
    value_rows<2>(weights, s.value_rows, n, dim, rows);
  }
  if (m < count) {
    const float* weights = &s.scores[m * kTile];
    float* row = out + m * dim;
    value_rows<1>(&weights, s.value_rows, n, dim, &row);
  }
}

// One head of one cell of the pool as floats.
template <typename KV>
static void widen_head(const AttentionArgs& a, const KV* cell, int kv_head, float* target) {
  if constexpr (is_code<KV>) {
    const float scale = to_float(*scale_of(cell, a.num_kv_heads, a.head_dim, kv_head));
    widen_codes(cell + kv_head * a.head_stride, scale, target, a.head_dim);
  } else {
    widen(cell + kv_head * a.head_stride, target, a.head_dim);
  }
}

// Pointers to keys [first, first + n) and their values as floats: into the pool itself, or into a widened copy.
template <typename KV>
static void gather_tile(const AttentionArgs& a, const AttentionItem& it, int first, int n, AttentionScratch& s) {
  const KV* pool = static_cast<const KV*>(a.kv);
  const int32_t* table = a.block_tables + it.row * a.table_stride;
  int block = first / a.block_size, offset = first % a.block_size;
  for (int j = 0; j < n; ++j) {
    const KV* cell = pool + table[block] * a.block_stride + offset * a.token_stride;
    if constexpr (std::is_same_v<KV, float>) {
      s.key_rows[j] = cell + it.kv_head * a.head_stride;
      s.value_rows[j] = s.key_rows[j] + a.value_offset;
    } else {
      widen_head(a, cell, it.kv_head, &s.keys[j * a.head_dim]);
      widen_head(a, cell + a.value_offset, it.kv_head, &s.values[j * a.head_dim]);
      s.key_rows[j] = &s.keys[j * a.head_dim];
      s.value_rows[j] = &s.values[j * a.head_dim];
    }
    if (++offset == a.block_size) offset = 0, ++block;
  }
}

static int first_position(const AttentionArgs& a, const AttentionItem& it) {
  const int queries = a.query_starts[it.row + 1] - a.query_starts[it.row];
  return a.context_lens[it.row] - queries + it.first_query;
}

template <typename KV>
static void run_tile(const AttentionArgs& a, const AttentionItem& it, int tile, AttentionScratch& s, const State& out) {
  const int group = a.group(), count = it.num_queries * group, position = first_position(a, it);
  const int first = tile * kTile, n = std::min(kTile, position + it.num_queries - first);
  gather_tile<KV>(a, it, first, n, s);
  score_tile(s.queries.data(), count, s, n, a.head_dim);
  for (int m = 0; m < count; ++m) {
    const int own = position + m / group - first;  // it sees keys up to its own, within the window
    const int low = a.window > 0 ? std::max(0, own - a.window + 1) : 0;
    softmax_tile(&s.scores[m * kTile], low, std::min(n, own + 1), a.scale, out.max + m, out.sum + m);
  }
  value_tile(s, out.acc, count, n, a.head_dim);
}

static void clear(const State& state, int count, int dim) {
  std::fill_n(state.acc, count * dim, 0.0f);
  std::fill_n(state.max, count, kMinusInf);
  std::fill_n(state.sum, count, 0.0f);
}

// Adds the result of a later tile to that of the tiles before it.
static void merge(const State& into, const State& from, int count, int dim) {
  for (int m = 0; m < count; ++m) {
    const float top = std::max(into.max[m], from.max[m]);
    if (top == kMinusInf) continue;
    const float x = std::exp(into.max[m] - top), y = std::exp(from.max[m] - top);
    into.max[m] = top;
    into.sum[m] = into.sum[m] * x + from.sum[m] * y;
    float* acc = into.acc + m * dim;
    const float* more = from.acc + m * dim;
    for (int d = 0; d < dim; ++d) acc[d] = acc[d] * x + more[d] * y;
  }
}

template <typename Q>
static void load_queries(const AttentionArgs& a, const AttentionItem& it, AttentionScratch& s) {
  const int width = a.group() * a.head_dim;
  for (int i = 0; i < it.num_queries; ++i) {
    const int64_t token = a.query_starts[it.row] + it.first_query + i;
    const Q* q = static_cast<const Q*>(a.q) + token * a.q_token_stride + it.kv_head * width;
    widen(q, &s.queries[i * width], width);
  }
}

template <typename Q>
static void store_output(const AttentionArgs& a, const AttentionItem& it, const State& state) {
  const int group = a.group(), dim = a.head_dim;
  for (int m = 0; m < it.num_queries * group; ++m) {
    const int64_t token = a.query_starts[it.row] + it.first_query + m / group;
    Q* out = static_cast<Q*>(a.out) + token * a.out_token_stride + (it.kv_head * group + m % group) * dim;
    const float inverse = 1.0f / state.sum[m];
    for (int d = 0; d < dim; ++d) from_float(state.acc[m * dim + d] * inverse, out + d);
  }
}

// Whoever finishes the last piece of a shared item merges the tiles of all pieces.
template <typename Q>
static void join(const AttentionArgs& a, const AttentionItem& it, AttentionPlan& plan, AttentionScratch& s) {
  const int count = it.num_queries * a.group(), dim = a.head_dim;
  const State total(s.total.data(), count, dim);
  clear(total, count, dim);
  for (int tile = it.first_tile; tile < it.end_tile; ++tile) {
    float* memory = &plan.partials[it.partial + State::size(count, dim) * (tile - it.first_tile)];
    merge(total, State(memory, count, dim), count, dim);
  }
  store_output<Q>(a, it, total);
}

template <typename Q, typename KV>
static void run_piece(const AttentionArgs& a, const AttentionItem& it, AttentionPlan& plan, AttentionScratch& s) {
  const int count = it.num_queries * a.group(), dim = a.head_dim;
  for (int tile = it.first_tile; tile < it.end_tile; ++tile) {
    float* memory = &plan.partials[it.partial + State::size(count, dim) * (tile - it.first_tile)];
    run_tile<KV>(a, it, tile, s, State(memory, count, dim));
  }
  if (plan.missing[it.join].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  plan.missing[it.join].store(plan.pieces_of(plan.joins[it.join]), std::memory_order_relaxed);  // for the next layer
  join<Q>(a, plan.joins[it.join], plan, s);
}

template <typename Q, typename KV>
static void run_item(const AttentionArgs& a, const AttentionItem& it, AttentionPlan& plan, AttentionScratch& s) {
  const int count = it.num_queries * a.group(), dim = a.head_dim;
  load_queries<Q>(a, it, s);
  if (it.partial >= 0) return run_piece<Q, KV>(a, it, plan, s);
  const State total(s.total.data(), count, dim), part(s.tile.data(), count, dim);
  clear(total, count, dim);
  for (int tile = it.first_tile; tile < it.end_tile; ++tile) {
    run_tile<KV>(a, it, tile, s, part);
    merge(total, part, count, dim);
  }
  store_output<Q>(a, it, total);
}

template <typename Q, typename KV>
static void attend_as(const AttentionArgs& a, AttentionPlan& plan, std::atomic<int>& next, AttentionScratch& s) {
  const int num_items = static_cast<int>(plan.items.size());
  for (int i = next.fetch_add(1); i < num_items; i = next.fetch_add(1)) run_item<Q, KV>(a, plan.items[i], plan, s);
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

AttentionPlan::AttentionPlan(const AttentionArgs& a, int num_threads) {
  const int step = queries_per_item(a);
  std::vector<AttentionItem> whole;
  for (int r = 0; r < a.num_rows; ++r)
    for (int h = 0; h < a.num_kv_heads; ++h) {
      const int queries = a.query_starts[r + 1] - a.query_starts[r];
      for (int q = 0; q < queries; q += step) {
        AttentionItem it{r, h, q, std::min(step, queries - q), 0, 0, -1, 0};
        const int position = first_position(a, it), end = position + it.num_queries;
        it.first_tile = a.window > 0 ? std::max(0, position - a.window + 1) / kTile : 0;
        it.end_tile = (end + kTile - 1) / kTile;
        whole.push_back(it);
      }
    }
  const int enough = kItemsPerThread * num_threads, have = static_cast<int>(whole.size());
  if (num_threads == 1 || have == 0 || have >= enough) {
    items = std::move(whole);
    return;
  }
  int64_t floats = 0;
  num_pieces = (enough + have - 1) / have;
  for (AttentionItem& it : whole) {
    const int tiles = it.end_tile - it.first_tile, pieces = pieces_of(it);
    if (pieces <= 1) {
      items.push_back(it);
      continue;
    }
    const int64_t state = State::size(it.num_queries * a.group(), a.head_dim);
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
  const int count = max_vectors(a), dim = a.head_dim;
  queries.resize(count * dim);
  scores.resize(count * kTile);
  total.resize(State::size(count, dim));
  tile.resize(State::size(count, dim));
  if (a.kv_dtype != kFloat32) keys.resize(kTile * dim), values.resize(kTile * dim);
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

// Query vectors against one tile of keys: scores, softmax weights, weighted values, and how the results of tiles merge.
//
// Keys are widened and turned round first, kLanes at a time: [dim][kLanes]. A vector then holds one coordinate of
// several keys, and scores need no sums across lanes. Values are read as they are stored. A query vector's results are
// the same bits whichever others it is computed with.
// Knows pointers to rows; knows nothing of pools, plans or threads.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kv_codes.h"
#include "simd.h"

namespace quire {

constexpr int kTile = 64;                        // keys
constexpr int kQueryRows = kLanes == 16 ? 6 : 3;  // of a register block of kWide vectors
constexpr int kWide = 4;
constexpr int kLinesAtOnce = 2;                  // fetched ahead
constexpr float kMinusInf = -INFINITY;

// Lines of memory that will be needed soon, fetched a few at a time between computations: so the memory works all the
// time, not only while something is waiting for it.
struct Ahead {
  const char* rows[2 * kTile];
  const int row_bytes;
  int next = 0, end = 0, offset = 0;

  explicit Ahead(int row_bytes) : row_bytes(row_bytes) {}

  // This, or null where nothing is left to fetch.
  Ahead* rest() { return next < end ? this : nullptr; }
  void add(const void* row) { rows[end++] = static_cast<const char*>(row); }
  void fetch(int lines) {
    for (; lines > 0 && next < end; --lines) {
      __builtin_prefetch(rows[next] + offset, 0, 2);
      offset += 64;
      if (offset >= row_bytes) offset = 0, ++next;
    }
  }
};

// Softmax state of some query vectors: unnormalised outputs, maxima, sums. A view of size(count, dim) floats.
struct State {
  float *acc, *max, *sum;

  State(float* memory, int count, int dim) : acc(memory), max(memory + count * dim), sum(max + padded(count)) {}
  static int64_t size(int64_t count, int64_t dim) { return count * dim + 2 * padded(count); }
  static int64_t padded(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }
};

// kLanes keys to their part of the columns, [dim][kLanes].
inline void turn_keys(const float* const* keys, int dim, float* columns) {
  int d = 0;
  for (; d + 4 <= dim; d += 4) {
    vfloat quads[4];
#pragma GCC unroll 16
    for (int i = 0; i < 4; ++i) quads[i] = load_quads(keys + i, d);
    transpose_quads(quads);
#pragma GCC unroll 16
    for (int i = 0; i < 4; ++i) store(columns + (d + i) * kLanes, quads[i]);
  }
  for (; d < dim; ++d)
    for (int j = 0; j < kLanes; ++j) columns[d * kLanes + j] = keys[j][d];
}

// scores[m][j] = q[m] . key j for M query vectors and W vectors of keys.
template <int M, int W>
[[gnu::noinline]] static void score_block(const float* q, const float* columns, int dim, float* scores, Ahead* ahead) {
  vfloat sum[M][W] = {};
  for (int d = 0; d < dim; ++d) {
    vfloat x[M];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) x[m] = splat(q[m * dim + d]);
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) {
      const vfloat key = load(columns + (i * dim + d) * kLanes);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) sum[m][i] += x[m] * key;
    }
    if (ahead) ahead->fetch(kLinesAtOnce);
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) store(scores + m * kTile + i * kLanes, sum[m][i]);
}

// Of the tile's first n keys, and of some after them.
template <int M>
static void score_rows(const float* q, const float* columns, int n, int dim, float* scores, Ahead* ahead) {
  constexpr int kSome = kTile / kLanes < kWide ? kTile / kLanes : kWide;
  for (int j = 0; j < n; j += kSome * kLanes) {
    if (n - j > kSome * kLanes / 2)
      score_block<M, kSome>(q, columns + j * dim, dim, scores + j, ahead);
    else
      score_block<M, kSome / 2>(q, columns + j * dim, dim, scores + j, ahead);
  }
}

// Which keys of the tile a query vector sees, and what codes are multiplied with; null where there are no codes.
struct TileView {
  int first, last;
  const float *key_scales, *value_scales;
};

// Scores of one query vector to softmax weights relative to the tile's maximum, times the values' scales.
inline void softmax_row(float* row, const TileView& view, float* max, float* sum) {
  constexpr int kVectors = kTile / kLanes;
  vfloat score[kVectors], top = splat(kMinusInf), total{};
  vint index;
  for (int i = 0; i < kLanes; ++i) index[i] = i;
  const bool whole = view.first <= 0 && view.last >= kTile;
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
    const int j = i * kLanes;
    score[i] = load(row + j);
    if (view.key_scales) score[i] *= load(view.key_scales + j);
    if (!whole) score[i] = (index < view.first - j) | (index >= view.last - j) ? splat(kMinusInf) : score[i];
    top = quire::max(score[i], top);
  }
  *max = reduce_max(top);
  *sum = 0.0f;
  if (*max == kMinusInf) {
    std::fill(row, row + kTile, 0.0f);
    return;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
    const int j = i * kLanes;
    const vfloat weight = exp_nonpositive(score[i] - splat(*max));
    store(row + j, view.value_scales ? weight * load(view.value_scales + j) : weight);
    total += weight;
  }
  *sum = reduce_add(total);
}

// Rows of values, one for each key; a head's own begin at `offset`.
struct Values {
  const void* const* rows;
  int64_t offset;
  int n, dim;
};

// W vectors of M outputs from dimension `first` on: out[m] = sum over j of weights[m][j] * value j. Of a single vector
// `count` elements exist.
template <int M, int W, typename E>
[[gnu::noinline]] static void value_block(const float* weights, const Values& v, int first, int count, float* out,
                                          Ahead* ahead) {
  vfloat acc[M][W] = {};
  const int64_t offset = v.offset + first;
  for (int j = 0, n = v.n; j < n; ++j) {
    const E* row = static_cast<const E*>(v.rows[j]) + offset;
    vfloat weight[M];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) weight[m] = splat(weights[m * kTile + j]);
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i, row += kLanes) {
      const vfloat value = W > 1 || count == kLanes ? load_floats(row) : load_some(row, count);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) acc[m][i] += weight[m] * value;
    }
    if (ahead) ahead->fetch(kLinesAtOnce);
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    float* target = out + m * v.dim + first;
#pragma GCC unroll 16
    for (int i = 0; i < W - 1; ++i) store(target + i * kLanes, acc[m][i]);
    if (W > 1 || count == kLanes) {
      store(target + (W - 1) * kLanes, acc[m][W - 1]);
    } else {
      const vfloat last = acc[m][W - 1];
      std::memcpy(target, &last, sizeof(float) * count);
    }
  }
}

template <int M, typename E>
static void value_rows(const float* weights, const Values& v, float* out, Ahead* ahead) {
  int d = 0;
  for (; d + kWide * kLanes <= v.dim; d += kWide * kLanes) value_block<M, kWide, E>(weights, v, d, kLanes, out, ahead);
  for (; d < v.dim; d += kLanes) value_block<M, 1, E>(weights, v, d, std::min(kLanes, v.dim - d), out, ahead);
}

// Calls work(constant number of rows, first row) for `count` rows in blocks of kQueryRows.
template <typename Work>
static void in_row_blocks(int count, Work&& work) {
  int m = 0;
  for (; m + kQueryRows <= count; m += kQueryRows) work(std::integral_constant<int, kQueryRows>{}, m);
  for (; kQueryRows > 4 && m + 4 <= count; m += 4) work(std::integral_constant<int, 4>{}, m);
  for (; m + 2 <= count; m += 2) work(std::integral_constant<int, 2>{}, m);
  if (m < count) work(std::integral_constant<int, 1>{}, m);
}

// Adds the result of a later tile to that of those before it. One function, so that no two places round differently.
[[gnu::noinline]] static void merge(const State& into, const State& from, int count, int dim) {
  for (int first = 0; first < count; first += kLanes) {
    const vfloat old = load(into.max + first), more = load(from.max + first), top = max(old, more);
    const vfloat shift = top == splat(kMinusInf) ? vfloat{} : top;
    alignas(64) float x[kLanes], y[kLanes];
    store(x, exp_nonpositive(old - shift));
    store(y, exp_nonpositive(more - shift));
    store(into.max + first, top);
    store(into.sum + first, load(into.sum + first) * load(x) + load(from.sum + first) * load(y));
    for (int m = first; m < std::min(first + kLanes, count); ++m) {
      float* acc = into.acc + static_cast<int64_t>(m) * dim;
      const float* part = from.acc + static_cast<int64_t>(m) * dim;
      const float scale_old = x[m - first], scale_more = y[m - first];
      for (int d = 0; d < dim; ++d) acc[d] = acc[d] * scale_old + part[d] * scale_more;
    }
  }
}

inline void clear(const State& state, int count, int dim) {
  std::fill_n(state.acc, static_cast<int64_t>(count) * dim, 0.0f);
  std::fill_n(state.max, State::padded(count), kMinusInf);
  std::fill_n(state.sum, State::padded(count), 0.0f);
}

}  // namespace quire

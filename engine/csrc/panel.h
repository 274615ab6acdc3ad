// Half a panel, 16 rows of W that are worked on together: where its lines and scales lie, and where its outputs go.
#pragma once
#include <algorithm>

#include "matmul.h"
#include "simd.h"

namespace quire {

// Loops over registers carry `#pragma GCC unroll`: unrolled early, their arrays become registers at every -O level. The
// innermost functions are not inlined: among others' variables they would run out of registers.
constexpr int kHalf = 16, kHalves = kPanel / kHalf;
constexpr int kVectors = kHalf / kLanes;
constexpr int kLineBytes = 64, kLineStride = kHalves * kLineBytes;
constexpr int kPrefetch = 16384;  // bytes ahead: a core's own prefetcher stops at every page
constexpr int kRowBlock = 96;     // rows of x per pass over the panels

struct HalfPanel {
  const Matrix& matrix;
  int64_t first_scale;  // index of its first group's first one

  // `index`: over the whole matrix.
  HalfPanel(const Matrix& m, int64_t index)
      : matrix(m), first_scale(index / kHalves * (m.padded_in() / m.group) * kPanel + index % kHalves * kHalf) {}

  // kLanes of them, from row i * kLanes on; those of one row.
  vfloat scale(int group, int i) const { return some(matrix.scales, group, i); }
  float one_scale(int group, int row) const { return one(matrix.scales, group, row); }

  // Half bytes without minima stand for q - 8.
  vfloat minimum(int group, int i, vfloat scale) const {
    return matrix.mins ? some(matrix.mins, group, i) : splat(-8.0f) * scale;
  }
  float one_minimum(int group, int row, float scale) const {
    return matrix.mins ? one(matrix.mins, group, row) : matrix.format == kQ4 ? -8.0f * scale : 0.0f;
  }

 private:
  vfloat some(const void* lines, int group, int i) const {
    const int64_t at = first_scale + static_cast<int64_t>(group) * kPanel + i * kLanes;
    return matrix.half_scales ? load_half(static_cast<const Float16*>(lines) + at)
                              : load(static_cast<const float*>(lines) + at);
  }
  float one(const void* lines, int group, int row) const {
    const int64_t at = first_scale + static_cast<int64_t>(group) * kPanel + row;
    return matrix.half_scales ? to_float(static_cast<const Float16*>(lines)[at]) : static_cast<const float*>(lines)[at];
  }
};

// The lines of half a panel, `columns` to a line.
inline const char* lines_of(const Matrix& m, int64_t half, int columns) {
  const int64_t panel_bytes = static_cast<int64_t>(m.padded_in()) / columns * kLineStride;
  return static_cast<const char*>(m.weights) + half / kHalves * panel_bytes + half % kHalves * kLineBytes;
}

// 16 outputs of one row of x, those that the matrix has.
inline void store_row(const Matrix& m, const Product& p, int64_t row, int64_t first, const vfloat* acc) {
  const int64_t count = std::min<int64_t>(kHalf, m.out - first);
  float* y = p.y + row * p.y_stride + first;
  if (count == kHalf && !m.bias) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) store(y + i * kLanes, p.add ? load(y + i * kLanes) + acc[i] : acc[i]);
    return;
  }
  alignas(64) float line[kHalf];
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) store(line + i * kLanes, acc[i]);
  for (int64_t j = 0; j < count; ++j) {
    const float value = line[j] + (m.bias ? m.bias[first + j] : 0.0f);
    y[j] = p.add ? y[j] + value : value;
  }
}

}  // namespace quire

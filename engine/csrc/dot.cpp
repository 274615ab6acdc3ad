// Few rows of x take the words of W apart in registers, anew for every tile of rows. From so many rows on that this
// costs more than the products, a slice of the panel is taken apart into the L1 cache first, once for all rows (Goto &
// van de Geijn 2008).
#include "dot.h"

#include <cstring>

#include "integers.h"
#include "panel.h"
#include "round.h"

namespace quire {

constexpr int kSlice = 256;  // columns of a slice: 8 KiB of pairs
constexpr int kMinGroup = 16;
constexpr int kTileRows = kLanes >= 8 ? 4 : 2;             // rows of x where words are taken apart in registers
constexpr int kBlockRows = kLanes == 16 ? 8 : kTileRows;  // the same in a register block over a slice
constexpr int kSlicedRows = 192;                           // rows of x that share a slice
constexpr int kRanges = 8;                                 // of numbers of rows: 1, 2, 3-4, 5-8, ... 33-64, more

// What a format is: columns of a line, steps that a line is taken apart into, and the words of one step, which meet one
// word of x.
template <int F>
struct Codes;

template <>
struct Codes<kQ4> {
  static constexpr int kColumns = 8, kSteps = 4;
  static vint words(vint line, int step) { return line >> 4 * step & 0x000f000f; }
  static vint dot(vint sum, vint weights, vint x) { return dot2(sum, weights, x); }
};

template <>
struct Codes<kQ8> {
  static constexpr int kColumns = 4, kSteps = 2;
  static vint words(vint line, int step) { return widen_bytes(line, step == 1); }
  static vint dot(vint sum, vint weights, vint x) { return dot2(sum, weights, x); }
};

template <>
struct Codes<kQ8Dot> {
  static constexpr int kColumns = 4, kSteps = 1;
  static vint words(vint line, int) { return line; }
  static vint dot(vint sum, vint weights, vint x) { return dot4(sum, weights, x); }
};

template <int F>
static bool has_minima(const Matrix& m) {
  return F == kQ4 || (F == kQ8 && m.mins != nullptr);
}

// A group's part of an output. Every path adds it this way.
static inline vfloat add_group(vfloat acc, vint sum, vfloat scale, float x_scale) {
  return acc + __builtin_convertvector(sum, vfloat) * (scale * splat(x_scale));
}
static inline vfloat add_minimum(vfloat acc, vfloat minimum, float x_sum) { return acc + minimum * splat(x_sum); }

static inline vint broadcast(const int32_t* word) { return *word - vint{}; }

// The same value, computed here: compilers would begin with all products of a line, and run out of registers. (By value:
// a reference would keep it in memory.)
static inline vint in_order(vint sum) {
#if defined(__x86_64__)
  asm volatile("" : "+v"(sum));
#endif
  return sum;
}

// Rows [row, row + M) of x times H halves of one panel.
template <int F, int M, int H>
[[gnu::noinline]] static void few_rows(const Matrix& m, const Product& p, int64_t row, int64_t first_half) {
  using C = Codes<F>;
  const Rounded x = rounded(m, p);
  const HalfPanel half(m, first_half);
  const int lines = m.group / C::kColumns;
  const bool minima = has_minima<F>(m);
  const char* line = lines_of(m, first_half, C::kColumns);
  const int32_t* word = x.words + row * x.stride;
  vfloat acc[H][M][kVectors] = {};
  for (int g = 0; g < x.groups; ++g) {
    vint sum[H][M][kVectors] = {};
#pragma GCC unroll 1
    for (int k = 0; k < lines; k += 2)  // whole pairs: a line is eight columns at most, a group sixteen at least
#pragma GCC unroll 2
      for (int pair = 0; pair < 2; ++pair, line += kLineStride, word += C::kSteps)
#pragma GCC unroll 16
        for (int h = 0; h < H; ++h) {
          __builtin_prefetch(line + h * kLineBytes + kPrefetch);
#pragma GCC unroll 16
          for (int step = 0; step < C::kSteps; ++step) {
            vint w[kVectors];
#pragma GCC unroll 16
            for (int i = 0; i < kVectors; ++i)
              w[i] = C::words(reinterpret_cast<const vint*>(line + h * kLineBytes)[i], step);
#pragma GCC unroll 16
            for (int r = 0; r < M; ++r)
#pragma GCC unroll 16
              for (int i = 0; i < kVectors; ++i)
                sum[h][r][i] = in_order(C::dot(sum[h][r][i], w[i], broadcast(word + r * x.stride + step)));
          }
        }
#pragma GCC unroll 16
    for (int h = 0; h < H; ++h)
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i) {
        const int place = h * kVectors + i;
        const vfloat scale = half.scale(g, place);
#pragma GCC unroll 16
        for (int r = 0; r < M; ++r)
          acc[h][r][i] = add_group(acc[h][r][i], sum[h][r][i], scale, x.scales[(row + r) * x.groups + g]);
        if (minima) {
          const vfloat low = half.minimum(g, place, scale);
#pragma GCC unroll 16
          for (int r = 0; r < M; ++r)
            acc[h][r][i] = add_minimum(acc[h][r][i], low, x.sums[(row + r) * x.groups + g]);
        }
      }
  }
#pragma GCC unroll 16
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 16
    for (int r = 0; r < M; ++r) store_row(m, p, row + r, (first_half + h) * kHalf, acc[h][r]);
}

template <int F, int M>
static void few_rows_of_panel(const Matrix& m, const Product& p, int64_t row, int64_t panel) {
  constexpr int kTogether = kVectors == 1 || M <= 2 ? kHalves : 1;
  for (int h = 0; h < kHalves; h += kTogether) few_rows<F, M, kTogether>(m, p, row, panel * kHalves + h);
}

// A panel for the rows [first, first + rows), in tiles of nearly equal height.
template <int F>
static void direct_rows(const Matrix& m, const Product& p, int64_t panel, int64_t first, int64_t rows, int height) {
  const int64_t tiles = (rows + height - 1) / height;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t row = first + rows * t / tiles, end = first + rows * (t + 1) / tiles;
    switch (end - row) {
      case 1: few_rows_of_panel<F, 1>(m, p, row, panel); break;
      case 2: few_rows_of_panel<F, 2>(m, p, row, panel); break;
      case 3: few_rows_of_panel<F, std::min(3, kTileRows)>(m, p, row, panel); break;
      default: few_rows_of_panel<F, kTileRows>(m, p, row, panel);
    }
  }
}

// Some columns of half a panel, taken apart: its words by step, and the scales and minima of its groups.
struct Slice {
  alignas(64) vint words[kSlice / 2 * kVectors];
  alignas(64) vfloat scales[kSlice / kMinGroup * kVectors], minima[kSlice / kMinGroup * kVectors];
};

template <int F>
static void take_apart(const Matrix& m, int64_t index, int first, int columns, Slice& slice) {
  using C = Codes<F>;
  const char* line = lines_of(m, index, C::kColumns) + static_cast<int64_t>(first) / C::kColumns * kLineStride;
  vint* words = slice.words;
  for (int k = 0; k < columns; k += C::kColumns, line += kLineStride) {
    __builtin_prefetch(line + kPrefetch);
#pragma GCC unroll 16
    for (int step = 0; step < C::kSteps; ++step)
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i) *words++ = C::words(reinterpret_cast<const vint*>(line)[i], step);
  }
  const HalfPanel half(m, index);
  const int first_group = first / m.group, groups = columns / m.group;
  for (int g = 0; g < groups; ++g)
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      const vfloat scale = half.scale(first_group + g, i);
      slice.scales[g * kVectors + i] = scale;
      if (has_minima<F>(m)) slice.minima[g * kVectors + i] = half.minimum(first_group + g, i, scale);
    }
}

// A register block: R rows of x times the columns of a slice.
struct Block {
  const int32_t* x;
  int64_t x_stride;
  const float *x_scales, *x_sums;  // from the slice's first group on
  int64_t x_groups;
  int groups, steps;  // of the slice; of a group
  bool minima;
  vfloat* acc;  // [R][16]
};

template <int F, int R>
[[gnu::noinline]] static void sum_groups(const Block& b, const vint* w, vint* sums) {
  const int32_t* x = b.x;
  for (int g = 0; g < b.groups; ++g, sums += R * kVectors) {
    vint c[R][kVectors] = {};
#pragma GCC unroll 1
    for (int k = 0; k < b.steps; ++k, ++x, w += kVectors) {
      vint words[kVectors];
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i) words[i] = w[i];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int i = 0; i < kVectors; ++i) c[r][i] = Codes<F>::dot(c[r][i], words[i], broadcast(x + r * b.x_stride));
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i) sums[r * kVectors + i] = c[r][i];
  }
}

template <int R>
[[gnu::noinline]] static void add_groups(const Block& b, const Slice& slice, const vint* sums) {
  vfloat acc[R][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) acc[r][i] = b.acc[r * kVectors + i];
  for (int g = 0; g < b.groups; ++g, sums += R * kVectors)
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      const vfloat scale = slice.scales[g * kVectors + i];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
        acc[r][i] = add_group(acc[r][i], sums[r * kVectors + i], scale, b.x_scales[r * b.x_groups + g]);
      if (b.minima) {
        const vfloat low = slice.minima[g * kVectors + i];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) acc[r][i] = add_minimum(acc[r][i], low, b.x_sums[r * b.x_groups + g]);
      }
    }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) b.acc[r * kVectors + i] = acc[r][i];
}

template <int F, int R>
static void block_rows(const Block& b, const Slice& slice) {
  alignas(64) vint sums[kSlice / kMinGroup * R * kVectors];
  sum_groups<F, R>(b, slice.words, sums);
  add_groups<R>(b, slice, sums);
}

template <int F>
static void block_of(int64_t rows, const Block& b, const Slice& slice) {
  switch (rows) {
    case 1: return block_rows<F, 1>(b, slice);
    case 2: return block_rows<F, 2>(b, slice);
    case 3: return block_rows<F, std::min(3, kBlockRows)>(b, slice);
    case 4: return block_rows<F, std::min(4, kBlockRows)>(b, slice);
    case 5: return block_rows<F, std::min(5, kBlockRows)>(b, slice);
    case 6: return block_rows<F, std::min(6, kBlockRows)>(b, slice);
    case 7: return block_rows<F, std::min(7, kBlockRows)>(b, slice);
    default: return block_rows<F, kBlockRows>(b, slice);
  }
}

// A panel for the rows [first, first + rows), rows <= kSlicedRows, in register blocks.
template <int F>
static void sliced_rows(const Matrix& m, const Product& p, int64_t panel, int64_t first, int64_t rows) {
  const Rounded x = rounded(m, p);
  const int padded = m.padded_in(), word_columns = padded / static_cast<int>(x.stride);
  alignas(64) vfloat acc[kHalves][kSlicedRows * kVectors];
  for (auto& half : acc)
    for (int64_t i = 0; i < rows * kVectors; ++i) half[i] = vfloat{};
  Slice slice;
  for (int k = 0; k < padded; k += kSlice)
    for (int h = 0; h < kHalves; ++h) {
      const int columns = std::min(kSlice, padded - k);
      take_apart<F>(m, panel * kHalves + h, k, columns, slice);
      const int64_t group = first * x.groups + k / m.group;
      Block block{x.words + first * x.stride + k / word_columns, x.stride, x.scales + group, x.sums + group, x.groups,
                  columns / m.group, m.group / word_columns, has_minima<F>(m), acc[h]};
      for (int64_t r = 0; r < rows; r += kBlockRows) {
        block_of<F>(std::min<int64_t>(rows - r, kBlockRows), block, slice);
        block.x += kBlockRows * x.stride, block.acc += kBlockRows * kVectors;
        block.x_scales += kBlockRows * x.groups, block.x_sums += kBlockRows * x.groups;
      }
    }
  for (int64_t r = 0; r < rows; ++r)
    for (int h = 0; h < kHalves; ++h)
      store_row(m, p, first + r, (panel * kHalves + h) * kHalf, acc[h] + r * kVectors);
}

// What `Matrix::heights` says of so many rows, or what is fastest on the machines that this was measured on.
template <int F>
static int height_for(const Matrix& m, int64_t rows) {
  int range = 0;
  while (range < kRanges - 1 && rows > int64_t{1} << range) ++range;
  if (m.heights[range] != 0) return m.heights[range];
  return F == kQ8Dot || rows <= 16 ? kTileRows : kSliced;
}

template <int F>
static void multiply_format(const Matrix& m, const Product& p, Range panels) {
  const int64_t blocks = (p.rows + kSlicedRows - 1) / kSlicedRows;
  const int64_t step = blocks == 0 ? 1 : (p.rows + blocks * kBlockRows - 1) / (blocks * kBlockRows) * kBlockRows;
  for (int64_t first = 0; first < p.rows; first += step) {
    const int64_t rows = std::min(step, p.rows - first);
    const int height = height_for<F>(m, rows);
    for (int64_t panel = panels.begin; panel < panels.end; ++panel)
      if (height == kSliced)
        sliced_rows<F>(m, p, panel, first, rows);
      else
        direct_rows<F>(m, p, panel, first, rows, std::min(height, kTileRows));
  }
}

void multiply_integers(const Matrix& m, const Product& p, Range panels) {
  switch (m.format) {
    case kQ4: return multiply_format<kQ4>(m, p, panels);
    case kQ8: return multiply_format<kQ8>(m, p, panels);
    default: return multiply_format<kQ8Dot>(m, p, panels);
  }
}

}  // namespace quire

// A register block holds the sums of some rows of x times 16 rows of W. Its weights are widened in registers, once per
// block; from so many rows on that widening costs more than the products, a slice of the panel is widened into the L1
// cache first (Goto & van de Geijn 2008). Both add the products of an output in the same order: column after column for
// float-like weights; column after column within a group, then scale times that sum and minimum times the sum of x,
// group after group, for quantized ones. So a row's result is the same bits whatever rows are computed beside it.
#include "matmul.h"

#include <cmath>
#include <memory>
#include <vector>

#include "simd.h"

namespace quire {

// Loops over registers carry `#pragma GCC unroll`: unrolled early, their arrays become registers at every -O level. The
// innermost functions are not inlined: among others' variables they would run out of registers.
constexpr int kHalf = 16, kHalves = kPanel / kHalf;  // rows of W that are worked on together, and how often they fit
constexpr int kVectors = kHalf / kLanes;
constexpr int kLineBytes = 64, kLineStride = kHalves * kLineBytes;
constexpr int kPrefetch = 16384;  // bytes ahead: a core's own prefetcher stops at every page
constexpr int kTileRows = kLanes >= 8 ? 6 : 2;                      // rows of x in a block that widens in registers
constexpr int kWideTileRows = kLanes == 16 ? 12 : kTileRows;        // the same over a widened slice
constexpr int kDirectRows = 2 * kTileRows;  // quantized weights: more rows than that are worth widening a slice
constexpr int kSlice = 256;                 // columns of a slice: 16 KiB of floats
constexpr int kRowBlock = 96;               // rows of x per pass over the panels
constexpr int kDotRows = 4;                 // rows of x in a block of integer products

// What a format is: columns of a line (64 bytes of half a panel), columns that share a scale (0: there are none), and how
// to get at columns and single elements. `column` gives kLanes lanes from lane i * kLanes on, times power(step).
template <int F>
struct Storage;

template <>
struct Storage<kF32> {
  static constexpr int kColumns = 1, kScaled = 0;
  static constexpr float power(int) { return 1.0f; }
  static inline vfloat column(const char* line, int i, int) {
    return load(reinterpret_cast<const float*>(line) + i * kLanes);
  }
  static inline float element(const char* line, int lane, int) { return reinterpret_cast<const float*>(line)[lane]; }
};

template <>
struct Storage<kBF16> {
  static constexpr int kColumns = 2, kScaled = 0;
  static constexpr float power(int) { return 1.0f; }
  static inline vfloat column(const char* line, int i, int step) {
    const vint words = reinterpret_cast<const vint*>(line)[i];
    return reinterpret_cast<vfloat>(step == 0 ? words << 16 : words & static_cast<int32_t>(0xffff0000));
  }
  static inline float element(const char* line, int lane, int step) {
    return to_float(reinterpret_cast<const BFloat16*>(line)[2 * lane + step]);
  }
};

template <>
struct Storage<kF16> {
  static constexpr int kColumns = 2, kScaled = 0;
  static constexpr float power(int) { return 1.0f; }
  static inline vfloat column(const char* line, int i, int step) {
    return load_half(reinterpret_cast<const Float16*>(line) + step * kHalf + i * kLanes);
  }
  static inline float element(const char* line, int lane, int step) {
    return to_float(reinterpret_cast<const Float16*>(line)[step * kHalf + lane]);
  }
};

template <>
struct Storage<kQ8> {
  static constexpr int kColumns = 4, kScaled = 32;
  static constexpr float power(int) { return 1.0f; }
  static inline vfloat column(const char* line, int i, int step) {
    return widen_int8(reinterpret_cast<const int8_t*>(line) + step * kHalf + i * kLanes);
  }
  static inline float element(const char* line, int lane, int step) {
    return reinterpret_cast<const int8_t*>(line)[step * kHalf + lane];
  }
};

template <>
struct Storage<kQ8Fine> : Storage<kQ8> {
  static constexpr int kScaled = 16;
};

template <>
struct Storage<kQ4> {
  static constexpr int kColumns = 8, kScaled = 32;
  static constexpr float power(int step) { return half_byte_power(step); }
  static inline vfloat column(const char* line, int i, int step) {
    return widen_half_byte(reinterpret_cast<const vint*>(line)[i], step);
  }
  static inline float element(const char* line, int lane, int step) {
    return reinterpret_cast<const uint32_t*>(line)[lane] >> 4 * step & 15;
  }
};

template <>
struct Storage<kQ8Dot> : Storage<kQ8> {
  static inline float element(const char* line, int lane, int step) {
    return reinterpret_cast<const int8_t*>(line)[4 * lane + step];
  }
};

template <int F>
static int64_t lines_of(const Matrix& matrix) {
  return matrix.padded_in() / Storage<F>::kColumns;
}

// Half a panel, 16 rows: where its lines and its scales are.
template <int F>
struct Half {
  const Matrix& matrix;
  int64_t index;  // over the whole matrix

  const char* lines() const {
    return static_cast<const char*>(matrix.weights) + index / kHalves * lines_of<F>(matrix) * kLineStride +
           index % kHalves * kLineBytes;
  }
  int64_t scale_index(int group) const {
    const int64_t groups = matrix.padded_in() / Storage<F>::kScaled;
    return (index / kHalves * groups + group) * kPanel + index % kHalves * kHalf;
  }
  inline vfloat values(const void* lines, int group, int i) const {
    const int64_t at = scale_index(group) + i * kLanes;
    return matrix.half_scales ? load_half(static_cast<const Float16*>(lines) + at)
                              : load(static_cast<const float*>(lines) + at);
  }
  inline vfloat scale(int group, int i) const { return values(matrix.scales, group, i); }
  inline vfloat minimum(int group, int i, vfloat scale) const {  // half bytes without minima stand for q - 8
    return matrix.mins ? values(matrix.mins, group, i) : splat(-8.0f) * scale;
  }
};

template <int F>
static bool has_minima(const Matrix& matrix) {
  return F == kQ4 || matrix.mins != nullptr;
}

// Whether the sums of x over groups are needed (formats with powers have minima).
template <int F>
static bool needs_sums(const Matrix& matrix) {
  return Storage<F>::kScaled != 0 && has_minima<F>(matrix);
}

// 16 outputs of one row of x, those that the matrix has.
static inline void store_row(const Matrix& m, const Product& p, int64_t row, int64_t first, const vfloat* acc) {
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

// Rows [row, row + M) of x times H halves of panels: independent sums hide the latency of each other's additions.
template <int F, int M, int H>
[[gnu::noinline]] static void few_rows(const Matrix& m, const Product& p, int64_t row, int64_t first_half) {
  using S = Storage<F>;
  constexpr int kUnit = S::kScaled ? S::kScaled : kGroup;
  const int units = m.padded_in() / kUnit;
  const int64_t panel_bytes = lines_of<F>(m) * kLineStride;
  const char* line = Half<F>{m, first_half}.lines();
  const float* x = p.x + row * p.x_stride;
  vfloat acc[H][M][kVectors] = {};
  for (int g = 0; g < units; ++g) {
    vfloat part[H][M][kVectors];
#pragma GCC unroll 16
    for (int h = 0; h < H; ++h)
#pragma GCC unroll 16
      for (int r = 0; r < M; ++r)
#pragma GCC unroll 16
        for (int i = 0; i < kVectors; ++i) part[h][r][i] = S::kScaled ? vfloat{} : acc[h][r][i];
#pragma GCC unroll 2
    for (int k = 0; k < kUnit; k += S::kColumns, x += S::kColumns, line += kLineStride) {
      const char* lines[H];
#pragma GCC unroll 16
      for (int h = 0; h < H; ++h) {
        lines[h] = line + h / kHalves * panel_bytes + h % kHalves * kLineBytes;
        __builtin_prefetch(lines[h] + kPrefetch);
      }
#pragma GCC unroll 16
      for (int step = 0; step < S::kColumns; ++step)
#pragma GCC unroll 16
        for (int h = 0; h < H; ++h) {
          vfloat w[kVectors];
#pragma GCC unroll 16
          for (int i = 0; i < kVectors; ++i) w[i] = S::column(lines[h], i, step);
#pragma GCC unroll 16
          for (int r = 0; r < M; ++r)
#pragma GCC unroll 16
            for (int i = 0; i < kVectors; ++i) part[h][r][i] += splat(x[r * p.x_stride + step]) * w[i];
        }
    }
#pragma GCC unroll 16
    for (int h = 0; h < H; ++h)
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i) {
        if constexpr (S::kScaled == 0) {
#pragma GCC unroll 16
          for (int r = 0; r < M; ++r) acc[h][r][i] = part[h][r][i];
        } else {
          const Half<F> half{m, first_half + h};
          const vfloat scale = half.scale(g, i);
#pragma GCC unroll 16
          for (int r = 0; r < M; ++r) acc[h][r][i] += scale * part[h][r][i];
          if (has_minima<F>(m)) {
            const vfloat low = half.minimum(g, i, scale);
#pragma GCC unroll 16
            for (int r = 0; r < M; ++r) acc[h][r][i] += low * splat(p.scratch[(row + r) * units + g]);
          }
        }
      }
  }
#pragma GCC unroll 16
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 16
    for (int r = 0; r < M; ++r) store_row(m, p, row + r, (first_half + h) * kHalf, acc[h][r]);
}

// M rows of x times all of some panels. One row is bound by memory, where more panels side by side are more streams;
// half bytes are bound by arithmetic.
template <int F, int M>
static void tile(const Matrix& m, const Product& p, int64_t row, Range halves) {  // whole panels
  constexpr int kSpare = kVectors == 1 ? 2 : 1;  // wide vectors leave registers for twice as much
  constexpr int kTogether = kSpare * (M > 2 ? 1 : M == 2 || F == kQ4 ? 2 : 4);
  int64_t half = halves.begin;
  for (; half + kTogether <= halves.end; half += kTogether) few_rows<F, M, kTogether>(m, p, row, half);
  if constexpr (kTogether > kHalves)
    for (; half < halves.end; half += kHalves) few_rows<F, M, kHalves>(m, p, row, half);
}

template <int F>
static void tile_of(int rows, const Matrix& m, const Product& p, int64_t row, Range halves) {
  switch (rows) {
    case 1: return tile<F, 1>(m, p, row, halves);
    case 2: return tile<F, 2>(m, p, row, halves);
    case 3: return tile<F, std::min(3, kTileRows)>(m, p, row, halves);
    case 4: return tile<F, std::min(4, kTileRows)>(m, p, row, halves);
    case 5: return tile<F, std::min(5, kTileRows)>(m, p, row, halves);
    default: return tile<F, kTileRows>(m, p, row, halves);
  }
}

// Rows [first, first + rows) in tiles of nearly equal height; a panel stays in the cache for all of them.
template <int F>
static void direct_rows(const Matrix& m, const Product& p, Range halves, int64_t first, int64_t rows) {
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows, step = tiles == 1 ? halves.end - halves.begin : kHalves;
  for (int64_t half = halves.begin; half < halves.end; half += step)
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t begin = rows * t / tiles, end = rows * (t + 1) / tiles;
      tile_of<F>(static_cast<int>(end - begin), m, p, first + begin, {half, std::min(half + step, halves.end)});
    }
}

// A slice of half a quantized panel in the L1 cache: q as floats, and the scales and minima of its groups.
struct Slice {
  alignas(64) float values[kSlice * kHalf];
  alignas(64) float scales[kSlice / 16 * kHalf], lows[kSlice / 16 * kHalf];
};

template <int F>
static void widen_slice(const Matrix& m, const Half<F>& half, int first, int count, Slice& slice) {
  using S = Storage<F>;
  const char* line = half.lines() + static_cast<int64_t>(first) / S::kColumns * kLineStride;
  for (int k = 0; k < count; k += S::kColumns, line += kLineStride) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i)
#pragma GCC unroll 16
      for (int step = 0; step < S::kColumns; ++step)
        store(slice.values + (k + step) * kHalf + i * kLanes, S::column(line, i, step) * splat(1.0f / S::power(step)));
  }
  if constexpr (S::kScaled != 0)
    for (int g = 0; g < count / S::kScaled; ++g)
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i) {
        const vfloat scale = half.scale(first / S::kScaled + g, i);
        store(slice.scales + g * kHalf + i * kLanes, scale);
        if (has_minima<F>(m))
          store(slice.lows + g * kHalf + i * kLanes, half.minimum(first / S::kScaled + g, i, scale));
      }
}

// R rows of one register block: x with its stride, the running results, and the group sums of x.
struct Block {
  const float* x;
  int64_t x_stride;
  float* acc;         // [R][16]
  const float* sums;  // [R][groups of a row], from the slice's first group on; null without minima
  int64_t sum_stride;
};

template <int kUnit, int R>
[[gnu::noinline]] static void block_rows(const Block& b, const Slice& slice, int count) {
  const float *x = b.x, *w = slice.values;
  for (int g = 0; g < count / kUnit; ++g) {
    vfloat c[R][kVectors] = {};
    for (int k = 0; k < kUnit; ++k, ++x, w += kHalf) {
      vfloat line[kVectors];
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i) line[i] = load(w + i * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int i = 0; i < kVectors; ++i) c[r][i] += splat(x[r * b.x_stride]) * line[i];
    }
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      const vfloat scale = load(slice.scales + g * kHalf + i * kLanes);
      const vfloat low = b.sums ? load(slice.lows + g * kHalf + i * kLanes) : vfloat{};
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        float* acc = b.acc + r * kHalf + i * kLanes;
        vfloat total = load(acc) + scale * c[r][i];
        if (b.sums) total += low * splat(b.sums[r * b.sum_stride + g]);
        store(acc, total);
      }
    }
  }
}

template <int kUnit>
static void block_of(int rows, const Block& b, const Slice& slice, int count) {
  switch (rows) {
    case 1: return block_rows<kUnit, 1>(b, slice, count);
    case 2: return block_rows<kUnit, 2>(b, slice, count);
    case 3: return block_rows<kUnit, std::min(3, kWideTileRows)>(b, slice, count);
    case 4: return block_rows<kUnit, std::min(4, kWideTileRows)>(b, slice, count);
    case 5: return block_rows<kUnit, std::min(5, kWideTileRows)>(b, slice, count);
    case 6: return block_rows<kUnit, std::min(6, kWideTileRows)>(b, slice, count);
    case 7: return block_rows<kUnit, std::min(7, kWideTileRows)>(b, slice, count);
    case 8: return block_rows<kUnit, std::min(8, kWideTileRows)>(b, slice, count);
    case 9: return block_rows<kUnit, std::min(9, kWideTileRows)>(b, slice, count);
    case 10: return block_rows<kUnit, std::min(10, kWideTileRows)>(b, slice, count);
    case 11: return block_rows<kUnit, std::min(11, kWideTileRows)>(b, slice, count);
    default: return block_rows<kUnit, kWideTileRows>(b, slice, count);
  }
}

// Half a panel for the rows [first, first + rows), rows <= kRowBlock, in register blocks of nearly equal height.
template <int F>
static void widened_rows(const Product& p, const Half<F>& half, int first, int rows) {
  const Matrix& m = half.matrix;
  const bool sums = needs_sums<F>(m);
  constexpr int kUnit = Storage<F>::kScaled;
  const int padded = m.padded_in(), tiles = (rows + kWideTileRows - 1) / kWideTileRows, groups = padded / kUnit;
  alignas(64) float acc[kRowBlock * kHalf];
  std::fill_n(acc, rows * kHalf, 0.0f);
  Slice slice;
  for (int k = 0; k < padded; k += kSlice) {
    const int count = std::min(kSlice, padded - k);
    widen_slice<F>(m, half, k, count, slice);
    for (int t = 0; t < tiles; ++t) {
      const int begin = rows * t / tiles, end = rows * (t + 1) / tiles;
      const int64_t row = first + begin;
      const Block block{p.x + row * p.x_stride + k, p.x_stride, acc + begin * kHalf,
                        sums ? p.scratch + row * groups + k / kUnit : nullptr, groups};
      block_of<kUnit>(end - begin, block, slice, count);
    }
  }
  for (int row = 0; row < rows; ++row) {
    vfloat line[kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) line[i] = load(acc + row * kHalf + i * kLanes);
    store_row(m, p, first + row, half.index * kHalf, line);
  }
}

// x rounded to 8 bits, in a product's scratch.
struct Codes {
  float* scales;  // [rows, groups]
  int8_t* codes;  // [rows, padded_in]
};

static Codes codes_of(const Matrix& m, const Product& p) {
  return {p.scratch, reinterpret_cast<int8_t*>(p.scratch + static_cast<int64_t>(p.rows) * m.padded_in() / kGroup)};
}

typedef int8_t vcode __attribute__((vector_size(kLanes), aligned(1), may_alias));

// One group; returns its scale. What is not finite makes that, and so the whole row, not a number.
static float round_group(const float* x, int8_t* codes) {
  vfloat top{}, rest{};
  for (int k = 0; k < kGroup; k += kLanes) {
    const vfloat some = load(x + k);
    top = quire::max(some < vfloat{} ? -some : some, top), rest += some - some;
  }
  const float scale = reduce_max(top) / 127.0f, wrong = reduce_add(rest);
  if (wrong != 0.0f || scale == 0.0f) {
    std::memset(codes, 0, kGroup);
    return wrong;
  }
  for (int k = 0; k < kGroup; k += kLanes) {
    const vfloat whole = load(x + k) / splat(scale) + splat(0x1.8p23f);  // rounded, in the lowest bits
    const vint code = reinterpret_cast<vint>(whole) - 0x4b400000;
    *reinterpret_cast<vcode*>(codes + k) = __builtin_convertvector(code, vcode);
  }
  return scale;
}

static void round_rows(const Team& team, const Matrix& m, const Product& p) {
  const Codes codes = codes_of(m, p);
  const int64_t groups = m.padded_in() / kGroup;
  const Range range = team.share(p.rows * groups);
  for (int64_t u = range.begin; u < range.end; ++u)
    codes.scales[u] = round_group(p.x + u / groups * p.x_stride + u % groups * kGroup, codes.codes + u * kGroup);
}

// Rows [row, row + M) of x times H halves of a panel: integer sums within a group, which are exact, then both scales.
template <int M, int H>
[[gnu::noinline]] static void dot_rows(const Matrix& m, const Product& p, int64_t row, int64_t first_half) {
  const Codes x = codes_of(m, p);
  const int groups = m.padded_in() / kGroup;
  const int8_t* codes = x.codes + row * m.padded_in();
  const char* line = Half<kQ8Dot>{m, first_half}.lines();
  vfloat acc[M][H][kVectors] = {};
  for (int g = 0; g < groups; ++g) {
    vint sum[M][H][kVectors] = {};
    for (int k = 0; k < kGroup; k += 4, codes += 4, line += kLineStride) {
#pragma GCC unroll 16
      for (int h = 0; h < H; ++h) {
        const char* words = line + h * kLineBytes;
        __builtin_prefetch(words + kPrefetch);
#pragma GCC unroll 16
        for (int r = 0; r < M; ++r) {
          int32_t four;
          std::memcpy(&four, codes + r * m.padded_in(), 4);
#pragma GCC unroll 16
          for (int i = 0; i < kVectors; ++i)
            sum[r][h][i] = dot4(sum[r][h][i], reinterpret_cast<const vint*>(words)[i], four - vint{});
        }
      }
    }
#pragma GCC unroll 16
    for (int h = 0; h < H; ++h)
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i) {
        const vfloat scale = Half<kQ8Dot>{m, first_half + h}.scale(g, i);
#pragma GCC unroll 16
        for (int r = 0; r < M; ++r)
          acc[r][h][i] +=
              __builtin_convertvector(sum[r][h][i], vfloat) * (scale * splat(x.scales[(row + r) * groups + g]));
      }
  }
#pragma GCC unroll 16
  for (int r = 0; r < M; ++r)
#pragma GCC unroll 16
    for (int h = 0; h < H; ++h) store_row(m, p, row + r, (first_half + h) * kHalf, acc[r][h]);
}

template <int M>
static void dot_panel(const Matrix& m, const Product& p, int64_t row, int64_t panel) {
  constexpr int kTogether = M <= 2 ? kHalves : 1;
  for (int h = 0; h < kHalves; h += kTogether) dot_rows<M, kTogether>(m, p, row, panel * kHalves + h);
}

// A panel stays in the cache for all rows of a block.
static void dot_panels(const Matrix& m, const Product& p, Range panels, int64_t first, int64_t rows) {
  const int64_t tiles = (rows + kDotRows - 1) / kDotRows;
  for (int64_t panel = panels.begin; panel < panels.end; ++panel)
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row = first + rows * t / tiles, end = first + rows * (t + 1) / tiles;
      switch (end - row) {
        case 1: dot_panel<1>(m, p, row, panel); break;
        case 2: dot_panel<2>(m, p, row, panel); break;
        case 3: dot_panel<3>(m, p, row, panel); break;
        default: dot_panel<kDotRows>(m, p, row, panel);
      }
    }
}

template <int F>
static bool widens_in_registers(int rows) {
  return Storage<F>::kScaled == 0 || rows <= kDirectRows;
}

// The sums of x over groups, and x divided by what `column` multiplies with; both in the product's scratch.
template <int F>
static Product prepare_format(const Team& team, const Matrix& m, const Product& p) {
  using S = Storage<F>;
  if constexpr (F == kQ8Dot) {
    round_rows(team, m, p);
    return p;
  }
  if (!needs_sums<F>(m)) return p;
  constexpr int kUnit = std::max(S::kScaled, kLanes);
  const bool divides = S::power(1) != 1.0f && widens_in_registers<F>(p.rows);
  const int64_t units = m.padded_in() / kUnit;
  float* scaled = p.scratch + p.rows * units;
  alignas(64) float inverse[kUnit];
  for (int k = 0; k < kUnit; ++k) inverse[k] = 1.0f / S::power(k % S::kColumns);
  const Range range = team.share(p.rows * units);
  for (int64_t u = range.begin; u < range.end; ++u) {
    const float* x = p.x + u / units * p.x_stride + u % units * kUnit;
    vfloat sum = load(x);
    for (int k = kLanes; k < kUnit; k += kLanes) sum += load(x + k);
    p.scratch[u] = reduce_add(sum);
    if (divides)
      for (int k = 0; k < kUnit; k += kLanes) store(scaled + u * kUnit + k, load(x + k) * load(inverse + k));
  }
  Product result = p;
  if (divides) result.x = scaled, result.x_stride = m.padded_in();
  return result;
}

template <int F>
static void multiply_format(const Matrix& m, const Product& p, Range panels) {
  const Range halves{panels.begin * kHalves, panels.end * kHalves};
  for (int first = 0; first < p.rows; first += kRowBlock) {
    const int rows = std::min(kRowBlock, p.rows - first);
    if constexpr (F == kQ8Dot) {
      dot_panels(m, p, panels, first, rows);
      continue;
    } else if constexpr (Storage<F>::kScaled != 0)
      if (!widens_in_registers<F>(p.rows)) {
        for (int64_t half = halves.begin; half < halves.end; ++half) widened_rows<F>(p, {m, half}, first, rows);
        continue;
      }
    direct_rows<F>(m, p, halves, first, rows);
  }
}

template <int F>
static void look_up_format(const Matrix& m, const int64_t* ids, Range range, float* y, int64_t y_stride) {
  using S = Storage<F>;
  for (int64_t i = range.begin; i < range.end; ++i) {
    const Half<F> half{m, ids[i] / kHalf};
    const int lane = static_cast<int>(ids[i] % kHalf);
    const char* lines = half.lines();
    for (int k = 0; k < m.in; ++k) {
      float value = S::element(lines + k / S::kColumns * kLineStride, lane, k % S::kColumns);
      if constexpr (S::kScaled != 0) {
        const int64_t at = half.scale_index(k / S::kScaled) + lane;
        const float scale = m.half_scales ? to_float(static_cast<const Float16*>(m.scales)[at])
                                          : static_cast<const float*>(m.scales)[at];
        value *= scale;
        if (m.mins)
          value += m.half_scales ? to_float(static_cast<const Float16*>(m.mins)[at])
                                 : static_cast<const float*>(m.mins)[at];
        else if (F == kQ4)
          value -= 8.0f * scale;
      }
      y[i * y_stride + k] = value;
    }
  }
}

#define QUIRE_BY_FORMAT(matrix, call, ...)          \
  switch ((matrix).format) {                        \
    case kF32: return call<kF32>(__VA_ARGS__);      \
    case kBF16: return call<kBF16>(__VA_ARGS__);    \
    case kF16: return call<kF16>(__VA_ARGS__);      \
    case kQ8: return call<kQ8>(__VA_ARGS__);        \
    case kQ4: return call<kQ4>(__VA_ARGS__);        \
    case kQ8Fine: return call<kQ8Fine>(__VA_ARGS__); \
    case kQ8Dot: return call<kQ8Dot>(__VA_ARGS__);  \
    default: break;                                 \
  }

int64_t scratch_floats(int64_t rows, int64_t in) {
  const int64_t padded = (in + kGroup - 1) / kGroup * kGroup;
  const int64_t sums = rows * padded / 16 + std::min<int64_t>(rows, kDirectRows) * padded;
  const int64_t codes = rows * padded / kGroup + rows * padded / 4;
  return std::max(sums, codes);
}

bool is_known(const Matrix& matrix) { return matrix.format >= kF32 && matrix.format <= kQ8Dot; }

Product prepare(const Team& team, const Matrix& matrix, const Product& product) {
  QUIRE_BY_FORMAT(matrix, prepare_format, team, matrix, product)
  return product;
}

void multiply(const Matrix& matrix, const Product& prepared, Range panels) {
  QUIRE_BY_FORMAT(matrix, multiply_format, matrix, prepared, panels)
}

void look_up(const Team& team, const Matrix& matrix, const int64_t* ids, int64_t count, float* y, int64_t y_stride) {
  QUIRE_BY_FORMAT(matrix, look_up_format, matrix, ids, team.share(count), y, y_stride)
}

struct MatmulArgs {
  Matrix matrix;
  const float* x;  // [rows, in]
  float* y;        // [rows, out]
  int64_t x_stride, y_stride;
  int32_t rows, num_threads;
};

struct LookUpArgs {
  Matrix matrix;
  const int64_t* ids;  // [count]
  float* y;            // [count, in]
  int64_t count;
  int32_t num_threads;
};

}  // namespace quire

// Returns 0, or 1 for a format it does not know.
extern "C" int quire_matmul(const quire::MatmulArgs* args) {
  using namespace quire;
  const Matrix& m = args->matrix;
  if (!is_known(m)) return 1;
  Product product{args->x, args->y, args->x_stride, args->y_stride, args->rows, false, nullptr};
  std::vector<float> padded;
  if (m.in != m.padded_in()) {
    padded.resize(static_cast<int64_t>(args->rows) * m.padded_in());
    for (int64_t r = 0; r < args->rows; ++r)
      std::copy_n(args->x + r * args->x_stride, m.in, padded.begin() + r * m.padded_in());
    product.x = padded.data();
    product.x_stride = m.padded_in();
  }
  const std::unique_ptr<float[]> scratch(new float[scratch_floats(args->rows, m.in)]);
  product.scratch = scratch.get();
  run_team(args->num_threads, [&](const Team& team) {
    const Product prepared = prepare(team, m, product);
    team.wait();
    multiply(m, prepared, team.share(m.panels()));
  });
  return 0;
}

// Returns 0, 1 for a format it does not know, or 2 for an id outside the matrix.
extern "C" int quire_look_up(const quire::LookUpArgs* args) {
  using namespace quire;
  if (!is_known(args->matrix)) return 1;
  for (int64_t i = 0; i < args->count; ++i)
    if (args->ids[i] < 0 || args->ids[i] >= args->matrix.out) return 2;
  const int num_threads = args->count > 8 ? args->num_threads : 1;
  run_team(num_threads, [&](const Team& team) {
    look_up(team, args->matrix, args->ids, args->count, args->y, args->matrix.in);
  });
  return 0;
}

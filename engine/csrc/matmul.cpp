// Products with float-like weights, and what all formats share. A register block holds the sums of some rows of x times
// 16 rows of W, whose weights are widened in registers, once per block. The products of an output are added column after
// column, so a row's result is the same bits whatever rows are computed beside it.
#include "matmul.h"

#include <memory>
#include <vector>

#include "dot.h"
#include "panel.h"
#include "round.h"

namespace quire {

constexpr int kTileRows = kLanes >= 8 ? 6 : 2;  // rows of x in a register block

// What a format is: columns of a line (64 bytes of half a panel), and how to get at single elements; float-like ones at
// kLanes lanes of a column from lane i * kLanes on, too.
template <int F>
struct Storage;

template <>
struct Storage<kF32> {
  static constexpr int kColumns = 1;
  static inline vfloat column(const char* line, int i, int) {
    return load(reinterpret_cast<const float*>(line) + i * kLanes);
  }
  static inline float element(const char* line, int lane, int) { return reinterpret_cast<const float*>(line)[lane]; }
};

template <>
struct Storage<kBF16> {
  static constexpr int kColumns = 2;
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
  static constexpr int kColumns = 2;
  static inline vfloat column(const char* line, int i, int step) {
    return load_half(reinterpret_cast<const Float16*>(line) + step * kHalf + i * kLanes);
  }
  static inline float element(const char* line, int lane, int step) {
    return to_float(reinterpret_cast<const Float16*>(line)[step * kHalf + lane]);
  }
};

template <>
struct Storage<kQ8> {
  static constexpr int kColumns = 4;
  static inline float element(const char* line, int lane, int step) {
    return reinterpret_cast<const int8_t*>(line)[4 * lane + step];
  }
};

template <>
struct Storage<kQ4> {
  static constexpr int kColumns = 8;
  static inline float element(const char* line, int lane, int step) {
    return reinterpret_cast<const uint32_t*>(line)[lane] >> 4 * step & 15;
  }
};

// Rows [row, row + M) of x times H halves of panels: independent sums hide the latency of each other's additions.
template <int F, int M, int H>
[[gnu::noinline]] static void few_rows(const Matrix& m, const Product& p, int64_t row, int64_t first_half) {
  using S = Storage<F>;
  const int64_t panel_bytes = static_cast<int64_t>(m.padded_in()) / S::kColumns * kLineStride;
  const char* line = lines_of(m, first_half, S::kColumns);
  const float* x = p.x + row * p.x_stride;
  vfloat acc[H][M][kVectors] = {};
  for (int groups = m.padded_in() / kGroup; groups > 0; --groups)
#pragma GCC unroll 2
    for (int k = 0; k < kGroup; k += S::kColumns, x += S::kColumns, line += kLineStride) {
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
            for (int i = 0; i < kVectors; ++i) acc[h][r][i] += splat(x[r * p.x_stride + step]) * w[i];
        }
    }
#pragma GCC unroll 16
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 16
    for (int r = 0; r < M; ++r) store_row(m, p, row + r, (first_half + h) * kHalf, acc[h][r]);
}

// M rows of x times all of some panels. One row is bound by memory, where more panels side by side are more streams.
template <int F, int M>
static void tile(const Matrix& m, const Product& p, int64_t row, Range halves) {  // whole panels
  constexpr int kSpare = kVectors == 1 ? 2 : 1;  // wide vectors leave registers for twice as much
  constexpr int kTogether = kSpare * (M > 2 ? 1 : M == 2 ? 2 : 4);
  int64_t half = halves.begin;
  for (; half + kTogether <= halves.end; half += kTogether) few_rows<F, M, kTogether>(m, p, row, half);
  if constexpr (kTogether > kHalves)
    for (; half < halves.end; half += kHalves) few_rows<F, M, kHalves>(m, p, row, half);
}

template <int F>
static void tile_of(int64_t rows, const Matrix& m, const Product& p, int64_t row, Range halves) {
  switch (rows) {
    case 1: return tile<F, 1>(m, p, row, halves);
    case 2: return tile<F, 2>(m, p, row, halves);
    case 3: return tile<F, std::min(3, kTileRows)>(m, p, row, halves);
    case 4: return tile<F, std::min(4, kTileRows)>(m, p, row, halves);
    case 5: return tile<F, std::min(5, kTileRows)>(m, p, row, halves);
    default: return tile<F, kTileRows>(m, p, row, halves);
  }
}

// Rows in tiles of nearly equal height; a panel stays in the cache for all of a block.
template <int F>
static void multiply_floats(const Matrix& m, const Product& p, Range panels) {
  const Range halves{panels.begin * kHalves, panels.end * kHalves};
  for (int64_t first = 0; first < p.rows; first += kRowBlock) {
    const int64_t rows = std::min<int64_t>(kRowBlock, p.rows - first);
    const int64_t tiles = (rows + kTileRows - 1) / kTileRows, step = tiles == 1 ? halves.end - halves.begin : kHalves;
    for (int64_t half = halves.begin; half < halves.end; half += step)
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t begin = rows * t / tiles, end = rows * (t + 1) / tiles;
        tile_of<F>(end - begin, m, p, first + begin, {half, std::min(half + step, halves.end)});
      }
  }
}

// A row of codes, as they were looked up, becomes the numbers that they stand for.
static void apply_scales(const Matrix& m, int64_t half, int lane, float* y) {
  const HalfPanel panel(m, half);
  for (int g = 0; g < m.in / m.group; ++g, y += m.group) {
    const float scale = panel.one_scale(g, lane), low = panel.one_minimum(g, lane, scale);
    for (int k = 0; k < m.group; ++k) y[k] = scale * y[k] + low;
  }
}

template <int F>
static void look_up_format(const Matrix& m, const int64_t* ids, Range range, float* y, int64_t y_stride) {
  using S = Storage<F>;
  for (int64_t i = range.begin; i < range.end; ++i) {
    const int64_t half = ids[i] / kHalf;
    const int lane = static_cast<int>(ids[i] % kHalf);
    const char* lines = lines_of(m, half, S::kColumns);
    float* row = y + i * y_stride;
    for (int k = 0; k < m.in; ++k) row[k] = S::element(lines + k / S::kColumns * kLineStride, lane, k % S::kColumns);
    if (m.group != 0) apply_scales(m, half, lane, row);
  }
}

int64_t scratch_floats(int64_t rows, int64_t in) { return rounded_floats(rows, (in + kGroup - 1) / kGroup * kGroup); }

bool is_known(const Matrix& m) {
  const bool quantized = m.format == kQ8 || m.format == kQ4 || m.format == kQ8Dot;
  const bool grouped = m.group == 16 || m.group == 32 || m.group == 64 || m.group == 128;
  return quantized ? grouped && m.in % m.group == 0 && m.in % kGroup == 0 : m.format >= kF32 && m.format <= kF16;
}

Product prepare(const Team& team, const Matrix& matrix, const Product& product) {
  if (matrix.group != 0) round_inputs(team, matrix, product);
  return product;
}

void multiply(const Matrix& matrix, const Product& prepared, Range panels) {
  switch (matrix.format) {
    case kF32: return multiply_floats<kF32>(matrix, prepared, panels);
    case kBF16: return multiply_floats<kBF16>(matrix, prepared, panels);
    case kF16: return multiply_floats<kF16>(matrix, prepared, panels);
    default: return multiply_integers(matrix, prepared, panels);
  }
}

void look_up(const Team& team, const Matrix& matrix, const int64_t* ids, int64_t count, float* y, int64_t y_stride) {
  const Range range = team.share(count);
  switch (matrix.format) {
    case kF32: return look_up_format<kF32>(matrix, ids, range, y, y_stride);
    case kBF16: return look_up_format<kBF16>(matrix, ids, range, y, y_stride);
    case kF16: return look_up_format<kF16>(matrix, ids, range, y, y_stride);
    case kQ4: return look_up_format<kQ4>(matrix, ids, range, y, y_stride);
    default: return look_up_format<kQ8>(matrix, ids, range, y, y_stride);
  }
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

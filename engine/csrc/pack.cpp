// Puts rows of a matrix into the panels that matmul.h describes.
#include <cstdint>
#include <cstring>

#include "matmul.h"

namespace quire {

struct PackArgs {
  const void* source;  // [num_rows, num_columns]
  void* target;        // panels of the whole matrix
  int64_t source_stride, first_row;
  int32_t num_rows, num_columns, padded_columns;
  int32_t format;  // of a matrix; or -1 and -2 for lines of scales, 4 and 2 bytes each
  int32_t num_threads;
};

// Where element (row, column) of a matrix lies: `kSize` bytes, `kColumns` of them in a line, side by side in a word or
// 16 rows after 16 rows.
template <int kSize, int kColumns, bool kWords>
static char* place(const PackArgs& a, int64_t row, int64_t column) {
  const int64_t line = row / kPanel * (a.padded_columns / kColumns) + column / kColumns;
  const int64_t half = row % kPanel / 16, lane = row % 16, step = column % kColumns;
  const int64_t element = kWords ? lane * kColumns + step : step * 16 + lane;
  return static_cast<char*>(a.target) + (line * (kPanel / 16) + half) * 64 + element * kSize;
}

template <int kSize, int kColumns, bool kWords = false>
static void pack_elements(const PackArgs& a, Range columns) {
  for (int64_t r = 0; r < a.num_rows; ++r) {
    const char* x = static_cast<const char*>(a.source) + r * a.source_stride * kSize;
    for (int64_t k = columns.begin; k < columns.end; ++k)
      std::memcpy(place<kSize, kColumns, kWords>(a, a.first_row + r, k), x + k * kSize, kSize);
  }
}

// Two half bytes as one byte: half as many columns, four of them in a word.
static PackArgs half_bytes_as_pairs(PackArgs args) {
  args.padded_columns /= 2;
  return args;
}

static void pack_half_bytes(const PackArgs& a, Range pairs) {
  const PackArgs as_pairs = half_bytes_as_pairs(a);
  for (int64_t r = 0; r < a.num_rows; ++r) {
    const int8_t* x = static_cast<const int8_t*>(a.source) + r * a.source_stride;
    for (int64_t k = pairs.begin; k < pairs.end; ++k) {
      const int byte = (x[2 * k] & 15) | (x[2 * k + 1] & 15) << 4;
      *place<1, 4, true>(as_pairs, a.first_row + r, k) = static_cast<char>(byte);
    }
  }
}

// Scales [group][32] of a panel.
template <int kSize>
static void pack_scales(const PackArgs& a, Range groups) {
  for (int64_t r = 0; r < a.num_rows; ++r) {
    const int64_t row = a.first_row + r;
    const char* x = static_cast<const char*>(a.source) + r * a.source_stride * kSize;
    char* y = static_cast<char*>(a.target) + (row / kPanel * a.padded_columns * kPanel + row % kPanel) * kSize;
    for (int64_t g = groups.begin; g < groups.end; ++g) std::memcpy(y + g * kPanel * kSize, x + g * kSize, kSize);
  }
}

}  // namespace quire

// Returns 0, or 1 for a format that it does not know. Half bytes come as int8, an even number of columns.
extern "C" int quire_pack(const quire::PackArgs* args) {
  using namespace quire;
  if (args->format < -2 || args->format > kQ8Dot) return 1;
  run_team(args->num_threads, [&](const Team& team) {
    const Range columns = team.share(args->num_columns);
    switch (args->format) {
      case -2: return pack_scales<2>(*args, columns);
      case -1: return pack_scales<4>(*args, columns);
      case kF32: return pack_elements<4, 1>(*args, columns);
      case kBF16: return pack_elements<2, 2, true>(*args, columns);
      case kF16: return pack_elements<2, 2>(*args, columns);
      case kQ4: return pack_half_bytes(*args, team.share(args->num_columns / 2));
      default: return pack_elements<1, 4, true>(*args, columns);
    }
  });
  return 0;
}

// y = x W^T with float32 activations and weights in a compact storage form. Float-like weights are widened in registers:
// the product is that of the widened matrix, in float32. Quantized weights are multiplied as integers, for which x is
// rounded, too (round.h): to 16 bits, or to 8 where Q8Dot says so.
//
// Weights are packed into panels of 32 output rows, input columns one after the other:
//
//   panel                    32 rows, two halves of 16; lines of 64 bytes: half 0, half 1, half 0, ...
//   a line                   some columns of 16 rows:
//     F32      1 column      16 floats
//     BF16     2 columns     16 words, the first column low
//     F16      2 columns     16 halfs, 16 halfs
//     Q8       4 columns     16 words, the first column in the lowest byte
//     Q8Dot    4 columns     the same; -127..127
//     Q4       8 columns     16 words, the first column in the lowest half byte
//   panel, group g           32 scales, 32 minima: one of each for `group` columns of a row
//   value = scale * q + minimum; without minima that is scale * q for 8 bits, scale * (q - 8) for 4
//
// Columns are padded to whole groups of 32 and rows to whole panels, with zeros.
#pragma once
#include <cstdint>

#include "team.h"

namespace quire {

constexpr int kPanel = 32;  // output rows side by side
constexpr int kGroup = 32;  // input columns are padded to a multiple of this

enum Format : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2, kQ8 = 3, kQ4 = 4, kQ8Dot = 5 };

struct Matrix {
  const void* weights;  // packed
  const void* scales;   // [panels, groups, 32] float or half, or null
  const void* mins;     // the same, or null: no minima
  const float* bias;    // [out], or null
  int32_t in, out, format, half_scales;
  int32_t group;       // columns that share a scale: 16, 32, 64 or 128, a divisor of `in`; 0: there are no scales
  uint8_t heights[8];  // how to go about so many rows, never what comes out: see dot.h

  int padded_in() const { return (in + kGroup - 1) / kGroup * kGroup; }
  int panels() const { return (out + kPanel - 1) / kPanel; }
};

struct Product {
  const float* x;  // [rows, padded_in]: zeros past `in`
  float* y;        // [rows, out]
  int64_t x_stride, y_stride;
  int32_t rows;
  bool add;        // y += instead of y =
  float* scratch;  // scratch_floats(rows, in), for `prepare`
};

int64_t scratch_floats(int64_t rows, int64_t in);

bool is_known(const Matrix& matrix);

// This member's share of what the kernels need beside x, into the scratch; the product to go on with. The team waits
// before it multiplies, and before the scratch is used again.
Product prepare(const Team& team, const Matrix& matrix, const Product& product);

// The outputs of some panels.
void multiply(const Matrix& matrix, const Product& prepared, Range panels);

// y[i] = row ids[i] of the matrix, [count, in].
void look_up(const Team& team, const Matrix& matrix, const int64_t* ids, int64_t count, float* y, int64_t y_stride);

}  // namespace quire

// x rounded to integers, as products with quantized weights take it: in the groups of columns that share a scale in W.
#pragma once
#include "matmul.h"

namespace quire {

// In a product's scratch.
struct Rounded {
  int32_t* words;  // [rows, stride]: the columns of x that meet one word of W
  float* scales;   // [rows, groups]
  float* sums;     // [rows, groups], of the rounded x
  int64_t stride, groups;
};

int64_t rounded_floats(int64_t rows, int64_t padded_in);

Rounded rounded(const Matrix& matrix, const Product& product);

// This member's share.
void round_inputs(const Team& team, const Matrix& matrix, const Product& product);

}  // namespace quire

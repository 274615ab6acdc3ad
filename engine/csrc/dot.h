// y = x W^T with quantized W: x is rounded, too (round.h), and integers are multiplied. Sums within a group are exact;
// then come both scales and the minima, group after group. So a row's result is the same bits whatever rows are computed
// beside it, and however.
#pragma once
#include "matmul.h"

namespace quire {

constexpr int kSliced = 255;  // a height: a slice of the panel is taken apart for all rows

// `Matrix::heights`: how many rows of x make a tile that takes the words of W apart in registers (1 to 4), or kSliced; 0
// leaves it to the kernels. One for 1, 2, 3-4, 5-8, 9-16, 17-32, 33-64 rows, and one for more.
//
// The outputs of some panels; x lies rounded in the product's scratch.
void multiply_integers(const Matrix& matrix, const Product& prepared, Range panels);

}  // namespace quire

// The small operators around matmul and attention, each one pass over its data, float32:
//
//   rotations       cosines and sines of position * frequency                (Su et al. 2021)
//   rms_norm        x / rms(x) * weight                                      (Zhang & Sennrich 2019)
//   rope_store      normalise (where the model does) and rotate q and k      (Su et al. 2021, half-split pairs),
//                   put k and v into the paged pool
//   silu_multiply   silu(gate) * up                                          (Shazeer 2020)
#pragma once
#include <cstdint>

#include "team.h"

namespace quire {

struct NormArgs {
  const float* x;
  const float* weight;  // [width]
  float* out;
  int64_t x_stride, out_stride;
  int32_t rows, width;
  float epsilon;
};

struct RotationArgs {
  const int64_t* positions;  // [rows]
  const float* frequencies;  // [half], radians per token
  float* cosines;            // [rows, half]
  float* sines;              // [rows, half]
  int32_t half;
  float factor;  // of both
};

struct RopeStoreArgs {
  float* qkv;            // [rows, heads + 2 kv_heads, head_dim]; q is changed in place
  const float* q_norm;   // [head_dim], or null
  const float* k_norm;   // the same
  const float* cosines;  // [rows, head_dim / 2]
  const float* sines;    // [rows, head_dim / 2]
  void* pool;            // one layer
  const int64_t* slots;  // [rows]: block * block_size + offset
  int64_t qkv_stride, block_stride, value_offset, token_stride, head_stride;
  int32_t rows, num_heads, num_kv_heads, head_dim, block_size, kv_dtype;
  float epsilon;
};

struct SiluMultiplyArgs {
  const float* gate_up;  // [rows, 2 * width]: gate, then up
  float* out;            // [rows, width]
  int64_t gate_up_stride, out_stride;
  int32_t rows, width;
};

// The first two do some rows, the others some heads (queries, then keys, then values) or some columns of all rows.
void rotations(const RotationArgs& args, Range rows);
void rms_norm(const NormArgs& args, Range rows);
void rope_store(const RopeStoreArgs& args, Range heads);
void silu_multiply(const SiluMultiplyArgs& args, Range columns);

}  // namespace quire

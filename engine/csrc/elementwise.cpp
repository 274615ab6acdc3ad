#include "elementwise.h"

#include <cmath>

#include "kv_codes.h"
#include "simd.h"

namespace quire {

static void norm_row(const float* x, const float* weight, float* out, int width, float epsilon) {
  vfloat squares{};
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) squares += load(x + i) * load(x + i);
  float sum = reduce_add(squares);
  for (; i < width; ++i) sum += x[i] * x[i];
  const float inverse = 1.0f / std::sqrt(sum / width + epsilon);
  for (i = 0; i < width; ++i) out[i] = x[i] * inverse * weight[i];
}

void rms_norm(const NormArgs& a, Range rows) {
  for (int64_t r = rows.begin; r < rows.end; ++r)
    norm_row(a.x + r * a.x_stride, a.weight, a.out + r * a.out_stride, a.width, a.epsilon);
}

void rotations(const RotationArgs& a, Range rows) {
  for (int64_t r = rows.begin; r < rows.end; ++r)
    for (int i = 0; i < a.half; ++i) {
      const float angle = static_cast<float>(a.positions[r]) * a.frequencies[i];
      a.cosines[r * a.half + i] = std::cos(angle) * a.factor;
      a.sines[r * a.half + i] = std::sin(angle) * a.factor;
    }
}

static void rotate(float* x, const float* cosines, const float* sines, int half) {
  for (int i = 0; i < half; ++i) {
    const float first = x[i], second = x[i + half];
    x[i] = first * cosines[i] - second * sines[i];
    x[i + half] = second * cosines[i] + first * sines[i];
  }
}

template <typename KV>
static void put(const RopeStoreArgs& a, const float* source, int64_t cell, int kv_head) {
  KV* pool = static_cast<KV*>(a.pool) + cell;
  KV* target = pool + kv_head * a.head_stride;
  if constexpr (is_code<KV>) {
    quantize_head(source, target, scale_of(pool, a.num_kv_heads, a.head_dim, kv_head), a.head_dim);
  } else {
    for (int i = 0; i < a.head_dim; ++i) from_float(source[i], target + i);
  }
}

static void put(const RopeStoreArgs& a, const float* source, int64_t cell, int kv_head) {
  switch (a.kv_dtype) {
    case kBFloat16: return put<BFloat16>(a, source, cell, kv_head);
    case kFloat16: return put<Float16>(a, source, cell, kv_head);
    case kInt8: return put<Int8Code>(a, source, cell, kv_head);
    case kFloat8E4M3: return put<Float8Code>(a, source, cell, kv_head);
    default: return put<float>(a, source, cell, kv_head);
  }
}

// One head of one row: a query head is changed in place, a key head too and then stored, a value head stored.
static void rope_store_head(const RopeStoreArgs& a, int64_t row, int head) {
  const int half = a.head_dim / 2;
  float* x = a.qkv + row * a.qkv_stride + static_cast<int64_t>(head) * a.head_dim;
  const bool is_query = head < a.num_heads, is_value = head >= a.num_heads + a.num_kv_heads;
  if (!is_value) {
    const float* norm = is_query ? a.q_norm : a.k_norm;
    if (norm) norm_row(x, norm, x, a.head_dim, a.epsilon);
    rotate(x, a.cosines + row * half, a.sines + row * half, half);
  }
  if (is_query) return;
  const int64_t block = a.slots[row] / a.block_size, offset = a.slots[row] % a.block_size;
  const int kv_head = head - a.num_heads - (is_value ? a.num_kv_heads : 0);
  put(a, x, block * a.block_stride + offset * a.token_stride + (is_value ? a.value_offset : 0), kv_head);
}

void rope_store(const RopeStoreArgs& a, Range heads) {
  for (int64_t row = 0; row < a.rows; ++row)
    for (int64_t head = heads.begin; head < heads.end; ++head) rope_store_head(a, row, static_cast<int>(head));
}

// silu(x) * up = x * up / (1 + exp(-x)), through exp(-|x|) so that nothing overflows.
static inline vfloat silu_times(vfloat x, vfloat up) {
  const vfloat e = exp_nonpositive(x < vfloat{} ? x : -x);
  return x * (x < vfloat{} ? e : splat(1.0f)) / (splat(1.0f) + e) * up;
}

static void silu_span(const float* gate, const float* up, float* out, int count) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, silu_times(load(gate + i), load(up + i)));
  if (i == count) return;
  alignas(64) float g[kLanes] = {}, u[kLanes] = {}, y[kLanes];
  std::copy(gate + i, gate + count, g);
  std::copy(up + i, up + count, u);
  store(y, silu_times(load(g), load(u)));
  std::copy_n(y, count - i, out + i);
}

void silu_multiply(const SiluMultiplyArgs& a, Range columns) {
  for (int64_t row = 0; row < a.rows; ++row) {
    const float* gate = a.gate_up + row * a.gate_up_stride + columns.begin;
    silu_span(gate, gate + a.width, a.out + row * a.out_stride + columns.begin, static_cast<int>(columns.size()));
  }
}

}  // namespace quire

// The operators on their own, on one thread.
extern "C" void quire_rms_norm(const quire::NormArgs* args) { quire::rms_norm(*args, {0, args->rows}); }
extern "C" void quire_rope_store(const quire::RopeStoreArgs* args) {
  quire::rope_store(*args, {0, args->num_heads + 2 * args->num_kv_heads});
}
extern "C" void quire_silu_multiply(const quire::SiluMultiplyArgs* args) {
  quire::silu_multiply(*args, {0, args->width});
}

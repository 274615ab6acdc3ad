// A group's scale is its largest magnitude / 32767 (or / 127), so nothing overflows, and a column loses half of that at
// most: with 16 bits a hundred times less than bfloat16 would lose.
#include "round.h"

#include <cfloat>
#include <cstring>

#include "simd.h"

namespace quire {

constexpr int kMinGroup = 16, kMaxGroup = 128;

int64_t rounded_floats(int64_t rows, int64_t padded_in) { return rows * (padded_in / 2 + 2 * padded_in / kMinGroup); }

Rounded rounded(const Matrix& m, const Product& p) {
  const int64_t stride = m.padded_in() / (m.format == kQ8Dot ? 4 : 2), groups = m.padded_in() / m.group;
  float* const scales = p.scratch + p.rows * stride;
  return {reinterpret_cast<int32_t*>(p.scratch), scales, scales + p.rows * groups, stride, groups};
}

struct GroupCodes {
  alignas(64) int32_t codes[kMaxGroup];
  float scale, sum;  // of what the codes stand for
};

// What is not finite makes the scale, and so the whole row, not a number. A scale too small to be exact is none.
static void round_group(const float* x, int count, float largest, GroupCodes& group) {
  vfloat top{}, rest{};
  for (int k = 0; k < count; k += kLanes) {
    const vfloat some = load(x + k);
    top = quire::max(some < vfloat{} ? -some : some, top), rest += some - some;
  }
  const float scale = reduce_max(top) / largest, wrong = reduce_add(rest);
  if (wrong != 0.0f || scale < FLT_MIN) {
    std::memset(group.codes, 0, sizeof(int32_t) * count);
    group.scale = group.sum = wrong;
    return;
  }
  vint sum{};
  for (int k = 0; k < count; k += kLanes) {
    const vfloat whole = load(x + k) / splat(scale) + splat(0x1.8p23f);  // rounded, in the lowest bits
    const vint code = reinterpret_cast<vint>(whole) - 0x4b400000;
    *reinterpret_cast<vint*>(group.codes + k) = code;
    sum += code;
  }
  int32_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += sum[i];
  group.scale = scale, group.sum = scale * static_cast<float>(total);
}

// Two columns to a word, the first one low, the second one kApart columns after it: a line has kApart words.
template <int kApart>
static void pack_pairs(const int32_t* codes, int count, int32_t* words) {
  typedef int32_t vpart __attribute__((vector_size(kApart * 4), aligned(4), may_alias));
  for (int k = 0; k < count; k += 2 * kApart, words += kApart) {
    const vpart low = *reinterpret_cast<const vpart*>(codes + k), high = *reinterpret_cast<const vpart*>(codes + k + kApart);
    *reinterpret_cast<vpart*>(words) = (low & 0xffff) | high << 16;
  }
}

// Four columns to a word, in their order.
static void pack_fours(const int32_t* codes, int count, int32_t* words) {
  typedef int8_t vcode __attribute__((vector_size(kLanes), aligned(1), may_alias));
  for (int k = 0; k < count; k += kLanes)
    *reinterpret_cast<vcode*>(words + k / 4) = __builtin_convertvector(*reinterpret_cast<const vint*>(codes + k), vcode);
}

void round_inputs(const Team& team, const Matrix& m, const Product& p) {
  const Rounded to = rounded(m, p);
  const int64_t columns_of_word = m.padded_in() / to.stride;
  const Range units = team.share(p.rows * to.groups);
  GroupCodes group;
  for (int64_t u = units.begin; u < units.end; ++u) {
    const int64_t row = u / to.groups, first = u % to.groups * m.group;
    round_group(p.x + row * p.x_stride + first, m.group, m.format == kQ8Dot ? 127.0f : 32767.0f, group);
    int32_t* const words = to.words + row * to.stride + first / columns_of_word;
    switch (m.format) {
      case kQ4: pack_pairs<4>(group.codes, m.group, words); break;
      case kQ8: pack_pairs<2>(group.codes, m.group, words); break;
      default: pack_fours(group.codes, m.group, words);
    }
    to.scales[u] = group.scale, to.sums[u] = group.sum;
  }
}

}  // namespace quire

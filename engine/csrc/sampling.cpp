// The draw over rows of logits, and each row's place in its order of likelihood:
//
//   quire_race    the token with the highest  x - log E,  E exponential noise of (key, token id)
//   quire_ahead   how many tokens lie ahead of a border, and which share of the probability
//
// The noise is that of engine/sampling/race.py, the same bits of hash and the same uniform number. Only a token that can
// still win has its two logarithms computed: a bound on the noise, from the exponent and mantissa of the uniform
// number, dismisses all but some dozens of a row.
#include <cmath>
#include <limits>

#include "simd.h"
#include "team.h"

namespace quire {

struct RaceArgs {
  const float* logits;         // [rows, width]
  const int64_t* ids;          // [rows, width] token ids, or null: the columns
  const int32_t* keys;         // [rows, 2]
  const float* border_logits;  // [rows], or null: every token runs
  const int64_t* border_ids;   // [rows]
  int64_t* tokens;             // [rows], what quire_race finds
  float* peaks;                // [rows]: highest logits
  int64_t* counts;             // [rows], what quire_ahead finds
  double* shares;              // [rows]
  int32_t rows, width, num_threads;
};

typedef uint32_t vuint __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kMaxNoise = 22.2f;           // -log of the smallest uniform number, 2^-32
constexpr float kStep = 0x1.fffffep-32f;     // 2^-31 (1 - 2^-24)
constexpr float kLog2 = 0.69314718f;
constexpr float kSlack = 1e-4f;              // above the rounding errors of a bound

static inline vint splat_int(int32_t x) { return x - vint{}; }

static inline bool any(vint mask) {
#if defined(__AVX512DQ__)
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(mask)) != 0;
#elif defined(__AVX__) && !defined(__AVX512F__)
  return _mm256_movemask_ps(reinterpret_cast<__m256>(mask)) != 0;
#else
  for (int i = 0; i < kLanes; ++i)
    if (mask[i]) return true;
  return false;
#endif
}

static inline vint lane_numbers() {
  vint v;
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}

// Columns `first ...` of a row, -inf beyond its end.
static inline vfloat load_padded(const float* x, int first, int width) {
  if (first + kLanes <= width) return load(x + first);
  vfloat v = splat(-kInfinity);
  for (int i = 0; first + i < width; ++i) v[i] = x[first + i];
  return v;
}

static float highest(const float* x, int width) {
  vfloat top = splat(-kInfinity);
  for (int i = 0; i < width; i += kLanes) top = max(load_padded(x, i, width), top);
  return reduce_max(top);
}

// Uniform numbers inside (0, 1) of token ids: lowbias32 (Wellons 2018) over the spread ids, a key word before each
// multiplication. The last shift is arithmetic: it clears the top bit.
static inline vfloat uniforms(vint ids, const int32_t* key) {
  vuint h = reinterpret_cast<vuint>(ids) * 0x9E3779B9u ^ static_cast<uint32_t>(key[0]);
  h = (h ^ h >> 16) * 0x7FEB352Du;
  h = (h ^ h >> 15 ^ static_cast<uint32_t>(key[1])) * 0x846CA68Bu;
  const vint bits = reinterpret_cast<vint>(h) ^ reinterpret_cast<vint>(h) >> 16;
  return (__builtin_convertvector(bits, vfloat) + splat(0.5f)) * splat(kStep);
}

// At least -log E. E = -log(1 - v) >= v, and the float's bits, read as a number, are at most log2 v.
static inline vfloat noise_bound(vfloat v) {
  const vfloat bits = __builtin_convertvector(reinterpret_cast<vint>(v), vfloat);
  return (splat(127.0f) - bits * splat(0x1p-23f)) * splat(kLog2) + splat(kSlack);
}

static inline float noise(float v) { return -std::log(-std::log1p(-v)); }

// One row: the runners' peak is subtracted first, so that scores are small numbers however large the logits are.
static void race_row(const RaceArgs& a, int64_t row) {
  const float* x = a.logits + row * a.width;
  const int64_t* ids = a.ids ? a.ids + row * a.width : nullptr;
  const float border = a.border_logits ? a.border_logits[row] : -kInfinity;
  const int64_t border_id = a.border_logits ? a.border_ids[row] : std::numeric_limits<int64_t>::max();
  const float peak = highest(x, a.width);
  const vint lanes = lane_numbers();
  float best = -kInfinity;
  int winner = 0;
  for (int i = 0; i < a.width; i += kLanes) {
    const vfloat logit = load_padded(x, i, a.width), lead = logit - splat(peak);
    const vint runs = (lead + splat(kMaxNoise) > splat(best)) & (logit >= splat(border));
    if (!any(runs)) continue;
    vint id = lanes + i;
    if (ids)
      for (int j = 0; j < kLanes && i + j < a.width; ++j) id[j] = static_cast<int32_t>(ids[i + j]);
    const vfloat v = uniforms(id, a.keys + row * 2), bound = lead + noise_bound(v);
    const vint hopeful = runs & (bound > splat(best));
    if (!any(hopeful)) continue;
    for (int j = 0; j < kLanes; ++j) {
      if (!hopeful[j] || (logit[j] == border && id[j] >= border_id)) continue;
      const float score = lead[j] + noise(v[j]);
      if (score > best) best = score, winner = i + j;
    }
  }
  a.tokens[row] = ids ? ids[winner] : winner;
  a.peaks[row] = peak;
}

// Sums in short runs of float32 and those in float64: exact to a few units of float32's last place.
static void ahead_row(const RaceArgs& a, int64_t row) {
  constexpr int kRun = 64 * kLanes;
  const float* x = a.logits + row * a.width;
  const vfloat peak = splat(highest(x, a.width)), border = splat(a.border_logits[row]);
  const vint border_id = splat_int(static_cast<int32_t>(a.border_ids[row])), lanes = lane_numbers();
  double total = 0, before = 0;
  vint count{};
  for (int first = 0; first < a.width; first += kRun) {
    vfloat run_total{}, run_before{};
    for (int i = first; i < std::min(first + kRun, a.width); i += kLanes) {
      const vfloat logit = load_padded(x, i, a.width), weight = exp_nonpositive(logit - peak);
      const vint is_ahead = (logit > border) | ((logit == border) & (lanes + i < border_id));
      run_total += weight;
      run_before += is_ahead ? weight : vfloat{};
      count -= is_ahead;
    }
    total += reduce_add(run_total);
    before += reduce_add(run_before);
  }
  int64_t counted = 0;
  for (int j = 0; j < kLanes; ++j) counted += count[j];
  a.counts[row] = counted;
  a.shares[row] = before / total;
}

// Whole rows, shared out.
template <typename Row>
static void each_row(const RaceArgs& a, Row row) {
  run_team(std::min(a.num_threads, a.rows), [&](const Team& team) {
    const Range rows = team.share(a.rows);
    for (int64_t r = rows.begin; r < rows.end; ++r) row(a, r);
  });
}

}  // namespace quire

extern "C" int quire_race(const quire::RaceArgs* args) {
  quire::each_row(*args, quire::race_row);
  return 0;
}

extern "C" int quire_ahead(const quire::RaceArgs* args) {
  quire::each_row(*args, quire::ahead_row);
  return 0;
}

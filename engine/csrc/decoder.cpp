// The forward pass of a decoder as one call and one parallel region: the same steps, in the same order, as
// engine/models/decoder.py, which stays the meaning and the test of this. Every line below is a kernel that the whole
// team runs together; `wait` stands wherever one reads what another has written. Waits cost more than small work, so a
// member goes on with what it has computed itself where it can: it rotates its own heads and activates its own columns,
// and with few rows each member normalises all of them for itself.
#include <cassert>
#include <cstring>
#include <map>
#include <numeric>

#include "attention.h"
#include "elementwise.h"
#include "matmul.h"

namespace quire {

// A projection: matrices with the same input, their outputs side by side. One, unless parts are stored differently.
struct Projection {
  const Matrix* parts;
  int32_t num_parts, in, out;
};

struct Layer {
  const float *input_norm, *mlp_norm, *q_norm, *k_norm;  // the last two may be null
  Projection qkv, output, gate_up, down;
  int32_t window;  // 0: none
};

struct DecoderArgs {
  const Layer* layers;
  const float* final_norm;
  Matrix embedding;
  int32_t num_layers, hidden_size, intermediate_size;
  float epsilon;
  // The step. `attention` describes it but for q, out and window; its `kv` is the first layer's.
  AttentionArgs attention;
  int64_t layer_bytes;       // from a layer's keys to the next one's
  const int64_t* token_ids;  // [num_tokens]
  const int64_t* slots;      // [num_tokens]
  const int64_t* positions;  // [num_tokens]
  const float* frequencies;  // [head_dim / 2], radians per token
  float* workspace;          // quire_decoder_workspace(args), 64-byte aligned
  float* out;                // [num_tokens, hidden_size]
  float rotation_factor;     // of cosines and sines
  int32_t num_tokens, num_threads;
};

constexpr int kFewRows = 8;  // so few that a member prepares them by itself

static int64_t padded(int64_t width) { return (width + kGroup - 1) / kGroup * kGroup; }

// Activations, rows padded with zeros to whole groups.
struct Buffer {
  float* rows;
  int64_t stride;
};

// One member's view of the workspace. What it prepares by itself is its own, the rest is shared.
struct Workspace {
  const DecoderArgs& a;
  const Team team;
  const bool few;  // rows
  Buffer hidden, normed, qkv, mixed, gate_up, activated;
  float *cosines, *sines;  // [num_tokens, head_dim / 2]
  float* scratch;
  int64_t floats = 0;

  Workspace(const DecoderArgs& args, const Team& member) : a(args), team(member), few(args.num_tokens <= kFewRows) {
    const int64_t queries = num_queries(), widest = std::max<int64_t>({a.hidden_size, queries, a.intermediate_size});
    hidden = take(a.hidden_size);
    qkv = take(queries + 2LL * a.attention.num_kv_heads * a.attention.head_dim);
    mixed = take(queries);
    gate_up = take(2LL * a.intermediate_size);
    activated = take(a.intermediate_size);
    const int64_t angles = padded(static_cast<int64_t>(a.num_tokens) * (a.attention.head_dim / 2));
    cosines = a.workspace + floats, sines = cosines + angles;
    floats += 2 * angles;
    const int64_t shared = floats;
    normed = take(a.hidden_size);
    scratch = a.workspace + floats;
    floats += padded(scratch_floats(a.num_tokens, widest));
    const int64_t own = few ? floats - shared : 0;
    normed.rows += own * team.rank, scratch += own * team.rank;
    floats += own * (team.size - 1);
  }

  // Who prepares what this member reads.
  Team preparers() const { return few ? Team::alone() : team; }

  // The padding of what is read in whole groups; kernels write the rest.
  void clear_padding() const {
    clear(normed, a.hidden_size, preparers().share(a.num_tokens));
    clear(mixed, num_queries(), team.share(a.num_tokens));
    clear(activated, a.intermediate_size, team.share(a.num_tokens));
  }

 private:
  int64_t num_queries() const { return static_cast<int64_t>(a.attention.num_heads) * a.attention.head_dim; }

  Buffer take(int64_t width) {
    const Buffer buffer{a.workspace + floats, padded(width)};
    floats += a.num_tokens * buffer.stride;
    return buffer;
  }

  static void clear(const Buffer& buffer, int64_t width, const Range& rows) {
    for (int64_t r = rows.begin; r < rows.end; ++r)
      std::memset(buffer.rows + r * buffer.stride + width, 0, (buffer.stride - width) * sizeof(float));
  }
};

// What the whole team shares beside the activations: plans by window, and a work counter for each layer's attention.
struct Shared {
  std::map<int32_t, AttentionPlan> plans;
  std::vector<std::atomic<int>> next;

  explicit Shared(const DecoderArgs& a) : next(a.num_layers) {
    for (int i = 0; i < a.num_layers; ++i) {
      AttentionArgs attention = a.attention;
      attention.window = a.layers[i].window;
      plans.try_emplace(attention.window, attention, a.num_threads);
      next[i].store(0);
    }
  }
};

// One member's view of the pass.
class Pass {
 public:
  Pass(const DecoderArgs& args, Shared& shared, const Team& team)
      : a_(args), t_(args.attention), w_(args, team), shared_(shared), team_(team), scratch_(args.attention) {}

  void run() {
    w_.clear_padding();
    rotations({a_.positions, a_.frequencies, w_.cosines, w_.sines, t_.head_dim / 2, a_.rotation_factor},
              team_.share(a_.num_tokens));
    look_up(team_, a_.embedding, a_.token_ids, a_.num_tokens, w_.hidden.rows, w_.hidden.stride);
    team_.wait();
    for (int i = 0; i < a_.num_layers; ++i) {
      attention(a_.layers[i], i);
      mlp(a_.layers[i]);
    }
    norm(a_.final_norm, {a_.out, a_.hidden_size}, team_);
  }

 private:
  void attention(const Layer& layer, int index) {
    prepared_norm(layer.input_norm);
    project(layer.qkv, w_.normed, w_.qkv, std::lcm(t_.head_dim, kPanel), [&](Range outputs) {
      rope_store(rope_args(layer, index), {outputs.begin / t_.head_dim, outputs.end / t_.head_dim});
    });
    team_.wait();
    attend_over_pool(layer, index);
    team_.wait();
    add(layer.output, w_.mixed);
    team_.wait();
  }

  void mlp(const Layer& layer) {
    prepared_norm(layer.mlp_norm);
    gate_and_up(layer);
    team_.wait();
    add(layer.down, w_.activated);
    team_.wait();
  }

  void norm(const float* weight, const Buffer& out, const Team& team) {
    rms_norm({w_.hidden.rows, weight, out.rows, w_.hidden.stride, out.stride, a_.num_tokens, a_.hidden_size, a_.epsilon},
             team.share(a_.num_tokens));
  }

  void prepared_norm(const float* weight) {
    norm(weight, w_.normed, w_.preparers());
    w_.preparers().wait();
  }

  // y = x W^T; the next part may use the scratch anew. `then` gets each range of outputs that this member computed,
  // multiples of `unit` outputs of the whole projection.
  template <typename Then>
  void project(const Projection& projection, const Buffer& x, const Buffer& y, int unit, Then&& then) {
    int64_t first = 0;
    for (int i = 0; i < projection.num_parts; ++i) {
      const Matrix& part = projection.parts[i];
      if (i > 0) w_.preparers().wait();
      const Product product = prepared(part, x, {y.rows + first, y.stride}, false);
      const Range outputs = share_outputs(part.out, unit);
      multiply(part, product, panels_of(outputs));
      then(Range{first + outputs.begin, first + outputs.end});
      first += part.out;
    }
  }

  // hidden += x W^T
  void add(const Projection& projection, const Buffer& x) {
    assert(projection.num_parts == 1);
    const Matrix& matrix = projection.parts[0];
    multiply(matrix, prepared(matrix, x, w_.hidden, true), team_.share(matrix.panels()));
  }
  // silu(gate) * up. A member computes the same columns of both, where these are whole panels.
  void gate_and_up(const Layer& layer) {
    const SiluMultiplyArgs silu{w_.gate_up.rows, w_.activated.rows, w_.gate_up.stride, w_.activated.stride,
                                a_.num_tokens, a_.intermediate_size};
    const int width = a_.intermediate_size;
    const Range columns = share_outputs(width, kPanel);
    if (layer.gate_up.num_parts == 1 && width % kPanel == 0) {
      const Matrix& matrix = layer.gate_up.parts[0];
      const Product product = prepared(matrix, w_.normed, w_.gate_up, false);
      const Range gate = panels_of(columns), up{gate.begin + width / kPanel, gate.end + width / kPanel};
      multiply(matrix, product, gate);
      multiply(matrix, product, up);
    } else {
      project(layer.gate_up, w_.normed, w_.gate_up, kPanel, [](Range) {});
      team_.wait();
    }
    silu_multiply(silu, columns);
  }

  Product prepared(const Matrix& matrix, const Buffer& x, const Buffer& y, bool add) {
    const Product product{x.rows, y.rows, x.stride, y.stride, a_.num_tokens, add, w_.scratch};
    const Product ready = prepare(w_.preparers(), matrix, product);
    w_.preparers().wait();
    return ready;
  }

  Range share_outputs(int64_t count, int unit) const {
    const Range units = team_.share((count + unit - 1) / unit);
    return {std::min(units.begin * unit, count), std::min(units.end * unit, count)};
  }
  static Range panels_of(Range outputs) { return {outputs.begin / kPanel, (outputs.end + kPanel - 1) / kPanel}; }

  char* pool_of(int index) const {
    return static_cast<char*>(const_cast<void*>(t_.kv)) + index * a_.layer_bytes;
  }

  RopeStoreArgs rope_args(const Layer& layer, int index) const {
    RopeStoreArgs args{};
    args.qkv = w_.qkv.rows, args.qkv_stride = w_.qkv.stride;
    args.q_norm = layer.q_norm, args.k_norm = layer.k_norm, args.epsilon = a_.epsilon;
    args.cosines = w_.cosines, args.sines = w_.sines;
    args.pool = pool_of(index), args.slots = a_.slots;
    args.block_stride = t_.block_stride, args.value_offset = t_.value_offset;
    args.token_stride = t_.token_stride, args.head_stride = t_.head_stride;
    args.rows = a_.num_tokens, args.num_heads = t_.num_heads, args.num_kv_heads = t_.num_kv_heads;
    args.head_dim = t_.head_dim, args.block_size = t_.block_size, args.kv_dtype = t_.kv_dtype;
    return args;
  }

  void attend_over_pool(const Layer& layer, int index) {
    AttentionArgs args = t_;
    args.q = w_.qkv.rows, args.q_token_stride = w_.qkv.stride;
    args.out = w_.mixed.rows, args.out_token_stride = w_.mixed.stride;
    args.kv = pool_of(index), args.window = layer.window;
    attend(args, shared_.plans.at(layer.window), shared_.next[index], scratch_);
  }

  const DecoderArgs& a_;
  const AttentionArgs& t_;
  const Workspace w_;
  Shared& shared_;
  const Team team_;
  AttentionScratch scratch_;
};

static bool is_known(const Projection& projection) {
  for (int i = 0; i < projection.num_parts; ++i)
    if (!is_known(projection.parts[i])) return false;
  return true;
}

static bool is_known(const DecoderArgs& a) {
  for (int i = 0; i < a.num_layers; ++i) {
    const Layer& layer = a.layers[i];
    for (const Projection& projection : {layer.qkv, layer.output, layer.gate_up, layer.down})
      if (!is_known(projection)) return false;
  }
  return is_known(a.embedding) && is_known(a.attention);
}

}  // namespace quire

// Floats that the workspace of a step needs.
extern "C" int64_t quire_decoder_workspace(const quire::DecoderArgs* args) {
  return quire::Workspace(*args, quire::Team{0, args->num_threads, nullptr}).floats;
}

// Returns 0, 1 for a format or dtype it does not know, or 2 for a token id outside the vocabulary.
extern "C" int quire_decoder_forward(const quire::DecoderArgs* args) {
  using namespace quire;
  if (!is_known(*args)) return 1;
  for (int i = 0; i < args->num_tokens; ++i)
    if (args->token_ids[i] < 0 || args->token_ids[i] >= args->embedding.out) return 2;
  Shared shared(*args);
  run_team(args->num_threads, [&](const Team& team) { Pass(*args, shared, team).run(); });
  return 0;
}

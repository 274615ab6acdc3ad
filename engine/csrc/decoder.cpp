// The forward pass of a decoder as one call and one parallel region: the same steps, in the same order, as
// engine/models/decoder.py, which stays the meaning and the test of this. Every line below is a kernel that the whole
// team runs together; `wait` stands wherever one reads what another has written.
#include <cstring>
#include <map>

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
  void* kv;        // the layer's keys and values in the pool
  int32_t window;  // 0: none
};

struct DecoderArgs {
  const Layer* layers;
  const float* final_norm;
  Matrix embedding;
  int32_t num_layers, hidden_size, intermediate_size;
  float epsilon;
  // The step. `attention` describes it but for q, out, kv and window.
  AttentionArgs attention;
  const int64_t* token_ids;  // [num_tokens]
  const int64_t* slots;      // [num_tokens]
  const float* cosines;      // [num_tokens, head_dim / 2]
  const float* sines;
  float* workspace;  // workspace_floats(args), 64-byte aligned
  float* out;        // [num_tokens, hidden_size]
  int32_t num_tokens, num_threads;
};

static int64_t padded(int64_t width) { return (width + kGroup - 1) / kGroup * kGroup; }

// Activations, rows padded with zeros to whole groups.
struct Buffer {
  float* rows;
  int64_t stride;
};

struct Workspace {
  Buffer hidden, normed, qkv, mixed, gate_up, activated;
  float* scratch;
  int64_t floats = 0;

  Workspace(const DecoderArgs& a, float* memory) {
    const AttentionArgs& t = a.attention;
    const int64_t tokens = a.num_tokens, queries = static_cast<int64_t>(t.num_heads) * t.head_dim;
    const auto take = [&](int64_t width) {
      Buffer buffer{memory + floats, padded(width)};
      floats += tokens * buffer.stride;
      return buffer;
    };
    hidden = take(a.hidden_size);
    normed = take(a.hidden_size);
    qkv = take(queries + 2LL * t.num_kv_heads * t.head_dim);
    mixed = take(queries);
    gate_up = take(2LL * a.intermediate_size);
    activated = take(a.intermediate_size);
    scratch = memory + floats;
    floats += scratch_floats(tokens, std::max({static_cast<int64_t>(a.hidden_size), queries,
                                               static_cast<int64_t>(a.intermediate_size)}));
  }

  // The padding of what is read in whole groups; kernels write the rest.
  void clear_padding(const DecoderArgs& a, const Range& rows) const {
    const int64_t queries = static_cast<int64_t>(a.attention.num_heads) * a.attention.head_dim;
    clear(normed, a.hidden_size, rows);
    clear(mixed, queries, rows);
    clear(activated, a.intermediate_size, rows);
  }

 private:
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
  Pass(const DecoderArgs& args, const Workspace& workspace, Shared& shared, const Team& team)
      : a_(args), w_(workspace), shared_(shared), team_(team), scratch_(args.attention) {}

  void run() {
    w_.clear_padding(a_, team_.share(a_.num_tokens));
    look_up(team_, a_.embedding, a_.token_ids, a_.num_tokens, w_.hidden.rows, w_.hidden.stride);
    team_.wait();
    for (int i = 0; i < a_.num_layers; ++i) {
      attention(a_.layers[i], i);
      mlp(a_.layers[i]);
    }
    norm(a_.final_norm, {a_.out, a_.hidden_size});
  }

 private:
  void attention(const Layer& layer, int index) {
    norm(layer.input_norm, w_.normed);
    team_.wait();
    project(layer.qkv, w_.normed, w_.qkv, false);
    team_.wait();
    rope(layer);
    team_.wait();
    attend_over_pool(layer, index);
    team_.wait();
    project(layer.output, w_.mixed, w_.hidden, true);
    team_.wait();
  }

  void mlp(const Layer& layer) {
    norm(layer.mlp_norm, w_.normed);
    team_.wait();
    project(layer.gate_up, w_.normed, w_.gate_up, false);
    team_.wait();
    silu_multiply(team_, {w_.gate_up.rows, w_.activated.rows, w_.gate_up.stride, w_.activated.stride, a_.num_tokens,
                          a_.intermediate_size});
    team_.wait();
    project(layer.down, w_.activated, w_.hidden, true);
    team_.wait();
  }

  void norm(const float* weight, const Buffer& out) {
    rms_norm(team_, {w_.hidden.rows, weight, out.rows, w_.hidden.stride, out.stride, a_.num_tokens, a_.hidden_size,
                     a_.epsilon});
  }

  void project(const Projection& projection, const Buffer& x, const Buffer& y, bool add) {
    float* out = y.rows;
    for (int i = 0; i < projection.num_parts; ++i) {
      const Matrix& part = projection.parts[i];
      multiply(team_, part, {x.rows, out, x.stride, y.stride, a_.num_tokens, add, w_.scratch});
      out += part.out;
    }
  }

  void rope(const Layer& layer) {
    const AttentionArgs& t = a_.attention;
    RopeStoreArgs args{};
    args.qkv = w_.qkv.rows, args.qkv_stride = w_.qkv.stride;
    args.q_norm = layer.q_norm, args.k_norm = layer.k_norm, args.epsilon = a_.epsilon;
    args.cosines = a_.cosines, args.sines = a_.sines;
    args.pool = layer.kv, args.slots = a_.slots;
    args.block_stride = t.block_stride, args.value_offset = t.value_offset;
    args.token_stride = t.token_stride, args.head_stride = t.head_stride;
    args.rows = a_.num_tokens, args.num_heads = t.num_heads, args.num_kv_heads = t.num_kv_heads;
    args.head_dim = t.head_dim, args.block_size = t.block_size, args.kv_dtype = t.kv_dtype;
    rope_store(team_, args);
  }

  void attend_over_pool(const Layer& layer, int index) {
    AttentionArgs args = a_.attention;
    args.q = w_.qkv.rows, args.q_token_stride = w_.qkv.stride;
    args.out = w_.mixed.rows, args.out_token_stride = w_.mixed.stride;
    args.kv = layer.kv, args.window = layer.window;
    attend(team_, args, shared_.plans.at(layer.window), shared_.next[index], scratch_);
  }

  const DecoderArgs& a_;
  const Workspace& w_;
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
  return quire::Workspace(*args, nullptr).floats;
}

// Returns 0, 1 for a format or dtype it does not know, or 2 for a token id outside the vocabulary.
extern "C" int quire_decoder_forward(const quire::DecoderArgs* args) {
  using namespace quire;
  if (!is_known(*args)) return 1;
  for (int i = 0; i < args->num_tokens; ++i)
    if (args->token_ids[i] < 0 || args->token_ids[i] >= args->embedding.out) return 2;
  const Workspace workspace(*args, args->workspace);
  Shared shared(*args);
  run_team(args->num_threads, [&](const Team& team) { Pass(*args, workspace, shared, team).run(); });
  return 0;
}

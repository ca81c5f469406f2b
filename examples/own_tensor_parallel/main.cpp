// A transformer of your own, whose layers are cut over TP ranks and sharded over the others (FSDP):
//   trireme launch -n 4 ./own_tensor_parallel TP [FILE]
// It learns to say the first word of a sequence again. FILE has the weights: the run goes on from them where
// it exists, on any mesh, and writes them at its end.
#include <torch/torch.h>

#include <filesystem>
#include <iostream>

#include "trireme/comm/mesh.h"
#include "trireme/parallel/tensor_layers.h"
#include "trireme/parallel/wrap.h"
#include "trireme/state/state_file.h"

namespace nn = torch::nn;
namespace parallel = trireme::parallel;
namespace state = trireme::state;
using GroupPtr = std::shared_ptr<trireme::comm::Group>;

constexpr int64_t kWords = 29, kTokens = 12, kWidth = 48, kHeads = 6;

// snippet: block
struct Block : nn::Module {
  static constexpr auto kRows = parallel::Rows::kSplit;  // between cut layers a rank has rows of its own
  explicit Block(const GroupPtr& tp)
      : qkv(std::make_shared<parallel::ColumnLinear>(
            kWidth, 3 * kWidth, tp, parallel::ColumnOptions{.rows = kRows, .heads = kHeads, .packed = 3})),
        out(std::make_shared<parallel::RowLinear>(kWidth, kWidth, tp, parallel::RowOptions{.rows = kRows})),
        up(std::make_shared<parallel::ColumnLinear>(kWidth, 4 * kWidth, tp,
                                                    parallel::ColumnOptions{.rows = kRows})),
        down(std::make_shared<parallel::RowLinear>(4 * kWidth, kWidth, tp,
                                                   parallel::RowOptions{.rows = kRows})) {
    register_module("norm1", norm1);
    register_module("qkv", qkv);
    register_module("out", out);
    register_module("norm2", norm2);
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(at::Tensor x) {  // (B, T / n, D)
    // All tokens, and the heads of this rank: (3, B, heads / n, T, D / heads).
    const auto heads =
        qkv->forward(norm1(x)).unflatten(-1, {3, -1, kWidth / kHeads}).permute({2, 0, 3, 1, 4});
    const at::Tensor mixed = at::scaled_dot_product_attention(heads[0], heads[1], heads[2], {}, 0.0, true);
    x = x + out->forward(mixed.transpose(1, 2).flatten(2));
    return x + down->forward(at::gelu(up->forward(norm2(x))));
  }
  nn::LayerNorm norm1{nn::LayerNormOptions({kWidth})}, norm2{nn::LayerNormOptions({kWidth})};
  std::shared_ptr<parallel::ColumnLinear> qkv;
  std::shared_ptr<parallel::RowLinear> out;
  std::shared_ptr<parallel::ColumnLinear> up;
  std::shared_ptr<parallel::RowLinear> down;
};
// end of snippet

// snippet: model
struct Transformer : nn::Module {
  explicit Transformer(const GroupPtr& tp)
      : words(std::make_shared<parallel::VocabParallelEmbedding>(kWords, kWidth, tp)),
        split(tp),
        head(std::make_shared<parallel::ColumnLinear>(
            kWidth, kWords, tp,
            parallel::ColumnOptions{.bias = false, .rows = Block::kRows, .uneven = true})),
        cross_entropy(kWords, tp) {
    register_module("words", words);
    register_module("places", places);
    for (int i = 0; i < 2; ++i) blocks->push_back(std::make_shared<Block>(tp));
    register_module("blocks", blocks);
    register_module("norm", norm);
    register_module("head", head);
  }
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets) {
    const at::Tensor place = at::arange(tokens.size(1), tokens.options());
    at::Tensor x = split.forward(words->forward(tokens) + places(place));
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return cross_entropy.forward(head->forward(norm(x)), targets);  // the rank's part of the logits
  }
  std::shared_ptr<parallel::VocabParallelEmbedding> words;
  nn::Embedding places{kTokens, kWidth};
  parallel::SplitRows split;
  nn::ModuleList blocks;
  nn::LayerNorm norm{nn::LayerNormOptions({kWidth})};
  std::shared_ptr<parallel::ColumnLinear> head;
  parallel::VocabParallelCrossEntropy cross_entropy;
};
// end of snippet

int main(int argc, char** argv) try {
  const auto world = trireme::comm::World::join_environment();
  const std::string file = argc > 2 ? argv[2] : "";
  // snippet: train
  trireme::plan::ParallelConfig axes;
  axes.tp = argc > 1 ? std::stoll(argv[1]) : world->size();
  const auto mesh = trireme::comm::make_mesh(world, trireme::plan::MeshShape::fit(axes, world->size()));
  torch::manual_seed(1);  // the same on all ranks, which draw whole matrices and keep their parts
  Transformer net(mesh.tp);
  const auto engine = parallel::fully_shard(net, mesh);  // over the ranks of data, under any policy
  if (std::filesystem::exists(file)) state::load_weights(*engine, file);
  const auto optimizer = trireme::optim::adamw(engine->optimizer_params(), {.lr = 3e-3});
  torch::manual_seed(100 + mesh.dp_rank);  // ranks of one tp group read the same data
  double first = 0.0, last = 0.0;
  for (int step = 0; step < 80; ++step) {
    const at::Tensor tokens = at::randint(kWords, {32, kTokens}, at::kLong).to(world->device());
    const at::Tensor loss = net.loss(tokens, tokens.narrow(1, 0, 1).expand({-1, kTokens}));
    engine->backward(loss);
    engine->clip_grad_norm(1.0);
    engine->step(*optimizer);
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  if (!file.empty()) state::save_weights(*engine, file);  // whole tensors
  // end of snippet
  if (world->rank() == 0) std::cout << "tp " << axes.tp << ": loss " << first << " -> " << last << "\n";
  return last < 0.5 ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}

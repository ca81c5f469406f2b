#include "trireme/bench/targets/families.h"

namespace trireme::bench {

LanguageModel language_model() {
  return {.workload = {"data.path=builtin", "optim.schedule=constant", "optim.lr=3e-4", "seed=42",
                       "parallel.policy=ddp", "memory.recompute=none"},
          .on_cpu = {"model.family=llama", "model.n_layers=4", "model.d_model=128", "model.n_heads=4",
                     "model.n_kv_heads=2", "model.d_ff=352", "model.vocab_size=256",
                     "model.tie_embeddings=false", "data.seq_len=32", "train.global_batch=16"},
          .on_gpu = {"model.preset=llama-1b", "model.vocab_size=32768", "precision.compute=bf16",
                     "data.seq_len=1024", "train.global_batch=16"}};
}

Target on_language_model(Target target) {
  LanguageModel model = language_model();
  const auto before = [](std::vector<std::string>& keys, std::vector<std::string> first) {
    first.insert(first.end(), keys.begin(), keys.end());
    keys = std::move(first);
  };
  before(target.workload, std::move(model.workload));
  before(target.on_cpu, std::move(model.on_cpu));
  before(target.on_gpu, std::move(model.on_gpu));
  return target;
}

}  // namespace trireme::bench

#include "trireme/nn/language_model.h"

#include <iterator>

#include "trireme/base/error.h"
#include "trireme/nn/functional.h"
#include "trireme/nn/gpt2.h"
#include "trireme/nn/llama.h"
#include "trireme/nn/loss.h"
#include "trireme/nn/mlp.h"
#include "trireme/nn/vocabulary_part.h"
#include "trireme/plan/model_facts.h"

namespace trireme::nn {
namespace {

template <typename Model>
std::shared_ptr<LanguageModel> make(const plan::ModelConfig& config) {
  return std::make_shared<Model>(config);
}

struct Factory {
  plan::ModelFamily family;
  std::shared_ptr<LanguageModel> (*make)(const plan::ModelConfig& config);
};

constexpr Factory kFactories[] = {{plan::ModelFamily::kGpt2, make<Gpt2>},
                                  {plan::ModelFamily::kLlama, make<Llama>},
                                  {plan::ModelFamily::kMlp, make<Mlp>}};
constexpr size_t count_language_families() {
  size_t count = 0;
  for (const plan::ModelFamily family : plan::all_values<plan::ModelFamily>())
    count += plan::reads_images(family) ? 0 : 1;
  return count;
}
static_assert(std::size(kFactories) == count_language_families());

}  // namespace

std::vector<Unit> LanguageModel::with_head(const Documents& documents, const LastStep& last) {
  const Head head = this->head();
  std::vector<Unit> units = body(documents);
  units.push_back({.name = plan::kHeadUnit,
                   .forward = [head, last](const at::Tensor& x) { return last(head.norm(x), head.weight); },
                   .has_parameters = !head.tied});
  return units;
}

std::vector<Unit> LanguageModel::units_in(const Documents& documents) {
  if (!joint()) return with_head(documents, logits);
  return with_head(documents, [joint = joint()](const at::Tensor& x, const at::Tensor& weight) {
    return joined_logits(x, weight, *joint);
  });
}

std::vector<Unit> LanguageModel::units(const LossTarget& target) {
  if (joint()) {
    return with_head(target.documents,
                     [target, joint = joint()](const at::Tensor& x, const at::Tensor& weight) {
                       return cut_cross_entropy(x, weight, target, joint);
                     });
  }
  return with_head(
      target.documents, [target, fp8 = head_fp8()](const at::Tensor& x, const at::Tensor& weight) {
        return x.is_cuda() || fp8 ? linear_cross_entropy(x, weight, target.targets, target.chunk_bytes,
                                                         target.gradient_scale, fp8)
                                  : cross_entropy(logits(x, weight), target.targets);
      });
}

Unit LanguageModel::final_norm() {
  return {.name = plan::kHeadUnit, .forward = head().norm};
}

std::shared_ptr<LanguageModel> build(const plan::ModelConfig& config) {
  for (const Factory& factory : kFactories) {
    if (factory.family == config.family) return factory.make(config);
  }
  throw LogicError("[nn.build] family {} has no factory", static_cast<int>(config.family));
}

}  // namespace trireme::nn

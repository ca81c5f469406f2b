// The head of a pipeline that is spread over its ranks: parts of the vocabulary, which the last stage joins.
#include <ATen/ATen.h>

#include "trireme/base/error.h"
#include "trireme/parallel/pipeline.h"

namespace trireme::parallel {

using plan::Message;
using Kind = plan::ActionKind;

/// What it makes for the last stage leaves at once; of forward passes alone stays what finish_() makes.
void Pipeline::forward_part(const plan::Action& action) {
  const int64_t stage = action.stage, micro_batch = action.micro_batch;
  const at::Tensor hidden = arrived(Message::kHidden, stage, micro_batch).variable_data();
  const StageAtWork& here = *stage_here(stage);
  if (here.engine) here.engine->begin_forward();
  if (!at::GradMode::is_enabled()) {
    finished_[micro_batch] = finish_(hidden, micro_batch);
    return;
  }
  const nn::VocabularyPart made = here.part(hidden, batch_.targets.at(static_cast<size_t>(micro_batch)));
  TRIREME_CHECK(made.message.defined() && made.stats.defined(),
                "[parallel.pipeline] stage {}, a part of the head, has made no message of micro-batch {}; "
                "return what nn::vocabulary_part() does",
                stage, micro_batch);
  in_flight_[{stage, micro_batch}] = {hidden, made.stats};
  hand_on({Kind::kForward, stage, micro_batch}, Message::kPart, made.message);
}

at::Tensor Pipeline::join_parts(const at::Tensor& output, int64_t micro_batch) {
  std::vector<at::Tensor> messages;
  for (int64_t part = schedule_.stages; part < schedule_.all_stages(); ++part)
    messages.push_back(arrived(Message::kPart, part, micro_batch));
  const auto place = static_cast<size_t>(micro_batch);
  const nn::JoinedVocabulary joined = nn::join_vocabulary(messages, batch_.targets.at(place), output.size(-1),
                                                          loss_scale(weights_.at(place)));
  finished_[micro_batch] = joined.loss;
  hand_on({Kind::kBackward, schedule_.stages - 1, micro_batch}, Message::kTotals, joined.totals);
  return joined.gradient.view(output.sizes());
}

/// Of forward passes alone, whose stats all ranks of the pipeline gather: each of them makes the losses, so
/// that all refuse the same targets, and they stay with the rank that has the last stage.
void Pipeline::join_losses(const std::vector<at::Tensor>& targets) {
  const at::NoGradGuard no_grad;
  for (auto& [micro_batch, stats] : finished_) {
    const at::Tensor mine = stats.reshape({-1});
    const at::Tensor all = mesh_.pp->size() > 1 ? comm::gather_rows(*mesh_.pp, mine) : mine.unsqueeze(0);
    stats = nn::joined_loss(all.view({-1, stats.size(0), stats.size(1)}),
                            targets.at(static_cast<size_t>(micro_batch)));
  }
  if (stage_here(schedule_.stages - 1) == nullptr) finished_.clear();
}

}  // namespace trireme::parallel

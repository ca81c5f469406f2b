// trireme eval: how likely the weights of a run or a model find a text, or endings of questions.
#include "trireme/cli/worker_eval.h"

#include <cmath>
#include <iterator>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/cli/words.h"
#include "trireme/cli/worker_verbs.h"
#include "trireme/plan/adapter.h"
#include "trireme/plan/config.h"

namespace trireme::cli {
namespace {

/// Long work says how far it has come.
class Progress {
 public:
  explicit Progress(bool speaks) : speaks_(speaks) {}
  void add(int64_t tokens) {
    tokens_ += tokens;
    if (!speaks_ || monotonic_seconds() - said_at_ < kPeriod_s) return;
    said_at_ = monotonic_seconds();
    log_info("eval    {} so far", counted(tokens_, "token"));
  }

 private:
  static constexpr double kPeriod_s = 10.0;
  bool speaks_;
  int64_t tokens_ = 0;
  double said_at_ = monotonic_seconds();
};

}  // namespace

std::vector<double> score(const Evaluation& evaluation, const train::Scorer::Next& next) {
  Progress progress(evaluation.speaks());
  const std::vector<double> nats = evaluation.scorer.score([&] {
    auto row = next();
    if (row) progress.add(std::ssize(row->tokens) - 1);
    return row;
  });
  for (const double one : nats) {
    if (std::isfinite(one)) continue;
    throw NumericsError(
        "[cli.eval] a log-likelihood in {} is {}: the weights {} hold NaN or infinity, or overflow in fp32",
        evaluation.options().data, -one, evaluation.options().weights);
  }
  return nats;
}

nlohmann::ordered_json header_of(const Evaluation& evaluation) {
  using Json = nlohmann::ordered_json;
  const EvalOptions& options = evaluation.options();
  return {{"schema", "trireme.eval/1"},
          {"command", evaluation.request.command},
          {"run", options.run.empty() ? Json() : Json(options.run)},
          {"weights", options.weights},
          {"data", options.data},
          {"tokenizer", evaluation.tokenizer.name()},
          {"window", options.window},
          {"ranks", evaluation.world.size()}};
}

int worker_eval(const Request& request, const Environment& environment) {
  const plan::WorldSpec spec = plan::detect_world(environment);
  const auto device = plan::parse<plan::Device>(request.eval.device);
  TRIREME_CHECK(device, "[cli.eval] the request has no valid device: '{}'", request.eval.device);
  const plan::Config config =
      plan::load({.path = {}, .text = request.config, .overrides = {}}, Environment()).config;
  const auto world = comm::World::join(spec, comm::take_device(*device, spec), config.comm.timeout_s);
  const auto tokenizer = data::make_tokenizer(config.data.tokenizer);
  train::Scorer scorer(plan::without_adapters(config.model), request.eval.weights, world);
  const Evaluation evaluation{request, *tokenizer, scorer, *world};
  request.eval.questions ? evaluate_questions(evaluation) : evaluate_text(evaluation);
  return 0;
}

}  // namespace trireme::cli

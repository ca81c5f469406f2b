#include "trireme/train/whole_passes.h"

#include <ATen/ATen.h>

#include "trireme/base/error.h"
#include "trireme/nn/init.h"
#include "trireme/plan/buckets.h"
#include "trireme/plan/model_family.h"
#include "trireme/train/batch_documents.h"
#include "trireme/train/connect.h"
#include "trireme/train/engine_options.h"
#include "trireme/train/guesses.h"
#include "trireme/train/program_call.h"

namespace trireme::train {
namespace {

Passes::Options pass_options(const ModelSetup& setup) {
  const bool always = setup.config.train.cuda_graphs == plan::CudaGraphs::kOn;
  return {.accumulation = setup.batch.accumulation,
          .rows = setup.batch.micro_batch,
          .step_rows = setup.batch.global_batch,
          .loss_chunk_bytes = setup.config.memory.loss_chunk_mib << 20,
          .make_recording = setup.records_passes && setup.config.train.step_program.empty()
                                ? parallel::recordings()
                                : parallel::RecordingMaker(),
          .when = always ? Passes::When::kAlways : Passes::When::kDeviceIdles};
}

/// Numbers that a batch adds to the sums of the metrics.
std::vector<double> own_sums(const std::vector<Metric>& metrics, const at::Tensor& logits,
                             const at::Tensor& targets) {
  std::vector<double> all;
  for (const Metric& metric : metrics) {
    const std::vector<double> sums =
        call_of_program([&] { return metric.add(logits, targets); }, "add() of the metric '{}'", metric.name);
    if (std::ssize(sums) != metric.sums) {
      throw ConfigError("[train.program] add() of the metric '{}' has given {} sums instead of {}",
                        metric.name, sums.size(), metric.sums);
    }
    all.insert(all.end(), sums.begin(), sums.end());
  }
  return all;
}

}  // namespace

WholePasses::WholePasses(const ModelSetup& setup, const nn::Fp8History* history,
                         std::vector<TrainedStage>& stages)
    : model_(make_model(setup, setup.mesh)),
      device_(setup.mesh.world->device()),
      reads_images_(plan::reads_images(setup.config.model.family)),
      counts_(setup.mesh.tp_rank == 0) {
  const plan::Config& config = setup.config;
  const bool buckets = config.parallel.bucket_mib > 0.0;
  const auto engine = std::make_shared<parallel::DataParallel>(
      *model_, plan::engine_units(config, setup.held), setup.mesh,
      engine_options(config, setup.mesh, history),
      nn::InitialWeights(setup.held.units, static_cast<uint64_t>(config.seed)),
      buckets ? parallel::UseFrom::kBuckets : parallel::UseFrom::kRunUnit);
  connect(*model_, *engine, config.memory, config.precision.fp8, history);
  if (!config.train.step_program.empty()) engine->run_program(given_program(setup), setup.batch.accumulation);
  passes_.emplace(*model_, *engine, device_, pass_options(setup));
  stages.push_back({.module = model_, .engine = engine});
}

Scores WholePasses::evaluate(const std::vector<data::Batch>& batches, const std::vector<Metric>& metrics,
                             Guesses* guesses) {
  Scores sum;
  for (const data::Batch& batch : batches) {
    const at::Tensor inputs = batch.inputs.to(device_), targets = batch.targets.to(device_);
    const nn::Documents documents = documents_on(device_, batch.documents);
    if (!reads_images_) {
      const double weight = batch.weight(),
                   loss = model_->loss(inputs, {.targets = targets, .documents = documents})
                              .to(at::kDouble)
                              .item<double>();
      if (weight > 0.0) sum += {.rows = weight, .loss = weight * loss};  // a mean over no targets is NaN
      if (metrics.empty()) continue;
    }
    const at::Tensor logits = model_->forward(inputs, documents);
    if (batch.rows == 0) continue;
    sum += {.own = own_sums(metrics, logits, targets)};
    if (!reads_images_) continue;
    if (guesses != nullptr) guesses->add(logits, targets, batch.samples);
    sum += score_images(logits, targets);
  }
  return counts_ ? sum : Scores();
}

at::Tensor WholePasses::infer(const at::Tensor& inputs,
                              const std::function<at::Tensor(const at::Tensor& logits)>& last) {
  return last(model_->forward(inputs));
}

}  // namespace trireme::train

#include "trireme/controller/worker_datasets.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <utility>

#include "trireme/base/build_info.h"
#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/base/heartbeat.h"
#include "trireme/base/log.h"
#include "trireme/data/corpus.h"
#include "trireme/data/dataset.h"
#include "trireme/data/loader.h"

namespace trireme::controller {

struct WorkerDatasets::Opened {
  plan::DatasetSpec spec;
  std::shared_ptr<const data::TokenSamples> samples = {};  ///< null: it is not open
};

namespace {

std::string in_words(const plan::DatasetSpec& spec) {
  return fmt::format("dataset '{}'{}", spec.path, spec.place.empty() ? "" : " of " + spec.place);
}

}  // namespace

WorkerDatasets::WorkerDatasets(comm::World& world, const Environment& environment, std::string program)
    : world_(world), environment_(environment), program_(std::move(program)) {}

WorkerDatasets::~WorkerDatasets() = default;

void WorkerDatasets::add(const plan::DatasetSpec& spec) {
  datasets_.push_back(std::make_unique<Opened>(Opened{.spec = spec}));
}

at::Tensor WorkerDatasets::rows(const tensor::BatchRows& wanted) {
  if (wanted.dataset < 1 || wanted.dataset > std::ssize(datasets_))
    throw ConfigError("[controller.dataset] there is no dataset {} among {}; declare it first",
                      wanted.dataset, datasets_.size());
  const plan::DatasetSpec& spec = datasets_[static_cast<size_t>(wanted.dataset - 1)]->spec;
  const std::string fault = batch_fault(spec, wanted.step);
  if (!fault.empty()) throw ConfigError("[controller.dataset] {}: {}", in_words(spec), fault);
  try {
    const Opened& dataset = opened(wanted.dataset);
    const std::vector<int64_t> samples = dataset.samples->order(
        wanted.step * spec.batch + wanted.rows.begin, wanted.rows.size(), static_cast<uint64_t>(spec.seed));
    const data::Batch batch = data::read_batch(*dataset.samples, samples,
                                               {.global_batch = spec.batch, .vocab_size = spec.vocab_size});
    return wanted.targets ? batch.targets : batch.inputs;
  } catch (const Error& error) {
    throw Error(error.exit_code(), fmt::format("[controller.dataset] worker {}: {}: {}", world_.rank(),
                                               in_words(spec), error.what()));
  }
}

const WorkerDatasets::Opened& WorkerDatasets::opened(int64_t number) {
  Opened& dataset = *datasets_[static_cast<size_t>(number - 1)];
  if (!dataset.samples) open(dataset, number);
  return dataset;
}

void WorkerDatasets::open(Opened& dataset, int64_t number) {
  const plan::DatasetSpec& spec = dataset.spec;
  const data::PreparedCorpus corpus =
      data::prepare_corpus({.path = spec.path,
                            .builtin_root = std::string(kTorchRoot) + "/include",
                            .tokenizer = spec.tokenizer,
                            .val_fraction = spec.val_fraction,
                            .cache_dir = cache_dir(environment_),
                            .seq_len = spec.seq_len,
                            .on_progress = [](const data::Progress&) { beat(); }});
  if (spec.vocab_size > 0 && corpus.vocab_size > spec.vocab_size)
    throw ConfigError(
        "its tokens go up to {}, but the model has {} (vocab_size); build the model with {} or more, or name "
        "another tokenizer",
        corpus.vocab_size - 1, spec.vocab_size, corpus.vocab_size);
  if (!corpus.note.empty() && world_.rank() == 0) log_warning("{}: {}", in_words(spec), corpus.note);
  dataset.samples = std::make_shared<data::Dataset>(corpus.folder, "train", spec.seq_len);
  check_same(dataset, number);
}

/// The worker that is first says what it has; nobody waits for another one.
void WorkerDatasets::check_same(const Opened& dataset, int64_t number) {
  const std::string key = fmt::format("{}/dataset {}", program_, number);
  const std::string digest = hex64(dataset.samples->digest());
  world_.announce(key, fmt::format("{} on worker {}", digest, world_.rank()));
  const std::string first = world_.announced(key);
  if (first.empty() || first.starts_with(digest)) return;
  throw DataError(
      "its tokens have the digest {} on worker {}, and {}; give all workers the same files, or name a folder "
      "that they share",
      digest, world_.rank(), first);
}

}  // namespace trireme::controller

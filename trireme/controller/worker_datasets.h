#pragma once
// Datasets of a program on one worker, which reads their batches itself: nothing of a batch passes the client
// or the dispatcher.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "trireme/base/env.h"
#include "trireme/comm/world.h"
#include "trireme/tensor/numbered_tensors.h"

namespace trireme::controller {

class WorkerDatasets {
 public:
  /// `world`, which must outlive it, is where workers compare their texts. `program` tells the programs of a
  /// world apart: the datasets of another one may have changed since. Tokens are kept in the folder that the
  /// environment names (cache_dir()).
  WorkerDatasets(comm::World& world, const Environment& environment, std::string program);
  ~WorkerDatasets();

  /// The next dataset, from 1 on. Nothing is opened.
  void add(const plan::DatasetSpec& spec);

  /// The rows of a batch of a dataset, (rows, seq_len) int64 on the CPU, as data::Loader reads them for
  /// `trireme train`. The first call for a dataset opens it: the text is made into tokens, unless this
  /// machine has them already, and their digest is compared with that of the worker that opened it first.
  /// Throws Error with the exit code and the words of the cause (data::prepare_corpus(), data::read_batch())
  /// behind this worker, the dataset's path and where it was declared; DataError also where other workers
  /// have another text, and ConfigError where it has more tokens than the model, and for datasets and batches
  /// that are not there.
  at::Tensor rows(const tensor::BatchRows& wanted);

 private:
  struct Opened;
  const Opened& opened(int64_t number);
  void open(Opened& dataset, int64_t number);
  void check_same(const Opened& dataset, int64_t number);

  comm::World& world_;
  Environment environment_;
  std::string program_;
  std::vector<std::unique_ptr<Opened>> datasets_;
};

}  // namespace trireme::controller

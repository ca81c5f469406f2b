#pragma once
// A program without a controller: every rank of a world makes the same instructions and runs them itself
// (SPMD). It is the same program, on the same tensors, that workers of a controller run.
#include <map>
#include <memory>

#include "trireme/comm/world.h"
#include "trireme/controller/program_runner.h"
#include "trireme/controller/recorded_steps.h"
#include "trireme/controller/worker_datasets.h"
#include "trireme/tensor/numbered_tensors.h"

namespace trireme::controller {

class RankProgram : public ProgramRunner, private tensor::Outside {
 public:
  /// Collective over the world. Tokens of datasets are kept in the folder that `environment` names.
  explicit RankProgram(std::shared_ptr<comm::World> world, bool is_explicit = false,
                       const Environment& environment = Environment::process());

  int64_t workers() const override { return world_->size(); }
  void add_signal(const std::string& name, const std::vector<int64_t>& workers) override;
  void add_dataset(const plan::DatasetSpec& dataset) override;
  void submit(const plan::Instruction& instruction) override;
  void define_step(uint32_t number, const plan::RecordedStep& step) override;
  void replay(uint32_t number, const std::vector<int64_t>& arguments) override;
  void flush() override {}
  void put(int64_t number, int64_t worker, const std::string& bytes) override;
  /// All ranks ask, and have the value.
  Asked ask(int64_t worker, int64_t bytes) override;

  const plan::Placer& placer() const { return tensors_.placer(); }

 private:
  at::Tensor value(int64_t from, const plan::TensorType& type) override;
  at::Tensor batch(const tensor::BatchRows& wanted) override { return datasets_.rows(wanted); }
  void answer(int64_t to, const at::Tensor& value) override;
  void share_if_fetched(const plan::Instruction& instruction);
  void share(int64_t number, const plan::TensorType& type);

  struct Waiting {
    int64_t worker = 0;
    std::promise<std::string> promise = {};
  };
  std::shared_ptr<comm::World> world_;
  std::shared_ptr<comm::Group> all_;
  WorkerDatasets datasets_;
  tensor::NumberedTensors tensors_;
  RecordedSteps steps_;
  std::map<int64_t, std::string> values_;
  std::map<int64_t, Waiting> waiting_;
  int64_t next_number_ = 1;
  at::Tensor answer_;  ///< of this rank, for the others
};

}  // namespace trireme::controller

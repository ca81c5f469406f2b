#pragma once
// A program without a controller: every rank of a world makes the same instructions and runs them itself
// (SPMD). It is the same program, on the same tensors, that workers of a controller run.
#include <map>
#include <memory>

#include "trireme/comm/world.h"
#include "trireme/gt/session.h"
#include "trireme/tensor/numbered_tensors.h"

namespace trireme::controller {

class RankSession : public gt::Session, private tensor::Outside {
 public:
  explicit RankSession(std::shared_ptr<comm::World> world, bool is_explicit = false);

  int64_t workers() const override { return world_->size(); }
  void add_signal(const std::string& name, const std::vector<int64_t>& workers) override;
  void submit(const plan::Instruction& instruction) override;
  void flush() override {}
  void put(int64_t number, int64_t worker, std::string bytes) override;
  /// All ranks ask, and have the value.
  std::future<std::string> answer(int64_t number, int64_t worker) override;

  const plan::Placer& placer() const { return tensors_.placer(); }

 private:
  at::Tensor value(int64_t from, const plan::TensorType& type) override;
  void answer(int64_t to, const at::Tensor& value) override;
  void share(int64_t number, const plan::TensorType& type);

  struct Asked {
    int64_t worker = 0;
    std::promise<std::string> promise = {};
  };
  std::shared_ptr<comm::World> world_;
  std::shared_ptr<comm::Group> all_;
  tensor::NumberedTensors tensors_;
  std::map<int64_t, std::string> values_;
  std::map<int64_t, Asked> asked_;
  at::Tensor answer_;  ///< of this rank, for the others
};

}  // namespace trireme::controller

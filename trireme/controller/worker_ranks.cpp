#include "trireme/controller/worker_ranks.h"

#include <ATen/ATen.h>

#include <numeric>
#include <utility>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/controller/worker_values.h"
#include "trireme/tensor/op_kernels.h"

namespace trireme::controller {
namespace {

std::vector<int64_t> all_ranks(int64_t size) {
  std::vector<int64_t> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

/// A name of this program that no earlier one of the world had.
std::string name_of_program(comm::World& world) {
  return world.share_from_root("a program of ranks", fmt::format("program {:.9f}", monotonic_seconds()));
}

}  // namespace

RankProgram::RankProgram(std::shared_ptr<comm::World> world, bool is_explicit, const Environment& environment)
    : world_(std::move(world)),
      all_(world_->make_group("values of the program", all_ranks(world_->size()))),
      datasets_(*world_, environment, name_of_program(*world_)),
      tensors_(*world_, *this, is_explicit) {}

void RankProgram::add_signal(const std::string& name, const std::vector<int64_t>& workers) {
  tensors_.add_signal(name, workers);
}

void RankProgram::add_dataset(const plan::DatasetSpec& dataset) {
  tensors_.add_dataset(dataset);
  datasets_.add(dataset);
}

void RankProgram::submit(const plan::Instruction& instruction) {
  tensors_.run(instruction);
  share_if_fetched(instruction);
}

void RankProgram::define_step(uint32_t number, const plan::RecordedStep& step) {
  steps_.add(number, to_bytes(step), /*is_last=*/true);
}

void RankProgram::replay(uint32_t number, const std::vector<int64_t>& arguments) {
  steps_.replay(number, arguments, [this](const RecordedSteps::Made& made) {
    tensors_.run(made.instruction, made.placed);
    share_if_fetched(made.instruction);
  });
}

void RankProgram::share_if_fetched(const plan::Instruction& instruction) {
  if (instruction.kind == plan::InstructionKind::kFetch)
    share(instruction.attributes.whole[0], tensors_.placer().tensor(instruction.input[0]).type);
}

/// Every rank has the value; the worker that asks takes its own.
void RankProgram::put(int64_t number, int64_t worker, const std::string& bytes) {
  if (worker == world_->rank()) values_.emplace(number, bytes);
}

at::Tensor RankProgram::value(int64_t from, const plan::TensorType& type) {
  const auto found = values_.find(from);
  TRIREME_CHECK(found != values_.end(), "[controller.ranks] no value {} was put here", from);
  const std::string bytes = std::move(found->second);
  values_.erase(found);
  return tensor_of(bytes, type);
}

ProgramRunner::Asked RankProgram::ask(int64_t worker, int64_t) {
  const int64_t number = next_number_++;
  return {number, waiting_.emplace(number, Waiting{worker}).first->second.promise.get_future()};
}

void RankProgram::answer(int64_t, const at::Tensor& value) {
  answer_ = value;
}

void RankProgram::share(int64_t number, const plan::TensorType& type) {
  auto asked = waiting_.extract(number);
  TRIREME_CHECK(!asked.empty(), "[controller.ranks] nobody asked for value {}", number);
  at::Tensor value = std::exchange(answer_, {});
  if (!value.defined())
    value =
        at::empty(type.shape, at::TensorOptions(tensor::scalar_type_of(type.dtype)).device(world_->device()));
  // Bytes travel, since not every dtype of a tensor is one of collectives.
  at::Tensor bytes = value.reshape({-1}).view(at::kByte);
  if (bytes.numel() > 0) all_->broadcast(bytes, asked.mapped().worker);
  asked.mapped().promise.set_value(bytes_of(value));
}

}  // namespace trireme::controller

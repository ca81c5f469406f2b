#include "trireme/controller/worker_program.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <optional>
#include <utility>
#include <variant>

#include "trireme/base/error.h"
#include "trireme/base/heartbeat.h"
#include "trireme/comm/process_id.h"
#include "trireme/comm/world.h"
#include "trireme/controller/recorded_steps.h"
#include "trireme/controller/worker_datasets.h"
#include "trireme/controller/worker_values.h"
#include "trireme/tensor/numbered_tensors.h"

namespace trireme::controller {
namespace {

/// How long next() waits before it looks whether the process should still be there.
constexpr double kIdle_s = 1.0;

/// Values of a session by way of the client's direct connection; small answers by way of the dispatcher;
/// batches from datasets that this worker opens.
class LinkedValues : public tensor::Outside {
 public:
  LinkedValues(WorkerLink& link, comm::World& world, const Environment& environment, uint64_t session)
      : link_(link),
        timeout_s_(world.timeout_s()),
        datasets_(world, environment, fmt::format("session {}", session)) {}

  void add_dataset(const plan::DatasetSpec& spec) { datasets_.add(spec); }

  at::Tensor value(int64_t from, const plan::TensorType& type) override {
    return tensor_of(link_.take_bulk(static_cast<uint64_t>(from), timeout_s_), type);
  }

  at::Tensor batch(const tensor::BatchRows& wanted) override { return datasets_.rows(wanted); }

  void answer(int64_t to, const at::Tensor& value) override {
    const auto request = static_cast<uint64_t>(to);
    if (value.nbytes() <= kMostAnswer) return link_.answer(request, bytes_of(value));
    link_.offer_bulk(request, bytes_of(value));
    link_.answer(request, {});
  }

 private:
  WorkerLink& link_;
  double timeout_s_;
  WorkerDatasets datasets_;
};

/// The world in which runs meet: each rank has the device of its worker, whatever the numbers of the workers
/// are, and shares its host with the ranks that are there.
plan::WorldSpec world_of_runs(const plan::WorldSpec& workers, comm::World& world) {
  plan::WorldSpec spec = workers;
  if (world.device().is_cuda()) spec.local_rank = world.device().index();
  if (spec.master_addr == kThisHost) return spec;
  const std::vector<std::string> hosts = world.gather_texts("hosts of workers", comm::host_identity());
  spec.local_world_size = std::ranges::count(hosts, hosts[static_cast<size_t>(world.rank())]);
  return spec;
}

/// Runs what the link gives.
class Worker {
 public:
  Worker(WorkerLink& link, comm::World& world, const Environment& environment, RunHost& host)
      : link_(link),
        world_(world),
        environment_(environment),
        host_(host),
        runs_(world_of_runs(link.world(), world)) {}

  void run() {
    while (!over_) {
      beat();
      std::optional<WorkItem> item = link_.next(kIdle_s);
      if (item) std::visit([this](const auto& one) { take(one); }, *item);
    }
  }

 private:
  void take(const SessionBegin& begin) {
    executed_ = 0;
    tensors_.reset();
    values_ = std::make_unique<LinkedValues>(link_, world_, environment_, begin.session);
    tensors_ = std::make_unique<tensor::NumberedTensors>(world_, *values_);
    steps_.clear();
  }
  /// Messages that nobody used are waited for: their links go.
  void take(const SessionEnd&) {
    if (tensors_) in_words("the end of the session", [&] { tensors_->clear(); });
    tensors_.reset();
    values_.reset();
    in_words("", [&] { host_.end(); });
  }
  void take(const RunAction& action) {
    in_words("", [&] {
      const std::string answer = host_.act(action.text, runs_);
      if (link_.number() == 0) link_.answer(action.request, answer);
    });
    link_.progress(++executed_);
  }
  void take(const Bye&) { over_ = true; }

  void take(const Scope& scope) {
    in_words(numbered("signal " + scope.name), [&] {
      tensors_->add_signal(scope.name, {scope.workers.begin(), scope.workers.end()});
    });
  }

  void take(const Declaration& declaration) {
    in_words(numbered(declaration.text), [&] {
      const plan::DatasetSpec spec = plan::dataset_from_text(declaration.text, "a declaration");
      tensors_->add_dataset(spec);
      values_->add_dataset(spec);
    });
  }

  void take(const Instructions& instructions) {
    std::string_view left = instructions.bytes;
    for (uint32_t i = 0; i < instructions.count; ++i) {
      plan::Instruction one;
      in_words(numbered("a record of an instruction"), [&] { one = plan::take_instruction(left); });
      run_in_words(one, [&] { tensors_->run(one); });
      link_.progress(++executed_);
    }
  }

  void take(const Step& step) {
    in_words(numbered("a recorded step"), [&] { steps_.add(step.number, step.bytes, step.is_last); });
  }

  void take(const Replay& replay) {
    int64_t at = 0;
    in_words("", [&] {
      steps_.replay(replay.number, replay.arguments, [&](const RecordedSteps::Made& made) {
        run_in_words(
            made.instruction, [&] { tensors_->run(made.instruction, made.placed); },
            fmt::format(" of a step that was captured, its instruction {}", at));
        ++at;
      });
    });
    link_.progress(++executed_, /*at_once=*/true);
  }

  template <typename Body>
  void run_in_words(const plan::Instruction& one, const Body& body, const std::string& of = {}) {
    try {
      body();
    } catch (...) {
      in_words(numbered(to_text(one, tensors_->placer().signals())) + of, [] { throw; });
    }
    beat();
  }
  std::string numbered(const std::string& what) const {
    return fmt::format("instruction {} '{}'", executed_, what);
  }

  /// Tells the client what failed before this worker ends. `what` is empty where errors say it themselves.
  template <typename Body>
  void in_words(const std::string& what, const Body& body) {
    try {
      body();
    } catch (const Error& error) {
      fail(what, static_cast<int64_t>(error.exit_code()), error.what());
    } catch (const c10::OutOfMemoryError& error) {
      fail(what, static_cast<int64_t>(ExitCode::kOutOfMemory), error.what_without_backtrace());
    } catch (const c10::Error& error) {
      fail(what, static_cast<int64_t>(ExitCode::kFailed), error.what_without_backtrace());
    } catch (const std::bad_alloc&) {
      fail(what, static_cast<int64_t>(ExitCode::kOutOfMemory), "this machine is out of memory");
    } catch (const std::exception& error) {
      fail(what, static_cast<int64_t>(ExitCode::kFailed), error.what());
    }
  }

  /// An instruction of a step has said what failed before the step that it belongs to fails.
  [[noreturn]] void fail(const std::string& what, int64_t code, const std::string& why) {
    if (std::exchange(has_failed_, true)) throw Error(static_cast<ExitCode>(code), why);
    const std::string text = what.empty() ? why : fmt::format("{}: {}", what, why);
    link_.failed(code, text);
    if (what.empty()) throw Error(static_cast<ExitCode>(code), why);
    throw Error(static_cast<ExitCode>(code),
                fmt::format("[controller.worker] worker {}: {}", link_.number(), text));
  }

  WorkerLink& link_;
  comm::World& world_;
  const Environment& environment_;
  RunHost& host_;
  plan::WorldSpec runs_;
  std::unique_ptr<LinkedValues> values_;
  std::unique_ptr<tensor::NumberedTensors> tensors_;
  RecordedSteps steps_;
  uint64_t executed_ = 0;
  bool over_ = false, has_failed_ = false;
};

}  // namespace

void run_worker(WorkerSettings settings, c10::Device device, double timeout_s, const Environment& environment,
                RunHost& host) {
  WorkerLink link(std::move(settings), environment);
  const std::shared_ptr<comm::World> world = comm::World::join(link.world(), device, timeout_s);
  Worker(link, *world, environment, host).run();
}

}  // namespace trireme::controller

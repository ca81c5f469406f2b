#include "trireme/controller/remote_program.h"

#include <mutex>
#include <utility>

#include "trireme/base/error.h"

namespace trireme::controller {

/// Connections to workers, made when they are first needed.
class RemoteProgram::BulkLines {
 public:
  explicit BulkLines(std::shared_ptr<ClientSession> session) : session_(std::move(session)) {}

  void put(int64_t worker, uint64_t id, const std::string& bytes) {
    const std::lock_guard lock(mutex_);
    line_to(worker).put(id, bytes);
  }
  std::string take(int64_t worker, uint64_t id) {
    const std::lock_guard lock(mutex_);
    return line_to(worker).take(id);
  }

 private:
  DataConnection& line_to(int64_t worker) {
    const auto found = lines_.find(worker);
    if (found != lines_.end()) return found->second;
    return lines_.emplace(worker, session_->data_connection(worker)).first->second;
  }

  std::shared_ptr<ClientSession> session_;
  std::mutex mutex_;
  std::map<int64_t, DataConnection> lines_;
};

RemoteProgram::RemoteProgram(ClientSettings settings, const Environment& environment)
    : session_(std::make_shared<ClientSession>(std::move(settings), environment)),
      lines_(std::make_shared<BulkLines>(session_)) {}

RemoteProgram::~RemoteProgram() = default;

void RemoteProgram::add_signal(const std::string& name, const std::vector<int64_t>& workers) {
  std::vector<uint32_t> numbers;
  for (const int64_t worker : workers) {
    if (worker < 0 || worker >= this->workers())
      throw ConfigError("[controller.client] signal {} has worker {}, and there are {}: 0 to {}", name,
                        worker, this->workers(), this->workers() - 1);
    numbers.push_back(static_cast<uint32_t>(worker));
  }
  session_->define_scope(signals_++, name, numbers);
}

void RemoteProgram::add_dataset(const plan::DatasetSpec& dataset) {
  session_->declare(to_text(dataset));
}

void RemoteProgram::submit(const plan::Instruction& instruction) {
  bytes_.clear();
  append_bytes(bytes_, instruction);
  submitted_ = session_->submit(bytes_, 1) + 1;
}

void RemoteProgram::define_step(uint32_t number, const plan::RecordedStep& step) {
  session_->define_step(number, to_bytes(step));
}

/// Workers make one step and have the next one: more would only let the client run ahead of what it reads.
void RemoteProgram::replay(uint32_t number, const std::vector<int64_t>& arguments) {
  constexpr size_t kMostUnderWay = 2;
  if (replays_.size() == kMostUnderWay) {
    session_->wait_executed_at_last(replays_.front());
    replays_.pop_front();
  }
  submitted_ = session_->replay(number, arguments) + 1;
  replays_.push_back(submitted_);
}

void RemoteProgram::put(int64_t number, int64_t worker, const std::string& bytes) {
  lines_->put(worker, static_cast<uint64_t>(number), bytes);
}

ProgramRunner::Asked RemoteProgram::ask(int64_t worker, int64_t bytes) {
  auto request = std::make_shared<ClientSession::Request>(session_->request());
  const uint64_t number = request->id();
  const bool is_bulk = bytes > static_cast<int64_t>(kMostAnswer);
  auto wait = [session = session_, lines = lines_, request, worker, number, is_bulk] {
    std::string small = request->get().bytes;
    return is_bulk ? lines->take(worker, number) : std::move(small);
  };
  return {static_cast<int64_t>(number), std::async(std::launch::deferred, std::move(wait))};
}

void RemoteProgram::wait() {
  session_->flush();
  session_->wait_executed(submitted_);
}

}  // namespace trireme::controller

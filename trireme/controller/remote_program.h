#pragma once
// A program whose instructions go to workers behind a dispatcher.
#include <deque>
#include <map>
#include <memory>

#include "trireme/controller/client_session.h"
#include "trireme/controller/program_runner.h"

namespace trireme::controller {

class RemoteProgram : public ProgramRunner {
 public:
  /// Throws as ClientSession does.
  RemoteProgram(ClientSettings settings, const Environment& environment);
  ~RemoteProgram() override;

  int64_t workers() const override { return std::ssize(session_->workers()); }
  const std::vector<WorkerInfo>& worker_list() const { return session_->workers(); }
  void add_signal(const std::string& name, const std::vector<int64_t>& workers) override;
  void add_dataset(const plan::DatasetSpec& dataset) override;
  void submit(const plan::Instruction& instruction) override;
  void define_step(uint32_t number, const plan::RecordedStep& step) override;
  void replay(uint32_t number, const std::vector<int64_t>& arguments) override;
  void flush() override { session_->flush(); }
  /// Returns when the worker has the bytes, which go to it directly.
  void put(int64_t number, int64_t worker, const std::string& bytes) override;
  /// Values above kMostAnswer come from the worker directly.
  Asked ask(int64_t worker, int64_t bytes) override;

  /// Waits until all workers have done all that was submitted. Throws CommError.
  void wait();

 private:
  class BulkLines;

  std::shared_ptr<ClientSession> session_;
  std::shared_ptr<BulkLines> lines_;
  uint32_t signals_ = 0;
  uint64_t submitted_ = 0;
  std::deque<uint64_t> replays_;  ///< ends of those that may be under way
  std::string bytes_;
};

}  // namespace trireme::controller

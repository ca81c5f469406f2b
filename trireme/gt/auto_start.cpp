// Workers that a program starts for itself: a server of its own, which starts them and ends with it.
#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <thread>

#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/base/program_path.h"
#include "trireme/controller/remote_program.h"
#include "trireme/gt/workers.h"
#include "trireme/launch/child.h"

namespace gt {

using trireme::CommError;
using trireme::Descriptor;
using trireme::Environment;
using trireme::EnvironmentError;
using trireme::controller::ClientSettings;
using trireme::controller::ProgramRunner;
using trireme::controller::RemoteProgram;

namespace {

std::string trireme_program(const Options& options, const Environment& environment) {
  if (const auto found = trireme::find_trireme(options.command, environment)) return *found;
  throw EnvironmentError(
      "[gt.workers] no program 'trireme' {}; set TRIREME_COMMAND to where it is, or start "
      "'trireme serve' by hand and call gt::connect()",
      options.command.empty() ? "is beside this one or in PATH" : fmt::format("is at '{}'", options.command));
}

/// The server, in a process of its own. It ends with this object, and with this process.
class OwnServer {
 public:
  OwnServer(int64_t workers, const Options& options, const Environment& environment)
      : socket_(fmt::format("{}/session-{}-{}", trireme::controller::runtime_folder(environment), ::getpid(),
                            next_number())),
        nowhere_(::open("/dev/null", O_RDWR | O_CLOEXEC)) {
    trireme::launch::ChildSpec spec{
        .program = trireme_program(options, environment),
        .args = {"serve", "-n", std::to_string(workers), "--socket", socket_, "--start-workers", "--device",
                 options.device, "--timeout", std::to_string(options.timeout_s)},
        .environment = environment};
    if (!options.verbose) spec.args.push_back("--quiet");
    spec.stdin_fd = spec.stdout_fd = nowhere_.get();
    child_.emplace(spec);
  }

  OwnServer(const OwnServer&) = delete;
  OwnServer& operator=(const OwnServer&) = delete;
  /// Its client has gone, and it ends by itself; else it is killed with all that it started.
  ~OwnServer() {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (!has_ended() && std::chrono::steady_clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  const std::string& socket() const { return socket_; }
  bool has_ended() const { return child_->has_ended(); }

 private:
  static int64_t next_number() {
    static std::atomic<int64_t> number = 0;
    return number++;
  }

  std::string socket_;
  Descriptor nowhere_;
  std::optional<trireme::launch::Child> child_;
};

/// A program whose server is its own; the connection ends before the server does.
class OwnProgram : public ProgramRunner {
 public:
  OwnProgram(int64_t workers, const Options& options, const Environment& environment)
      : server_(workers, options, environment), program_(joined(options, environment)) {}

  int64_t workers() const override { return program_->workers(); }
  void add_signal(const std::string& name, const std::vector<int64_t>& workers) override {
    program_->add_signal(name, workers);
  }
  void add_dataset(const trireme::plan::DatasetSpec& dataset) override { program_->add_dataset(dataset); }
  void submit(const trireme::plan::Instruction& instruction) override { program_->submit(instruction); }
  void define_step(uint32_t number, const trireme::plan::RecordedStep& step) override {
    program_->define_step(number, step);
  }
  void replay(uint32_t number, const std::vector<int64_t>& arguments) override {
    program_->replay(number, arguments);
  }
  void flush() override { program_->flush(); }
  void put(int64_t number, int64_t worker, const std::string& bytes) override {
    program_->put(number, worker, bytes);
  }
  Asked ask(int64_t worker, int64_t bytes) override { return program_->ask(worker, bytes); }
  const RemoteProgram& remote() const { return *program_; }

 private:
  /// The server needs a moment until it listens.
  std::unique_ptr<RemoteProgram> joined(const Options& options, const Environment& environment) {
    const auto deadline =
        std::chrono::steady_clock::now() + std::chrono::duration<double>(std::min(options.timeout_s, 30.0));
    while (!std::filesystem::exists(server_.socket())) {
      if (server_.has_ended())
        throw CommError(
            "[gt.workers] the server that was started has ended before it listened; its message is above");
      if (std::chrono::steady_clock::now() > deadline)
        throw CommError("[gt.workers] the server that was started does not listen at {}", server_.socket());
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return std::make_unique<RemoteProgram>(
        ClientSettings{.address = {.path = server_.socket(), .port = 0}, .timeout_s = options.timeout_s},
        environment);
  }

  OwnServer server_;
  std::unique_ptr<RemoteProgram> program_;
};

}  // namespace

Workers gpu_workers(int64_t count, const Options& given) {
  const Options options = given.completed();
  if (count < 1) throw trireme::ConfigError("[gt.workers] {} workers; ask for one or more", count);
  auto program = std::make_shared<OwnProgram>(count, options, Environment::process());
  const std::string& devices = program->remote().worker_list().front().devices;
  if (devices == "cpu" && options.device == "auto")
    trireme::log_info("no GPU is here for {} workers: they compute on the CPU", count);
  return {std::move(program), options};
}

}  // namespace gt

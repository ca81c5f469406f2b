#include "trireme/gt/workers.h"

#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/controller/remote_program.h"
#include "trireme/gt/program.h"

namespace gt {

using trireme::ConfigError;
using trireme::Environment;
using trireme::controller::Address;
using trireme::controller::address_of;
using trireme::controller::ClientSettings;
using trireme::controller::CredentialFiles;
using trireme::controller::ProgramRunner;
using trireme::controller::RemoteProgram;

namespace {

/// The variable of ours, or its twin of the document, which is named once.
std::optional<std::string> either(const Environment& environment, const std::string& name) {
  const auto ours = environment.get("TRIREME_" + name), theirs = environment.get("GT_" + name);
  if (!ours && theirs) trireme::log_info("GT_{0}={1} is read as TRIREME_{0}", name, *theirs);
  return ours ? ours : theirs;
}

bool is_on(const Environment& environment, const std::string& name) {
  const std::string value = either(environment, name).value_or("0");
  if (value == "1" || value == "true" || value == "on") return true;
  if (value == "0" || value == "false" || value == "off") return false;
  throw ConfigError("[gt] TRIREME_{} is '{}'; use 1 or 0", name, value);
}

/// The variables of this process, and what the options name in their place.
Environment environment_of(const Options& options) {
  Environment environment = Environment::process();
  const CredentialFiles files{.token = options.token,
                              .certificate = options.certificate,
                              .key = options.key,
                              .authority = options.authority};
  files.put_into(environment);
  return environment;
}

std::shared_ptr<ProgramRunner> join(Address address, const Options& options, const Environment& environment) {
  return std::make_shared<RemoteProgram>(
      ClientSettings{.address = std::move(address), .timeout_s = options.timeout_s}, environment);
}

}  // namespace

Options Options::from_environment(const Environment& environment) {
  return Options().completed(environment);
}

Options Options::completed(const Environment& environment) const {
  Options options = *this;
  const auto complete = [](std::string& value, const std::optional<std::string>& said) {
    if (value.empty()) value = said.value_or("");
  };
  complete(options.signals, either(environment, "CONFIG"));
  complete(options.instruction_log, either(environment, "INSTRUCTION_LOG"));
  complete(options.program_file, environment.get("TRIREME_PROGRAM_FILE"));
  complete(options.command, environment.get("TRIREME_COMMAND"));
  complete(options.host, environment.get("TRIREME_HOST"));
  options.auto_shard = auto_shard || is_on(environment, "AUTO_SHARD");
  options.verbose = verbose || is_on(environment, "VERBOSE") || is_on(environment, "DEBUG_DISPATCHER");
  if (device != "auto") return options;
  const std::string backend = either(environment, "BACKEND").value_or("auto");
  options.device = backend == "numpy" ? "cpu" : backend == "pytorch" || backend == "torch" ? "auto" : backend;
  if (options.device != "cpu" && options.device != "cuda" && options.device != "auto")
    throw ConfigError("[gt] TRIREME_BACKEND is '{}'; use cpu, cuda or auto", backend);
  return options;
}

Workers::Workers(std::shared_ptr<ProgramRunner> runner, const Options& options) : runner_(std::move(runner)) {
  std::optional<trireme::plan::Signals> signals;
  if (!options.signals.empty()) signals = trireme::plan::load_signals(options.signals);
  program_ = std::make_shared<Program>(runner_, signals, options.is_explicit, options.auto_shard);
  if (!options.instruction_log.empty()) program_->log_to(options.instruction_log);
  if (!options.program_file.empty()) program_->write_to(options.program_file);
  Program::make_current(program_.get());
}

Workers::~Workers() {
  if (program_ && Program::exists() && Program::current() == program_) Program::make_current(nullptr);
}

void Workers::flush() {
  program_->flush();
}

namespace {

/// Credentials are for other hosts: nobody asks for them on this one, and whoever named them expects
/// encryption.
void check_credentials(const Address& address, const Options& given) {
  const bool any =
      !given.token.empty() || !given.certificate.empty() || !given.key.empty() || !given.authority.empty();
  if (!any || address.is_beyond()) return;
  throw ConfigError(
      "[gt.connect] a token or a certificate is named for {}, which is of this host and takes none; name the "
      "host in "
      "gt::Options::host",
      address.text());
}

}  // namespace

Workers connect(int64_t port, const Options& given) {
  const Options options = given.completed();
  const Address address = address_of(options.host.empty() ? "localhost" : options.host, port);
  check_credentials(address, given);
  return {join(address, options, environment_of(options)), options};
}

Workers connect(const std::string& socket, const Options& given) {
  const Options options = given.completed();
  check_credentials({.path = socket, .port = 0}, given);
  return {join({.path = socket, .port = 0}, options, Environment::process()), options};
}

}  // namespace gt

// Worker processes that meet at an address which other hosts reach compute what those of 127.0.0.1 do.
#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <numeric>
#include <optional>

#include "tests/controller/trained_mini_gpt.h"
#include "tests/report/temporary_folder.h"
#include "trireme/controller/tls.h"
#include "trireme/gt/workers.h"
#include "trireme/launch/child.h"

namespace trireme {
namespace {

/// An address of IPv4 that other hosts may reach; none: this machine has no network.
std::optional<std::string> address_of_a_network() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return std::nullopt;
  std::optional<std::string> found;
  for (const ifaddrs* one = first; one != nullptr && !found; one = one->ifa_next) {
    const bool is_network = (one->ifa_flags & IFF_UP) != 0 && (one->ifa_flags & IFF_LOOPBACK) == 0;
    if (!is_network || one->ifa_addr == nullptr || one->ifa_addr->sa_family != AF_INET) continue;
    std::array<char, INET_ADDRSTRLEN> text{};
    const auto* const name = reinterpret_cast<const sockaddr_in*>(one->ifa_addr);
    found = ::inet_ntop(AF_INET, &name->sin_addr, text.data(), text.size());
  }
  ::freeifaddrs(first);
  return found;
}

/// `trireme serve` with workers of its own, in a process.
class ServerAt {
 public:
  ServerAt(const std::string& host, const std::string& token) {
    std::array<int, 2> pipe{};
    if (::pipe2(pipe.data(), O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
    const Descriptor reads(pipe[0]);
    Descriptor writes(pipe[1]);
    launch::ChildSpec spec{.program = TRIREME_PROGRAM,
                           .args = {"serve", "-q", "-n", "2", "--host", host, "-p", "0", "--start-workers",
                                    "--device", "cpu", "--timeout", "60"},
                           .environment = Environment::process()};
    if (!token.empty()) spec.args.insert(spec.args.end(), {"--token", token});
    spec.stdout_fd = writes.get();
    child_.emplace(spec);
    writes.close();
    std::string said;
    for (char letter = 0; !said.ends_with('\n') && ::read(reads.get(), &letter, 1) == 1;) said += letter;
    said_ = said;
  }
  /// "serving 2 workers at tcp:HOST:PORT".
  const std::string& said() const { return said_; }
  int64_t port() const { return std::stoll(said_.substr(said_.rfind(':') + 1)); }

 private:
  std::optional<launch::Child> child_;
  std::string said_;
};

struct Trained {
  Outcome outcome;
  std::vector<float> echo;  ///< more than fits into a message of the server
};

Trained train_at(const std::string& host, const std::string& token) {
  const mini_gpt::Config config = with_stages(1);
  const ServerAt server(host, token);
  EXPECT_NE(server.said().find("tcp:" + (token.empty() ? "127.0.0.1" : host)), std::string::npos)
      << server.said();
  gt::Options options{.signals = signals_file(config, 2, 2), .device = "cpu"};
  options.host = host;
  options.token = token;
  const gt::Workers workers = gt::connect(server.port(), options);
  std::vector<float> values(300'000);
  std::iota(values.begin(), values.end(), 0.0F);
  Trained trained;
  trained.echo = gt::tensor(values, {300'000}).fetch().floats();
  trained.outcome = trained_model(config, {});
  return trained;
}

TEST(BeyondProcesses, ComputeWhatThoseOfThisHostDo) {
  const auto host = address_of_a_network();
  if (!host) GTEST_SKIP() << "this machine has no address but those of its loopback interface";
  if (!controller::has_tls()) GTEST_SKIP() << "this build has no OpenSSL";
  const TemporaryFolder folder;
  const Trained here = train_at("localhost", ""), beyond = train_at(*host, folder.file("token"));
  EXPECT_TRUE(std::filesystem::exists(folder.file("token")));
  EXPECT_EQ(beyond.outcome.begin, here.outcome.begin);
  EXPECT_EQ(beyond.outcome.end, here.outcome.end);
  EXPECT_EQ(beyond.outcome.losses, here.outcome.losses);
  ASSERT_EQ(beyond.echo.size(), 300'000U);
  EXPECT_EQ(beyond.echo, here.echo);
  EXPECT_EQ(beyond.echo.back(), 299'999.0F);
}

}  // namespace
}  // namespace trireme

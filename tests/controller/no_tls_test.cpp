// A build without OpenSSL: what leaves the host is refused before anything begins.
#include <gtest/gtest.h>

#include "tests/controller/fake_session.h"
#include "trireme/controller/address.h"

namespace trireme::controller {
namespace {

TEST(NoTls, NothingListensOrConnectsBeyondThisHost) {
  const TemporaryFolder folder;
  make_token_file(folder.file("token"));
  const Environment environment({{kTokenVariable, folder.file("token")}});
  const Address address{.path = {}, .port = 0, .host = "127.0.0.2"};
  const std::string listening = test::error_from([&] { Listener(address, environment); });
  const std::string connecting =
      test::error_from([&] { connect_to(address, environment, "the server", after_seconds(1)); });
  for (const std::string& said : {listening, connecting})
    EXPECT_NE(said.find("no OpenSSL"), std::string::npos) << said;
}

}  // namespace
}  // namespace trireme::controller

#include "trireme/plan/text_file.h"

#include <gtest/gtest.h>

#include <fstream>

#include "tests/report/temporary_folder.h"
#include "trireme/base/error.h"

namespace trireme::plan {
namespace {

TEST(TextFile, TakesTheMemoryOfItsBytesAndNotOfTheLimit) {
  const TemporaryFolder folder;
  const std::string path = folder.file("text.txt");
  for (const size_t size : {size_t{0}, size_t{10}, size_t{1} << 16, (size_t{1} << 16) + 1, size_t{200'000}}) {
    const std::string bytes(size, 'x');
    std::ofstream(path) << bytes;
    const std::string text = read_text_file(path, size_t{64} << 20);
    EXPECT_EQ(text, bytes);
    EXPECT_LE(text.capacity(), 2 * size + 64);
    EXPECT_EQ(read_text_file(path, size), bytes) << "the limit itself is allowed";
    if (size > 0) {
      EXPECT_THROW(read_text_file(path, size - 1), ConfigError);
    }
  }
  EXPECT_THROW(read_text_file("/dev/zero", 1000), ConfigError);
  EXPECT_THROW(read_text_file(folder.path(), 1000), EnvironmentError);
  EXPECT_THROW(read_text_file(folder.file("none"), 1000), EnvironmentError);
}

}  // namespace
}  // namespace trireme::plan

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/checkpoint/saved.h"
#include "trireme/base/error.h"
#include "trireme/base/hash.h"

namespace trireme::checkpoint::testing {
namespace {

const Layout kTwo{.replicas = 1, .shards = 2, .stages = 1, .tensor = 1};

/// Two checkpoints of a run; the newer one is about to be damaged.
struct Damaged {
  Damaged() {
    Store store(scratch.path("checkpoints"));
    older = save(store, kTwo, 1);
    newer = save(store, kTwo, 2);
    for (const std::string& name : Folder(path(newer)).names())
      files[name] = trireme::testing::slurp(path(newer + "/" + name));
  }
  std::string path(const std::string& name) const { return scratch.path("checkpoints/" + name); }
  void restore() const {
    std::filesystem::remove_all(path(newer));
    for (const auto& [name, content] : files) scratch.write("checkpoints/" + newer + "/" + name, content);
  }

  Scratch scratch;
  std::string older, newer;
  std::map<std::string, std::string> files;  ///< of the newer one
};

/// Loads all of the newest checkpoint as a resuming run would: another one where this one is damaged.
int64_t loaded_step(const Damaged& damaged, std::vector<std::string>& messages) {
  const Folder folder(damaged.path(""));
  std::string older_than;
  for (;;) {
    Newest newest = newest_checkpoint(folder, older_than);
    messages.insert(messages.end(), newest.passed_over.begin(), newest.passed_over.end());
    if (!newest.checkpoint) return -1;
    try {
      newest.checkpoint->state();
      for (int64_t rank = 0; rank < kTwo.ranks(); ++rank) {
        const std::string error = read_error(*newest.checkpoint, kTwo, rank);
        if (!error.empty()) return -2;  // a silent load
      }
      return newest.checkpoint->commit().step;
    } catch (const DataError& error) {
      messages.emplace_back(error.what());
      older_than = std::filesystem::path(newest.checkpoint->path()).filename();
    }
  }
}

void expect_detected(const Damaged& damaged, const std::string& what) {
  std::vector<std::string> messages;
  ASSERT_EQ(loaded_step(damaged, messages), 1) << what;
  ASSERT_EQ(messages.size(), 1u) << what;
  EXPECT_NE(messages.front().find(damaged.newer), std::string::npos) << messages.front();
}

TEST(Corruption, TheUndamagedOneLoads) {
  const Damaged damaged;
  std::vector<std::string> messages;
  EXPECT_EQ(loaded_step(damaged, messages), 2);
  EXPECT_TRUE(messages.empty());
}

/// Whether a file of the newer checkpoint is refused. Data are read with `open`, which has seen the headers.
bool is_refused(const Damaged& damaged, const Checkpoint& open, const std::string& name, size_t place) {
  const auto& files = open.index().files;
  const auto file = std::ranges::find(files, name, &StoredFile::name);
  try {
    if (file != files.end() && place >= static_cast<size_t>(file->header_bytes)) {
      read_error(open, kTwo, file - files.begin());
    } else {
      const Checkpoint fresh(damaged.path(damaged.newer));
      fresh.state();
      for (int64_t rank = 0; rank < kTwo.ranks(); ++rank) read_error(fresh, kTwo, rank);
    }
    return false;
  } catch (const DataError&) {
    return true;
  }
}

/// Every bit of every file of a checkpoint of 16 KiB; at some of them the whole way to the one before is
/// gone.
TEST(Corruption, EveryFlippedBitIsDetectedAndTheOneBeforeIsUsed) {
  const Damaged damaged;
  const Checkpoint open(damaged.path(damaged.newer));
  for (int64_t rank = 0; rank < kTwo.ranks(); ++rank) ASSERT_EQ(read_error(open, kTwo, rank), "");
  size_t bytes = 0;
  for (const auto& [name, content] : damaged.files) {
    bytes += content.size();
    std::fstream file(damaged.path(damaged.newer + "/" + name),
                      std::ios::in | std::ios::out | std::ios::binary);
    const auto put = [&](size_t place, char byte) {
      file.seekp(static_cast<std::streamoff>(place));
      file.put(byte);
      file.flush();
    };
    for (size_t bit = 0; bit < 8 * content.size(); ++bit) {
      const char byte = content[bit / 8];
      put(bit / 8, static_cast<char>(byte ^ 1 << bit % 8));
      ASSERT_TRUE(is_refused(damaged, open, name, bit / 8)) << "bit " << bit << " of " << name;
      if (bit % 101 == 0) expect_detected(damaged, fmt::format("bit {} of {}", bit, name));
      put(bit / 8, byte);
      if (::testing::Test::HasFailure()) return;
    }
  }
  EXPECT_GE(bytes, size_t{16} << 10);
  std::vector<std::string> messages;
  EXPECT_EQ(loaded_step(damaged, messages), 2);  // it was put back each time
}

TEST(Corruption, AFlippedBitOfATensorIsToldByItsName) {
  const Damaged damaged;
  const Checkpoint checkpoint(damaged.path(damaged.newer));
  for (const auto& [name, tensor] : checkpoint.index().tensors) {
    for (const StoredPiece& piece : tensor.pieces) {
      if (piece.region.numel() == 0) continue;
      const std::string& file = checkpoint.index().files[piece.file].name;
      std::string content = damaged.files.at(file);
      content[static_cast<size_t>(piece.offset)] ^= 1;
      damaged.scratch.write("checkpoints/" + damaged.newer + "/" + file, content);
      const std::vector<std::string> problems = Checkpoint(damaged.path(damaged.newer)).verify();
      ASSERT_EQ(problems.size(), 1u);
      EXPECT_NE(problems[0].find("'" + name + "'"), std::string::npos) << problems[0];
      EXPECT_NE(problems[0].find(file), std::string::npos) << problems[0];
      damaged.scratch.write("checkpoints/" + damaged.newer + "/" + file, damaged.files.at(file));
    }
  }
  EXPECT_TRUE(checkpoint.verify().empty());
}

/// Truncated, extended, zeroed, overwritten, swapped, stale, doubled and missing files.
TEST(Corruption, AThousandRandomOnesAreDetected) {
  const Damaged damaged;
  std::vector<std::string> names;
  for (const auto& [name, content] : damaged.files) names.push_back(name);
  const auto write = [&](const std::string& name, const std::string& content) {
    damaged.scratch.write("checkpoints/" + damaged.newer + "/" + name, content);
  };
  int done = 0;
  for (uint64_t round = 0; done < 1000; ++round) {
    const auto random = [&](uint64_t which, size_t limit) {
      return mix64(round, which) % std::max<size_t>(limit, 1);
    };
    const std::string& name = names[random(0, names.size())];
    const std::string& whole = damaged.files.at(name);
    std::string content = whole;
    const size_t begin = random(1, whole.size()),
                 length = 1 + random(2, std::min<size_t>(whole.size() - begin, 4096));
    switch (random(3, 9)) {
      case 0:
        content.resize(begin);
        break;
      case 1:
        content.append(length, '\0');
        break;
      case 2:
        content.replace(begin, length, length, '\0');
        break;
      case 3:
        for (size_t i = 0; i < length; ++i) content[begin + i] = static_cast<char>(mix64(round, 10 + i));
        break;
      case 4:
        content.erase(begin, length);
        break;
      case 5:
        content.insert(begin, whole.substr(begin, length));
        break;
      case 6:
        content = damaged.files.at(names[random(4, names.size())]);
        break;
      case 7:
        content = trireme::testing::slurp(damaged.path(damaged.older + "/" + name));
        break;
      default:
        content.clear();
        break;
    }
    if (content == whole) continue;
    ++done;
    write(name, content);
    expect_detected(damaged, fmt::format("round {} on {}", round, name));
    write(name, whole);
    if (::testing::Test::HasFailure()) return;
  }
  std::vector<std::string> messages;
  EXPECT_EQ(loaded_step(damaged, messages), 2);
}

TEST(Corruption, FilesThatAreNoFilesAreDetected) {
  const Damaged damaged;
  for (const auto& [name, content] : damaged.files) {
    const std::string path = damaged.path(damaged.newer + "/" + name);
    std::filesystem::remove(path);
    expect_detected(damaged, name + " missing");
    std::filesystem::create_symlink(damaged.scratch.write("elsewhere", content), path);
    expect_detected(damaged, name + " a link to a good copy");
    std::filesystem::remove(path);
    std::filesystem::create_symlink("/dev/zero", path);
    expect_detected(damaged, name + " a link to a device");
    std::filesystem::remove(path);
    std::filesystem::create_directory(path);
    expect_detected(damaged, name + " a folder");
    damaged.restore();
  }
}

}  // namespace
}  // namespace trireme::checkpoint::testing

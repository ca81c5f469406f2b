#include <gtest/gtest.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "tests/data/scratch.h"
#include "tests/data/tokens.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/data/corpus.h"
#include "trireme/data/lock.h"

namespace trireme::data {
namespace {

using testing::Scratch;

CorpusOptions options_for(const Scratch& scratch, const std::string& name) {
  return {.path = scratch.path(name), .val_fraction = 0.0, .cache_dir = scratch.path("cache"), .seq_len = 4};
}

/// Runs `body` in a child process; returns its exit status.
pid_t start_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    set_log_level(LogLevel::kSilent);
    int status = 99;
    try {
      status = body();
    } catch (const std::exception&) {
    }
    ::_exit(status);
  }
  return child;
}

int exit_status(pid_t child) {
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

bool has_temporary_folder(const Scratch& scratch) {
  if (!std::filesystem::exists(scratch.path("cache"))) return false;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(scratch.path("cache"))) {
    if (entry.path().extension() == ".tmp") return true;
  }
  return false;
}

TEST(PrepareCorpusFailure, NamesAMissingPathWithTheExitCodeOfAConfig) {
  const Scratch scratch;
  try {
    prepare_corpus(options_for(scratch, "missing"));
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kUsage);
    EXPECT_NE(std::string(error.what()).find(scratch.path("missing")), std::string::npos) << error.what();
  }
}

TEST(PrepareCorpusFailure, NamesSizesOfACorpusShorterThanOneSequence) {
  const Scratch scratch;
  scratch.write("short", "abcd");
  const std::string message =
      testing::message_of<ConfigError>([&] { prepare_corpus(options_for(scratch, "short")); });
  EXPECT_NE(message.find("4 training tokens"), std::string::npos) << message;
  EXPECT_NE(message.find("one sequence needs 5"), std::string::npos) << message;
  EXPECT_NE(message.find(scratch.path("short")), std::string::npos) << message;
  scratch.write("enough", "abcde");
  EXPECT_EQ(prepare_corpus(options_for(scratch, "enough")).train_tokens, 5);
}

TEST(PrepareCorpusFailure, RefusesATextOfSeparatorsOnly) {
  const Scratch scratch;
  scratch.write("text", "<|endoftext|>\n<|endoftext|>\n");
  const std::string message =
      testing::message_of<ConfigError>([&] { prepare_corpus(options_for(scratch, "text")); });
  EXPECT_NE(message.find(" 0 training tokens"), std::string::npos) << message;
}

TEST(PrepareCorpusFailure, RefusesFractionsAndFoldersThatDoNotExist) {
  const Scratch scratch;
  scratch.write("text", "abcdefgh");
  CorpusOptions options = options_for(scratch, "text");
  for (const double fraction : {-0.1, 1.0, 2.0, std::nan("")}) {
    options.val_fraction = fraction;
    EXPECT_THROW(prepare_corpus(options), ConfigError) << fraction;
  }
  EXPECT_FALSE(has_temporary_folder(scratch));
  options = options_for(scratch, "text");
  options.path = "builtin";
  EXPECT_THROW(prepare_corpus(options), ConfigError);
}

TEST(PrepareCorpusFailure, NamesACacheThatCannotBeWritten) {
  const Scratch scratch;
  scratch.write("text", "abcdefgh");
  CorpusOptions options = options_for(scratch, "text");
  options.cache_dir = scratch.path("text");  // a file
  const std::string message = testing::message_of<EnvironmentError>([&] { prepare_corpus(options); });
  EXPECT_NE(message.find(scratch.path("text")), std::string::npos) << message;
}

/// As a user who owns nothing: file modes do not stop root.
int as_nobody(const std::function<int()>& body) {
  return exit_status(start_child([&] {
    if (::geteuid() == 0 && (::setgid(65534) != 0 || ::setuid(65534) != 0)) return 98;
    return body();
  }));
}

TEST(PrepareCorpusFailure, NamesAnUnreadableFileAndLeavesNothingBehind) {
  const Scratch scratch;
  scratch.write("t/a", "readable text");
  const std::string secret = scratch.write("t/b", "secret");
  std::filesystem::create_directory(scratch.path("cache"));
  ::chmod(scratch.path("").c_str(), 0755);
  ::chmod(scratch.path("cache").c_str(), 0777);
  ::chmod(secret.c_str(), 0);
  const int status = as_nobody([&] {
    const std::string message =
        testing::message_of<DataError>([&] { prepare_corpus(options_for(scratch, "t")); });
    return message.find(secret) != std::string::npos ? 0 : 1;
  });
  if (status == 98) GTEST_SKIP() << "this sandbox does not let root become another user";
  EXPECT_EQ(status, 0);
  EXPECT_FALSE(has_temporary_folder(scratch));
}

TEST(PrepareCorpusFailure, NamesAnUnreadableFolder) {
  const Scratch scratch;
  scratch.write("t/a", "readable text");
  scratch.write("t/closed/b", "secret");
  ::chmod(scratch.path("").c_str(), 0755);
  ::chmod(scratch.path("t/closed").c_str(), 0);
  const int status = as_nobody([&] {
    const std::string message =
        testing::message_of<ConfigError>([&] { prepare_corpus(options_for(scratch, "t")); });
    return message.find(scratch.path("t/closed")) != std::string::npos ? 0 : 1;
  });
  ::chmod(scratch.path("t/closed").c_str(), 0755);
  if (status == 98) GTEST_SKIP() << "this sandbox does not let root become another user";
  EXPECT_EQ(status, 0);
}

TEST(PrepareCorpusFailure, PreparesADamagedCacheAgain) {
  const Scratch scratch;
  scratch.write("text", "some text of some length");
  const PreparedCorpus first = prepare_corpus(options_for(scratch, "text"));
  const std::string shard = first.folder + "/train-00000.tokens";
  const std::function<void()> damages[] = {
      [&] { std::filesystem::resize_file(shard, 70); },
      [&] { std::filesystem::remove(shard); },
      [&] { std::filesystem::remove(first.folder + "/index.json"); },
      [&] { std::filesystem::resize_file(first.folder + "/index.json", 40); },
  };
  for (const auto& damage : damages) {
    damage();
    ::testing::internal::CaptureStderr();
    const PreparedCorpus again = prepare_corpus(options_for(scratch, "text"));
    const std::string log = ::testing::internal::GetCapturedStderr();
    EXPECT_FALSE(again.from_cache);
    EXPECT_NE(log.find("preparing it again"), std::string::npos) << log;
    EXPECT_EQ(testing::read_text(again.folder, "train"), "some text of some length");
    EXPECT_TRUE(prepare_corpus(options_for(scratch, "text")).from_cache);
  }
}

TEST(PrepareCorpusFailure, ClearsWhatAnInterruptedPreparationLeft) {
  const Scratch scratch;
  scratch.write("text", "some text of some length");
  const PreparedCorpus first = prepare_corpus(options_for(scratch, "text"));
  std::filesystem::remove_all(first.folder);
  std::filesystem::create_directories(first.folder + ".tmp/half");
  EXPECT_FALSE(prepare_corpus(options_for(scratch, "text")).from_cache);
  EXPECT_FALSE(has_temporary_folder(scratch));
}

TEST(PrepareCorpusFailure, GivenUpAnywhereLeavesNothingBehind) {
  struct GivenUp {};
  const Scratch scratch;
  scratch.write("t/text", std::string(3 << 20, 'x'));
  scratch.write("t/more", "some more");
  for (int calls = 1;; ++calls) {
    CorpusOptions options = options_for(scratch, "t");
    int left = calls;
    options.on_progress = [&](const Progress&) {
      if (--left == 0) throw GivenUp();
    };
    try {
      prepare_corpus(options);
      EXPECT_GT(calls, 5);
      break;
    } catch (const GivenUp&) {
    }
    EXPECT_FALSE(has_temporary_folder(scratch)) << "after " << calls << " calls";
  }
  EXPECT_TRUE(prepare_corpus(options_for(scratch, "t")).from_cache);
}

TEST(PrepareCorpusFailure, ClearsWhatAKilledProcessLeftOfAnotherCorpus) {
  const Scratch scratch;
  scratch.write("text", "some text of some length");
  const std::string data = scratch.path("cache/data/");
  std::filesystem::create_directories(data + "0123456789abcdef.tmp/half");
  std::filesystem::create_directories(data + "fedcba9876543210.tmp/half");
  const FileLock held(data + "fedcba9876543210.lock", 0.0);
  prepare_corpus(options_for(scratch, "text"));
  EXPECT_FALSE(std::filesystem::exists(data + "0123456789abcdef.tmp"));
  EXPECT_TRUE(std::filesystem::exists(data + "fedcba9876543210.tmp")) << "its process is alive";
}

/// The names in a folder that were removed, or closed after writing, in the order in which that happened.
class FolderEvents {
 public:
  explicit FolderEvents(const std::string& folder) {
    EXPECT_GE(::inotify_add_watch(fd_, folder.c_str(), IN_DELETE | IN_CLOSE_WRITE), 0) << folder;
  }
  FolderEvents(const FolderEvents&) = delete;
  FolderEvents& operator=(const FolderEvents&) = delete;
  ~FolderEvents() { ::close(fd_); }

  std::vector<std::string> names() const {
    std::vector<std::string> names;
    alignas(inotify_event) char buffer[1 << 16];
    const ssize_t size = ::read(fd_, buffer, sizeof buffer);
    for (ssize_t at = 0; at < size;) {
      const auto* event = reinterpret_cast<const inotify_event*>(buffer + at);
      names.emplace_back(event->name);
      at += static_cast<ssize_t>(sizeof(inotify_event)) + event->len;
    }
    return names;
  }

 private:
  int fd_ = ::inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
};

TEST(PrepareCorpusFailure, HoldsTheLockOfAnAbandonedFolderUntilTheFolderIsGone) {
  const Scratch scratch;
  scratch.write("text", "some text of some length");
  std::filesystem::create_directories(scratch.path("cache/data/0123456789abcdef.tmp/half"));
  const FolderEvents events(scratch.path("cache/data"));
  prepare_corpus(options_for(scratch, "text"));
  const std::vector<std::string> names = events.names();
  const auto removed = std::ranges::find(names, "0123456789abcdef.tmp");
  const auto let_go = std::ranges::find(names, "0123456789abcdef.lock");
  EXPECT_NE(removed, names.end());
  EXPECT_NE(let_go, names.end());
  EXPECT_LT(removed, let_go);
}

TEST(PrepareCorpusConcurrency, TwoProcessesPrepareOnceAndAgree) {
  const Scratch scratch;
  std::string text;
  for (int i = 0; i < 400'000; ++i) text += fmt::format("line {}\n", i);
  scratch.write("text", text);
  for (int round = 0; round < 3; ++round) {
    std::filesystem::remove_all(scratch.path("cache"));
    int gate[2];
    ASSERT_EQ(::pipe(gate), 0);
    const auto child = [&] {
      char start;
      ::close(gate[1]);
      if (::read(gate[0], &start, 1) != 0) return 97;  // the end of the pipe starts both at once
      const PreparedCorpus corpus = prepare_corpus(options_for(scratch, "text"));
      if (corpus.train_tokens != static_cast<int64_t>(text.size())) return 96;
      return corpus.from_cache ? 1 : 2;
    };
    const pid_t first = start_child(child), second = start_child(child);
    ::close(gate[0]);
    ::close(gate[1]);
    EXPECT_EQ(exit_status(first) + exit_status(second), 3) << "one prepares, the other finds it";
    const PreparedCorpus corpus = prepare_corpus(options_for(scratch, "text"));
    EXPECT_TRUE(corpus.from_cache);
    EXPECT_EQ(testing::read_text(corpus.folder, "train"), text);
  }
}

}  // namespace
}  // namespace trireme::data

#include "trireme/cli/questions.h"

#include <gtest/gtest.h>

#include "tests/report/temporary_folder.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"

namespace trireme::cli {
namespace {

class Questions : public ::testing::Test {
 protected:
  std::vector<Question> read(const std::string& text) const {
    write_file_atomic(folder_.file("q.jsonl"), text);
    return read_questions(folder_.file("q.jsonl"));
  }

  /// The refusal of a good line and `line`.
  template <typename ErrorType>
  std::string refusal(const std::string& line) const {
    try {
      read(std::string(kGood) + "\n\n" + line + "\n");
    } catch (const ErrorType& error) {
      return error.what();
    }
    return "none";
  }

  static constexpr const char* kGood = R"({"prompt": "a", "choices": ["b", "cd"], "answer": 1, "id": 7})";
  TemporaryFolder folder_;
};

TEST_F(Questions, AreALineEach) {
  const auto questions =
      read(std::string(kGood) + "\r\n\n" + R"({"answer":0,"choices":["\u00e9","x","y"],"prompt":""})");
  ASSERT_EQ(questions.size(), 2u);
  EXPECT_EQ(questions[0].line, 1);
  EXPECT_EQ(questions[0].prompt, "a");
  EXPECT_EQ(questions[0].choices, (std::vector<std::string>{"b", "cd"}));
  EXPECT_EQ(questions[0].answer, 1u);
  EXPECT_EQ(questions[1].line, 3);
  EXPECT_EQ(questions[1].prompt, "");
  EXPECT_EQ(questions[1].choices.front(), "\xc3\xa9");
}

TEST_F(Questions, AreRefusedWithTheirLine) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"prompt": "a", "choices": ["b", "c"], "answer": 2})", "'answer' is 2"},
      {R"({"prompt": "a", "choices": ["b", "c"], "answer": -1})", "'answer' is -1"},
      {R"({"prompt": "a", "choices": ["b", "c"], "answer": "0"})", "no whole number"},
      {R"({"prompt": "a", "choices": ["b", ""], "answer": 0})", "choice 1 is empty"},
      {R"({"prompt": "a", "choices": ["b", 3], "answer": 0})", "choice 1 is no string"},
      {R"({"prompt": "a", "choices": ["b"], "answer": 0})", "two are the least"},
      {R"({"prompt": "a", "choices": "bc", "answer": 0})", "'choices' is no list"},
      {R"({"prompt": 1, "choices": ["b", "c"], "answer": 0})", "'prompt' is no string"},
      {R"({"choices": ["b", "c"], "answer": 0})", "no field 'prompt'"},
      {R"({"prompt": "a", "answer": 0})", "no field 'choices'"},
      {R"({"prompt": "a", "choices": ["b", "c"]})", "no field 'answer'"},
      {R"(["a"])", "no JSON object"},
      {R"({"prompt": )", "no JSON object"}};
  for (const auto& [line, why] : cases) {
    const std::string refused = refusal<DataError>(line);
    EXPECT_NE(refused.find(why), std::string::npos) << line << ": " << refused;
    EXPECT_NE(refused.find("q.jsonl, line 3"), std::string::npos) << refused;
  }
}

TEST_F(Questions, NeedAFileThatHoldsSome) {
  EXPECT_THROW(read("\n \n"), ConfigError);
  EXPECT_THROW(read_questions(folder_.file("absent.jsonl")), ConfigError);
  EXPECT_THROW(read_questions(folder_.file("")), ConfigError);
  write_file_atomic(folder_.file("q.jsonl.gz"), "x");
  EXPECT_THROW(read_questions(folder_.file("q.jsonl.gz")), ConfigError);
}

}  // namespace
}  // namespace trireme::cli

// Conversations and prompts with answers: what counts in the loss, how they are packed, and what is refused.
#include "trireme/data/conversation.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "tests/data/scratch.h"
#include "trireme/base/error.h"
#include "trireme/data/corpus.h"
#include "trireme/data/dataset.h"
#include "trireme/data/index.h"
#include "trireme/data/loader.h"

namespace trireme::data {
namespace {

using testing::Scratch;

constexpr const char* kTemplate =
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}";
constexpr const char* kMarkedTemplate =
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}</>{% endfor %}";

ConversationFormat chat_format(const std::string& source, plan::LossOn loss_on = plan::LossOn::kAnswers) {
  return {.format = plan::DataFormat::kChat,
          .loss_on = loss_on,
          .chat = std::make_shared<const text::ChatTemplate>(source, "test")};
}

/// The text with [ and ] around what counts, and $ for the token at the end.
std::string shown(const ConversationFormat& format, const std::string& record) {
  std::string text = marked_text(format, record, "a.jsonl, line 3").text;
  for (char& byte : text) {
    if (byte == MarkedText::kBegin) byte = '[';
    if (byte == MarkedText::kEnd) byte = ']';
    if (byte == MarkedText::kEndToken) byte = '$';
  }
  return text;
}

constexpr const char* kTwoTurns =
    R"({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"},
        {"role": "assistant", "content": "b"}]})";

TEST(Conversation, CountsWhatTheAssistantWrites) {
  EXPECT_EQ(shown(chat_format(kTemplate), kTwoTurns),
            "<system>s</><user>q</><assistant>[a</>]<user>r</><assistant>[b</>]");
  EXPECT_EQ(shown(chat_format(kMarkedTemplate), kTwoTurns),
            "<system>s</><user>q</><assistant>[a]</><user>r</><assistant>[b]</>");
  EXPECT_EQ(shown(chat_format(kTemplate, plan::LossOn::kAll), R"({"prompt": "q", "answer": "a"})"),
            "[<user>q</><assistant>a</>]");
  EXPECT_EQ(shown(chat_format(kTemplate),
                  R"({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]})"),
            "<user>q</><assistant>[a</>]");
}

TEST(Conversation, CountsAnswersOfPairsAndTheTokenThatEndsThem) {
  const ConversationFormat format{.format = plan::DataFormat::kAnswers};
  EXPECT_EQ(shown(format, R"({"prompt": "q: ", "completion": "a"})"), "q: [a]$");
  EXPECT_EQ(shown(format, R"({"question": "é", "response": "ü"})"), "é[ü]$");
  EXPECT_EQ(shown({.format = plan::DataFormat::kAnswers, .loss_on = plan::LossOn::kAll},
                  R"({"prompt": "q: ", "answer": "a"})"),
            "[q: a]$");
}

TEST(Conversation, RefusesRecordsByLineAndReason) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"[]", "no JSON object"},
      {"{", "no JSON"},
      {R"({"text": "a"})", "'prompt', 'question'"},
      {R"({"prompt": "a"})", "'answer', 'completion', 'response'"},
      {R"({"prompt": 3, "answer": "a"})", "'prompt' is number, not a string"},
      {R"({"prompt": "a", "answer": ""})", "answer is empty"},
      {R"({"messages": []})", "empty one"},
      {R"({"messages": [{"role": "wizard", "content": "a"}]})", "role 'wizard'"},
      {R"({"messages": [{"content": "a"}]})", "no 'role'"},
      {R"({"messages": [{"role": "user"}]})", "no 'content'"},
      {R"({"messages": [{"role": "user", "content": "a"}]})", "no answer"},
      {R"({"conversations": [{"from": "cat", "value": "a"}]})", "'cat'"},
      {R"({"messages": )" + std::string(100, '[') + std::string(100, ']') + "}", "64 deep"},
  };
  for (const auto& [record, reason] : cases) {
    try {
      marked_text(chat_format(kTemplate), record, "a.jsonl, line 3");
      ADD_FAILURE() << "accepted: " << record;
    } catch (const DataError& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find(reason), std::string::npos) << message;
      EXPECT_NE(message.find("a.jsonl, line 3"), std::string::npos) << message;
    }
  }
}

TEST(Conversation, RefusesTemplatesThatHideWhereAnswersBegin) {
  const std::string last_only =
      "{% for m in messages %}{% if loop.last %}!{% endif %}{{ m.content }}{% endfor %}";
  const std::string thinks =
      "{% for m in messages %}{{ m.content }}|{% endfor %}"
      "{% if add_generation_prompt %}<think>{% endif %}";
  for (const std::string& source : {last_only, thinks}) {
    try {
      marked_text(chat_format(source), kTwoTurns, "a.jsonl, line 3");
      ADD_FAILURE() << "accepted: " << source;
    } catch (const ConfigError& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find("generation"), std::string::npos) << message;
      EXPECT_NE(message.find("line 3"), std::string::npos) << message;
    }
  }
}

TEST(Conversation, TokensAreThoseOfTheWholeText) {
  const auto tokenizer = make_tokenizer(std::string(TRIREME_TEXT_FIXTURES) + "/llama3.json");
  const auto vocab = static_cast<int32_t>(tokenizer->vocab_size());
  std::string record = R"({"prompt": "The quick brown", "answer": " fox jumps over"})";
  const MarkedText marked = marked_text({.format = plan::DataFormat::kAnswers}, record, "");
  std::vector<int32_t> plain, counted;
  for (const int32_t id : encode_marked(*tokenizer, marked.text)) {
    plain.push_back(id % vocab);
    if (id >= vocab) counted.push_back(id % vocab);
  }
  ASSERT_EQ(plain.back(), tokenizer->document_separator());
  plain.pop_back();
  EXPECT_EQ(plain, tokenizer->encode(marked.plain()));
  counted.pop_back();
  EXPECT_EQ(tokenizer->decode(counted), " fox jumps over");
  EXPECT_LT(counted.size(), plain.size());
}

class PackedConversations : public ::testing::Test {
 protected:
  PreparedCorpus prepare(const std::string& lines, int64_t seq_len, double val_fraction = 0.0,
                         int64_t threads = 1, plan::LossOn loss_on = plan::LossOn::kAnswers,
                         bool keep_apart = true) {
    scratch_.write("chats.jsonl", lines);
    return prepare_corpus({.path = scratch_.path("chats.jsonl"),
                           .format = plan::DataFormat::kAnswers,
                           .loss_on = loss_on,
                           .keep_apart = keep_apart,
                           .val_fraction = val_fraction,
                           .cache_dir = scratch_.path("cache" + std::to_string(threads)),
                           .seq_len = seq_len,
                           .threads = threads});
  }
  /// Inputs of a sample, and its targets with . for those that do not count; zeros are 0.
  static std::pair<std::string, std::string> sample(const Dataset& dataset, int64_t index) {
    const auto length = static_cast<size_t>(dataset.seq_len());
    std::vector<int64_t> tokens(length + 1), targets(length);
    dataset.read_targets(index, tokens, targets);
    std::string inputs, wanted;
    for (size_t i = 0; i < length; ++i) {
      inputs += tokens[i] == 0 ? '0' : static_cast<char>(tokens[i]);
      wanted += targets[i] == kIgnoredTarget ? '.' : targets[i] == 0 ? '0' : static_cast<char>(targets[i]);
    }
    return {inputs, wanted};
  }

  Scratch scratch_;
};

using Sample = std::pair<std::string, std::string>;

TEST_F(PackedConversations, AreWholeInWindowsAndCountAnswersAlone) {
  const PreparedCorpus corpus = prepare(
      "{\"prompt\": \"ab\", \"answer\": \"cd\"}\n\n{\"prompt\": \"xyz\", \"answer\": \"w\"}\n"
      "{\"prompt\": \"p\", \"answer\": \"q\"}\n",
      8);
  const Dataset dataset(corpus.folder, "train", 8);
  ASSERT_EQ(dataset.size(), 2);
  EXPECT_EQ(sample(dataset, 0), Sample("abcd0pq0", ".cd0.q0."));
  EXPECT_EQ(sample(dataset, 1), Sample("xyzw0000", "..w0...."));
  using Begins = std::vector<int64_t>;
  EXPECT_EQ(dataset.document_begins(0), Begins{5});
  EXPECT_EQ(dataset.document_begins(1), Begins{5});  // of what fills the window
  EXPECT_EQ(dataset.kept_targets(0), 5);
  EXPECT_EQ(dataset.kept_targets(1), 2);
  EXPECT_TRUE(corpus.note.empty()) << corpus.note;
  EXPECT_NE(corpus.description.find("3 conversations, 54% of 13 tokens count, windows 81% full"),
            std::string::npos)
      << corpus.description;
}

std::string many_pairs(int count) {
  std::string lines;
  for (int i = 0; i < count; ++i)
    lines += fmt::format("{{\"prompt\": \"{}\", \"answer\": \"{}\"}}\n", std::string(1 + i % 11, 'p'),
                         std::string(1 + i * 7 % 19, 'a'));
  return lines;
}

/// Runs that do not ask where conversations begin have the shards that they always had.
TEST_F(PackedConversations, AreStoredInTwoKindsUnlessTheyAreKeptApart) {
  const std::string lines = many_pairs(40);
  const PreparedCorpus together = prepare(lines, 32, 0.0, 1, plan::LossOn::kAnswers, /*keep_apart=*/false),
                       apart = prepare(lines, 32);
  ASSERT_NE(together.folder, apart.folder);
  EXPECT_EQ(read_index(together.folder).kinds, kCountedKinds);
  EXPECT_EQ(read_index(apart.folder).kinds, kKindsWithBegins);
  const Dataset plain(together.folder, "train", 32), marked(apart.folder, "train", 32);
  EXPECT_NE(plain.digest(), marked.digest());
  ASSERT_EQ(plain.size(), marked.size());
  for (int64_t i = 0; i < plain.size(); ++i) {
    EXPECT_EQ(sample(plain, i), sample(marked, i));
    EXPECT_EQ(plain.kept_targets(i), marked.kept_targets(i));
    EXPECT_FALSE(plain.document_begins(i).has_value());
    EXPECT_TRUE(marked.document_begins(i).has_value());
  }
}

TEST_F(PackedConversations, NeverCountTheirFirstToken) {
  const PreparedCorpus corpus =
      prepare("{\"prompt\": \"ab\", \"answer\": \"cd\"}\n{\"prompt\": \"p\", \"answer\": \"q\"}\n", 8, 0.0, 1,
              plan::LossOn::kAll);
  EXPECT_EQ(sample(Dataset(corpus.folder, "train", 8), 0), Sample("abcd0pq0", "bcd0.q0."));
}

TEST_F(PackedConversations, CountsWhatTruncationTakes) {
  const PreparedCorpus corpus = prepare(
      "{\"prompt\": \"ab\", \"answer\": \"cdefgh\"}\n{\"prompt\": \"abcdefghij\", \"answer\": \"k\"}\n", 4);
  const Dataset dataset(corpus.folder, "train", 4);
  ASSERT_EQ(dataset.size(), 1);
  EXPECT_EQ(sample(dataset, 0), Sample("abcd", ".cd."));
  EXPECT_EQ(dataset.document_begins(0), std::vector<int64_t>());
  for (const char* words : {"2 conversations are longer", "13 tokens cut off", "1 answer cut short", "1 lost",
                            "1 conversation left out"})
    EXPECT_NE(corpus.note.find(words), std::string::npos) << words << " in " << corpus.note;
}

TEST_F(PackedConversations, RefuseDataOfWhichNothingIsLeft) {
  EXPECT_THROW(prepare("{\"prompt\": \"abcdefghij\", \"answer\": \"k\"}\n", 4), ConfigError);
  scratch_.write("chats.txt", "text");
  EXPECT_THROW(prepare_corpus({.path = scratch_.path("chats.txt"),
                               .format = plan::DataFormat::kAnswers,
                               .cache_dir = scratch_.path("cache"),
                               .seq_len = 4}),
               ConfigError);
}

TEST_F(PackedConversations, AreTheSameOnAnyNumberOfThreadsAndEachInOneSplit) {
  const PreparedCorpus one = prepare(many_pairs(500), 32, 0.2, 1),
                       three = prepare(many_pairs(500), 32, 0.2, 3);
  int64_t pairs = 0;
  for (const char* split : {"train", "val"}) {
    const Dataset first(one.folder, split, 32), second(three.folder, split, 32);
    EXPECT_EQ(first.digest(), second.digest());
    for (int64_t i = 0; i < first.size(); ++i) {
      const auto [inputs, targets] = sample(first, i);
      EXPECT_EQ(inputs[0], 'p') << "a window begins with a conversation";
      for (size_t at = 0; at + 1 < inputs.size(); ++at) {
        const bool is_answer = inputs[at + 1] == 'a' || (inputs[at] == 'a' && inputs[at + 1] == '0');
        EXPECT_EQ(targets[at] != '.', is_answer) << inputs;
      }
      pairs += std::ranges::count(targets, '0');
    }
  }
  EXPECT_EQ(pairs, 500);
}

TEST_F(PackedConversations, WeighBatchesByTheTargetsOfAllRanks) {
  const PreparedCorpus corpus = prepare(many_pairs(200), 32);
  const auto dataset = std::make_shared<Dataset>(corpus.folder, "train", 32);
  double shares = 0.0;
  std::vector<int64_t> of_steps;
  for (int64_t rank = 0; rank < 2; ++rank) {
    Loader loader(dataset, {.sampler = {.samples = dataset->size(), .seed = 3},
                            .global_batch = 8,
                            .micro_batch = 2,
                            .dp_rank = rank,
                            .dp_size = 2});
    for (int i = 0; i < 2; ++i) {
      const Batch batch = loader.next();
      int64_t kept = 0;
      for (int64_t at = 0; at < batch.targets.numel(); ++at)
        kept += batch.targets.const_data_ptr<int64_t>()[at] == kIgnoredTarget ? 0 : 1;
      EXPECT_EQ(batch.kept, kept);
      EXPECT_GT(kept, 0);
      of_steps.push_back(batch.step_kept);
      shares += batch.share();
    }
  }
  EXPECT_NEAR(shares, 1.0, 1e-12);
  EXPECT_EQ(std::set<int64_t>(of_steps.begin(), of_steps.end()).size(), 1u);
}

}  // namespace
}  // namespace trireme::data

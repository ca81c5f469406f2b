// Steps that are made again and again, and what their numbers follow from.
#include "trireme/plan/step_recording.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

#include "trireme/base/error.h"

namespace trireme::plan {
namespace {

const std::vector<std::string> kSignals = {"a"};

/// Instructions of a text, without digests.
std::vector<MadeInstruction> step_of(const std::string& lines) {
  std::vector<MadeInstruction> step;
  for (const Instruction& one :
       program_from_text("trireme.program/1\nsignal a workers=0\n" + lines, "p.txt").instructions)
    step.push_back({one, 7});
  return step;
}

/// A step with a new batch, an update of t1 and a fetched loss.
std::vector<MadeInstruction> training_step(int64_t number, double rate) {
  const int64_t first = 100 + 10 * number;
  std::string text = "t" + std::to_string(first) +
                     " = input dtype=fp32 from=" + std::to_string(3 + 2 * number) + " shape=4,4 @a\n";
  text += "t" + std::to_string(first + 1) + " = matmul t" + std::to_string(first) + " t1 @a\n";
  text += "fetch t" + std::to_string(first + 1) + " to=" + std::to_string(50 + number) + "\n";
  text += "adamw_ t1 t2 t3 t4 step=" + std::to_string(number + 1) + " lr=" + std::to_string(rate) +
          " beta1=0.9 beta2=0.99 eps=1e-8 @a\n";
  text += "free t" + std::to_string(first + 1) + "\n";
  return step_of(text);
}

bool is_match(const StepRecording& recording, const std::vector<MadeInstruction>& step,
              std::vector<int64_t>* arguments = nullptr) {
  StepMatch match(recording);
  for (const MadeInstruction& made : step) {
    if (!match.take(made.instruction, made.placed)) return false;
  }
  if (arguments != nullptr) *arguments = match.arguments();
  return match.is_complete();
}

/// The step that follows from the arguments.
std::vector<Instruction> replayed(const RecordedStep& step, const std::vector<int64_t>& arguments) {
  std::vector<Instruction> made;
  size_t number = 0;
  for (size_t i = 0; i < step.instructions.size(); ++i) made.push_back(step.made(i, number, arguments));
  EXPECT_EQ(number, step.groups.size());
  return made;
}

void expect_replayed(const StepRecording& recording, const std::vector<MadeInstruction>& step) {
  std::vector<int64_t> arguments;
  ASSERT_TRUE(is_match(recording, step, &arguments));
  const std::vector<Instruction> made = replayed(step_from_bytes(to_bytes(recording.step())), arguments);
  ASSERT_EQ(made.size(), step.size());
  for (size_t i = 0; i < made.size(); ++i) {
    Instruction wanted = step[i].instruction;
    wanted.line = made[i].line;
    EXPECT_EQ(made[i], wanted) << i;
  }
}

TEST(StepRecording, FindsTheNumbersThatChangeAlike) {
  StepRecording recording(training_step(0, 0.1));
  EXPECT_FALSE(recording.is_known());
  EXPECT_EQ(recording.difference(training_step(1, 0.1), kSignals), "");
  EXPECT_EQ(recording.observe(training_step(1, 0.1), kSignals), "it was made for the second time");
  ASSERT_TRUE(recording.is_known());
  // Tensors of a step; its value from outside; request and step of the update, which both grow by one.
  EXPECT_EQ(recording.step().is_real, (std::vector<bool>{false, false, false}));
  for (int64_t number = 2; number < 5; ++number) expect_replayed(recording, training_step(number, 0.1));
  EXPECT_FALSE(is_match(recording, training_step(5, 0.2))) << "the rate has never changed before";
  EXPECT_EQ(recording.difference(training_step(5, 0.2), kSignals), "");
  const std::string why = recording.observe(training_step(5, 0.2), kSignals);
  EXPECT_EQ(recording.step().is_real.size(), 4U);
  EXPECT_NE(why.find("lr=0.2"), std::string::npos) << why;
  EXPECT_NE(why.find("for the first time"), std::string::npos) << why;
  expect_replayed(recording, training_step(6, 0.3));
  expect_replayed(recording, training_step(9, 0.1));
}

TEST(StepRecording, DividesGroupsWhoseNumbersGoApart) {
  StepRecording recording(training_step(0, 0.1));
  recording.observe(training_step(1, 0.1), kSignals);
  std::vector<MadeInstruction> later = training_step(2, 0.1);
  later[2].instruction.attributes.whole[0] += 5;  // the client asked for other values between
  EXPECT_FALSE(is_match(recording, later));
  const std::string why = recording.observe(later, kSignals);
  EXPECT_NE(why.find("fetch"), std::string::npos) << why;
  EXPECT_NE(why.find("adamw_"), std::string::npos) << why;
  EXPECT_EQ(recording.step().is_real.size(), 4U);
  std::vector<MadeInstruction> next = training_step(3, 0.1);
  next[2].instruction.attributes.whole[0] += 17;
  expect_replayed(recording, next);
}

TEST(StepRecording, SeesEachDifference) {
  StepRecording recording(training_step(0, 0.1));
  recording.observe(training_step(1, 0.1), kSignals);
  const auto changed = [&](size_t index, const auto& change) {
    std::vector<MadeInstruction> step = training_step(2, 0.1);
    change(step[index]);
    return step;
  };
  const std::vector<std::vector<MadeInstruction>> others = {
      changed(0, [](MadeInstruction& one) { one.instruction.attributes.list[0] = 8; }),
      changed(0, [](MadeInstruction& one) { one.instruction.place = TensorPlacement::shard(0); }),
      changed(1, [](MadeInstruction& one) { one.instruction.op = Op::kMul; }),
      changed(1, [](MadeInstruction& one) { one.instruction.no_grad = true; }),
      changed(1, [](MadeInstruction& one) { one.instruction.signal = -1; }),
      changed(1, [](MadeInstruction& one) { one.placed = 8; }),
      changed(1, [](MadeInstruction& one) { one.instruction.input[1] = 2; }),
      changed(1, [](MadeInstruction& one) { std::swap(one.instruction.input[0], one.instruction.input[1]); }),
      changed(4, [](MadeInstruction& one) { one.instruction.kind = InstructionKind::kTrack; })};
  for (size_t i = 0; i < others.size(); ++i) EXPECT_FALSE(is_match(recording, others[i])) << i;
  std::vector<MadeInstruction> shorter = training_step(2, 0.1), longer = shorter;
  shorter.pop_back();
  longer.push_back(longer.back());
  EXPECT_FALSE(is_match(recording, shorter));
  EXPECT_FALSE(is_match(recording, longer));
  const std::string differs = recording.difference(others[2], kSignals);
  EXPECT_NE(differs.find("= mul "), std::string::npos) << differs;
  EXPECT_NE(differs.find("matmul"), std::string::npos) << differs;
  EXPECT_NE(recording.difference(others[5], kSignals).find("another type"), std::string::npos);
  EXPECT_NE(recording.difference(shorter, kSignals).find("4 instructions"), std::string::npos);
}

/// An operation may come from one of two lines; errors have to name the right one.
TEST(StepRecording, HasLinesAsNumbers) {
  const auto step = [](int line) { return step_of("t1 = relu t0 @a #" + std::to_string(line) + "\n"); };
  StepRecording recording(step(10));
  recording.observe(step(11), kSignals);
  expect_replayed(recording, step(10));
  std::vector<int64_t> arguments;
  ASSERT_TRUE(is_match(recording, step(10), &arguments));
  EXPECT_EQ(replayed(recording.step(), arguments).at(0).line, 10U);
}

/// Numbers that all change on their own are too many to be sent in each step.
TEST(StepRecording, OfTooManyArgumentsIsNotCompared) {
  const auto step = [](uint64_t seed) {
    std::mt19937 random(static_cast<uint32_t>(seed));
    std::vector<MadeInstruction> made;
    for (uint32_t i = 0; i < 5000; ++i) {
      made.push_back(step_of("t1 = randn shape=2 @a\n")[0]);
      made.back().instruction.output[0] = i;
      made.back().instruction.attributes.whole[1] = static_cast<int64_t>(random());
    }
    return made;
  };
  StepRecording recording(step(0));
  recording.observe(step(1), kSignals);
  EXPECT_FALSE(recording.is_known());
  EXPECT_NE(recording.observe(step(2), kSignals).find("4096"), std::string::npos);
}

TEST(StepRecording, RefusesBytesThatAreNone) {
  StepRecording recording(training_step(0, 0.1));
  recording.observe(training_step(1, 0.1), kSignals);
  const std::string bytes = to_bytes(recording.step());
  for (size_t size = 0; size < bytes.size(); ++size)
    EXPECT_THROW(step_from_bytes(std::string_view(bytes).substr(0, size)), DataError) << size;
  EXPECT_THROW(step_from_bytes(bytes + "x"), DataError);
  std::mt19937_64 random(3);
  for (int i = 0; i < 20000; ++i) {
    std::string edited = bytes;
    edited[random() % edited.size()] = static_cast<char>(random());
    try {
      const RecordedStep step = step_from_bytes(edited);
      replayed(step, std::vector<int64_t>(step.is_real.size(), static_cast<int64_t>(random())));
    } catch (const DataError&) {
    }
  }
}

}  // namespace
}  // namespace trireme::plan

#include "trireme/plan/instruction.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <set>
#include <string>

#include "tests/support/refusal.h"
#include "trireme/base/error.h"

namespace trireme::plan {
namespace {

/// A feed-forward part under tensor parallelism, its loss, and an update by hand.
const std::string kProgram = R"(trireme.program/1
signal pp_stage0 workers=0,1
signal stage0_to_stage1 workers=3,2
dataset path=/my%20docs tokenizer=byte seq_len=8 batch=4 seed=7 val_fraction=0.02 vocab_size=256 #train.cpp:2
t0 = input dtype=fp32 shape=8,16 @pp_stage0 #3
t1 = input dtype=fp32 shape=16,64 @pp_stage0_colpar #4
t2 = input dtype=fp32 shape=64,16 @pp_stage0_rowpar #5
t3 = matmul t0 t1 @pp_stage0_colpar #7
t4 = gelu t3 @pp_stage0_colpar #8
free t3
t5 = matmul t4 t2 @pp_stage0_rowpar #9
t6 = cross t5 @stage0_to_stage1 #11
t7 = input dtype=int64 shape=8 @pp_stage1
t8 = cross_entropy t6 t7 @pp_stage1 #13
t9 = randn dtype=bf16 seed=17 shape=4,2
t10 = input dtype=fp32 from=7 shape=8,16 place=S(0) @pp_stage0 #20
track t10
t11 = matmul t10 t1 place=R no_grad @pp_stage0_colpar
t12 = square t10 @pp_stage0
t13 = sum t12 @pp_stage0
backward t13 #23
backward t12 t10 later=3
weights later=3 @pp_stage0
t14 = gradient t10
fetch t13 to=5
t15 = batch dataset=1 step=3 targets=1 place=S(0) @pp_stage0 #24
)";

std::string reading(const std::string& lines) {
  return trireme::test::failure_of<ConfigError>(
      [&] { program_from_text("trireme.program/1\n" + lines, "p.txt"); });
}

std::string checking(const std::string& lines) {
  return trireme::test::failure_of<ConfigError>(
      [&] { verify(program_from_text("trireme.program/1\n" + lines, "p.txt"), "p.txt"); });
}

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_TRUE(text.find(part) != std::string::npos) << "'" << text << "' lacks '" << part << "'";
}

TEST(Instruction, IsALineAsTheDocumentWritesIt) {
  Instruction product{.op = Op::kMatmul, .signal = 0, .inputs = 2, .outputs = 1};
  product.input = {5, 4};
  product.output = {7};
  EXPECT_EQ(to_text(product, {"pp_stage0_colpar"}), "t7 = matmul t5 t4 @pp_stage0_colpar");
}

TEST(Instruction, ProgramsGoBothWays) {
  const Program program = program_from_text(kProgram, "p.txt");
  EXPECT_EQ(program.instructions.size(), 22u);
  EXPECT_EQ(program.signals, (std::vector<std::string>{"pp_stage0", "stage0_to_stage1", "pp_stage0_colpar",
                                                       "pp_stage0_rowpar", "pp_stage1"}));
  EXPECT_EQ(program.workers, (std::vector<std::vector<int64_t>>{{0, 1}, {3, 2}}));
  ASSERT_EQ(program.datasets.size(), 1u);
  EXPECT_EQ(program.datasets[0], (DatasetSpec{.path = "/my docs",
                                              .seq_len = 8,
                                              .batch = 4,
                                              .seed = 7,
                                              .vocab_size = 256,
                                              .place = "train.cpp:2"}));
  EXPECT_EQ(to_text(program), kProgram);
  EXPECT_EQ(program.instructions[3].line, 7u);
  const Program spaced = program_from_text(
      "// a comment\n\ntrireme.program/1\n  t0  =  full   shape=2,3 value=1.5 dtype=bf16 // so\r\n", "p.txt");
  EXPECT_EQ(to_text(spaced), "trireme.program/1\nt0 = full dtype=bf16 value=1.5 shape=2,3\n");
}

/// A client's file has signals and datasets where they are used first.
TEST(Instruction, DeclarationsMayStandBetweenInstructions) {
  const Program program = program_from_text(
      "trireme.program/1\nsignal a workers=0\nt0 = full shape=2 @a\nsignal b workers=1\n"
      "dataset path=docs\nt1 = batch dataset=1 @b\n",
      "p.txt");
  EXPECT_EQ(program.workers, (std::vector<std::vector<int64_t>>{{0}, {1}}));
  EXPECT_EQ(program.datasets.size(), 1u);
  EXPECT_EQ(program_from_text(to_text(program), "p.txt"), program);
}

/// Any character of a path survives, and so do all digits of a share.
TEST(Instruction, DatasetsGoBothWays) {
  std::mt19937_64 random(11);
  const std::string letters = "a/ %\"'\\#=@\t\n\r\x01\x7f\xc3\xa4.t5";
  for (int round = 0; round < 2000; ++round) {
    DatasetSpec spec{.seq_len = 1 + static_cast<int64_t>(random() % 1000),
                     .batch = 1 + static_cast<int64_t>(random() % 1000),
                     .seed = static_cast<int64_t>(random()),
                     .val_fraction = std::ldexp(static_cast<double>(random()), -65),
                     .vocab_size = static_cast<int64_t>(random() % 60000)};
    spec.tokenizer = "t";
    for (size_t i = random() % 12 + 1; i > 0; --i) spec.path += letters[random() % letters.size()];
    for (size_t i = random() % 12; i > 0; --i) spec.tokenizer += letters[random() % letters.size()];
    for (size_t i = random() % 6; i > 0; --i) spec.place += letters[random() % letters.size()];
    const Program program{.datasets = {spec, spec}};
    ASSERT_EQ(program_from_text(to_text(program), "p.txt"), program) << to_text(spec);
    ASSERT_EQ(dataset_from_text(to_text(spec), "x"), spec) << to_text(spec);
  }
}

/// Every operation with every attribute it has, and numbers that need all of their digits.
TEST(Instruction, EveryOperationAndAttributeGoesBothWays) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 50; ++round) {
    Program program{.signals = {"a", "b/c-d.e"}};
    for (size_t number = 0; number < kNames<Op>.size(); ++number) {
      const OpRecord& record = record_of(static_cast<Op>(number));
      Instruction one{.op = record.op, .line = static_cast<uint32_t>(random() % 3)};
      one.signal = number == 0 ? 0 : number == 1 ? 1 : static_cast<int32_t>(random() % 3) - 1;
      one.inputs = static_cast<uint16_t>(random() % (kMostOpInputs + 1));
      one.outputs = static_cast<uint16_t>(random() % (kMostOpResults + 1));
      for (size_t i = 0; i < one.inputs; ++i) one.input[i] = static_cast<uint32_t>(random());
      for (size_t i = 0; i < one.outputs; ++i) one.output[i] = static_cast<uint32_t>(random());
      for (size_t i = 0; i < record.whole.size(); ++i) {
        if (record.whole[i] == "dtype")
          one.attributes.whole[i] = static_cast<int64_t>(random() % 5);
        else if (!record.whole[i].empty())
          one.attributes.whole[i] = static_cast<int64_t>(random());
      }
      for (size_t i = 0; i < record.real.size(); ++i) {
        if (!record.real[i].empty())
          one.attributes.real[i] =
              std::ldexp(static_cast<double>(random()), static_cast<int>(random() % 200) - 150);
      }
      one.no_grad = random() % 2 != 0;
      const TensorPlacement places[] = {TensorPlacement::replicate(), TensorPlacement::partial(),
                                        TensorPlacement::shard(static_cast<int64_t>(random() % 8))};
      if (random() % 2 != 0) one.place = places[random() % 3];
      if (!record.list.empty()) {
        std::vector<int64_t> items(random() % (OpAttributes::kMostListed + 1));
        for (int64_t& item : items) item = static_cast<int64_t>(random() % 1000) - 500;
        one.attributes.set_items(items);
      }
      program.instructions.push_back(one);
    }
    const std::string text = to_text(program);
    const Program again = program_from_text(text, "p.txt");
    ASSERT_EQ(again, program) << text;
    ASSERT_EQ(program_hash(again), program_hash(program));
    std::string bytes;
    for (const Instruction& one : program.instructions) append_bytes(bytes, one);
    std::string_view left = bytes;
    for (const Instruction& one : program.instructions) ASSERT_EQ(take_instruction(left), one);
    ASSERT_TRUE(left.empty());
  }
}

TEST(Instruction, EveryKindGoesThroughBytes) {
  const Program program = program_from_text(kProgram, "p.txt");
  std::string bytes;
  for (const Instruction& one : program.instructions) append_bytes(bytes, one);
  EXPECT_LT(bytes.size(), 25 * program.instructions.size());
  std::string_view left = bytes;
  for (const Instruction& one : program.instructions) ASSERT_EQ(take_instruction(left), one);
}

/// Bytes of another program, or damaged ones, are an instruction or refused, and nothing else.
TEST(Instruction, DamagedBytesAreReadOrRefused) {
  const Program program = program_from_text(kProgram, "p.txt");
  std::mt19937 random(7);
  int64_t read = 0, refused = 0;
  for (int round = 0; round < 100000; ++round) {
    std::string bytes;
    append_bytes(bytes, program.instructions[random() % program.instructions.size()]);
    for (int edit = 0; edit < 2; ++edit) bytes[random() % bytes.size()] = static_cast<char>(random());
    if (random() % 4 == 0) bytes.resize(random() % bytes.size());
    std::string_view left = bytes;
    try {
      const Instruction one = take_instruction(left);
      EXPECT_LE(one.inputs, kMostOpInputs);
      EXPECT_LE(one.outputs, kMostOpResults);
      EXPECT_LT(static_cast<size_t>(one.op), kNames<Op>.size());
      ++read;
    } catch (const DataError&) {
      ++refused;
    }
  }
  EXPECT_GT(read, 1000);
  EXPECT_GT(refused, 1000);
}

TEST(Instruction, TypesFollowFromOperations) {
  const auto types = verify(program_from_text(kProgram, "p.txt"), "p.txt");
  ASSERT_EQ(types.size(), 16u);
  EXPECT_EQ(types.at(4), (TensorType{{8, 64}}));
  EXPECT_EQ(types.at(6), (TensorType{{8, 16}}));
  EXPECT_EQ(types.at(8), (TensorType{Shape{}}));
  EXPECT_EQ(types.at(9), (TensorType{{4, 2}, TensorDtype::kBf16}));
  EXPECT_EQ(types.at(15), (TensorType{{4, 8}, TensorDtype::kInt64}));
}

TEST(Instruction, HashesTellMeaningsApart) {
  const Program program = program_from_text(kProgram, "p.txt");
  Program moved = program;
  for (Instruction& one : moved.instructions) one.line += 100;
  moved.datasets[0].place = "other.cpp:3";
  EXPECT_EQ(program_hash(moved), program_hash(program)) << "lines of the source do not count";
  std::set<uint64_t> hashes = {program_hash(program)};
  const std::pair<const char*, const char*> edits[] = {{"matmul t4 t2", "matmul t2 t4"},
                                                       {"gelu", "silu"},
                                                       {"seed=17", "seed=18"},
                                                       {"free t3", "free t4"},
                                                       {"@pp_stage1 ", "@pp_stage2 "},
                                                       {"4,2", "2,4"},
                                                       {"t9 =", "t90 ="},
                                                       {"bf16", "fp16"},
                                                       {"place=S(0)", "place=S(1)"},
                                                       {"no_grad ", ""},
                                                       {"workers=3,2", "workers=2,3"},
                                                       {"to=5", "to=6"},
                                                       {"t10 later=3", "t10 later=4"},
                                                       {"step=3", "step=4"},
                                                       {" targets=1", ""},
                                                       {"my%20docs", "my%20text"},
                                                       {"seq_len=8", "seq_len=9"},
                                                       {"seed=7", "seed=8"}};
  for (const auto& [from, to] : edits) {
    std::string text = kProgram;
    text.replace(text.find(from), std::string(from).size(), to);
    hashes.insert(program_hash(program_from_text(text, "p.txt")));
  }
  EXPECT_EQ(hashes.size(), 1 + std::size(edits));
}

/// Lists of workers, all but the first empty, have the numbers of an instruction in which nearly all are 0.
TEST(Instruction, HashesTellWorkersFromInstructions) {
  const uint64_t crossing = program_hash({.instructions = {{.kind = InstructionKind::kCross}}});
  Program program{.signals = {"first"}, .workers = {{0, 0}}};
  for (int empty = 0; empty < 100; ++empty) {
    EXPECT_NE(program_hash(program), crossing) << empty;
    program.signals.emplace_back("other");
    program.workers.emplace_back();
  }
}

TEST(Instruction, LinesThatCannotBeReadAreNamed) {
  const std::pair<const char*, const char*> lines[] = {
      {"t1 = matmull t0 t0", "p.txt:2: unknown operation 'matmull', did you mean 'matmul'?"},
      {"t1 = xyzzy t0", "unknown operation 'xyzzy'; see"},
      {"t1 =", "there is no operation"},
      {"= relu t0", "no result before '='"},
      {"x = relu t0", "'x' is no tensor"},
      {"t1 = relu \"\"", "'' is no tensor"},
      {"t1 = relu 5", "'5' is no tensor"},
      {"t1 = relu t99999999999", "is no tensor"},
      {"t1 t2 t3 t4 t5 = split t0", "more than 4 results"},
      {"t1 = cat t0 t0 t0 t0 t0 t0 t0", "more than 6 operands"},
      {"t1 = relu t0 dim=1", "'relu' has no attribute 'dim'"},
      {"t1 = softmax t0 dims=1", "'softmax' has no attribute 'dims'; it has dim"},
      {"t1 = full other=1", "'full' has no attribute 'other'; it has dtype, value, shape"},
      {"t1 = softmax t0 =1", "has no attribute ''"},
      {"t1 = softmax t0 dim=1 dim=2", "dim is given twice"},
      {"t1 = softmax t0 dim=one", "dim=one is no whole number"},
      {"t1 = scale t0 by=nan", "by=nan is no number"},
      {"t1 = scale t0 by=", "by= is no number"},
      {"t1 = cast t0 dtype=fp8", "is no dtype; use fp32, bf16"},
      {"t1 = reshape t0 shape=1,,2", "is no list of whole numbers"},
      {"t1 = reshape t0 shape=1,2,3,4,5,6,7,8,9", "has 9 numbers; there may be 8"},
      {"t1 = relu t0 @", "'@' is no name of a signal"},
      {"t1 = relu t0 \"@a b\"", "'@a b' is no name of a signal"},
      {"t1 = relu t0 @a @b", "two signals"},
      {"t1 = relu t0 #0", "'#0' is no line"},
      {"free t0 by=1", "'free' has no attribute 'by'"},
      {"t1 = relu t0 place=X", "place=X is no placement; write R, P or S(0)"},
      {"free t0 place=R", "'free' has no attribute 'place'"},
      {"t1 = cross t0 no_grad", "takes no 'no_grad'"},
      {"signal a", "a signal is written 'signal NAME workers=0,1'"},
      {"signal a workers=x", "'x' is no worker"},
      {"signal a workers=0\nsignal a workers=1", "'a' is named twice"},
      {"t1 = relu t0 @b\nsignal a workers=1", "signals stand before the first instruction that names one"},
      {"dataset", "p.txt:2: path is empty; name a file or folder"},
      {"dataset docs", "'docs' says nothing of a dataset; write path="},
      {"dataset path=docs seqlen=4", "a dataset has no 'seqlen'; did you mean 'seq_len'?"},
      {"dataset path=docs batch=four", "batch=four is no number"},
      {"dataset path=docs batch=0", "batch is 0; give 1 to"},
      {"dataset path=docs val_fraction=1", "val_fraction is 1; give 0 up to below 1"},
      {"dataset path=docs val_fraction=nan", "val_fraction is nan"},
      {"dataset path=docs vocab_size=-1", "vocab_size is -1"},
      {"dataset path=docs%2", "has a % without two digits"},
      {"dataset path=docs%2x", "has a % without two digits"},
      {"free t0 step=1", "'free' has no attribute 'step'"},
  };
  for (const auto& [line, said] : lines) expect_contains(reading(line), said);
  expect_contains(
      trireme::test::failure_of<ConfigError>([] { program_from_text("t0 = relu t1\n", "p.txt"); }),
      "p.txt:1: a program begins");
  expect_contains(trireme::test::failure_of<ConfigError>([] { program_from_text("\n", "p.txt"); }),
                  "no line says 'trireme.program/1'");
}

TEST(Instruction, ProgramsThatCannotRunAreNamed) {
  const std::string made = "t0 = input dtype=fp32 shape=4,8\n";
  const std::pair<std::string, const char*> programs[] = {
      {"t1 = relu t0 #9\n", "instruction 1 't1 = relu t0 #9': t0 is used before it is made"},
      {made + "free t0\nt1 = relu t0\n", "instruction 3 't1 = relu t0': t0 was freed by instruction 2"},
      {made + "free t0\nfree t0\n", "was freed by instruction 2"},
      {made + made, "t0 is made twice"},
      {made + "t1 = matmul t0 t0\n", "the first has 8 columns, the second 4 rows"},
      {made + "t1 t2 = relu t0\n", "it has 1 results, and names 2"},
      {made + "t1 = sgd_ t0 t0\n", "it has 0 results, and names 1"},
      {made + "t1 t2 = split t0 dim=1 sizes=4,2\n", "sizes add up to 6, not to 8"},
      {made + "t1 = cross t0\n", "to the workers of a signal; add '@'"},
      {made + "t1 = cross t0 t0 @b\n", "a tensor crosses alone"},
      {made + "t1 = input t0\n", "an input has no operands"},
      {"t0 = input shape=-4\n", "negative dimension"},
      {made + "t1 = free t0\n", "'free' takes one tensor"},
      {made + "t1 t2 = split t0 dim=1 sizes=9223372036854775807,9223372036854775807\n",
       "add up to more than 8"},
      {"t0 = full dtype=fp32 shape=281474976710656,16384\n", "too large"},
      {"t0 = randn dtype=int64 shape=4\n", "random numbers are floating"},
      {made + "t1 = dropout t0 p=1\n", "p is 1; give 0 up to below 1"},
      {made + "adamw_ t0 t0 t0 t0 lr=1\n", "steps count from 1"},
      {"t0 = input dtype=int64 shape=4\nsgd_ t0 t0 lr=1\n", "floating"},
      {made + "track t0\ntrack t1\n", "t1 is used before"},
      {"t0 = input dtype=int64 shape=4\ntrack t0\n", "int64 (4) has no gradient"},
      {made + "t1 = gradient t0\n", "its gradient is not collected; write 'track'"},
      {made + "track t0\nt1 = relu t0\nbackward t1\n", "a root without a gradient is a scalar"},
      {made + "t1 = sum t0\nbackward t1\n", "no gradient passes from t1"},
      {made + "track t0\nt1 = sum t0 no_grad\nbackward t1\n", "no gradient passes from t1"},
      {made + "track t0\nt1 = relu t0\nt2 = sum t0\nbackward t1 t2\n", "another type"},
      {made + "track t0\nbackward t0 t0 t0\n", "'backward' takes a scalar, or roots"},
      {made + "weights later=0 @a\n", "write later=1"},
      {made + "weights t0 later=1 @a\n", "takes the number of a backward pass"},
      {made + "t1 = fetch t0\n", "'fetch' takes one tensor"},
      {"t0 = input dtype=fp32 shape=4 place=S(1)\n", "cannot be placed S(1)"},
      {"t0 = input dtype=fp32 shape=4 place=P\n", "cannot be placed P"},
      {"t0 = batch step=1\n", "there is no dataset 0 among 0; declare it, and count from dataset=1"},
      {"dataset path=d\nt0 = batch dataset=2\n", "there is no dataset 2 among 1"},
      {"dataset path=d\nt0 = batch dataset=1 step=-1\n", "there is no batch -1; batches are numbered from 0"},
      {"dataset path=d batch=2\nt0 = batch dataset=1 step=4611686018427387903\n",
       "numbered from 0 to 4611686018427387902"},
      {"dataset path=d\nt0 = batch dataset=1 targets=2\n", "targets is 2; give 1, or 0 for inputs"},
      {"dataset path=d\nt0 = batch dataset=1 place=P\n", "cannot be placed P"},
      {"dataset path=d\nt0 = batch dataset=1 place=S(2)\n", "cannot be placed S(2)"},
      {made + "dataset path=d\nt1 = batch t0 dataset=1\n", "a batch has no operands and one result"},
  };
  for (const auto& [text, said] : programs) expect_contains(checking(text), said);
  EXPECT_EQ(checking(made + "t1 t2 = split t0 dim=1 sizes=4,4\nadd_ t1 t2\nfree t0\n"), "");
}

/// Records that no text made, as a message of another process may hold them.
TEST(Instruction, RecordsThatCannotBeAreRefused) {
  const auto refused = [](const Instruction& one) {
    return trireme::test::failure_of<ConfigError>(
        [&] { verify({.signals = {}, .instructions = {one}}, "x"); });
  };
  expect_contains(refused({.inputs = 7}), "7 operands");
  expect_contains(refused({.outputs = 5}), "5 results");
  expect_contains(refused({.signal = 3}), "there is no signal 3");
  expect_contains(refused({.signal = -2}), "there is no signal -2");
  expect_contains(refused({.op = static_cast<Op>(999)}), "there is no operation 999");
  expect_contains(refused({.kind = static_cast<InstructionKind>(10)}), "there is no kind 10");
  Instruction listed{.outputs = 1};
  listed.attributes.listed = 100;
  expect_contains(refused(listed), "a list of 100 numbers");
  listed.attributes.listed = 0;
  listed.attributes.real[0] = HUGE_VAL;
  expect_contains(refused(listed), "no finite number");
  Instruction relu{.op = Op::kRelu, .inputs = 1, .outputs = 1};
  relu.attributes.whole[0] = 5;
  expect_contains(refused(relu), "whole number 0 is 5, but it has none there");
  Instruction freed{.kind = InstructionKind::kFree, .inputs = 1};
  freed.attributes.real[1] = 2.0;
  expect_contains(refused(freed), "number 1 is 2");
  freed.attributes = {};
  freed.attributes.listed = 1;
  expect_contains(refused(freed), "takes none");
  expect_contains(
      trireme::test::failure_of<ConfigError>([] { verify({.signals = {"a//b"}, .instructions = {}}, "x"); }),
      "'a//b' is no name of a signal");
  const auto hashed = [](const Instruction& one) {
    return trireme::test::failure_of<ConfigError>(
        [&] { program_hash({.signals = {}, .instructions = {one}}); });
  };
  expect_contains(hashed({.inputs = 7}), "7 operands");
  expect_contains(hashed(relu), "it has none there");
}

/// Texts with wrong bytes are read or refused, and nothing else.
TEST(Instruction, EditedTextsAreReadOrRefused) {
  std::mt19937 random(3);
  const std::string letters = "t0123456789=@#., _-ablmnorxy/\"\n";
  int64_t read = 0, refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string text = kProgram;
    for (int edit = 0; edit < 3; ++edit) text[random() % text.size()] = letters[random() % letters.size()];
    const std::string message = trireme::test::failure_of<ConfigError>([&] {
      const Program program = program_from_text(text, "p.txt");
      EXPECT_EQ(program_hash(program_from_text(to_text(program), "p.txt")), program_hash(program)) << text;
      verify(program, "p.txt");
    });
    (message.empty() ? read : refused) += 1;
  }
  EXPECT_EQ(read + refused, 20000);
  EXPECT_GT(refused, 1000);
  EXPECT_GT(read, 100);
}

}  // namespace
}  // namespace trireme::plan

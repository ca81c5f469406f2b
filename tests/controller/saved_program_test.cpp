// Programs that are saved and go on: with the same bits on the same mesh, with the same numbers on others.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/controller/saved_run.h"
#include "tests/support/refusal.h"
#include "trireme/base/error.h"
#include "trireme/checkpoint/safetensors.h"

namespace trireme {
namespace {

std::string bytes_of_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

double largest_difference(const Values& a, const Values& b) {
  double largest = 0;
  for (const auto& [name, values] : a) {
    for (size_t i = 0; i < values.size(); ++i)
      largest = std::max(largest, std::abs(static_cast<double>(values[i]) - b.at(name).at(i)));
  }
  return largest;
}

/// Four steps are two, a file, and two more of a program that began with other weights.
void expect_goes_on(bool adamw) {
  const SavedMesh home{.tp = 2, .stages = 2};
  const std::string file = saved_path("home"), again = saved_path("again");
  const SavedOutcome straight = train_until(4, home, adamw);
  const SavedOutcome half = train_until(2, home, adamw, "", file);
  const SavedOutcome resumed = train_until(4, home, adamw, file);
  EXPECT_EQ(resumed.begin, 2);
  EXPECT_EQ(resumed.values, straight.values);
  EXPECT_EQ(resumed.losses, std::vector<double>(straight.losses.begin() + 2, straight.losses.end()));
  EXPECT_GT(largest_difference(half.values, straight.values), 1e-3) << "the steps change nothing";
  for (const SavedMesh& mesh : {SavedMesh{1, 4}, SavedMesh{4, 1}, SavedMesh{1, 1}}) {
    const std::string what = std::to_string(mesh.tp) + " x " + std::to_string(mesh.stages);
    EXPECT_EQ(train_until(2, mesh, adamw, file, again).values, half.values) << what;
    EXPECT_EQ(bytes_of_file(again), bytes_of_file(file)) << what;
    const SavedOutcome other = train_until(4, mesh, adamw, file);
    EXPECT_LT(largest_difference(other.values, straight.values), 1e-6) << what;
  }
}

TEST(SavedPrograms, GoOnWithAdamW) {
  expect_goes_on(true);
}

TEST(SavedPrograms, GoOnWithSgd) {
  expect_goes_on(false);
}

/// Weights that lie on workers get the file's values where they lie, and so does what is kept of them.
TEST(SavedPrograms, GoBackWhereTheyStand) {
  const std::string file = saved_path("back"), again = saved_path("back-again");
  on_saved_mesh({.tp = 2, .stages = 2}, [&](bool is_first) {
    SavedRun run(with_stages(2), true, 5);
    run.step(0);
    run.save(file, 1);
    const Values saved = values_of(run.named());
    run.step(1);
    run.step(2);
    const Values wanted = values_of(run.named());
    EXPECT_EQ(run.load(file), 1);
    EXPECT_EQ(values_of(run.named()), saved);
    run.save(is_first ? again : again + "-other", 1);
    run.step(1);
    run.step(2);
    EXPECT_EQ(values_of(run.named()), wanted);
  });
  EXPECT_EQ(bytes_of_file(again), bytes_of_file(file));
}

/// Before its first use a weight is on no workers: neither saving nor loading places it.
TEST(SavedPrograms, SavingAndLoadingPlaceNothing) {
  const SavedMesh mesh{.tp = 2, .stages = 2};
  const std::string file = saved_path("fresh"), weights = saved_path("weights");
  const Values begin = train_until(0, mesh, true).values;
  const SavedOutcome straight = train_until(2, mesh, true);
  on_saved_mesh(mesh, [&](bool) {
    SavedRun run(with_stages(2), true, 5);
    run.save(file, 0);
    gt::save(weights, run.named());
    run.step(0);
    run.step(1);
    EXPECT_EQ(values_of(run.named()), straight.values);
  });
  EXPECT_EQ(train_until(2, mesh, true, file).values, straight.values);
  on_saved_mesh(mesh, [&](bool) {
    SavedRun run(with_stages(2), true, 7);
    gt::load(weights, run.named());
    run.step(0);
    run.step(1);
    EXPECT_EQ(values_of(run.named()), straight.values);
  });
  const checkpoint::SafetensorsReader reader(weights);
  EXPECT_EQ(reader.tensors().size(), begin.size());
  for (const auto& [name, values] : begin)
    EXPECT_TRUE(reader.read(name).flatten().equal(at::tensor(values))) << name;
}

/// Random numbers of a program go on, too.
TEST(SavedPrograms, TakeTheNextRandomNumbers) {
  const std::string file = saved_path("seed");
  std::vector<float> wanted;
  for (const int64_t seed : {3, 4}) {
    on_saved_mesh({}, [&](bool) {
      SavedRun run(with_stages(1), true, seed);
      if (wanted.empty()) {
        run.save(file, 7);
        wanted = gt::randn({3}).fetch().floats();
        return;
      }
      EXPECT_EQ(run.load(file), 7);
      EXPECT_EQ(gt::randn({3}).fetch().floats(), wanted);
    });
  }
}

/// Two parameters, of which one is updated.
struct SmallProgram {
  gt::Tensor used = gt::randn({4, 3}), idle = gt::randn({3});
  gt::AdamW optimizer{std::vector<gt::Tensor>{used.requires_grad_(), idle.requires_grad_()}, 0.1};

  SmallProgram() { update(); }
  void update() {
    gt::matmul(gt::ones({2, 4}), used).mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  gt::nn::NamedTensors named() const { return {{"used", used}, {"idle", idle}}; }
};

using Tensors = std::map<std::string, at::Tensor>;

/// A file with other tensors, as another program writes it.
void rewrite_saved(const std::string& from, const std::string& to,
                   const std::function<void(Tensors&)>& change) {
  const checkpoint::SafetensorsReader reader(from);
  Tensors tensors;
  for (const auto& [name, info] : reader.tensors()) tensors[name] = reader.read(name);
  change(tensors);
  std::map<std::string, checkpoint::TensorInfo> infos;
  for (const auto& [name, tensor] : tensors) infos[name] = {tensor.scalar_type(), tensor.sizes().vec()};
  auto metadata = reader.metadata();
  metadata.erase("trireme.xxh3");
  checkpoint::SafetensorsWriter writer(to, infos, metadata);
  for (const auto& [name, tensor] : tensors) writer.write(name, tensor);
  writer.commit();
}

void replace_in_file(const std::string& from, const std::string& to, const std::string& text,
                     const std::string& by) {
  std::string bytes = bytes_of_file(from);
  const size_t at = bytes.find(text);
  ASSERT_NE(at, std::string::npos) << text;
  bytes.replace(at, text.size(), by);
  std::ofstream(to, std::ios::binary) << bytes;
}

/// A file, and a program that has gone on since it was written.
class RefusedFiles {
 public:
  RefusedFiles() {
    gt::save_training(good_, program_.named(), program_.optimizer, 1);
    program_.update();
    gt::randn({1});
    gt::save_training(before_, program_.named(), program_.optimizer, 1);
  }

  SmallProgram& program() { return program_; }
  const std::string& good() const { return good_; }
  const std::string& bad() const { return bad_; }

  /// Loading the bad file says so, and changes nothing that a file has.
  void expect_refused(const std::vector<std::string>& says) {
    test::expect_mentions(
        test::failure_of([&] { gt::load_training(bad_, program_.named(), program_.optimizer); }), says);
    expect_unchanged();
  }
  void expect_unchanged() {
    gt::save_training(now_, program_.named(), program_.optimizer, 1);
    EXPECT_EQ(bytes_of_file(now_), bytes_of_file(before_));
  }

 private:
  SmallProgram program_;
  std::string good_ = saved_path("good"), bad_ = saved_path("bad"), now_ = saved_path("now"),
              before_ = saved_path("before");
};

TEST(SavedPrograms, RefuseDamagedFilesAndChangeNothing) {
  on_saved_mesh({}, [&](bool) {
    RefusedFiles files;
    std::string bytes = bytes_of_file(files.good());
    const std::string whole = bytes;
    bytes.back() ^= 1;
    std::ofstream(files.bad(), std::ios::binary) << bytes;
    files.expect_refused({"[gt.load] " + files.bad(), "digest", "take an earlier file"});
    std::ofstream(files.bad(), std::ios::binary) << whole.substr(0, whole.size() - 4);
    files.expect_refused({files.bad(), "bytes"});
    replace_in_file(files.good(), files.bad(), R"("note.step":"1")", R"("note.step":"3")");
    files.expect_refused({"[gt.load] " + files.bad(), "digest"});
    rewrite_saved(files.good(), files.bad(), [](Tensors& all) { all.at("optimizer.step.used").fill_(-1); });
    files.expect_refused({"'optimizer.step.used' is -1"});
    std::filesystem::remove(files.bad());
    files.expect_refused({"[gt.load] there is no file '" + files.bad() + "'"});
  });
}

TEST(SavedPrograms, RefuseFilesOfOtherProgramsAndChangeNothing) {
  on_saved_mesh({}, [&](bool) {
    RefusedFiles files;
    const auto refused = [&](const std::vector<std::string>& says, const std::function<void(Tensors&)>& how) {
      rewrite_saved(files.good(), files.bad(), how);
      files.expect_refused(says);
    };
    refused({"lacks 1 tensors", "'idle'"}, [](Tensors& all) { all.erase("idle"); });
    refused({"lacks 1 of its tensors", "'more'"}, [](Tensors& all) { all["more"] = at::zeros({2}); });
    refused({"'used' is F32 (3, 4) there", "fp32 (4, 3)"},
            [](Tensors& all) { all["used"] = all["used"].t().contiguous(); });
    refused({"'idle' is BF16 (3)"}, [](Tensors& all) { all["idle"] = all["idle"].to(at::kBFloat16); });
    refused({"'optimizer.exp_avg.used' is not there after 1 updates"},
            [](Tensors& all) { all.erase("optimizer.exp_avg.used"); });
    refused({"'optimizer.exp_avg.idle' is there after 0 updates"}, [](Tensors& all) {
      for (const char* kind : {"exp_avg", "exp_avg_sq"})
        all[std::string("optimizer.") + kind + ".idle"] = at::zeros({3});
    });
    gt::save(files.bad(), files.program().named());
    files.expect_refused({"tensors alone", "gt::load()"});
    gt::SGD other({files.program().used, files.program().idle}, 0.1);
    test::expect_mentions(
        test::failure_of([&] { gt::load_training(files.good(), files.program().named(), other); }),
        {"lacks 2 of its tensors", "optimizer.exp_avg"});
    files.expect_unchanged();
  });
}

/// A file of Python's safetensors has no digest; weights alone are taken out of the file of a training.
TEST(SavedPrograms, TakeFilesWithoutADigestAndWeightsAlone) {
  on_saved_mesh({}, [&](bool) {
    RefusedFiles files;
    rewrite_saved(files.good(), files.bad(), [](Tensors& all) { all.at("idle").fill_(2.5); });
    gt::load(files.bad(), files.program().named());
    EXPECT_EQ(files.program().idle.fetch().floats(), std::vector<float>(3, 2.5f));
    EXPECT_EQ(files.program().optimizer.states().at(0).steps, 2);
  });
}

TEST(SavedPrograms, MistakesAreErrorsOfTheirLines) {
  on_saved_mesh({}, [&](bool) {
    SmallProgram program;
    const std::string path = saved_path("mistakes");
    const auto says = [&](const gt::nn::NamedTensors& named, const std::vector<std::string>& parts) {
      test::expect_mentions(test::failure_of([&] { gt::save(path, named); }), parts);
    };
    says({{"a", program.used}, {"a", program.idle}}, {"'a' comes twice"});
    says({{"a", program.used}, {"b", program.used}}, {"'b' is of a tensor that has the name 'a'"});
    says({{"", program.used}}, {"is none for a tensor"});
    says({{"optimizer.a", program.used}}, {"begins as those of optimizers do"});
    says({{"a", gt::Tensor()}}, {"of an empty tensor"});
    test::expect_mentions(test::failure_of([&] {
                            gt::save_training(path, {{"used", program.used}}, program.optimizer, 1);
                          }),
                          {"fp32 (3)", "has no name"});
    EXPECT_FALSE(std::filesystem::exists(path));
    gt::save(path, program.named());
    const gt::Tensor view = program.used.slice(0, 0, 1);
    test::expect_mentions(test::failure_of([&] { gt::load(path, program.named()); }),
                          {"memory another one shares", "saved_program_test.cpp:"});
  });
}

}  // namespace
}  // namespace trireme

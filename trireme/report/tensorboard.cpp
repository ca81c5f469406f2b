// TensorBoard event files: TFRecord framing around Event protobufs (tensorflow/core/util/event.proto and
// framework/summary.proto), encoded with protozero.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <list>
#include <optional>
#include <protozero/pbf_writer.hpp>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "trireme/base/descriptor.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/report/crc32c.h"
#include "trireme/report/machine.h"
#include "trireme/report/run_dir.h"

namespace trireme::report {
namespace {

namespace event_field {
enum : protozero::pbf_tag_type { kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5 };
}
namespace summary_field {
enum : protozero::pbf_tag_type { kValue = 1 };
}
namespace value_field {
enum : protozero::pbf_tag_type { kTag = 1, kSimpleValue = 2 };
}

using Scalar = std::pair<std::string_view, double>;

double wall_time() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

std::string version_event() {
  std::string event;
  protozero::pbf_writer writer(event);
  writer.add_double(event_field::kWallTime, wall_time());
  writer.add_string(event_field::kFileVersion, "brain.Event:2");
  return event;
}

std::string scalars_event(int64_t step, std::span<const Scalar> scalars) {
  std::string event;
  protozero::pbf_writer writer(event);
  writer.add_double(event_field::kWallTime, wall_time());
  writer.add_int64(event_field::kStep, step);
  protozero::pbf_writer summary(writer, event_field::kSummary);
  for (const auto& [tag, number] : scalars) {
    protozero::pbf_writer value(summary, summary_field::kValue);
    value.add_string(value_field::kTag, tag.data(), tag.size());
    value.add_float(value_field::kSimpleValue, static_cast<float>(number));
  }
  summary.commit();
  return event;
}

void append_little_endian(std::string& out, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i) & 0xff);
}

/// u64 length, its masked CRC, the data, its masked CRC.
std::string frame(std::string_view data) {
  std::string record;
  append_little_endian(record, data.size(), 8);
  append_little_endian(record, masked_crc32c(record), 4);
  record += data;
  append_little_endian(record, masked_crc32c(data), 4);
  return record;
}

/// Appends whole records: each goes out in one write, so a reader that follows the file never meets half of
/// one.
class RecordFile {
 public:
  explicit RecordFile(std::string path)
      : path_(std::move(path)),
        file_(::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644)) {
    if (!file_) {
      throw EnvironmentError("[report.tensorboard] cannot open {}: {}; check the folder and its permissions",
                             path_, errno_text(errno));
    }
  }

  void append(std::string_view data) {
    const std::string record = frame(data);
    append_all(file_.get(), record.data(), record.size(), path_);
  }

 private:
  std::string path_;
  Descriptor file_;
};

/// TensorBoard takes any file with "tfevents" in its name; time, host and process keep two writers apart.
std::string event_path(const RunDirectory& run) {
  return run.file(fmt::format("tensorboard/events.out.tfevents.{:010}.{}.{}", std::time(nullptr),
                              describe_machine().hostname, getpid()));
}

/// Its file is made when the run begins or goes on: one that is refused leaves none, and one whose folder was
/// removed makes it again.
class TensorboardSink final : public Sink {
 public:
  explicit TensorboardSink(const RunDirectory& run) : run_(run) {}

  void begin(int64_t) override { open(); }

  void record(const StepRecord& step) override {
    open();
    std::vector<Scalar> scalars = {{"loss", step.loss},
                                   {"grad_norm", step.grad_norm},
                                   {"lr", step.lr},
                                   {"tokens_per_s", step.tokens_per_s},
                                   {"step_ms", step.step_ms},
                                   {"steps_per_s", step.steps_per_s()},
                                   {"peak_bytes", static_cast<double>(step.peak_bytes)}};
    if (step.tflops_per_rank > 0.0) scalars.emplace_back("tflops_per_rank", step.tflops_per_rank);
    if (step.active_bytes > 0) scalars.emplace_back("active_bytes", static_cast<double>(step.active_bytes));
    if (step.reserved_bytes > 0)
      scalars.emplace_back("reserved_bytes", static_cast<double>(step.reserved_bytes));
    if (step.communication_ms) scalars.emplace_back("communication_ms", *step.communication_ms);
    if (step.exposed_ms) scalars.emplace_back("exposed_ms", *step.exposed_ms);
    if (const auto share = step.communication_share()) scalars.emplace_back("communication_share", *share);
    if (step.loss_scale) scalars.emplace_back("loss_scale", *step.loss_scale);
    if (step.val_loss) scalars.emplace_back("val_loss", *step.val_loss);
    if (step.val_top1) scalars.emplace_back("val_top1", *step.val_top1);
    if (step.val_top5) scalars.emplace_back("val_top5", *step.val_top5);
    std::list<std::string> names;  // of which scalars keep no copies
    for (const auto& [name, value] : step.val_metrics)
      scalars.emplace_back(names.emplace_back("val_" + name), value);
    file_->append(scalars_event(step.step, scalars));
  }

  void finish(const RunSummary&) override {}  // every record is already on its way to the disk

 private:
  void open() {
    if (file_) return;
    make_directories(run_.file("tensorboard"));
    file_.emplace(event_path(run_));
    file_->append(version_event());
  }

  RunDirectory run_;
  std::optional<RecordFile> file_;
};

}  // namespace

std::unique_ptr<Sink> make_tensorboard_sink(const RunDirectory& run) {
  return std::make_unique<TensorboardSink>(run);
}

}  // namespace trireme::report

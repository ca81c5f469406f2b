// metrics.jsonl line by line, whatever state it is in.
#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "trireme/base/text.h"
#include "trireme/report/recorded_number.h"
#include "trireme/report/run_record.h"

namespace trireme::report {
namespace {

using Json = nlohmann::json;

/// Removes what was recorded at `step` and behind it.
void cut_before(Curve& curve, double step) {
  while (!curve.empty() && curve.x.back() >= step) {
    curve.x.pop_back();
    curve.y.pop_back();
  }
}

class MetricsReader {
 public:
  void add_line(const std::string& line) {
    ++number_;
    const Json json = Json::parse(line, nullptr, false);
    if (json.is_discarded()) return note_damage(line.empty() ? "is empty" : "is not JSON");
    if (!json.is_object()) return note_damage("is not an object");
    const auto step = recorded_step(json);
    if (!step) return note_damage("has no step");
    add_record(json, static_cast<double>(*step));
  }

  Metrics take() { return std::move(metrics_); }

 private:
  void note_damage(const std::string& why) {
    constexpr int64_t kShown = 5;
    if (metrics_.damaged_lines++ < kShown)
      metrics_.damage.push_back("line " + with_commas(number_) + " " + why);
  }

  void add_record(const Json& json, double step) {
    if (!metrics_.steps.empty() && step <= metrics_.steps.back()) go_back_to(step);
    metrics_.steps.push_back(step);
    for (const auto& [key, value] : json.items()) {
      if (key == "step") continue;
      if (key == "skipped" && value.is_boolean() && value.get<bool>()) metrics_.skipped.push_back(step);
      if (const auto number = recorded_number(value)) metrics_.curves[key].add(step, *number);
    }
  }

  void go_back_to(double step) {
    while (!metrics_.steps.empty() && metrics_.steps.back() >= step) {
      metrics_.steps.pop_back();
      ++metrics_.made_again;
    }
    for (auto& [key, curve] : metrics_.curves) cut_before(curve, step);
    std::erase_if(metrics_.skipped, [&](double skipped) { return skipped >= step; });
  }

  Metrics metrics_;
  int64_t number_ = 0;
};

}  // namespace

const Curve& Metrics::curve(const std::string& key) const {
  static const Curve kNone;
  const auto found = curves.find(key);
  return found == curves.end() ? kNone : found->second;
}

Metrics read_metrics(const std::string& path) {
  MetricsReader reader;
  std::ifstream file(path, std::ios::binary);
  bool unfinished = false;
  for (std::string line; std::getline(file, line);) {
    unfinished = file.eof();  // getline met the end before a newline
    if (!unfinished || Json::accept(line)) reader.add_line(line);
  }
  Metrics metrics = reader.take();
  metrics.ends_inside_a_line = unfinished;
  return metrics;
}

}  // namespace trireme::report

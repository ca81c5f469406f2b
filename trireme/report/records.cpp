// Records as lines of JSON.
#include <cmath>
#include <nlohmann/json.hpp>

#include "trireme/report/run_dir.h"

namespace trireme::report {
namespace {

using OrderedJson = nlohmann::ordered_json;

/// JSON has no non-finite numbers; readers of every language accept these strings.
OrderedJson number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

OrderedJson number(std::optional<double> value) {
  return value ? number(*value) : OrderedJson();
}

/// One line; generated text may end inside a UTF-8 sequence, which becomes U+FFFD.
std::string dump(const OrderedJson& json) {
  return json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

OrderedJson early_end_json(const EarlyEnd& end) {
  if (!end.reason.empty()) return {{"step", end.step}, {"reason", end.reason}};
  OrderedJson json = {{"step", end.step},
                      {"best_step", end.best_step},
                      {"best_val_" + end.metric, number(end.best_value)},
                      {"validations", end.validations}};
  if (end.metric != "loss") json["monitor"] = end.metric;
  if (end.higher_is_better) json["higher_is_better"] = true;
  return json;
}

OrderedJson profile_json(const KernelProfile& profile) {
  OrderedJson groups = OrderedJson::array();
  for (const KernelGroup& group : profile.groups)
    groups.push_back({{"name", group.name}, {"ms", number(group.ms)}, {"calls", group.calls}});
  return {{"of", profile.of_gpu ? "GPU kernels" : "CPU operators"},
          {"steps", profile.steps},
          {"step_ms", number(profile.step_ms)},
          {"idle_ms", number(profile.idle_ms)},
          {"groups", groups}};
}

}  // namespace

std::string to_json_line(const StepRecord& record) {
  OrderedJson json;
  json["step"] = record.step;
  json["loss"] = number(record.loss);
  json["grad_norm"] = number(record.grad_norm);
  json["lr"] = number(record.lr);
  json["tokens"] = record.tokens;
  json["tokens_per_s"] = number(record.tokens_per_s);
  if (record.tflops_per_rank > 0.0) json["tflops_per_rank"] = number(record.tflops_per_rank);
  json["step_ms"] = number(record.step_ms);
  json["steps_per_s"] = number(record.steps_per_s());
  json["communication_ms"] = number(record.communication_ms);
  json["exposed_ms"] = number(record.exposed_ms);
  json["communication_share"] = number(record.communication_share());
  if (record.checkpoint_ms) json["checkpoint_ms"] = number(*record.checkpoint_ms);
  json["peak_bytes"] = record.peak_bytes;
  if (record.active_bytes > 0) json["active_bytes"] = record.active_bytes;
  if (record.reserved_bytes > 0) json["reserved_bytes"] = record.reserved_bytes;
  if (record.loss_scale) json["loss_scale"] = number(*record.loss_scale);
  if (record.skipped) json["skipped"] = true;
  if (record.val_loss) json["val_loss"] = number(*record.val_loss);
  if (record.val_top1) json["val_top1"] = number(*record.val_top1);
  if (record.val_top5) json["val_top5"] = number(*record.val_top5);
  for (const auto& [name, value] : record.val_metrics) json["val_" + name] = number(value);
  for (const SourceUse& source : record.sources) {
    json["samples/" + source.name] = source.samples;
    json["epochs/" + source.name] = number(source.epochs);
  }
  return dump(json);
}

std::string to_json_line(const RunSummary& summary) {
  OrderedJson json;
  json["steps"] = summary.steps;
  json["final_loss"] = number(summary.final_loss);
  json["final_val_loss"] = number(summary.final_val_loss);
  if (summary.final_val_top1) json["final_val_top1"] = number(*summary.final_val_top1);
  if (summary.final_val_top5) json["final_val_top5"] = number(*summary.final_val_top5);
  for (const auto& [name, value] : summary.final_val_metrics) json["final_val_" + name] = number(value);
  for (const SourceUse& source : summary.sources) {
    json["sources"][source.name] = {
        {"share", number(source.share)}, {"samples", source.samples}, {"epochs", number(source.epochs)}};
  }
  const bool timed = summary.steps_per_s > 0.0;
  json["tokens_per_s"] = timed ? number(summary.tokens_per_s) : OrderedJson();
  json["steps_per_s"] = timed ? number(summary.steps_per_s) : OrderedJson();
  json["peak_bytes"] = summary.peak_bytes;
  if (!summary.peak_bytes_by_pp_rank.empty()) json["peak_bytes_by_pp_rank"] = summary.peak_bytes_by_pp_rank;
  if (summary.active_bytes > 0) json["active_bytes"] = summary.active_bytes;
  if (summary.reserved_bytes > 0) json["reserved_bytes"] = summary.reserved_bytes;
  json["seconds_to_first_step"] = number(summary.seconds_to_first_step);
  json["wall_s"] = number(summary.wall_s);
  json["weights_digest"] = summary.weights_digest;
  json["deterministic"] = summary.why_bits_vary.empty();
  if (!summary.why_bits_vary.empty()) json["why_bits_vary"] = summary.why_bits_vary;
  const auto state = [](const RunCost::State& bytes) {
    return OrderedJson{
        {"parameters", bytes.parameters}, {"gradients", bytes.gradients}, {"optimizer", bytes.optimizer}};
  };
  json["state_bytes"] = {{"predicted", state(summary.cost.predicted)},
                         {"measured", state(summary.cost.measured)}};
  const auto& sent = summary.cost.predicted_wire_bytes;
  json["wire_bytes_per_step"] = {{"predicted", sent ? OrderedJson(*sent) : OrderedJson()},
                                 {"measured", summary.cost.measured_wire_bytes}};
  const auto& activations = summary.cost.measured_activation_bytes;
  json["activation_bytes"] = {{"predicted", summary.cost.predicted_activation_bytes},
                              {"measured", activations ? OrderedJson(*activations) : OrderedJson()}};
  json["communication_ms"] = {{"total", number(summary.cost.communication_ms)},
                              {"exposed", number(summary.cost.exposed_ms)}};
  if (summary.cost.measured_copy_bytes > 0)
    json["checkpoint_copy_bytes"] = {{"predicted", summary.cost.predicted_copy_bytes},
                                     {"measured", summary.cost.measured_copy_bytes}};
  json["gathered_bytes"] = {{"predicted", summary.cost.predicted_gathered_bytes}};
  json["baseline_bytes"] = summary.cost.baseline_bytes;
  json["predicted_peak_bytes"] = summary.cost.predicted_peak_bytes;
  json["sample"] = summary.sample;
  json["weights"] = summary.weights_path.empty() ? OrderedJson() : OrderedJson(summary.weights_path);
  if (!summary.best_weights_path.empty())
    json["best_weights"] = {{"path", summary.best_weights_path}, {"step", summary.best_step}};
  if (summary.resumed_at > 0) json["resumed_at"] = summary.resumed_at;
  if (summary.checkpoints + summary.checkpoints_late + summary.checkpoints_failed > 0) {
    json["checkpoints"] = {{"written", summary.checkpoints},
                           {"late", summary.checkpoints_late},
                           {"failed", summary.checkpoints_failed}};
  }
  if (summary.profile) json["profile"] = profile_json(*summary.profile);
  if (summary.early_end) json["early_stop"] = early_end_json(*summary.early_end);
  json["stop_signal"] = summary.stop_signal == 0 ? OrderedJson() : OrderedJson(summary.stop_signal);
  return dump(json);
}

}  // namespace trireme::report

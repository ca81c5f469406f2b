#include "trireme/train/profile.h"

#include <kineto/ActivityType.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <string_view>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/kernels/device.h"

namespace trireme::train {
namespace {

namespace profiler = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;

/// What names of kernels contain, in the order in which it is looked for.
constexpr std::array<std::pair<std::string_view, std::string_view>, 58> kMarks = {{
    {"vectorized_gather", "embedding"},
    {"nccl", "communication"},
    {"sum_kernel<", "communication"},
    {"gather_kernel<", "communication"},
    {"begin_kernel", "communication"},
    {"end_kernel", "communication"},
    {"sum_packs", "communication"},
    {"sum_elements", "communication"},
    {"PtoP", "communication"},
    {"implicit_gemm", "convolution"},
    {"ImplicitGemmConvolution", "convolution"},
    {"fprop_optimized", "convolution"},
    {"conv_weights", "convolution"},
    {"forward_sums", "norm"},
    {"backward_sums", "norm"},
    {"forward_statistics", "norm"},
    {"backward_coefficients", "norm"},
    {"forward_elements", "norm"},
    {"backward_elements", "norm"},
    {"pool_forward", "pooling"},
    {"pool_backward", "pooling"},
    {"cudnn", "attention"},
    {"sdpa", "attention"},
    {"fmha", "attention"},
    {"flash", "attention"},
    {"attention", "attention"},
    {"rotate_", "rope"},
    {"nvjet", "GEMM"},
    {"gemm", "GEMM"},
    {"cutlass", "GEMM"},
    {"splitK", "GEMM"},
    {"cross_entropy", "loss"},
    {"vocabulary_", "loss"},
    {"scale_kernel", "loss"},
    {"norm", "norm"},
    {"add_partial_rows", "norm"},
    {"column_sums", "bias"},
    {"map_rows", "activation"},
    {"map_columns", "activation"},
    {"update_parts", "optimizer"},
    {"update_blocks", "optimizer"},
    {"square_partials", "optimizer"},
    {"add_partials", "optimizer"},
    {"amax_flat", "FP8 casts"},
    {"amax_rows", "FP8 casts"},
    {"cast_tiles", "FP8 casts"},
    {"turn_tiles", "FP8 casts"},
    {"amax_of_part", "FP8 casts"},
    {"cast_part", "FP8 casts"},
    {"decode_kernel", "NF4"},
    {"scale_columns", "adapter"},
    {"sum_windows", "embedding"},
    {"add_parts", "embedding"},
    {"index", "embedding"},
    {"Sort", "embedding"},
    {"elementwise", "elementwise"},
    {"reduce_kernel", "elementwise"},
    {"Mem", "memory"},
}};

using Interval = std::pair<uint64_t, uint64_t>;

/// ns that the intervals cover.
uint64_t covered(std::vector<Interval> intervals) {
  std::sort(intervals.begin(), intervals.end());
  uint64_t sum = 0, until = 0;
  for (const auto& [begin, end] : intervals) {
    if (end <= until) continue;
    sum += end - std::max(begin, until);
    until = end;
  }
  return sum;
}

KernelProfile summed_up(const std::vector<profiler::KinetoEvent>& events, int64_t steps) {
  std::map<std::string, KernelGroup> groups;
  std::vector<Interval> busy;
  for (const profiler::KinetoEvent& event : events) {
    const auto kind = static_cast<libkineto::ActivityType>(event.activityType());
    const bool is_range = kind == libkineto::ActivityType::GPU_USER_ANNOTATION;
    if (event.deviceType() != c10::DeviceType::CUDA || is_range || event.durationNs() == 0) continue;
    KernelGroup& group = groups[kernel_group(event.name())];
    group.ms += static_cast<double>(event.durationNs()) * 1e-6;
    ++group.calls;
    busy.emplace_back(event.startNs(), event.endNs());
  }
  KernelProfile profile;
  if (busy.empty()) return profile;
  const auto count = static_cast<double>(steps);
  for (auto& [name, group] : groups) {
    profile.groups.push_back({name, group.ms / count, group.calls / steps});
  }
  std::ranges::sort(profile.groups, std::greater<>(), &KernelGroup::ms);
  const uint64_t first = std::ranges::min(busy, {}, &Interval::first).first;
  const uint64_t last = std::ranges::max(busy, {}, &Interval::second).second;
  profile.step_ms = static_cast<double>(last - first) * 1e-6 / count;
  profile.idle_ms = profile.step_ms - static_cast<double>(covered(std::move(busy))) * 1e-6 / count;
  return profile;
}

}  // namespace

std::string kernel_group(const std::string& name) {
  for (const auto& [mark, group] : kMarks) {
    if (name.find(mark) != std::string::npos) return std::string(group);
  }
  return "other";
}

std::string to_text(const KernelProfile& profile) {
  if (profile.groups.empty()) return "only CPU operators: there are no GPU kernels to sum up";
  std::string text = fmt::format("{:.2f} ms a step, {:.2f} ms idle", profile.step_ms, profile.idle_ms);
  for (const KernelGroup& group : profile.groups) {
    text += fmt::format("; {} {:.2f} ms ({})", group.name, group.ms, group.calls);
  }
  return text;
}

Profiler::Profiler(std::string path, int64_t first, int64_t steps)
    : path_(std::move(path)), first_(first), steps_(steps) {}

Profiler::~Profiler() {
  if (running_) profiler::disableProfiler();
}

void Profiler::begin_step(int64_t step) {
  if (steps_ == 0 || step != first_) return;
  kernels::synchronize_gpu();
  const ProfilerConfig config(ProfilerState::KINETO);
  std::set<ActivityType> activities = {ActivityType::CPU};
  if (!kernels::gpus().empty()) activities.insert(ActivityType::CUDA);
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  running_ = true;
}

bool Profiler::end_step(int64_t step) {
  if (!running_ || step != first_ + steps_ - 1) return false;
  kernels::synchronize_gpu();
  write();
  return true;
}

void Profiler::write() {
  running_ = false;
  const auto trace = profiler::disableProfiler();
  result_ = summed_up(trace->events(), steps_);
  std::filesystem::create_directories(std::filesystem::path(path_).parent_path());
  trace->save(path_);
}

}  // namespace trireme::train

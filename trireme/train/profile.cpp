#include "trireme/train/profile.h"

#include <kineto/ActivityType.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <limits>
#include <map>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

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

/// Likewise for operators on a CPU: those of torch and of trireme/kernels, and ranges of the engine.
constexpr std::array<std::pair<std::string_view, std::string_view>, 39> kOperatorMarks = {{
    {"send ", "communication"},
    {"recv ", "communication"},
    {"gather ", "communication"},
    {"reduce ", "communication"},
    {"c10d", "communication"},
    {"gloo", "communication"},
    {"update", "optimizer"},
    {"adamw", "optimizer"},
    {"sgd", "optimizer"},
    {"sum_of_squares", "optimizer"},
    {"convolution", "convolution"},
    {"aten::conv", "convolution"},
    {"conv_weights", "convolution"},
    {"attention", "attention"},
    {"head_gradients", "rope"},
    {"rope", "rope"},
    {"cross_entropy", "loss"},
    {"nll_loss", "loss"},
    {"log_softmax", "loss"},
    {"vocabulary_part", "loss"},
    {"scale_columns", "adapter"},
    {"trireme::scale", "loss"},
    {"pool", "pooling"},
    {"norm", "norm"},
    {"gelu", "activation"},
    {"swiglu", "activation"},
    {"column_sums", "bias"},
    {"fp8_cast", "FP8 casts"},
    {"fp8_amax", "FP8 casts"},
    {"embedding", "embedding"},
    {"mm", "GEMM"},
    {"matmul", "GEMM"},
    {"aten::linear", "GEMM"},
    {"aten::einsum", "GEMM"},
    {"aten::copy_", "memory"},
    {"aten::empty", "memory"},
    {"aten::zero", "memory"},
    {"aten::fill_", "memory"},
    {"aten::", "elementwise"},
}};

/// Views of torch, and what calls other operators that count.
constexpr std::array<std::string_view, 13> kViews = {
    "aten::narrow",     "aten::slice",     "aten::view",   "aten::t",  "aten::reshape",
    "aten::as_strided", "aten::transpose", "aten::select", "aten::to", "aten::unsqueeze",
    "aten::detach",     "aten::expand",    "aten::permute"};
constexpr std::array<std::string_view, 3> kCallers = {"forward ", "autograd::", "torch::autograd::"};

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

/// Adds up what `steps` steps ran.
class ProfileSum {
 public:
  void add(const std::string& group, uint64_t begin, uint64_t end) {
    KernelGroup& sum = groups_[group];
    sum.ms += static_cast<double>(end - begin) * 1e-6;
    ++sum.calls;
    busy_.emplace_back(begin, end);
  }

  KernelProfile result(bool of_gpu, int64_t steps) && {
    KernelProfile profile{.of_gpu = of_gpu, .steps = steps, .groups = {}};
    if (busy_.empty()) return profile;
    const auto count = static_cast<double>(steps);
    for (const auto& [name, group] : groups_)
      profile.groups.push_back({name, group.ms / count, group.calls / steps});
    std::ranges::sort(profile.groups, std::greater<>(), &KernelGroup::ms);
    const uint64_t first = std::ranges::min(busy_, {}, &Interval::first).first;
    const uint64_t last = std::ranges::max(busy_, {}, &Interval::second).second;
    profile.step_ms = static_cast<double>(last - first) * 1e-6 / count;
    profile.idle_ms = profile.step_ms - static_cast<double>(covered(std::move(busy_))) * 1e-6 / count;
    return profile;
  }

 private:
  std::map<std::string, KernelGroup> groups_;
  std::vector<Interval> busy_;
};

void add_kernels(const std::vector<profiler::KinetoEvent>& events, ProfileSum& sum) {
  for (const profiler::KinetoEvent& event : events) {
    const auto kind = static_cast<libkineto::ActivityType>(event.activityType());
    const bool is_range = kind == libkineto::ActivityType::GPU_USER_ANNOTATION;
    if (event.deviceType() != c10::DeviceType::CUDA || is_range || event.durationNs() == 0) continue;
    sum.add(kernel_group(event.name()), event.startNs(), event.endNs());
  }
}

/// An operator counts with all that it calls, so that nothing is counted twice: on each thread those that are
/// called by another one that counts are left out.
void add_operators(const std::vector<profiler::KinetoEvent>& events, ProfileSum& sum) {
  struct Call {
    uint64_t thread, begin, end;
    std::string group;
  };
  std::vector<Call> calls;
  for (const profiler::KinetoEvent& event : events) {
    std::string group = operator_group(event.name());
    if (event.deviceType() != c10::DeviceType::CPU || event.isAsync() || group.empty()) continue;
    calls.push_back({event.startThreadId(), event.startNs(), event.endNs(), std::move(group)});
  }
  // Where two begin at once, the longer one has called the other.
  std::ranges::sort(calls, {}, [](const Call& call) {
    return std::tuple(call.thread, call.begin, std::numeric_limits<uint64_t>::max() - call.end);
  });
  const Call* caller = nullptr;
  for (const Call& call : calls) {
    if (caller != nullptr && caller->thread == call.thread && call.begin < caller->end) continue;
    sum.add(call.group, call.begin, call.end);
    caller = &call;
  }
}

KernelProfile summed_up(const std::vector<profiler::KinetoEvent>& events, int64_t steps, bool of_gpu) {
  ProfileSum sum;
  of_gpu ? add_kernels(events, sum) : add_operators(events, sum);
  return std::move(sum).result(of_gpu, steps);
}

}  // namespace

std::string kernel_group(const std::string& name) {
  for (const auto& [mark, group] : kMarks) {
    if (name.find(mark) != std::string::npos) return std::string(group);
  }
  return "other";
}

std::string operator_group(const std::string& name) {
  const auto begins = [&](std::string_view caller) { return name.starts_with(caller); };
  if (std::ranges::find(kViews, name) != kViews.end() || std::ranges::any_of(kCallers, begins)) return "";
  for (const auto& [mark, group] : kOperatorMarks) {
    if (name.find(mark) != std::string::npos) return std::string(group);
  }
  return "";
}

std::string to_text(const KernelProfile& profile) {
  if (profile.groups.empty() && profile.of_gpu) return "without kernels: CUPTI has recorded none";
  std::string text =
      fmt::format("{}{:.2f} ms a step, {:.2f} ms idle", profile.of_gpu ? "" : "of CPU operators, ",
                  profile.step_ms, profile.idle_ms);
  for (const KernelGroup& group : profile.groups) {
    text += fmt::format("; {} {:.2f} ms ({})", group.name, group.ms, group.calls);
  }
  return text;
}

Profiler::Profiler(std::string path, int64_t first, int64_t steps, bool on_gpu)
    : path_(std::move(path)), first_(first), steps_(steps), on_gpu_(on_gpu) {}

Profiler::~Profiler() {
  if (running_) profiler::disableProfiler();
}

void Profiler::begin_step(int64_t step) {
  if (steps_ == 0 || step != first_) return;
  kernels::synchronize_gpu();
  const ProfilerConfig config(ProfilerState::KINETO);
  std::set<ActivityType> activities = {ActivityType::CPU};
  if (on_gpu_) activities.insert(ActivityType::CUDA);
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
  result_ = summed_up(trace->events(), steps_, on_gpu_);
  std::filesystem::create_directories(std::filesystem::path(path_).parent_path());
  trace->save(path_);
}

}  // namespace trireme::train

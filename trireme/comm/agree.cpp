#include "trireme/comm/agree.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <new>

#include "trireme/base/log.h"

namespace trireme::comm {
namespace {

/// A rank that ended before others had read its last message would be taken for lost.
void leave_together(Group& group) {
  try {
    gather_scalars(group, {0.0});
  } catch (const CommError& error) {
    log_debug("{}", error.what());  // the failure is what counts
  }
}

template <ExitCode kCode>
struct Elsewhere : TypedError<kCode>, FailedElsewhere {
  explicit Elsewhere(const std::string& text)
      : TypedError<kCode>("{}", text), FailedElsewhere(static_cast<const Error&>(*this)) {}
};

[[noreturn]] void throw_elsewhere(ExitCode code, const std::string& text) {
  switch (code) {
    case ExitCode::kUsage:
      throw Elsewhere<ExitCode::kUsage>(text);
    case ExitCode::kEnvironment:
      throw Elsewhere<ExitCode::kEnvironment>(text);
    case ExitCode::kOutOfMemory:
      throw Elsewhere<ExitCode::kOutOfMemory>(text);
    case ExitCode::kCommunication:
      throw Elsewhere<ExitCode::kCommunication>(text);
    case ExitCode::kNumerics:
      throw Elsewhere<ExitCode::kNumerics>(text);
    case ExitCode::kCorruptData:
      throw Elsewhere<ExitCode::kCorruptData>(text);
    default:
      throw Elsewhere<ExitCode::kFailed>(text);
  }
}

/// The exit code that a rank has put behind its values, as a rank among failures: none is the largest.
double severity(const std::vector<double>& row) {
  return row.back() == 0.0 ? std::numeric_limits<double>::infinity() : row.back();
}

}  // namespace

std::pair<ExitCode, std::string> code_and_text(const std::exception_ptr& error) {
  if (!error) return {ExitCode::kOk, {}};
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {
    return {known.exit_code(), known.what()};
  } catch (const c10::OutOfMemoryError& full) {
    return {ExitCode::kOutOfMemory, full.what_without_backtrace()};
  } catch (const c10::Error& from_torch) {
    return {ExitCode::kFailed, from_torch.what_without_backtrace()};
  } catch (const std::bad_alloc& full) {
    return {ExitCode::kOutOfMemory, full.what()};
  } catch (const std::exception& other) {
    return {ExitCode::kFailed, other.what()};
  } catch (...) {
    return {ExitCode::kFailed, "something was thrown that is no std::exception"};
  }
}

bool any_rank(Group& group, bool mine) {
  return std::ranges::any_of(gather_scalars(group, {mine ? 1.0 : 0.0}),
                             [](const auto& rank) { return rank.front() > 0.0; });
}

std::string text_of(Group& group, int64_t root, std::string text) {
  at::Tensor size = at::full({1}, std::ssize(text), at::kLong).to(group.device());
  group.broadcast(size, root);
  text.resize(static_cast<size_t>(size.item<int64_t>()));
  if (text.empty()) return text;
  at::Tensor bytes = at::from_blob(text.data(), {std::ssize(text)}, at::kByte).clone().to(group.device());
  group.broadcast(bytes, root);
  const at::Tensor host = bytes.cpu();
  return {static_cast<const char*>(host.const_data_ptr()), text.size()};
}

std::vector<std::vector<double>> gather_or_throw(Group& group, std::vector<double> values,
                                                 const std::exception_ptr& mine, std::string_view where) {
  const auto [code, text] = code_and_text(mine);
  values.push_back(static_cast<double>(static_cast<int>(code)));
  auto rows =
      group.size() == 1 ? std::vector<std::vector<double>>{std::move(values)} : gather_scalars(group, values);
  const auto worst = std::ranges::min_element(rows, {}, severity);
  if (worst->back() == 0.0) {
    for (auto& row : rows) row.pop_back();
    return rows;
  }
  const auto agreed = static_cast<ExitCode>(static_cast<int>(worst->back()));
  const int64_t root = worst - rows.begin();
  const std::string cause = group.size() == 1 ? text : text_of(group, root, text);
  if (group.size() > 1) leave_together(group);
  if (code == agreed) std::rethrow_exception(mine);
  if (mine) log_error("{}", text);
  throw_elsewhere(
      agreed, fmt::format("[{}] rank {} failed: {}", where, group.ranks()[static_cast<size_t>(root)], cause));
}

void throw_together(Group& group, const std::exception_ptr& mine, std::string_view where) {
  gather_or_throw(group, {}, mine, where);
}

}  // namespace trireme::comm

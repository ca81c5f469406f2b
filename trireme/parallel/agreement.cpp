#include "trireme/parallel/agreement.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "trireme/base/hash.h"
#include "trireme/base/text.h"

namespace trireme::parallel {
namespace {

/// The text of the rank `root` of the data-parallel group.
std::string text_of(int64_t root, std::string text, const comm::Mesh& mesh) {
  const c10::Device device = mesh.world->device();
  at::Tensor size = at::full({1}, static_cast<int64_t>(text.size()), at::kLong).to(device);
  mesh.dp->broadcast(size, root);
  text.resize(static_cast<size_t>(size.item<int64_t>()));
  at::Tensor bytes =
      at::from_blob(text.data(), {static_cast<int64_t>(text.size())}, at::kByte).clone().to(device);
  mesh.dp->broadcast(bytes, root);
  const at::Tensor host = bytes.cpu();
  return {static_cast<const char*>(host.const_data_ptr()), text.size()};
}

/// Throws the refusal of this rank, or that of the first which refuses.
void pass_on(const std::exception_ptr& refusal, const std::vector<std::vector<double>>& rows,
             const comm::Mesh& mesh, const char* operation) {
  const auto refusing = std::ranges::find_if(rows, [](const auto& row) { return row.back() != 0.0; });
  if (refusing == rows.end()) return;
  const auto root = static_cast<int64_t>(refusing - rows.begin());
  const std::string reason = text_of(root, code_and_text(refusal).second, mesh);
  if (refusal) std::rethrow_exception(refusal);
  throw Error(static_cast<ExitCode>(static_cast<int>(refusing->back())),
              fmt::format("[parallel.{}] rank {} refuses: {}", operation,
                          mesh.dp->ranks()[static_cast<size_t>(root)], reason));
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
  } catch (const std::exception& other) {
    return {ExitCode::kFailed, other.what()};
  } catch (...) {
    return {ExitCode::kFailed, "something was thrown that is no std::exception"};
  }
}

void check_alike(const std::vector<std::string>& lines, const std::exception_ptr& refusal,
                 const comm::Mesh& mesh, const char* operation) {
  const std::string mine = join(lines, "\n");
  const auto [upper, lower] = comm::in_halves(xxh3(mine));
  const auto rows = comm::gather_scalars(
      *mesh.dp, {upper, lower, static_cast<double>(static_cast<int>(code_and_text(refusal).first))});
  pass_on(refusal, rows, mesh, operation);
  const auto other = std::ranges::find_if(rows, [&](const auto& rank) { return rank != rows.front(); });
  if (other == rows.end()) return;
  const int64_t first_rank = mesh.dp->ranks().front(), rank = mesh.world->rank();
  const std::string first = text_of(0, mine, mesh);
  if (first == mine) {
    throw LogicError(
        "[parallel.{}] rank {} has a different module than rank {}, or different options; its message names "
        "the first difference",
        operation, mesh.dp->ranks()[static_cast<size_t>(other - rows.begin())], rank);
  }
  const std::vector<std::string> others = split(first, '\n');
  const auto differs = std::ranges::mismatch(lines, others);
  throw LogicError(
      "[parallel.{}] ranks have different modules: rank {} has '{}' where rank {} has '{}'; build the same "
      "module with the same options on all ranks, and register parameters and buffers in the same order",
      operation, rank, *differs.in1, first_rank, *differs.in2);
}

}  // namespace trireme::parallel

#include "trireme/state/local_state.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "trireme/state/whole_state.h"

namespace trireme::state {
namespace {

int64_t ranks_in_file(const StateReader& reader, const std::string& kind, const std::string& param) {
  int64_t ranks = 0;
  while (reader.file_has(local_name(ranks, kind, param))) ++ranks;
  return ranks;
}

}  // namespace

std::string local_name(int64_t dp_rank, const std::string& kind, const std::string& param) {
  return optimizer_name(fmt::format("local.{}.{}", dp_rank, kind), param);
}

bool allow_local_state(StateReader& reader, const std::string& kind, const plan::FlatEntry& entry) {
  const int64_t saved = ranks_in_file(reader, kind, entry.name);
  for (int64_t rank = 0; rank < saved; ++rank)
    reader.allow(local_name(rank, kind, entry.name), entry.whole_shape(), at::kFloat);
  return saved > 0;
}

at::Tensor read_local_state(const StateReader& reader, const comm::Group& ranks, const std::string& kind,
                            const plan::FlatEntry& entry, const plan::Region& region) {
  const int64_t saved = ranks_in_file(reader, kind, entry.name);
  if (saved == 0) return {};
  if (saved == ranks.size()) return reader.read(local_name(ranks.rank(), kind, entry.name), region);
  at::Tensor sum = at::zeros({region.numel()}, at::kFloat);
  for (int64_t rank = 0; rank < saved; ++rank) sum += reader.read(local_name(rank, kind, entry.name), region);
  return sum.div_(static_cast<double>(saved));
}

}  // namespace trireme::state

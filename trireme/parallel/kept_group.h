#pragma once
// A group in the context of an autograd function, whose backward pass is collective over it. Private to
// parallel/*.cpp.
#include <torch/csrc/autograd/custom_function.h>

#include <memory>
#include <utility>

#include "trireme/comm/group.h"

namespace trireme::parallel {

struct GroupHolder : torch::CustomClassHolder {
  explicit GroupHolder(std::shared_ptr<comm::Group> held) : group(std::move(held)) {}
  std::shared_ptr<comm::Group> group;
};

inline void keep_group(torch::autograd::AutogradContext& context, const std::shared_ptr<comm::Group>& group) {
  context.saved_data["group"] = at::IValue::make_capsule(c10::make_intrusive<GroupHolder>(group));
}

inline comm::Group& kept_group(torch::autograd::AutogradContext& context) {
  const auto holder = context.saved_data["group"].toCapsule();
  return *static_cast<GroupHolder&>(*holder).group;
}

}  // namespace trireme::parallel

#include "trireme/parallel/unit_choice.h"

#include <torch/nn/module.h>

#include <algorithm>

#include "trireme/parallel/module_parameters.h"

namespace trireme::parallel {
namespace {

/// A collective of so few elements takes as long as an empty one.
constexpr int64_t kFewElements = 4096;
/// Shares of a module's elements: one part in so many.
constexpr int64_t kEnter = 4, kUnit = 100, kLeftInRoot = 10;

bool is_container(const torch::nn::Module& module) {
  const std::string name = module.name();
  return std::ranges::any_of(std::vector{"SequentialImpl", "ModuleListImpl", "ModuleDictImpl"},
                             [&](const char* kind) { return name.find(kind) != std::string::npos; });
}

std::string path_of(const std::string& parent, const std::string& name) {
  return parent.empty() ? name : parent + "." + name;
}

ModuleSize measure(const torch::nn::Module& module, const std::string& path,
                   const std::map<std::string, int64_t>& elements) {
  ModuleSize size{.container = is_container(module)};
  for (const auto& entry : module.named_parameters(/*recurse=*/false)) {
    const auto counted = elements.find(path_of(path, entry.key()));
    if (counted != elements.end()) size.direct += counted->second;
  }
  for (const auto& child : module.named_children()) {
    size.children.push_back(measure(*child.value(), path_of(path, child.key()), elements));
    size.children.back().name = child.key();
  }
  return size;
}

/// Mean size of the children that have parameters; 0 where there are none.
int64_t mean_child(const ModuleSize& module) {
  int64_t sum = 0, count = 0;
  for (const ModuleSize& child : module.children) {
    sum += child.total();
    count += child.total() > 0;
  }
  return count == 0 ? 0 : sum / count;
}

/// The largest mean_child() of the outermost containers in `module`.
int64_t largest_blocks(const ModuleSize& module) {
  if (module.container) return mean_child(module);
  int64_t largest = 0;
  for (const ModuleSize& child : module.children) largest = std::max(largest, largest_blocks(child));
  return largest;
}

/// One walk from the root, with fixed bars.
class Walk {
 public:
  /// `bar`: elements of a unit at least; `container_bar`: of a child of a container.
  Walk(const ModuleSize& root, int64_t bar, int64_t container_bar, bool follows_containers)
      : bar_(bar),
        container_bar_(container_bar),
        follows_containers_(follows_containers),
        large_(root.total() / kEnter) {
    visit(root, "");
  }

  const std::vector<std::string>& blocks() const { return blocks_; }
  /// Elements of submodules that are too small.
  int64_t left() const { return left_; }
  int64_t mean_in_containers() const {
    return in_containers_ == 0 ? 0 : elements_in_containers_ / in_containers_;
  }

 private:
  void visit(const ModuleSize& module, const std::string& path) {
    const int64_t least = !module.container     ? bar_
                          : follows_containers_ ? std::min(container_bar_, mean_child(module) / 2)
                                                : container_bar_;
    for (const ModuleSize& child : module.children) {
      if (child.total() == 0) continue;
      const std::string place = path_of(path, child.name);
      const size_t before = blocks_.size();
      const int64_t left_before = left_;
      if (is_entered(child, module.container)) visit(child, place);
      if (blocks_.size() > before) continue;
      left_ = left_before;
      child.total() >= least ? add(child, place, module.container) : void(left_ += child.total());
    }
  }

  bool is_entered(const ModuleSize& module, bool in_container) const {
    const int64_t inside = module.total() - module.direct;
    if (inside < module.direct || inside == 0) return false;  // most of it would stay in the root
    return module.total() > large_ || (!in_container && largest_blocks(module) >= container_bar_);
  }

  void add(const ModuleSize& module, const std::string& place, bool in_container) {
    blocks_.push_back(place);
    if (!in_container) return;
    ++in_containers_;
    elements_in_containers_ += module.total();
  }

  int64_t bar_, container_bar_;
  bool follows_containers_;
  int64_t large_;
  std::vector<std::string> blocks_;
  int64_t left_ = 0, in_containers_ = 0, elements_in_containers_ = 0;
};

}  // namespace

int64_t ModuleSize::total() const {
  int64_t sum = direct;
  for (const ModuleSize& child : children) sum += child.total();
  return sum;
}

ModuleSize sizes_of(const torch::nn::Module& module, const std::map<std::string, int64_t>& shares) {
  std::map<std::string, int64_t> elements = shares;
  for (const ModuleParameter& param : module_parameters(module))
    elements.try_emplace(param.name, param.tensor.numel());
  return measure(module, "", elements);
}

std::vector<std::string> choose_blocks(const ModuleSize& module, int64_t min_unit_numel) {
  if (min_unit_numel > 0) return Walk(module, min_unit_numel, min_unit_numel, false).blocks();
  const int64_t total = module.total();
  const int64_t small = std::max(kFewElements, total / kUnit);
  const int64_t blocks = Walk(module, small, small, true).mean_in_containers();
  const int64_t most_in_root = total / kLeftInRoot;
  for (int64_t bar = std::max(small, std::min(blocks, most_in_root));;
       bar = std::max(kFewElements, bar / 2)) {
    const Walk walk(module, bar, std::min(bar, small), true);
    if (bar == kFewElements || walk.left() <= most_in_root) return walk.blocks();
  }
}

}  // namespace trireme::parallel

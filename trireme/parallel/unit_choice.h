#pragma once
// Which submodules fully_shard() makes units of where nobody names them: by their structure and size, which
// are the same on all ranks.
#include <cstdint>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace trireme::parallel {

/// A module as the choice sees it. A parameter with several names counts where its first one is.
struct ModuleSize {
  std::string name = {};                  ///< under its parent
  int64_t direct = 0;                     ///< elements of the parameters that it registers itself
  std::vector<ModuleSize> children = {};  ///< in the order of registration
  bool container = false;                 ///< a Sequential, ModuleList or ModuleDict: its children are alike
  int64_t total() const;                  ///< elements, with those of all submodules
};

/// The sizes of `module` and its submodules, the same on all ranks.
ModuleSize sizes_of(const torch::nn::Module& module);

/// Paths of submodules, none within another, for one unit each; what is left stays in the root. From the root
/// down, a submodule with more than a quarter of all elements is entered, and so is one whose containers hold
/// children that are large enough for units. What is not entered is a unit when it has at least
/// `min_unit_numel` elements. 0 chooses that number: 1% of the module, or what the units from containers have
/// on average if that is more, and less where a tenth of the module would stay in the root because of it, but
/// some thousand elements; children of containers that are entered need no more than half of what these have
/// on average.
std::vector<std::string> choose_blocks(const ModuleSize& module, int64_t min_unit_numel = 0);

}  // namespace trireme::parallel

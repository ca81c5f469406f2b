#pragma once
// Which submodules fully_shard() makes units of when options name none: it goes by their structure and size,
// which are the same on all ranks.
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace trireme::parallel {

/// A module as choose_blocks() sees it. A parameter with several names counts where its first name is.
struct ModuleSize {
  std::string name = {};                  ///< under its parent
  int64_t direct = 0;                     ///< elements of the parameters that it registers itself
  std::vector<ModuleSize> children = {};  ///< in the order of registration
  bool container = false;                 ///< a Sequential, ModuleList or ModuleDict: its children are alike
  int64_t total() const;                  ///< elements, with those of all submodules
};

/// The sizes of `module` and its submodules, the same on all ranks. `shares`: elements that parameters with
/// these first names count for, where ranks hold parts of different sizes.
ModuleSize sizes_of(const torch::nn::Module& module, const std::map<std::string, int64_t>& shares = {});

/// Paths of submodules, none within another, for one unit each; all other parameters stay in the root. From
/// the root down, a submodule is entered when it has more than a quarter of all elements, or when its
/// containers hold children that are large enough for units. A submodule that is not entered becomes a unit
/// when it has at least `min_unit_numel` elements. 0 chooses that number: 1% of the module or, if that is
/// more, the average size of the units from containers; but less when a tenth of the module would otherwise
/// stay in the root, down to some thousand elements. A child of an entered container needs no more than half
/// of the average of that container's children.
std::vector<std::string> choose_blocks(const ModuleSize& module, int64_t min_unit_numel = 0);

}  // namespace trireme::parallel

// The file trireme.rates/1.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/plan/rates.h"

namespace trireme::plan {
namespace {

using RatesJson = nlohmann::ordered_json;

constexpr const char* kRatesSchema = "trireme.rates/1";

RatesJson json_of(const ProductGrids& grids) {
  RatesJson json;
  for (size_t pass = 0; pass < kProductPasses; ++pass) {
    const ProductGrid& grid = grids[pass];
    json[std::string(kNames<ProductPass>[pass])] = {
        {"m", grid.m}, {"n", grid.n}, {"k", grid.k}, {"seconds", grid.seconds}};
  }
  return json;
}

RatesJson json_of(const std::vector<AttentionRate>& rates) {
  RatesJson json = RatesJson::array();
  for (const AttentionRate& rate : rates) {
    json.push_back({{"length", rate.length},
                    {"head_dim", rate.head_dim},
                    {"forward_flops_per_s", rate.forward},
                    {"backward_flops_per_s", rate.backward}});
  }
  return json;
}

/// The rates of memory with their names in the file.
struct MemoryField {
  const char* name;
  double MemoryRates::*rate;
};
constexpr MemoryField kMemoryFields[] = {{"copy", &MemoryRates::copy},
                                         {"add", &MemoryRates::add},
                                         {"norm", &MemoryRates::norm},
                                         {"norm_backward", &MemoryRates::norm_backward},
                                         {"activation", &MemoryRates::activation},
                                         {"activation_backward", &MemoryRates::activation_backward},
                                         {"loss", &MemoryRates::loss},
                                         {"update", &MemoryRates::update}};

RatesJson json_of(const MemoryRates& rates) {
  RatesJson json;
  for (const MemoryField& field : kMemoryFields) json[field.name] = rates.*field.rate;
  if (rates.cached > 0.0) json["cached"] = rates.cached;
  return json;
}

RatesJson json_of(const LinkRate& rate) {
  return {{"ranks", rate.ranks}, {"latency_s", rate.latency_s}, {"bytes_per_s", rate.bytes_per_s}};
}

RatesJson json_of(const std::vector<LinkRate>& rates) {
  RatesJson json = RatesJson::array();
  for (const LinkRate& rate : rates) json.push_back(json_of(rate));
  return json;
}

RatesJson json_of(const LinkRates& links) {
  return {{"measured", links.measured},        {"gather", json_of(links.gather)},
          {"reduce", json_of(links.reduce)},   {"send", json_of(links.send)},
          {"between", json_of(links.between)}, {"host_ranks", links.host_ranks}};
}

/// A value of the file with the path that leads to it, for messages.
class RatesField {
 public:
  RatesField(const RatesJson& json, std::string path, const std::string& file)
      : json_(&json), path_(std::move(path)), file_(&file) {}

  RatesField at(const std::string& key) const {
    if (!json_->is_object()) refuse("is no object", "write one with " + key);
    const auto found = json_->find(key);
    const std::string path = path_.empty() ? key : path_ + "." + key;
    if (found == json_->end())
      throw ConfigError("[plan.rates] {}: {} is missing; give it, or measure with 'trireme doctor --probe'",
                        *file_, path);
    return {*found, path, *file_};
  }
  bool has(const std::string& key) const { return json_->is_object() && json_->contains(key); }
  std::vector<std::string> keys() const {
    if (!json_->is_object()) refuse("is no object", "write one with a key for each dtype");
    std::vector<std::string> names;
    for (const auto& [key, value] : json_->items()) names.push_back(key);
    return names;
  }
  std::vector<RatesField> entries() const {
    if (!json_->is_array() || json_->empty()) refuse("is no list of values", "give at least one entry");
    std::vector<RatesField> fields;
    for (size_t i = 0; i < json_->size(); ++i)
      fields.emplace_back((*json_)[i], fmt::format("{}[{}]", path_, i), *file_);
    return fields;
  }
  double positive() const {
    const double value = json_->is_number() ? json_->get<double>() : 0.0;
    if (!std::isfinite(value) || value <= 0.0) refuse("must be a number above 0", kMeasure);
    return value;
  }
  double at_least_0() const {
    const double value = json_->is_number() ? json_->get<double>() : -1.0;
    if (!std::isfinite(value) || value < 0.0) refuse("must be a number that is not negative", kMeasure);
    return value;
  }
  int64_t count() const {
    constexpr int64_t kMost = int64_t{1} << 40;
    const int64_t value = json_->is_number_integer() ? json_->get<int64_t>() : 0;
    if (value < 1 || value > kMost) refuse("must be a whole number above 0", kMeasure);
    return value;
  }
  bool flag() const {
    if (!json_->is_boolean()) refuse("must be true or false", "write one of them");
    return json_->get<bool>();
  }
  std::string text() const {
    if (!json_->is_string()) refuse("must be a text", "write it in quotes");
    return json_->get<std::string>();
  }
  [[noreturn]] void refuse(std::string_view rule, std::string_view fix) const {
    constexpr size_t kShown = 40;
    throw ConfigError("[plan.rates] {}: {} = {} {}; {}", *file_, path_.empty() ? "the document" : path_,
                      json_->dump().substr(0, kShown), rule, fix);
  }

  static constexpr const char* kMeasure = "measure with 'trireme doctor --probe'";

 private:
  const RatesJson* json_;
  std::string path_;
  const std::string* file_;
};

std::vector<int64_t> rising(const RatesField& field) {
  std::vector<int64_t> sizes;
  for (const RatesField& entry : field.entries()) {
    sizes.push_back(entry.count());
    if (sizes.size() > 1 && sizes[sizes.size() - 2] >= sizes.back())
      entry.refuse("is not larger than the size before it", "list sizes from the smallest up");
  }
  return sizes;
}

/// Refuses a time below that of a product that is smaller along one axis: predictions would fall where work
/// grows.
void check_rises(const ProductGrid& grid, const std::vector<RatesField>& entries) {
  const size_t strides[] = {grid.n.size() * grid.k.size(), grid.k.size(), 1};
  const size_t sizes[] = {grid.m.size(), grid.n.size(), grid.k.size()};
  for (size_t at = 0; at < entries.size(); ++at) {
    for (size_t axis = 0; axis < 3; ++axis) {
      const bool is_first = at / strides[axis] % sizes[axis] == 0;
      if (!is_first && grid.seconds[at] < grid.seconds[at - strides[axis]])
        entries[at].refuse("is less than a smaller product takes", RatesField::kMeasure);
    }
  }
}

ProductGrid grid_of(const RatesField& field) {
  ProductGrid grid{
      .m = rising(field.at("m")), .n = rising(field.at("n")), .k = rising(field.at("k")), .seconds = {}};
  const std::vector<RatesField> entries = field.at("seconds").entries();
  for (const RatesField& entry : entries) grid.seconds.push_back(entry.positive());
  if (grid.seconds.size() != grid.m.size() * grid.n.size() * grid.k.size())
    field.at("seconds").refuse("has not one time for each m, n and k", "list them by m, then n, then k");
  check_rises(grid, entries);
  return grid;
}

ProductGrids grids_of(const RatesField& field) {
  ProductGrids grids;
  for (size_t pass = 0; pass < kProductPasses; ++pass)
    grids[pass] = grid_of(field.at(std::string(kNames<ProductPass>[pass])));
  return grids;
}

std::vector<AttentionRate> attention_from(const RatesField& field) {
  std::vector<AttentionRate> rates;
  for (const RatesField& entry : field.entries())
    rates.push_back({entry.at("length").count(), entry.at("head_dim").count(),
                     entry.at("forward_flops_per_s").positive(),
                     entry.at("backward_flops_per_s").positive()});
  return rates;
}

MemoryRates memory_from(const RatesField& field) {
  MemoryRates rates;
  for (const MemoryField& of : kMemoryFields) rates.*of.rate = field.at(of.name).positive();
  if (field.has("cached")) rates.cached = field.at("cached").positive();
  return rates;
}

LinkRate link_from(const RatesField& field) {
  return {field.at("ranks").count(), field.at("latency_s").at_least_0(), field.at("bytes_per_s").positive()};
}

std::vector<LinkRate> links_by_ranks(const RatesField& field) {
  std::vector<LinkRate> rates;
  for (const RatesField& entry : field.entries()) {
    rates.push_back(link_from(entry));
    if (rates.size() > 1 && rates[rates.size() - 2].ranks >= rates.back().ranks)
      entry.refuse("has no more ranks than the entry before it", "list entries from the fewest ranks up");
  }
  return rates;
}

LinkRates links_from(const RatesField& field) {
  return {.gather = links_by_ranks(field.at("gather")),
          .reduce = links_by_ranks(field.at("reduce")),
          .send = link_from(field.at("send")),
          .between = link_from(field.at("between")),
          .host_ranks = field.at("host_ranks").count(),
          .measured = field.at("measured").flag()};
}

Rates rates_from(const RatesField& root) {
  if (root.at("schema").text() != kRatesSchema)
    root.at("schema").refuse("is another kind of document",
                             fmt::format("give a file with the schema {}", kRatesSchema));
  Rates rates{.device = root.at("device").text(),
              .on_gpu = root.at("on_gpu").flag(),
              .measured = root.at("measured").flag(),
              .ranks = root.at("ranks").count(),
              .launch_s = root.at("launch_s").at_least_0()};
  for (const std::string& dtype : root.at("products").keys())
    rates.products[dtype] = grids_of(root.at("products").at(dtype));
  for (const std::string& dtype : root.at("attention").keys())
    rates.attention[dtype] = attention_from(root.at("attention").at(dtype));
  for (const std::string& dtype : root.at("memory").keys())
    rates.memory[dtype] = memory_from(root.at("memory").at(dtype));
  const std::string known = known_gpu(rates.device);
  rates.links = root.has("links") ? links_from(root.at("links"))
                                  : usual_rates(rates.on_gpu ? Device::kCuda : Device::kCpu, known).links;
  if (root.has("disk"))
    rates.disk = {root.at("disk").at("write").at_least_0(), root.at("disk").at("read").at_least_0()};
  if (root.has("peak_flops")) {
    for (const std::string& dtype : root.at("peak_flops").keys())
      rates.peak_flops[dtype] = root.at("peak_flops").at(dtype).positive();
  }
  return rates;
}

/// The line, from 1, of the `byte`-th character.
int64_t line_of(const std::string& text, size_t byte) {
  return 1 + std::ranges::count(text.substr(0, byte == 0 ? 0 : byte - 1), '\n');
}

}  // namespace

std::string to_json(const Rates& rates) {
  RatesJson json = {{"schema", kRatesSchema},     {"device", rates.device}, {"on_gpu", rates.on_gpu},
                    {"measured", rates.measured}, {"ranks", rates.ranks},   {"launch_s", rates.launch_s}};
  json["products"] = json["attention"] = json["memory"] = RatesJson::object();
  for (const auto& [dtype, grids] : rates.products) json["products"][dtype] = json_of(grids);
  for (const auto& [dtype, all] : rates.attention) json["attention"][dtype] = json_of(all);
  for (const auto& [dtype, memory] : rates.memory) json["memory"][dtype] = json_of(memory);
  json["links"] = json_of(rates.links);
  json["disk"] = {{"write", rates.disk.write}, {"read", rates.disk.read}};
  json["peak_flops"] = RatesJson::object();
  for (const auto& [dtype, flops] : rates.peak_flops) json["peak_flops"][dtype] = flops;
  return json.dump(1, ' ', false, RatesJson::error_handler_t::replace) + "\n";
}

Rates rates_from_text(const std::string& text, const std::string& file) {
  RatesJson json;
  try {
    json = RatesJson::parse(text);
  } catch (const RatesJson::parse_error& error) {
    throw ConfigError("[plan.rates] {}:{}: this is no JSON; measure again with 'trireme doctor --probe {}'",
                      file, line_of(text, error.byte), file);
  }
  Rates rates = rates_from({json, "", file});
  rates.origin = file;
  return rates;
}

}  // namespace trireme::plan

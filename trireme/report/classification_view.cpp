#include "trireme/report/classification_view.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "trireme/base/file.h"

namespace trireme::report {
namespace {

using OrderedJson = nlohmann::ordered_json;

/// The loss in JSON, with the text of metrics.jsonl where it is not finite.
OrderedJson loss_json(double loss) {
  return std::isfinite(loss) ? OrderedJson(loss) : OrderedJson("Infinity");
}

}  // namespace

std::string to_json(const Classification& classification) {
  OrderedJson json = {{"schema", "trireme.validation/1"},        {"step", classification.step},
                      {"images", classification.images},         {"right", classification.right},
                      {"not_finite", classification.not_finite}, {"classes", classification.classes},
                      {"confusion", OrderedJson::array()},       {"mistakes", OrderedJson::array()}};
  const auto classes = static_cast<size_t>(std::ssize(classification.classes));
  for (auto row = classification.confusion.begin(); row != classification.confusion.end();
       row += static_cast<std::ptrdiff_t>(classes))
    json["confusion"].push_back(std::vector<int64_t>(row, row + static_cast<std::ptrdiff_t>(classes)));
  for (const Classification::Mistake& one : classification.worst) {
    json["mistakes"].push_back({{"sample", one.sample},
                                {"name", one.name},
                                {"true", one.truth},
                                {"predicted", one.guess},
                                {"loss", loss_json(one.loss)},
                                {"predicted_probability", one.guess_probability},
                                {"true_probability", one.truth_probability}});
  }
  return json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

void write_classification(const Classification& classification, const RunDirectory& run) {
  write_file_atomic(run.file("validation.json"), to_json(classification) + "\n");
  make_directories(run.file("pictures"));
  if (const std::string matrix = draw_confusion(classification); !matrix.empty())
    write_file_atomic(run.file("pictures/confusion.svg"), matrix);
  write_file_atomic(run.file("pictures/mistakes.svg"), draw_mistakes(classification));
}

}  // namespace trireme::report

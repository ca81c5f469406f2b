// Writes tensors with an installed Trireme and reads them back.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include "trireme/checkpoint/safetensors.h"

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const at::Tensor weight = at::arange(6, at::kFloat).view({2, 3});
  trireme::checkpoint::SafetensorsWriter writer(argv[1], {{"weight", {at::kFloat, {2, 3}}}},
                                                {{"made_by", "consumer"}});
  writer.write("weight", weight);
  writer.commit();
  const trireme::checkpoint::SafetensorsReader reader(argv[1]);
  const bool same = at::equal(reader.read("weight"), weight) && reader.metadata().at("made_by") == "consumer";
  fmt::print("round trip {}\n", same ? "exact" : "differs");
  return same ? 0 : 1;
}

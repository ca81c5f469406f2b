#pragma once
// The verbs of `trireme ckpt` that have files of their own, and what they share.
#include <string>

namespace CLI {
class App;
}

namespace trireme::cli {

struct Front;

/// Throws EnvironmentError when --force would replace a folder at `path` that is neither empty nor an earlier
/// export. An export has safetensors files and, if `beside` names one, that file.
void check_replaceable(const std::string& path, const std::string& beside = {});

/// import-hf and export-hf.
void add_hugging_face(CLI::App& ckpt, Front& front);

void add_merge(CLI::App& ckpt, Front& front);

}  // namespace trireme::cli

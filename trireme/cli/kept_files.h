#pragma once
// Files that a run keeps beside its config.
#include <map>
#include <string>

#include "trireme/plan/config.h"
#include "trireme/report/run_dir.h"

namespace trireme::cli {

/// Name of the file with the name of the run's tokenizer; a run on bytes or images has none.
inline constexpr const char* kTokenizerFile = "tokenizer.txt";

/// For report::Manifest::files: those that the config names (plan::texts_to_keep()), and kTokenizerFile.
/// Throws as they, and as text::tokenizer_digest().
std::map<std::string, std::string> files_to_keep(const plan::Config& config);

/// Throws ConfigError that names both where the tokenizer of `config`, that of `run`, is another one now than
/// the run was trained with; as text::tokenizer_digest() where it cannot be read.
void check_tokenizer(const report::RunDirectory& run, const plan::Config& config);

}  // namespace trireme::cli

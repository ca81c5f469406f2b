#pragma once
// Paths of a config before anything is started: whether there is text, and where.
#include <string>

#include "trireme/base/env.h"
#include "trireme/plan/config.h"
#include "trireme/plan/config_files.h"

namespace trireme::cli {

/// Makes data.path absolute, so that the config that a run keeps means the same text from any folder; a
/// relative one is taken from the current folder, and a field of JSON Lines stays (data::parse_text_path()).
/// `config_file` is where it may have come from, or empty. Throws ConfigError where there is no text that
/// this user may read.
void settle_data_path(plan::Config& config, const std::string& config_file);

/// Throws ConfigError where data.path asks for the data of a program, and no program has asked for this run.
void check_program_data(const plan::Config& config, const Environment& environment);

/// Throws ConfigError where a text of the settled data.path is in a format that is not read. Looks at the
/// names of all files of a folder.
void check_texts(const plan::Config& config);

/// Where data.tokenizer is a file or folder, makes it absolute likewise; model.vocab_size follows it unless
/// somebody has given one, or a preset one that is large enough. Throws ConfigError where there is no
/// tokenizer that trains (data::make_tokenizer()), or the model has fewer rows than it has tokens, and
/// DataError and EnvironmentError where its files cannot be read.
void settle_tokenizer(plan::ResolvedConfig& resolved, const std::string& config_file);

/// Why data.tokenizer of `model` cannot be the tokenizer that came with it in the folder of Hugging Face;
/// empty: it can.
std::string why_no_tokenizer(const std::string& folder, const plan::ModelConfig& model);

/// settle_tokenizer() for a config that is only shown: where there is no tokenizer yet, a note says so.
void settle_tokenizer_if_any(plan::ResolvedConfig& resolved, const std::string& config_file);

/// Throws EnvironmentError where the data of `config` has to be prepared in the cache folder, and nothing can
/// be written there: ranks would find that only after they have met.
void check_cache_folder(const plan::Config& config, const Environment& environment);

/// Makes the paths of plan::config_files() absolute likewise. Where `config_file` is that of a run, and names
/// a file that is gone or is another one by now, the run's own copy counts.
void settle_kept_files(plan::ResolvedConfig& resolved, const std::string& config_file);

/// Whether the file that `config` names for `kept` is gone or has no longer this `text`. If so, says that,
/// and from now on `config` names the run's `copy`.
bool use_copy_of_changed(const plan::ConfigFile& kept, plan::Config& config, const std::string& copy,
                         const std::string& text);

}  // namespace trireme::cli

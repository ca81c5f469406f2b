#pragma once
// The command line before and after CLI11: config overrides are taken out first, and what CLI11 does not know
// is answered with the nearest name.
#include <string>
#include <vector>

#include "trireme/cli/front.h"

namespace trireme::cli {

/// Takes `--section.key=value`, `--section.key value` and the same for keys without a section (`--name=x`),
/// ours or of other trainers, out of `arguments` (verb first) and returns them as "key=value". A boolean key
/// alone means true. Verbs without a config keep their arguments. Throws UsageError when a value is missing,
/// and for a key that the verb does not read.
std::vector<std::string> take_overrides(std::vector<std::string>& arguments);

/// Takes the "--" between the options of `launch` and its program out of `arguments`: CLI11 would end the
/// verb there. One that belongs to the program stays.
void drop_program_mark(std::vector<std::string>& arguments);

/// Splits an option such as "--run-dir=", whose shell variable was empty, into two words: CLI11 would take
/// the next word for its value. The words of `launch` stay, which may be those of its program.
void keep_empty_words(std::vector<std::string>& arguments);

/// Throws UsageError when the first word is no verb of `app`, naming the nearest.
void check_verb(const CLI::App& app, const std::vector<std::string>& arguments);

/// Throws UsageError for the first word that no option took, naming the nearest option or subcommand.
void check_leftovers(const CLI::App& app);

/// The words as one line that a shell would split the same way.
std::string shell_line(const std::vector<std::string>& words);

/// The verb that was parsed, with its subcommand: "trireme config show".
std::string parsed_path(const CLI::App& app);

}  // namespace trireme::cli

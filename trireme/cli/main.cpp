// trireme: the front command. It parses, checks and starts; training itself happens in trireme-worker.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <exception>
#include <system_error>

#include "trireme/base/streams.h"
#include "trireme/cli/arguments.h"
#include "trireme/cli/front.h"
#include "trireme/cli/request.h"

namespace trireme::cli {
namespace {

constexpr const char* kExamples =
    "Examples:\n"
    "  trireme train -n 2 --model.preset=gpt-tiny --train.steps=50\n"
    "  trireme generate latest --prompt 'int main('\n"
    "  trireme help train                       # the same as trireme train --help\n\n"
    "Exit codes: 0 ok, 1 failed, 2 usage or config, 3 environment, 4 out of memory, 5 communication, 6 "
    "numerics,\n"
    "7 corrupt data, 8 comparison failed, 75 preempted and saved, 128+N killed by signal N (130 Ctrl-C, 143 "
    "SIGTERM).";

void describe(CLI::App& app, Front& front) {
  app.set_version_flag("--version", version_line());
  app.get_formatter()->column_width(34);
  app.allow_extras();  // leftovers are answered by check_leftovers, with the nearest name
  app.require_subcommand(0, 1);
  add_train(app, front);
  add_launch(app, front);
  add_worker(app, front);
  add_generate(app, front);
  add_eval(app, front);
  add_ckpt(app, front);
  add_data(app, front);
  add_bench(app, front);
  add_doctor(app, front);
  add_plan(app, front);
  add_pipeline(app, front);
  add_lab(app, front);
  add_sweep(app, front);
  add_find_lr(app, front);
  add_replay(app, front);
  add_serve(app, front);
  add_ps(app, front);
  add_top(app, front);
  add_report(app, front);
  add_presets(app, front);
  add_config(app, front);
  add_version(app, front);
  app.footer(kExamples);  // after the verbs, which would inherit it
}

/// CLI11 alone would read a number that does not fit as the largest that does.
void refuse_numbers_that_do_not_fit(CLI::App& app) {
  const auto fits = [](const std::string& word) {
    int64_t number = 0;
    const auto read = std::from_chars(word.data(), word.data() + word.size(), number);
    return read.ec == std::errc::result_out_of_range ? word + " does not fit in 64 bits" : std::string();
  };
  for (CLI::Option* option : app.get_options()) {
    if (option->get_type_name() == "INT") option->check(fits);
  }
  for (CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; }))
    refuse_numbers_that_do_not_fit(*verb);
}

/// "trireme help train" is "trireme train --help", and "trireme help" is "trireme --help".
void take_help(std::vector<std::string>& arguments) {
  if (arguments.empty() || arguments.front() != "help") return;
  arguments.erase(arguments.begin());
  arguments.emplace_back("--help");
}

/// "--ranks: 'two' is not a whole number" of CLI11's "Could not convert: --ranks = two".
std::string conversion_text(const CLI::App& app, const CLI::ConversionError& error) {
  const std::string text = error.what();
  const size_t begin = text.find("--"), equals = text.find(" = ");
  if (begin == std::string::npos || equals == std::string::npos) return text;
  const std::string name = text.substr(begin, equals - begin);
  const CLI::App* verb = &app;
  while (!verb->get_subcommands().empty()) verb = verb->get_subcommands().front();
  const CLI::Option* const option = verb->get_option_no_throw(name);
  const bool is_whole = option != nullptr && option->get_type_name() == "INT";
  return fmt::format("{}: '{}' is not a {}", name, text.substr(equals + 3),
                     is_whole ? "whole number" : "number");
}

/// CLI11 takes its arguments in reverse order.
void parse(CLI::App& app, std::vector<std::string> arguments) {
  std::ranges::reverse(arguments);
  try {
    app.parse(arguments);
  } catch (const CLI::Success&) {
    throw;
  } catch (const CLI::ConversionError& error) {
    throw UsageError(fmt::format("[cli] {}", conversion_text(app, error)),
                     fmt::format("see '{} --help'", parsed_path(app)));
  } catch (const CLI::ParseError& error) {
    check_leftovers(app);  // knows the nearest name, which is worth more than CLI11's answer
    throw UsageError(fmt::format("[cli] {}", error.what()), fmt::format("see '{} --help'", parsed_path(app)));
  }
}

/// An empty word is mostly a variable that a script has not set, and must not stand for a default. A prompt
/// may be empty, and --resume says itself what to write.
void refuse_empty_words(const CLI::App& app) {
  for (const CLI::Option* option : app.get_options()) {
    const std::string name = option->get_name();
    const bool may_be_empty = name == "--prompt" || option->get_expected_min() == 0;
    if (may_be_empty || std::ranges::find(option->results(), "") == option->results().end()) continue;
    throw UsageError(fmt::format("[cli] {} has an empty value", name),
                     "give it a value, or leave it out; in a script, check the variable that sets it");
  }
  for (const CLI::App* verb : app.get_subcommands()) refuse_empty_words(*verb);
}

/// As the user has typed it, who may have started a program that becomes `trireme train`.
std::string command_line(std::vector<std::string> words, const Environment& environment) {
  const auto program = environment.get(kProgramVariable);
  if (!program || words.size() < 2 || words[1] != "train") return shell_line(words);
  words.erase(words.begin());
  words.front() = *program;
  return shell_line(words);
}

int run(const std::vector<std::string>& words) {
  const Environment environment = Environment::process();
  Front front{
      .environment = environment, .command = command_line(words, environment), .overrides = {}, .action = {}};
  CLI::App app("Distributed training in C++ on libtorch: data and pipeline parallelism from one config file.",
               "trireme");
  describe(app, front);
  refuse_numbers_that_do_not_fit(app);
  std::vector<std::string> arguments(words.begin() + 1, words.end());
  take_help(arguments);
  check_verb(app, arguments);
  front.overrides = take_overrides(arguments);
  drop_program_mark(arguments);
  keep_empty_words(arguments);
  try {
    parse(app, arguments);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  }
  check_leftovers(app);
  refuse_empty_words(app);
  TRIREME_CHECK(front.action != nullptr, "[cli] no command handled '{}'", front.command);
  return front.action();
}

int report(const std::exception& error, ExitCode code) {
  write_stderr(fmt::format("error: {}\n", error.what()));
  return static_cast<int>(code);
}

int answer(std::vector<std::string> words) {
  try {
    words.front() = "trireme";
    return run(words);
  } catch (const UsageError& error) {
    const int code = report(error, error.exit_code());
    write_stderr(fmt::format("hint: {}\n", error.hint()));
    return code;
  } catch (const Error& error) {
    return report(error, error.exit_code());
  } catch (const std::exception& error) {
    if (std::ferror(stdout) != 0) return 0;  // a print threw: flush_results tells
    return report(error, ExitCode::kFailed);
  }
}

}  // namespace
}  // namespace trireme::cli

int main(int argc, char** argv) {
  trireme::hold_standard_streams();
  return trireme::flush_results(trireme::cli::answer({argv, argv + argc}));
}

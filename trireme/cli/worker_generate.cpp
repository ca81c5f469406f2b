#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>

#include "trireme/base/error.h"
#include "trireme/base/utf8.h"
#include "trireme/cli/kept_files.h"
#include "trireme/cli/worker_verbs.h"
#include "trireme/data/tokenizer.h"
#include "trireme/kernels/device.h"
#include "trireme/nn/language_model.h"
#include "trireme/plan/adapter.h"
#include "trireme/plan/config.h"
#include "trireme/report/run_dir.h"
#include "trireme/state/state_file.h"
#include "trireme/text/chat_template_file.h"
#include "trireme/train/generate.h"

namespace trireme::cli {
namespace {

struct Asked {
  std::string prompt;
  std::optional<int32_t> end_token;  ///< that ends an answer
};

/// What the template writes behind an answer says which token ends it.
std::optional<int32_t> end_of_turn(const text::ChatTemplate& chat, const nlohmann::ordered_json& question,
                                   const std::string& prompt, const data::Tokenizer& tokenizer) {
  const std::string answer = "answer";
  nlohmann::ordered_json answered = question;
  answered.push_back({{"role", "assistant"}, {"content", answer}});
  const std::string whole = chat.render(answered, false).text;
  const size_t end = whole.rfind(answer);
  if (!whole.starts_with(prompt) || end == std::string::npos) return tokenizer.end_token();
  const std::vector<int32_t> behind = tokenizer.encode(whole.substr(end + answer.size()));
  return !behind.empty() && tokenizer.is_special(behind[0]) ? behind[0] : tokenizer.end_token();
}

Asked asked(const GenerateOptions& options, const plan::Config& config, const data::Tokenizer& tokenizer) {
  if (options.chat.empty())
    return {options.prompt.empty() ? config.train.sample_prompt : options.prompt, tokenizer.end_token()};
  const text::ChatTemplate chat = text::load_chat_template(config.data.chat_template, config.data.tokenizer);
  nlohmann::ordered_json question = nlohmann::ordered_json::array();
  question.push_back({{"role", "user"}, {"content", options.chat}});
  std::string prompt = chat.render(question, true).text;
  const auto end = end_of_turn(chat, question, prompt, tokenizer);
  return {std::move(prompt), end};
}

}  // namespace

int worker_generate(const Request& request) {
  const GenerateOptions& options = request.generate;
  const report::RunDirectory run = report::RunDirectory::open(options.run);
  const plan::Config config =
      plan::load({.path = run.file("config.yaml"), .text = {}, .overrides = {}}, Environment()).config;
  if (plan::reads_images(config.model.family)) {
    throw ConfigError(
        "[cli.generate] {} trained an image model ({}), which generates no text; choose a run on text",
        run.path(), config.model.family);
  }
  check_tokenizer(run, config);
  const auto tokenizer = data::make_tokenizer(config.data.tokenizer);
  const auto [prompt, end_token] = asked(options, config, *tokenizer);
  if (prompt.empty())
    throw ConfigError(
        "[cli.generate] both --prompt and train.sample_prompt of {} are empty; pass --prompt TEXT",
        run.path());
  const std::vector<int32_t> prompt_tokens = tokenizer->encode(prompt);
  if (prompt_tokens.empty()) {
    throw ConfigError("[cli.generate] the tokenizer {} drops all of the prompt '{}'; pass another --prompt",
                      tokenizer->name(), printable_line(prompt));
  }
  const auto model = nn::build(plan::without_adapters(config.model));
  state::load_weights(*model, options.weights);
  model->eval();
  const bool gpu = config.device != plan::Device::kCpu && !kernels::gpus().empty();
  const at::Device device = gpu ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
  model->to(device);

  const std::vector<int32_t> tokens = train::generate(*model, prompt_tokens,
                                                      {.max_tokens = options.max_tokens,
                                                       .temperature = options.temperature,
                                                       .top_k = options.top_k,
                                                       .vocab_size = tokenizer->vocab_size(),
                                                       .end_token = end_token,
                                                       .seed = static_cast<uint64_t>(options.seed),
                                                       .context = config.data.seq_len},
                                                      device);
  const std::string text = data::decode_after(*tokenizer, prompt_tokens, tokens);
  if (request.json) {
    const nlohmann::json result = {{"schema", "trireme.generate/1"},
                                   {"run", run.path()},
                                   {"prompt", prompt},
                                   {"text", text},
                                   {"tokens", tokens.size()}};
    std::cout << result.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
  } else {
    std::cout << printable(options.chat.empty() ? prompt + text : text) << "\n";
  }
  return 0;
}

}  // namespace trireme::cli

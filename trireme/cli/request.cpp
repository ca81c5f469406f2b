#include "trireme/cli/request.h"

#include <nlohmann/json.hpp>

#include "trireme/base/error.h"

namespace trireme::bench {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ToyPipelineMode, name, micro_batches, window, blocking)

}  // namespace trireme::bench

namespace trireme::cli {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(GenerateOptions, run, weights, prompt, chat, max_tokens, temperature,
                                   top_k, seed)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(EvalOptions, device, run, weights, data, questions, per_document, window)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(DataOptions, action, path, format, train, test, seed, threads, fonts,
                                   sheet, side, images, rounds)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(BenchCommOptions, device, mib, rounds, pairs)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ControllerOptions, address, device, number, timeout_s, prints)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RatesOptions, device, file)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ReplayOptions, device, file, values, seed, is_explicit, timeline)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(BenchPipelineOptions, device, schedules, micro_batches, micro_batch_size,
                                   chunks, warmup, steps, study, timeline, details)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ToyPipelineOptions, device, schedule, modes, ranks, batch_size, width,
                                   depth, steps, seed, lr, study, timeline)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Request, verb, config, run_dir, runs_root, resume, resume_from, attempt,
                                   ranks, finishes, command, json, quiet, silent, generate, eval, data,
                                   bench_comm, bench_pipeline, toy_pipeline, controller, rates, replay)

std::string to_json(const Request& request) {
  try {
    return nlohmann::json(request).dump();
  } catch (const nlohmann::json::type_error& error) {
    throw ConfigError(
        "[cli.request] the command line or the config is not UTF-8 text ({}); retype it as UTF-8",
        error.what());
  }
}

Request request_from_json(const std::string& text) {
  try {
    return nlohmann::json::parse(text).get<Request>();
  } catch (const nlohmann::json::exception& error) {
    throw LogicError(
        "[cli.request] TRIREME_REQUEST is not a valid request ({}); start the worker through 'trireme'",
        error.what());
  }
}

}  // namespace trireme::cli

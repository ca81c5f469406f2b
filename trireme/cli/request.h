#pragma once
// The front command's request to the worker: one JSON value in the variable TRIREME_REQUEST, the same for all
// ranks.
#include <cstdint>
#include <string>
#include <vector>

#include "trireme/bench/pipeline_runs.h"

namespace trireme::cli {

/// The variable by which a program that calls train_main() says what the front command is to start as ranks.
inline constexpr const char* kProgramVariable = "TRIREME_PROGRAM";

struct GenerateOptions {
  std::string run;           ///< run directory
  std::string weights = {};  ///< its final ones, or a checkpoint
  std::string prompt;
  std::string chat = {};  ///< a question that the chat template writes; empty: `prompt` as it is
  int64_t max_tokens = 256;
  double temperature = 0.8;  ///< 0: greedy
  int64_t top_k = 0;         ///< 0: all
  int64_t seed = 42;
};

struct EvalOptions {
  std::string device = "cpu";
  std::string run;            ///< run directory; empty: a model of another make
  std::string weights;        ///< of the run, or the folder of the model
  std::string data;           ///< text as data.path has it, or a file of questions
  bool questions = false;     ///< with several endings each
  bool per_document = false;  ///< a row for each document or question
  int64_t window = 0;         ///< most tokens that one token is predicted from
};

struct BenchCommOptions {
  std::string device = "cpu";
  std::vector<int64_t> mib;  ///< sizes of the whole tensor in bf16
  int64_t rounds = 5;        ///< alternations of all cases
  bool pairs = false;        ///< messages between each two ranks, too
};

/// A measurement of this machine's rates.
struct RatesOptions {
  std::string device = "cpu";
  std::string file;  ///< that rank 0 writes
};

struct BenchPipelineOptions : bench::PipelineRun {
  std::string device = "cpu";
  std::vector<std::string> schedules;  ///< as plan::ScheduleName has them
  std::string timeline;                ///< folder for pictures and traces; empty: none
  bool details = false;                ///< tables by rank and stage for more than one schedule
};

struct ToyPipelineOptions : bench::ToyPipelineRun {
  std::string device = "cpu";
  std::vector<bench::ToyPipelineMode> modes;
  std::string timeline;  ///< folder for pictures and traces; empty: none
};

struct DataOptions {
  std::string action;  ///< make_digits, info or bench
  std::string path;
  std::string format = "cifar10";       ///< or mnist
  int64_t train = 50000, test = 10000;  ///< images
  int64_t seed = 42, threads = 1;
  std::string fonts;                             ///< a folder; empty: those of the system
  std::string sheet;                             ///< a picture of the first images; empty: none
  int64_t side = 224, images = 200, rounds = 5;  ///< of bench
};

/// A controller's program that is run again without its client.
struct ReplayOptions {
  std::string device = "cpu";
  std::string file;
  std::string values = "random";  ///< of inputs; or zeros
  int64_t seed = 42;
  bool is_explicit = false;
  std::string timeline;  ///< folder for a picture and a trace; empty: none
};

/// A worker of a controller.
struct ControllerOptions {
  std::string address;  ///< of the server, as controller::Address::text() has it
  std::string device = "auto";
  int64_t number = -1;  ///< that it wants; -1: any
  double timeout_s = 300.0;
  bool prints = false;  ///< worker 0 prints what a run prints; else the client does
};

struct Request {
  /// train, generate, eval, data, bench_comm, bench_pipeline, toy_pipeline, controller, replay, rates or
  /// probe
  std::string verb = {};
  std::string config;   ///< resolved YAML (train, eval, bench_pipeline, toy_pipeline)
  std::string run_dir;  ///< made by the front command; empty: rank 0 makes one below `runs_root`
  std::string runs_root = "runs";
  bool resume = false;           ///< go on from a checkpoint of `run_dir`
  std::string resume_from = {};  ///< this one; empty: the newest that is whole
  int64_t attempt = 0;           ///< as report::Continuation has it, of `run_dir`
  int64_t ranks = 0;             ///< that the user asked the launcher for; 0: it chose
  bool finishes = true;          ///< the worker completes the run directory's manifest, and says where it is
  std::string command;           ///< the user's command line, for the manifest
  bool json = false;             ///< results as JSON lines on stdout
  bool quiet = false;            ///< no start-up lines, no progress
  bool silent = false;           ///< nothing on stdout
  GenerateOptions generate = {};
  EvalOptions eval = {};
  DataOptions data = {};
  BenchCommOptions bench_comm = {};
  BenchPipelineOptions bench_pipeline = {};
  ToyPipelineOptions toy_pipeline = {};
  ControllerOptions controller = {};
  RatesOptions rates = {};
  ReplayOptions replay = {};
};

std::string to_json(const Request& request);
/// Throws LogicError when the text is not what to_json() writes.
Request request_from_json(const std::string& text);

}  // namespace trireme::cli

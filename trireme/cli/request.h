#pragma once
// What the front command tells the worker: one JSON value in the variable TRIREME_REQUEST, the same for all
// ranks.
#include <cstdint>
#include <string>
#include <vector>

namespace trireme::cli {

struct GenerateOptions {
  std::string run;  ///< run directory
  std::string prompt;
  int64_t max_tokens = 256;
  double temperature = 0.8;  ///< 0: greedy
  int64_t top_k = 0;         ///< 0: all
  int64_t seed = 42;
};

struct BenchCommOptions {
  std::string device = "cpu";
  std::vector<int64_t> mib;  ///< sizes of the whole tensor in bf16
  int64_t rounds = 5;        ///< alternations of all cases
};

struct Request {
  std::string verb;     ///< train, generate, bench_comm or probe
  std::string config;   ///< resolved YAML (train)
  std::string run_dir;  ///< made by the front command; empty: rank 0 makes one below `runs_root`
  std::string runs_root = "runs";
  std::string command;  ///< the user's command line, for the manifest
  bool json = false;    ///< results as JSON lines on stdout
  bool quiet = false;   ///< no start-up lines, no progress
  bool silent = false;  ///< nothing on stdout
  GenerateOptions generate = {};
  BenchCommOptions bench_comm = {};
};

std::string to_json(const Request& request);
/// Throws LogicError when the text is not what to_json() writes.
Request request_from_json(const std::string& text);

}  // namespace trireme::cli

#pragma once
// What a worker can be asked to do. Each returns an exit code.
#include "trireme/base/env.h"
#include "trireme/cli/request.h"

namespace trireme::train {
struct Program;
}

namespace trireme::cli {

/// `program`: what a program of one's own brings; null: nothing.
int worker_train(const Request& request, const Environment& environment,
                 const train::Program* program = nullptr);
/// Prints text from the weights of a finished run.
int worker_generate(const Request& request);
/// Counts how likely the weights of a run or a model find a text, or endings of questions.
int worker_eval(const Request& request, const Environment& environment);
/// Draws digits, or says what a folder of images holds.
int worker_data(const Request& request);
/// Times the way of JPEG files to batches beside libjpeg-turbo alone.
int worker_bench_images(const Request& request);
/// Times collectives against each other and prints a table, or JSON.
int worker_bench_comm(const Request& request, const Environment& environment);
/// Times pipeline schedules on a model of random tokens and prints a table, or JSON.
int worker_bench_pipeline(const Request& request, const Environment& environment);
/// Trains an MLP on random numbers in a pipeline, in one or more modes, and prints a table, or JSON.
int worker_toy_pipeline(const Request& request, const Environment& environment);
/// Works for a controller until it ends.
int worker_controller(const Request& request, const Environment& environment);
/// Runs a controller's program without its client and prints what it fetches, or JSON.
int worker_replay(const Request& request, const Environment& environment);
/// Prints one JSON object: torch, GPUs, NCCL, threads, loaded libraries.
int worker_probe();
/// Measures the rates of this machine (plan/rates.h) on all ranks at once; rank 0 writes them to a file.
int worker_rates(const Request& request, const Environment& environment);

}  // namespace trireme::cli

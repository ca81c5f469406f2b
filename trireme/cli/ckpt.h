#pragma once
// The verbs of `trireme ckpt` that have files of their own.

namespace CLI {
class App;
}

namespace trireme::cli {

struct Front;

/// import-hf and export-hf.
void add_hugging_face(CLI::App& ckpt, Front& front);

}  // namespace trireme::cli

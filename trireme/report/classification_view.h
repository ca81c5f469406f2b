#pragma once
// How a model classifies held-out images, for people and for programs: its confusion matrix, a sheet of its
// worst mistakes, and both as JSON.
#include <string>

#include "trireme/base/classification.h"
#include "trireme/report/run_dir.h"

namespace trireme::report {

/// True classes are rows, predicted ones columns, with counts and shares of the row; colours alone where
/// there are more than 24 classes. Empty where there is no matrix. SVG.
std::string draw_confusion(const Classification& classification);

/// The worst mistakes with their pictures, what the model took each for, and how likely it found that. SVG.
std::string draw_mistakes(const Classification& classification);

/// As JSON: {schema, step, images, right, not_finite, classes, confusion (a row for each true class),
/// mistakes}.
std::string to_json(const Classification& classification);

/// Writes pictures/confusion.svg, where there is a matrix, pictures/mistakes.svg and validation.json. Throws
/// EnvironmentError.
void write_classification(const Classification& classification, const RunDirectory& run);

}  // namespace trireme::report

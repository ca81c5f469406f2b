#pragma once
// A number that a run recorded over its steps, and how a million steps become a line that a picture can hold.
#include <cstdint>
#include <optional>
#include <vector>

namespace trireme::report {

/// x ascends; y may be NaN or infinite.
struct Curve {
  std::vector<double> x, y;

  size_t size() const { return x.size(); }
  bool empty() const { return x.empty(); }
  void add(double at, double value) {
    x.push_back(at);
    y.push_back(value);
  }
};

/// Neighbouring points of a curve as one point, which keeps their smallest and largest values.
struct Bin {
  double first = 0.0, last = 0.0;            ///< x of the first and the last of them
  double low = 0.0, high = 0.0, mean = 0.0;  ///< of those that are finite
  int64_t count = 0;                         ///< of those that are finite
  int64_t not_finite = 0;
  double x() const { return 0.5 * (first + last); }
};

/// A bin for each point; if there are more than `most` points, at most `most` bins over equal parts of x.
std::vector<Bin> bins_of(const Curve& curve, size_t most);

/// The value below which a share of `values` lies (0.5: the median), interpolated between neighbours; none
/// when there are no values. Values that are not finite are left out.
std::optional<double> quantile(std::vector<double> values, double share);

}  // namespace trireme::report

#include "trireme/base/error.h"
#include "trireme/data/images/digits.h"

namespace trireme::data {

class DigitPainter::Impl {};

DigitPainter::DigitPainter(const std::vector<std::string>&) {
  throw EnvironmentError(
      "[data.digits] this build cannot draw digits; install libfreetype-dev and rebuild, or copy a folder "
      "that 'trireme data make digits' wrote on another machine");
}

DigitPainter::~DigitPainter() = default;

const std::vector<std::string>& DigitPainter::fonts() const {
  throw LogicError("[data.digits] there is no painter");
}

const std::vector<std::string>& DigitPainter::files() const {
  throw LogicError("[data.digits] there is no painter");
}

Image DigitPainter::draw(int64_t, DigitFormat, SampleDraws&) {
  throw LogicError("[data.digits] there is no painter");
}

}  // namespace trireme::data

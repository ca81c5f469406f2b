#include "trireme/report/page_parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "trireme/base/utf8.h"

namespace trireme::report {
namespace {

/// Elements and attributes of is_plain_svg().
constexpr auto kSvgTags =
    std::to_array<std::string_view>({"circle", "ellipse", "g", "image", "line", "path", "polygon", "polyline",
                                     "rect", "svg", "text", "title", "tspan"});
constexpr auto kSvgAttributes = std::to_array<std::string_view>({"cx",
                                                                 "cy",
                                                                 "d",
                                                                 "dx",
                                                                 "dy",
                                                                 "fill",
                                                                 "fill-opacity",
                                                                 "font-family",
                                                                 "font-size",
                                                                 "font-weight",
                                                                 "height",
                                                                 "href",
                                                                 "image-rendering",
                                                                 "opacity",
                                                                 "points",
                                                                 "preserveAspectRatio",
                                                                 "r",
                                                                 "rx",
                                                                 "ry",
                                                                 "stroke",
                                                                 "stroke-dasharray",
                                                                 "stroke-opacity",
                                                                 "stroke-width",
                                                                 "text-anchor",
                                                                 "transform",
                                                                 "version",
                                                                 "viewBox",
                                                                 "width",
                                                                 "x",
                                                                 "x1",
                                                                 "x2",
                                                                 "xmlns",
                                                                 "y",
                                                                 "y1",
                                                                 "y2"});

template <size_t kSize>
bool is_known(const std::array<std::string_view, kSize>& words, std::string_view word) {
  return std::ranges::find(words, word) != words.end();
}

/// Goes over an SVG's text once.
class SvgCheck {
 public:
  explicit SvgCheck(std::string_view text) : text_(text) {}

  bool holds() {
    while (at_ < text_.size()) {
      if (text_[at_] != '<') {
        if (open_.empty() && text_[at_] != '\n' && text_[at_] != ' ') return false;
        ++at_;
      } else if (!take_tag()) {
        return false;
      }
    }
    return open_.empty() && began_;
  }

 private:
  bool take(std::string_view word) {
    if (!text_.substr(at_).starts_with(word)) return false;
    at_ += word.size();
    return true;
  }

  std::string_view name() {
    const size_t begin = at_;
    while (at_ < text_.size() &&
           (std::isalnum(static_cast<unsigned char>(text_[at_])) != 0 || text_[at_] == '-'))
      ++at_;
    return text_.substr(begin, at_ - begin);
  }

  void skip_blanks() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t')) ++at_;
  }

  bool take_tag() {
    ++at_;
    if (take("/")) {
      const std::string_view closed = name();
      if (open_.empty() || open_.back() != closed || !take(">")) return false;
      open_.pop_back();
      return true;
    }
    const std::string_view tag = name();
    if (!is_known(kSvgTags, tag) || (open_.empty() && (began_ || tag != "svg"))) return false;
    began_ = true;
    for (skip_blanks(); at_ < text_.size(); skip_blanks()) {
      if (take("/>")) return true;
      if (take(">")) {
        open_.push_back(tag);
        return true;
      }
      if (!take_attribute()) return false;
    }
    return false;
  }

  /// Whether the address holds the image itself, as pixels.
  static bool is_inside(std::string_view address) {
    constexpr std::string_view kPng = "data:image/png;base64,", kDigits = "+/=";
    return address.starts_with(kPng) && std::ranges::all_of(address.substr(kPng.size()), [&](char letter) {
             return std::isalnum(static_cast<unsigned char>(letter)) != 0 ||
                    kDigits.find(letter) != kDigits.npos;
           });
  }

  bool take_attribute() {
    const std::string_view attribute = name();
    if (!is_known(kSvgAttributes, attribute) || !take("=\"")) return false;
    const size_t end = text_.find('"', at_);
    if (end == std::string_view::npos) return false;
    const std::string_view value = text_.substr(at_, end - at_);
    at_ = end + 1;
    if (attribute == "href") return is_inside(value);
    // "url(" in any of its spellings would load something.
    return value.find_first_of("<&\\") == std::string_view::npos &&
           value.find("(#") == std::string_view::npos && value.find("url") == std::string_view::npos &&
           value.find("URL") == std::string_view::npos;
  }

  std::string_view text_;
  size_t at_ = 0;
  bool began_ = false;
  std::vector<std::string_view> open_;
};

/// Pictures of a run that have a title here; others are shown under their names.
struct KnownPicture {
  std::string_view name, title;
};
constexpr auto kKnownPictures = std::to_array<KnownPicture>({{"pictures/confusion.svg", "Confusion matrix"},
                                                             {"pictures/mistakes.svg", "Worst mistakes"},
                                                             {"traces/pipeline.svg", "One pipeline step"}});

Markup caption_of(const std::string& name) {
  const auto known = std::ranges::find(kKnownPictures, name, &KnownPicture::name);
  if (known == kKnownPictures.end()) return element("figcaption", element("b", name));
  return element("figcaption",
                 element("b", std::string(known->title)) + element("span", {{"class", "of"}}, name));
}

std::string_view style_of(RunState state) {
  switch (state) {
    case RunState::kFinished:
      return "good";
    case RunState::kInterrupted:
      return "fair";
    case RunState::kFailed:
      return "poor";
    case RunState::kRunning:
    case RunState::kNoEnd:
      return "open";
  }
  return "";
}

}  // namespace

std::string whole_page(const std::string& title, const Markup& body) {
  const Markup head =
      element("meta", {{"charset", "utf-8"}}) +
      element("meta", {{"name", "viewport"}, {"content", "width=device-width, initial-scale=1"}}) +
      element("meta", {{"http-equiv", "Content-Security-Policy"},
                       {"content", "default-src 'none'; img-src data:; style-src 'unsafe-inline'"}}) +
      element("meta", {{"name", "color-scheme"}, {"content", "light dark"}}) + element("title", title) +
      element("style", Markup::trusted(std::string(page_style())));
  return "<!DOCTYPE html>\n" +
         element("html", {{"lang", "en"}}, element("head", head) + element("body", element("main", body)))
             .html();
}

Markup section(const std::string& title, const Markup& content) {
  if (content.empty()) return {};
  return element("section", element("h2", title) + content);
}

Markup note_below_title(const std::string& note) {
  return note.empty() ? Markup() : element("p", {{"class", "note"}}, note);
}

Markup folded(const std::string& title, const Markup& content) {
  return element("details", element("summary", title) + content);
}

Markup draw_table(const PageTable& table) {
  Markup rows;
  if (!table.titles.empty()) {
    Markup titles;
    for (const Markup& title : table.titles) titles += element("th", title);
    rows += element("thead", element("tr", titles));
  }
  Markup body;
  for (const std::vector<Markup>& row : table.rows) {
    Markup cells;
    for (const Markup& cell : row) cells += element("td", cell);
    body += element("tr", cells);
  }
  rows += element("tbody", body);
  return element("div", {{"class", "scrolls"}}, element("table", {{"class", table.style}}, rows));
}

Markup draw_facts(const std::vector<std::pair<std::string, std::string>>& facts) {
  PageTable table{.titles = {}, .rows = {}, .style = "facts"};
  for (const auto& [what, value] : facts) table.rows.push_back({what, value});
  return draw_table(table);
}

Markup state_pill(RunState state) {
  return element("span", {{"class", "pill " + std::string(style_of(state))}}, state_name(state));
}

bool is_plain_svg(const std::string& svg) {
  return is_utf8(svg) && printable(svg) == svg && SvgCheck(svg).holds();
}

Markup draw_picture(const PictureFile& picture) {
  const Markup caption = caption_of(picture.name);
  if (picture.svg && is_plain_svg(picture.content))
    return element("figure", {{"class", "picture"}}, caption + Markup::trusted(picture.content));
  const std::string type = picture.svg ? "image/svg+xml" : "image/png";
  return element(
      "figure", {{"class", "picture"}},
      caption + element("img", {{"alt", picture.name},
                                {"src", fmt::format("data:{};base64,{}", type, base64(picture.content))}}));
}

std::string time_text(const std::string& timestamp) {
  if (timestamp.size() < 20 || timestamp[10] != 'T' || timestamp.back() != 'Z') return timestamp;
  return timestamp.substr(0, 10) + " " + timestamp.substr(11, 8) + " UTC";
}

}  // namespace trireme::report

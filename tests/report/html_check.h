#pragma once
// Whether a page is what browsers and XML parsers agree on.
#include <cctype>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace trireme::report {

/// Goes over a document of elements, attributes in double quotes and the entities that our pages use.
class HtmlCheck {
 public:
  explicit HtmlCheck(std::string_view text) : text_(text) {}

  /// What is wrong first, with the text around it; empty: nothing.
  std::string problem() {
    if (!take("<!DOCTYPE html>\n")) return "no doctype";
    while (problem_.empty() && at_ < text_.size()) {
      if (text_[at_] == '<') {
        tag();
      } else {
        character();
      }
    }
    if (problem_.empty() && !open_.empty()) fail("not closed: " + open_.back());
    return problem_;
  }

  const std::vector<std::string>& attributes() const { return attributes_; }  ///< name="value", unescaped
  const std::multiset<std::string>& tags() const { return tags_; }

 private:
  void fail(const std::string& what) {
    const size_t begin = at_ < 60 ? 0 : at_ - 60;
    if (problem_.empty()) problem_ = what + " near ..." + std::string(text_.substr(begin, 120));
  }

  bool take(std::string_view word) {
    if (!text_.substr(at_).starts_with(word)) return false;
    at_ += word.size();
    return true;
  }

  std::string name() {
    const size_t begin = at_;
    while (at_ < text_.size() &&
           (std::isalnum(static_cast<unsigned char>(text_[at_])) != 0 || text_[at_] == '-'))
      ++at_;
    return std::string(text_.substr(begin, at_ - begin));
  }

  void character() {
    if (text_[at_] == '&') {
      for (const std::string_view entity : {"&amp;", "&lt;", "&gt;", "&quot;", "&#39;"}) {
        if (take(entity)) return;
      }
      return fail("unknown entity");
    }
    const auto letter = static_cast<unsigned char>(text_[at_]);
    if (letter < 0x20 && letter != '\n' && letter != '\t') return fail("control character");
    ++at_;
  }

  void tag() {
    ++at_;
    if (take("/")) {
      const std::string closed = name();
      if (open_.empty() || open_.back() != closed) return fail("closes " + closed);
      if (!take(">")) return fail("end of a tag");
      open_.pop_back();
      return;
    }
    const std::string opened = name();
    if (opened.empty()) return fail("no tag");
    tags_.insert(opened);
    while (take(" ")) attribute();
    if (take("/>")) return;
    if (!take(">")) return fail("tag " + opened);
    open_.push_back(opened);
  }

  void attribute() {
    std::string text = name();
    if (text.empty() || !take("=\"")) return fail("attribute");
    text += "=\"";
    for (; at_ < text_.size() && text_[at_] != '"'; ++at_) {
      if (text_[at_] == '<') return fail("< in an attribute");
      text += text_[at_];
    }
    if (!take("\"")) return fail("attribute without an end");
    attributes_.push_back(text + "\"");
  }

  std::string_view text_;
  size_t at_ = 0;
  std::vector<std::string> open_;
  std::vector<std::string> attributes_;
  std::multiset<std::string> tags_;
  std::string problem_;
};

}  // namespace trireme::report

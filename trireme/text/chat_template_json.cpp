// The filter tojson, as `transformers` defines it: json.dumps() of Python without ASCII escapes.
#include <algorithm>
#include <cmath>

#include "trireme/base/error.h"
#include "trireme/text/chat_template_context.h"
#include "trireme/text/unicode.h"

namespace trireme::text {
namespace {

constexpr int64_t kWidestIndent = 64;

struct JsonStyle {
  bool only_ascii = false, sorts_keys = false, has_lines = false;
  std::string indent = {}, between_items = ", ", after_key = ": ";
};

void append_unit(std::string& json, uint32_t unit) {
  json += fmt::format("\\u{:04x}", unit);
}

void append_beyond_ascii(std::string& json, CodePoint point, std::string_view bytes, bool only_ascii) {
  if (!only_ascii) {
    json += bytes;
  } else if (point.value < 0x10000) {
    append_unit(json, point.value);
  } else {
    append_unit(json, 0xd800 + ((point.value - 0x10000) >> 10));
    append_unit(json, 0xdc00 + ((point.value - 0x10000) & 0x3ff));
  }
}

std::string quoted_json(std::string_view text, bool only_ascii) {
  constexpr std::string_view kSpecial = "\"\\\n\r\t\b\f", kLetters = "\"\\nrtbf";
  std::string json = "\"";
  for (size_t i = 0; i < text.size();) {
    const CodePoint point = code_point_at(text, i);
    const size_t kind = kSpecial.find(text[i]);
    if (kind != std::string_view::npos) {
      json += '\\';
      json += kLetters[kind];
    } else if (point.value < 0x20) {
      append_unit(json, point.value);
    } else if (point.value < 0x80) {
      json += text[i];
    } else {
      append_beyond_ascii(json, point, text.substr(i, point.length), only_ascii);
    }
    i += point.length;
  }
  return json + '"';
}

class JsonWriter {
 public:
  JsonWriter(ChatContext& context, const JsonStyle& style) : context_(context), style_(style) {}

  std::string run(const ChatValue& value) {
    write(value, 0);
    return std::move(json_);
  }

 private:
  void add(std::string_view text) {
    context_.spend(text.size() + 1);
    json_ += text;
  }

  void line(int depth) {
    if (!style_.has_lines) return;
    add("\n");
    for (int i = 0; i < depth; ++i) add(style_.indent);
  }

  void write(const ChatValue& value, int depth) {
    if (value.items() != nullptr) return write_list(*value.items(), depth);
    if (value.fields() != nullptr) return write_mapping(*value.fields(), depth);
    if (value.string() != nullptr) return add(quoted_json(*value.string(), style_.only_ascii));
    if (value.is<ChatValue::None>()) return add("null");
    if (const auto* flag = value.as<bool>()) return add(*flag ? "true" : "false");
    if (const auto* number = value.as<double>()) return add(written(*number));
    if (!value.is<int64_t>()) context_.refuse(fmt::format("tojson gets {}", value.type_name()));
    add(std::to_string(*value.as<int64_t>()));
  }

  static std::string written(double number) {
    if (std::isnan(number)) return "NaN";
    return std::isinf(number) ? (number > 0 ? "Infinity" : "-Infinity") : python_float(number);
  }

  void write_list(const ChatList& items, int depth) {
    if (items.empty()) return add("[]");
    add("[");
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) add(style_.between_items);
      line(depth + 1);
      write(items[i], depth + 1);
    }
    line(depth);
    add("]");
  }

  void write_mapping(ChatFields fields, int depth) {
    if (fields.empty()) return add("{}");
    if (style_.sorts_keys) std::ranges::sort(fields, {}, [](const auto& field) { return field.first; });
    add("{");
    for (size_t i = 0; i < fields.size(); ++i) {
      if (i > 0) add(style_.between_items);
      line(depth + 1);
      add(quoted_json(fields[i].first, style_.only_ascii));
      add(style_.after_key);
      write(fields[i].second, depth + 1);
    }
    line(depth);
    add("}");
  }

  ChatContext& context_;
  const JsonStyle& style_;
  std::string json_;
};

JsonStyle style_of(ChatContext& context, const ChatCall& call) {
  const ChatGiven given(context, "tojson", call, {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style{.only_ascii = given.flag(0), .sorts_keys = given.flag(3)};
  const ChatValue* indent = given.get(1);
  if (indent != nullptr && !indent->is<ChatValue::None>()) {
    style.has_lines = true;
    style.between_items = ",";
    const int64_t width = indent->string() != nullptr ? 0 : context.integer(*indent, "the indent of tojson");
    style.indent = std::string(static_cast<size_t>(std::clamp<int64_t>(width, 0, kWidestIndent)), ' ');
    if (indent->string() != nullptr) style.indent = *indent->string();
    if (width > kWidestIndent) context.refuse("the indent of tojson is wider than 64");
  }
  const ChatValue* separators = given.get(2);
  if (separators == nullptr || separators->is<ChatValue::None>()) return style;
  if (separators->items() == nullptr || separators->items()->size() != 2)
    context.refuse("the separators of tojson are not two strings");
  style.between_items = context.string((*separators->items())[0], "tojson");
  style.after_key = context.string((*separators->items())[1], "tojson");
  return style;
}

}  // namespace

std::string chat_json(ChatContext& context, const ChatValue& value, const ChatCall& call) {
  const JsonStyle style = style_of(context, call);
  return JsonWriter(context, style).run(value);
}

}  // namespace trireme::text

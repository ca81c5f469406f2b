// Chat templates render as Python's jinja2 does; expected.json is written by make_chat_fixtures.py.
#include "trireme/text/chat_template.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "tests/data/scratch.h"
#include "tests/text/expected.h"
#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/text/chat_template_parser.h"
#include "trireme/text/unicode.h"

namespace trireme::text::testing {
namespace {

using Json = nlohmann::ordered_json;

std::string chat_fixtures() {
  return fixtures() + "/chat/";
}

std::string chat_source(const std::string& name) {
  std::ifstream file(chat_fixtures() + name + ".jinja", std::ios::binary);
  EXPECT_TRUE(file) << name;
  return {std::istreambuf_iterator<char>(file), {}};
}

Json expected_chats(const std::string& folder) {
  std::ifstream file(folder + "/expected.json");
  EXPECT_TRUE(file) << folder;
  return Json::parse(file);
}

/// As the script writes it: text and spans in characters, or null.
Json as_expected(const ChatText& rendered) {
  const auto characters = [&](size_t bytes) {
    return count_characters(std::string_view(rendered.text).substr(0, bytes));
  };
  Json spans = Json::array();
  for (const Span& span : rendered.generated) spans.push_back({characters(span.begin), characters(span.end)});
  return {rendered.text, spans};
}

template <typename Render>
Json result_of(Render render) {
  try {
    return as_expected(render());
  } catch (const ConfigError& error) {
    EXPECT_TRUE(std::string_view(error.what()).starts_with("[text.chat_template] ")) << error.what();
    return nullptr;
  }
}

/// The error, where there was one.
template <typename Render>
std::string refusal_of_chat(Render render) {
  try {
    const ChatText rendered = render();
    return "rendered: " + rendered.text;
  } catch (const ConfigError& error) {
    return error.what();
  }
}

void compare_template(const Json& file, const std::string& name, const std::string& source,
                      const Json& wanted) {
  ChatTemplate chat(source, name);
  ChatFields tokens;
  for (const auto& [key, token] : file["special_tokens"].items())
    tokens.emplace_back(key, ChatValue::text(token.get<std::string>()));
  chat.set_special_tokens(tokens);
  for (size_t i = 0; i < wanted.size(); ++i) {
    const Json& messages = file["conversations"][i / 2];
    const auto render = [&] { return chat.render(messages, i % 2 == 1); };
    ASSERT_EQ(result_of(render), wanted[i]) << name << " of " << messages.dump() << "\n"
                                            << (wanted[i].is_null() ? "" : refusal_of_chat(render));
  }
}

void compare_chats(const std::string& folder) {
  const Json file = expected_chats(folder);
  for (const auto& [name, wanted] : file["templates"].items()) {
    compare_template(file, name, chat_source(name), wanted);
  }
  for (const auto& [name, packaged] : file["packaged"].items()) {
    const auto source = packaged["source"].get<std::string>();
    const std::string refusal = refusal_of_chat([&] { return ChatTemplate(source, name), ChatText(); });
    if (refusal == "rendered: ") {
      compare_template(file, name, source, packaged["rendered"]);
    } else {
      std::cout << refusal << "\n";
    }
  }
}

ChatText run_expression(const std::string& source, const Json& variables) {
  const std::string name = "expression";
  return run_chat_template(parse_chat_template(source, name), name, *chat_value_of(variables).fields());
}

std::string refusal_of_source(const std::string& source) {
  return refusal_of_chat([&] { return run_expression(source, Json{{"messages", Json::array()}, {"x", 5}}); });
}

TEST(ChatTemplate, EqualsPythonOnTemplatesOfTheFamilies) {
  compare_chats(chat_fixtures());
}

TEST(ChatTemplate, EqualsPythonOnEachExpression) {
  const Json file = expected_chats(chat_fixtures());
  ASSERT_GT(file["expressions"].size(), 100u);
  for (const Json& each : file["expressions"]) {
    const auto render = [&] { return run_expression(each[0].get<std::string>(), file["variables"]); };
    EXPECT_EQ(result_of(render), each[1]) << each[0] << "\n"
                                          << (each[1].is_null() ? "" : refusal_of_chat(render));
  }
}

TEST(ChatTemplate, EqualsPythonHereOnRandomConversations) {
  const char* named = std::getenv("TRIREME_TEST_PYTHON");
  const std::string python = named == nullptr ? "python3" : named;
  if (std::system((python + " -c 'import jinja2' 2> /dev/null").c_str()) != 0)
    GTEST_SKIP() << python << " has no module jinja2; set TRIREME_TEST_PYTHON to one that has";
  const trireme::testing::Scratch scratch;
  const std::string script =
      fixtures() + "/../make_chat_fixtures.py --packages --seed 7 --output " + scratch.path("");
  ASSERT_EQ(std::system((python + " " + script).c_str()), 0);
  compare_chats(scratch.path(""));
}

TEST(ChatTemplate, CommittedExpectationsAreWhatTheScriptWrites) {
  const char* named = std::getenv("TRIREME_TEST_PYTHON");
  const std::string python = named == nullptr ? "python3" : named;
  if (std::system((python + " -c 'import jinja2' 2> /dev/null").c_str()) != 0)
    GTEST_SKIP() << python << " has no module jinja2; set TRIREME_TEST_PYTHON to one that has";
  const trireme::testing::Scratch scratch;
  const std::string script = fixtures() + "/../make_chat_fixtures.py --output " + scratch.path("");
  ASSERT_EQ(std::system((python + " " + script).c_str()), 0);
  EXPECT_EQ(expected_chats(scratch.path("")), expected_chats(chat_fixtures()));
}

TEST(ChatTemplate, RefusesWhatIsNotReadByNameAndLine) {
  const std::vector<std::pair<std::string, std::vector<std::string>>> cases = {
      {"\n\n{% include 'x' %}", {"line 3", "include", "generation"}},
      {"a\n{{ x | frobnicate }}", {"line 2", "filter 'frobnicate'", "tojson"}},
      {"{{ x is prime }}", {"line 1", "test 'prime'", "defined"}},
      {"\n{{ 'a'.zfill(3) }}", {"line 2", "zfill"}},
      {"{{ lipsum() }}", {"line 1", "lipsum"}},
      {"{% for i in [1] recursive %}{% endfor %}", {"recursive"}},
      {"{{ [1, 2] }}", {"a list", "tojson"}},
      {"{{ x ** 2 }}", {"**"}},
      {"{{ f(*x) }}", {"star"}},
      {"\n{{ 0x1f }}", {"line 2", "decimal"}},
      {"{{ loop.cycle }}{% for i in [1] %}{{ loop.cycle(1) }}{% endfor %}", {"loop"}},
      {"{{ nothing.x }}", {"'nothing'", "undefined"}},
      {"\n\n\n{{ raise_exception('too short') }}", {"line 4", "too short"}},
      {"{% if x %}\n{% endfor %}", {"line 2", "endfor"}},
      {"\n{{ 99999999999999999999 }}", {"line 2", "too large"}},
      {"{{ 1e999 }}", {"too large"}},
      {"{{ '99999999999999999999' | int }}", {"63 bits"}},
      {"{% set n = namespace() %}{% set n.x = [y] | map('default', n) | list %}", {"namespace", "part of"}},
      {"{% macro f() %}{% generation %}{% endgeneration %}{% endmacro %}{{ f() }}", {"generation"}},
  };
  for (const auto& [source, words] : cases) {
    const std::string message = refusal_of_source(source);
    for (const std::string& word : words)
      EXPECT_NE(message.find(word), std::string::npos) << source << "\n" << message;
  }
}

TEST(ChatTemplate, StopsTemplatesThatWorkWithoutEnd) {
  const std::string nested =
      "{% for a in range(1000) %}{% for b in range(1000) %}{% for c in range(1000) %}x"
      "{% endfor %}{% endfor %}{% endfor %}";
  const std::string doubled =
      "{% set n = namespace(t='ab') %}{% for i in range(60) %}{% set n.t = n.t + n.t %}{% endfor %}";
  const std::string lists =
      "{% set n = namespace(t=[1]) %}{% for i in range(40) %}{% set n.t = [n.t, n.t] %}{% endfor %}{{ n.t | "
      "tojson }}";
  const std::string compared =
      "{% set n = namespace(t=[1]) %}{% for i in range(40) %}{% set n.t = [n.t, n.t] %}{% endfor %}{{ n.t == "
      "n.t }}";
  std::string many = "{% set n = namespace() %}";
  for (int i = 0; i < 50'000; ++i) many += "{% set n.x" + std::to_string(i) + " = 1 %}";
  const std::string searched = "{% set a = 'a' * 8000000 %}{{ ('a' * 4000000 + 'b') in a }}";
  for (const std::string& source : {nested, doubled, lists, compared, many}) {
    EXPECT_NE(refusal_of_source(source).find("more steps or text"), std::string::npos)
        << source.substr(0, 200);
  }
  EXPECT_EQ(refusal_of_source(searched), "rendered: False")
      << "in time, since work is in proportion to the text";
  EXPECT_NE(refusal_of_source("{{ 'a' * 9000000000 }}").find("too often"), std::string::npos);
  EXPECT_NE(refusal_of_source("{{ range(1000000) }}").find("100000"), std::string::npos);
  EXPECT_NE(refusal_of_source("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}").find("16 deep"),
            std::string::npos);
  EXPECT_NE(refusal_of_source(
                "{% set n = namespace(t=[1]) %}{% for i in range(90) %}{% set n.t = [n.t] %}{% endfor %}")
                .find("64 deep"),
            std::string::npos);
}

TEST(ChatTemplate, RefusesSyntaxThatIsNestedTooDeep) {
  const auto repeated = [](std::string_view part, int times) {
    std::string text;
    for (int i = 0; i < times; ++i) text += part;
    return text;
  };
  const std::vector<std::string> sources = {
      "{{ " + repeated("(", 100000) + "1" + repeated(")", 100000) + " }}",
      "{{ " + repeated("not ", 100000) + "1 }}",
      "{{ " + repeated("-", 100000) + "1 }}",
      "{{ x" + repeated(" + x", 100000) + " }}",
      "{{ x" + repeated(" | trim", 100000) + " }}",
      "{{ x" + repeated("[0]", 100000) + " }}",
      repeated("{% if x %}", 100000) + repeated("{% endif %}", 100000),
      "{{ " + repeated("[", 100000)};
  for (const std::string& source : sources) {
    const std::string message = refusal_of_source(source);
    EXPECT_NE(message.find("[text.chat_template]"), std::string::npos) << source.substr(0, 40) << "\n"
                                                                       << message;
  }
  const auto large = [] { return ChatTemplate(std::string(2000000, 'x'), "large").render({}, false); };
  EXPECT_NE(refusal_of_chat(large).find("2000000 bytes"), std::string::npos);
}

TEST(ChatTemplate, RefusesConversationsThatAreNestedTooDeep) {
  Json deep = 1;
  for (int i = 0; i < 200; ++i) deep = Json::array({deep});
  const ChatTemplate chat("{{ 1 }}", "one");
  EXPECT_THROW(chat.render(deep, false), ConfigError);
}

TEST(ChatTemplate, DamagedTemplatesGiveErrorsOrText) {
  const Json file = expected_chats(chat_fixtures());
  std::vector<std::string> sources;
  for (const auto& [name, wanted] : file["templates"].items()) sources.push_back(chat_source(name));
  for (uint64_t execution = 0; execution < 3000; ++execution) {
    std::string source = sources[execution % sources.size()];
    for (uint64_t change = 0; change < 1 + execution % 3; ++change) {
      const size_t at = mix64(execution, 3 * change) % source.size();
      const std::string& other = sources[mix64(execution, 3 * change + 1) % sources.size()];
      source.replace(at, mix64(execution, 3 * change + 2) % 4,
                     other.substr(at % other.size(), mix64(execution, 99 + change) % 6));
    }
    const std::string message = refusal_of_chat([&] {
      return ChatTemplate(replace_invalid(source), "damaged")
          .render(file["conversations"][execution % 20], true);
    });
    ASSERT_TRUE(message.starts_with("rendered: ") || message.starts_with("[text.chat_template]")) << message;
  }
}

}  // namespace
}  // namespace trireme::text::testing

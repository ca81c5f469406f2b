#!/usr/bin/env python3
"""Renders conversations with chat templates by Python's jinja2, set as `transformers` sets it: tests/text compares ours with that.
Needs: pip install jinja2.

Writes into the output folder expected.json: the conversations, what each NAME.jinja of fixtures/chat makes of each without and with
a generation prompt (null where it refuses), the characters that its generation blocks have written, and the same for short
expressions. With --packages, the templates that the installed packages trl and axolotl ship as well.

strftime_now is left out, so that templates write their fixed date: text for training must not depend on the day.
"""
import argparse
import functools
import importlib.util
import json
import pathlib
import random

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

FIXTURES = pathlib.Path(__file__).parent / "fixtures" / "chat"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


class Generation(jinja2.ext.Extension):
    """{% generation %} blocks. `rendered` holds what the template has written before the block."""
    tags = {"generation"}

    def __init__(self, environment):
        super().__init__(environment)

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller):
        text = caller()
        begin = len("".join(self.environment.rendered))
        self.environment.spans.append([begin, begin + len(text)])
        return text


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment():
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    return made


@functools.cache
def compiled(source):
    env = environment()
    try:
        return env, env.from_string(source)
    except (jinja2.exceptions.TemplateError, SyntaxError):
        return env, None


def render(source, variables):
    """[text, spans], or None where the template or the conversation is refused."""
    env, template = compiled(source)
    env.rendered, env.spans = [], []
    try:
        for piece in template.root_render_func(template.new_context(unprintable(variables))):
            env.rendered.append(piece)
    except Exception:  # of jinja2, or of Python's operators
        return None
    return ["".join(env.rendered), env.spans]


class Unprintable:
    """Lists and mappings as text would be Python's notation, which ours refuses."""
    def __str__(self):
        raise TypeError("a list or a mapping is written as text")


class List(Unprintable, list):
    pass


class Mapping(Unprintable, dict):
    pass


def unprintable(value):
    if isinstance(value, list):
        return List(unprintable(item) for item in value)
    return Mapping((key, unprintable(item)) for key, item in value.items()) if isinstance(value, dict) else value


def turns(*contents, system=None):
    messages = [] if system is None else [{"role": "system", "content": system}]
    for index, content in enumerate(contents):
        messages.append({"role": "assistant" if index % 2 else "user", "content": content})
    return messages


WORDS = ["Hello", "there,", "naïve", "café", "中文", "😀👍🏽", "\n", "  ", "\t", "\u00a0", "\u3000", "<|im_end|>", "</s>", "<think>",
         "\n</think>\n\n", "{{ x }}", "{% if %}", "'quoted'", '"double"', "back\\slash", "\x1c", "<tool_response>", "0.5", "["]


def conversations(seed):
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln \"am\" Rhein", "days": [1, 2.5, None, True]}}}
    tooled = turns("Weather?") + [{"role": "assistant", "content": "", "tool_calls": [call]},
                                  {"role": "tool", "content": "{\"sun\": 1}"}, {"role": "assistant", "content": "Sunny."}]
    given = [
        turns("Hi", "Hello!"), turns("Hi"), turns("Hi", "Hello!", "Bye", "See you.", system="Be brief."),
        turns("  spaces \n", "\n\tanswer\u3000\n", system="  s "), turns("", ""), turns("a", "b", "c", "d", "e"),
        turns("2+2?", "<think>\nfour\n</think>\n\n4", "and 3+3?", "<think>six</think>6"), [],
        [{"role": "assistant", "content": "first"}, {"role": "user", "content": "second"}],
        [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}], tooled,
        [{"role": "user", "content": [{"type": "text", "text": " parts "}, {"type": "image"}]}, {"role": "assistant", "content": "ok"}],
        [{"role": "critic", "content": "hm"}], [{"role": "user"}],
    ]
    draw = random.Random(seed)
    for _ in range(8):
        texts = ["".join(draw.choices(WORDS, k=draw.randint(1, 8))) for _ in range(draw.randint(1, 5))]
        given.append(turns(*texts, system="".join(draw.choices(WORDS, k=3)) if draw.random() < 0.4 else None))
    return given


EXPRESSIONS = """
{{ 1 + 2 * 3 - 4 // 3 }}|{{ 7 % 3 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 2.5 * 2 }} {{ 1e16 * 10 }} {{ 0.0001 }} {{ 1.5 / 100000 }}
{{ -1 + 2 }} {{ - x }} {{ +3 }} {{ true + true }} {{ 10000000000000000.0 }} {{ 123456789012345.0 }}|{{ 1 / 0 }}|{{ 1 % 0 }}
{{ 'a' ~ 1 ~ none ~ true ~ 2.0 ~ nothing }}|{{ 'a' + 1 }}|{{ 'a' * 3 }}{{ 2 * 'b' }}{{ 'c' * -1 }}|{{ nothing + 'a' }}|{{ [1] + [2] == [1, 2] }}
{{ (1, 2) == [1, 2] }} {{ [1, [2, 'x']] == [1, [2, 'x']] }} {{ {'a': 1} == {'a': 1.0} }} {{ 1 == true }} {{ 'a' == 1 }} {{ none == nothing }}
{{ 1 < 2 < 3 }} {{ 3 > 2 > 2 }} {{ 'a' < 'b' }} {{ 'é' > 'z' }} {{ 1 <= 1.0 }} {{ 2 >= 3 }} {{ 1 != 2 }}|{{ 1 < 'a' }}|{{ nothing < 1 }}
{{ 'b' in 'abc' }} {{ 'd' not in 'abc' }} {{ 2 in [1, 2] }} {{ 'k' in {'k': 1} }} {{ 1 in {'k': 1} }} {{ not 'b' in 'abc' }}|{{ 1 in 'abc' }}|{{ 1 in 5 }}
{{ 'a' in nothing }} {{ x and 'y' }} {{ 0 or 'z' }} {{ not x }} {{ not not '' }} {{ none or nothing or 0 }} {{ '' and 1 }}
{{ 'a' if x else 'b' }}{{ 'a' if not x }}{{ 'a' if false else 'b' if x == 5 else 'c' }}
{{ s[0] }}{{ s[-1] }}{{ s[1:3] }}{{ s[::-1] }}{{ s[:-1] }}{{ s[10:] }}{{ s[99] }}{{ s[-3:] }}{{ s[5:1:-2] }}{{ s[::2] }}
{{ l[0] }}{{ l[-1] }}{{ l[7] }}{{ l[1:] | join(',') }}{{ l[::-1] | join }}{{ l[-2:99] | join('+') }}|{{ l[1:2:0] }}|{{ l[0].x }}|{{ l[7].x }}
{{ m.a }}{{ m['a'] }}{{ m.none }}{{ m['none'] }}{{ m.b.c }}{{ m['b']['c'] }}|{{ m.none.x }}|{{ nothing.x }}|{{ nothing['x'] }}|{{ nothing() }}|{{ none.x }}
{{ m.get('a') }}{{ m.get('z') }}{{ m.get('z', 'd') }}{% for k, v in m.items() %}{{ k }}={{ v | tojson }};{% endfor %}{% for k in m %}{{ k }}{% endfor %}
{{ m.keys() | list | tojson }}{{ m.values() | list | tojson }}{{ m | length }}{{ l | length }}{{ s | length }}{{ nothing | length }}|{{ 5 | length }}
{{ '  a b\\t\\n' | trim }}.{{ 'xxaxx' | trim('x') }}.{{ 'xyaxy'.strip('yx') }}.{{ ' a '.lstrip() }}.{{ ' a '.rstrip() }}.{{ '\\u3000a\\x1c'.strip() }}.
{{ 'a,b,,c'.split(',') | tojson }}{{ ' a  b c '.split() | tojson }}{{ 'a-b-c'.split('-', 1) | tojson }}{{ 'a b c'.split(none, 1) | tojson }}{{ ''.split(',') | tojson }}
{{ 'a-b-c'.rsplit('-', 1) | tojson }}{{ ''.split() | tojson }}{{ 'a-b'.split(sep='-', maxsplit=3) | tojson }}|{{ 'a'.split('') }}
{{ 'abc'.startswith('ab') }}{{ 'abc'.endswith('c') }}{{ 'abc'.startswith(('x', 'a')) }}{{ 'abc'.endswith('') }}|{{ 'abc'.startswith(1) }}
{{ 'aaa'.replace('a', 'b') }}{{ 'aaa'.replace('a', '', 1) }}{{ 'a.b' | replace('.', '->') }}{{ 'aaa' | replace('a', 'c', 2) }}{{ 'abab'.replace('ab', 'a') }}
{{ 'Abc dEF'.upper() }}{{ 'ÀB'.lower() }}{{ 'abc dEF' | capitalize }}{{ 'heLLo wor-ld (x)' | title }}{{ 'X' | lower }}{{ 'x' | upper }}{{ 'aB'.capitalize() }}
{{ 'abcabc'.find('c') }}{{ 'é€c'.find('c') }}{{ 'abc'.find('x') }}{{ 'aaaa'.count('aa') }}{{ '-'.join(['a', 'b']) }}{{ 'pre-x'.removeprefix('pre-') }}{{ 'x.y'.removesuffix('.y') }}
{{ 'a\\nb\\r\\nc\\n'.splitlines() | tojson }}{{ 'tab\\there' }}{{ 'quote\\'s' }}{{ "d\\"q" }}{{ '\\x41\\u00e9\\U0001f600' }}{{ 'back\\\\slash' }}{{ '\\q' }}
{{ [1, 'a', none, true, 1.5, {'k': [], 'e': {}}] | tojson }}{{ 'ü"\\\\\\n\\x01\\x7f/' | tojson }}{{ 'ü😀' | tojson(ensure_ascii=true) }}
{{ {'b': 1, 'a': [1, 2]} | tojson(indent=2) }}{{ {'b': 1, 'a': [1, {}]} | tojson(indent=0, sort_keys=true) }}{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':')) }}
{{ m | tojson(indent=4) }}{{ [] | tojson(indent=4) }}|{{ nothing | tojson }}|{{ [nothing] | tojson }}
{{ nothing | default('d') }}{{ '' | default('d') }}{{ '' | default('d', true) }}{{ none | default('d') }}{{ none | default('d', boolean=true) }}{{ nothing | d('e') }}{{ nothing | default }}
{{ l | first }}{{ l | last }}{{ [] | first }}{{ s | list | join('|') }}{{ m | list | join(',') }}{{ l | map('upper') | join(',') }}{{ messages | map(attribute='role') | join(' ') }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | rejectattr('role', '==', 'user') | map(attribute='content') | join }}{{ [0, 1, '', 'a'] | select | list | tojson }}
{{ [1, 2, 3, 4] | select('odd') | list | tojson }}{{ [1, 2, 3] | reject('in', [1]) | list | tojson }}{{ messages | selectattr('x') | list | tojson }}{{ messages | selectattr('content', 'string') | list | length }}
{{ messages | map(attribute='b.c', default='-') | join }}{{ ['1', '2'] | map('int') | list | tojson }}{{ [' a '] | map('trim') | list | tojson }}{{ m | dictsort | tojson }}{{ m | items | list | tojson }}
{{ 5 | string }}{{ none | string }}{{ '12' | int + 1 }}{{ true | int }}{{ 'x' | safe }}{{ nothing | trim }}{{ 5 | trim }}{{ nothing | list | tojson }}{{ nothing | items | list | tojson }}
{{ x is defined }}{{ nothing is defined }}{{ nothing is not defined }}{{ none is none }}{{ x is number }}{{ 1.0 is float }}{{ 1 is integer }}{{ true is integer }}{{ true is boolean }}{{ 's' is string }}
{{ m is mapping }}{{ l is mapping }}{{ l is sequence }}{{ m is sequence }}{{ s is iterable }}{{ nothing is iterable }}{{ none is iterable }}{{ 1 is sequence }}{{ true is true }}{{ 1 is true }}{{ false is false }}
{{ 3 is odd }}{{ 3 is even }}{{ 3 is eq 3 }}{{ 3 is in [3] }}{{ 3 is gt 2 }}{{ 3 is ne(3) }}{{ x is not none and x is defined }}{{ range is callable }}{{ nothing is undefined }}
{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set c = (1, 2) %}{{ c | length }}{% set (d, e) = ['x', 'y'] %}{{ d }}{{ e }}|{% set a, b = [1] %}
{% set a = 1 %}{% for i in [1] %}{% set a = 2 %}{{ a }}{% endfor %}{{ a }}{% if true %}{% set a = 3 %}{% endif %}{{ a }}
{% set n = namespace(a=1) %}{% for i in [1, 2] %}{% set n.a = n.a + i %}{% endfor %}{{ n.a }}{{ n.b }}{% set n.b = 'x' %}{{ n.b }}{{ n['b'] }}|{% set x.y = 1 %}
{% set t %}a{{ x }}{% set x = 9 %}{{ x }}{% endset %}{{ t }}{{ x }}{{ t | length }}
{% for i in [1, 2, 3] %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.previtem }}{{ loop.nextitem }} {% endfor %}
{% for i in [] %}x{% else %}none{% endfor %}{% for i in nothing %}x{% else %}none{% endfor %}{% for i in [1, 2, 3] if i != 2 %}{{ i }}{{ loop.length }}{% endfor %}|{% for i in none %}{% endfor %}
{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}
{% for i in [1, 2] %}{% for j in [1, 2] %}{{ loop.index }}{{ i }}{{ j }}{% endfor %}{{ loop.index }}{% endfor %}{{ loop is defined }}{{ i is defined }}
{% for c in 'aé😀' %}{{ c }}.{% endfor %}{% for k, v in [['a', 1], ('b', 2)] %}{{ k }}{{ v }}{% endfor %}{% for i in range(3) %}{{ i }}{% endfor %}{{ range(1, 9, 3) | list | tojson }}{{ range(3, 0, -1) | list | tojson }}
{% macro f(a, b='d', c=a) %}[{{ a }}{{ b }}{{ c }}{{ x }}]{% endmacro %}{{ f(1) }}{{ f(1, 2) }}{{ f(b=3, a=4) }}{{ f() }}{{ f(1, 2, 3) | length }}|{% macro f(a) %}{% endmacro %}{{ f(1, 2) }}
{% macro f(n) %}{{ n }}{% if n > 0 %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(5) }}{% set z = 1 %}{% macro g() %}{{ z }}{% set z = 5 %}{% endmacro %}{% set z = 2 %}{{ g() }}{{ z }}
{% if x == 5 %}five{% elif x == 6 %}six{% else %}other{% endif %}{% if not x %}no{% elif x %}yes{% endif %}{%if true%}tight{%endif%}
  {% if true %}  \\n  a  {% endif %}\\n b {%- if true -%}  c  {%- endif +%}  \\n d {{- ' e ' -}} f \\n  {#- comment -#}  g\\n{# c #}\\nh\\n
a\\n  {% set q = 1 %}  \\n  {%+ if true %}b{% endif %}\\n\\n{{ 'c' }}\\n\\n  {{- 'd' }}\\n  {# x #} e {#+ y +#}\\n f\\n\\n
{{ {'a': {'b': 1}}['a']['b'] }}{{ {'a': {'b': 1}} | length }}{{ dict(a=1).a }}{{ [1, 2,][1] }}{{ (1,) | length }}{{ () | length }}{{ 'a' 'b' }}{{ l.0 }}
{{ raise_exception('no') }}|{{ l.append(1) }}|{{ x | nofilter }}|{{ x is notest }}|{% nothing %}|{% if x %}|{{ }}|{{ 1 2 }}|{% for %}{% endfor %}|{% set %}
{{ x }
{% endif %}
{{ 'a }}
{{ (1 }}
{# open
{{ (1] }}
{{ x
{% for i in l %}{% else %}
{% break %}
{% generation %}x{{ s }}{% set s = 1 %}{% endgeneration %}y{{ s }}{% for i in [1, 2] %}{% generation %}é{{ i }}{% endgeneration %}-{% endfor %}
{{ 1 if }}|{{ a b }}|{{ 'x'.nope }}.|{{ 5.nope }}|{{ x.nope }}.|{{ l.nope }}.|{{ s | join('-') }}|{{ 'a' is string is defined }}|{{ x is divisibleby }}
"""


def expressions():
    found = []
    for line in EXPRESSIONS.strip("\n").split("\n"):
        # Alternatives that are refused stand each for itself; a bar within a tag is a filter's.
        parts, depth, begin = [], 0, 0
        for at, character in enumerate(line):
            depth += line.startswith(("{{", "{%"), at) - line.startswith(("}}", "%}"), at)
            if character == "|" and line[at - 1:at] in ("}", ".", " ") and line[at + 1:at + 2] == "{" and depth <= 0:
                parts.append(line[begin:at])
                begin, depth = at + 1, 0
        for part in parts + [line[begin:]]:
            found.append(part.replace("\\\\", "\0").replace("\\n", "\n").replace("\0", "\\") if part[:1] in " a" else
                         part.replace("\\\\", "\\"))
    return found


def package_templates():
    folders = []
    for package, inside in (("trl", "chat_templates"), ("axolotl", "utils/chat_templates/templates")):
        spec = importlib.util.find_spec(package)
        if spec is not None:
            folders.append((package, pathlib.Path(spec.origin).parent / inside))
    return {f"{package}_{path.stem}": path.read_text() for package, folder in folders for path in sorted(folder.glob("*.jinja"))}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=pathlib.Path, default=FIXTURES)
    parser.add_argument("--seed", type=int, default=1, help="of the random conversations")
    parser.add_argument("--packages", action="store_true", help="with the templates that trl and axolotl ship")
    options = parser.parse_args()
    sources = {path.stem: path.read_text() for path in sorted(FIXTURES.glob("*.jinja"))}
    packaged = package_templates() if options.packages else {}
    given = conversations(options.seed)
    variables = {"x": 5, "s": "aéb😀c", "l": ["p", "q", "r"], "m": {"a": 1, "B": "two", "b": {"c": "é"}}, "messages": given[2], **TOKENS}

    def all_of(source):
        common = {"tools": None, "documents": None, **TOKENS}
        return [render(source, {"messages": messages, "add_generation_prompt": prompted, **common})
                for messages in given for prompted in (False, True)]

    result = {
        "special_tokens": TOKENS, "conversations": given, "variables": variables,
        "templates": {name: all_of(source) for name, source in sources.items()},
        "packaged": {name: {"source": source, "rendered": all_of(source)} for name, source in packaged.items()},
        "expressions": [[source, render(source, variables)] for source in expressions()],
    }
    (options.output / "expected.json").write_text(json.dumps(result, ensure_ascii=False, indent=0) + "\n")


if __name__ == "__main__":
    main()

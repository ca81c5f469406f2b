#!/usr/bin/env python3
"""Writes trireme/text/unicode_tables.cpp: the properties of code points as Python's `tokenizers` sees them, and where
PCRE2 and utf8proc, whose Unicode is older, see them otherwise. Everything is found by asking these libraries.

Needs: pip install tokenizers; libpcre2-8.so.0 and libutf8proc.so.2 of the distribution whose static libraries are built in.
"""
import argparse
import ctypes
import pathlib

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

CODE_POINTS = [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]
EVERYTHING = "".join(map(chr, CODE_POINTS))
CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co Cn".split()
DECOMPOSE, STABLE, COMPAT = 1 << 4, 1 << 1, 1 << 2  # of utf8proc.h


def in_tokenizers(pattern):
    """The code points that `pattern` matches there."""
    pieces = pre_tokenizers.Split(Regex(pattern), "removed").pre_tokenize_str(EVERYTHING)
    found = set(CODE_POINTS)
    for _, (begin, end) in pieces:
        found.difference_update(CODE_POINTS[begin:end])
    return found


class Pcre2:
    UTF, UCP = 0x00080000, 0x00020000

    def __init__(self):
        self.library = ctypes.CDLL("libpcre2-8.so.0")
        for name in "compile", "match_data_create", "get_ovector_pointer":
            getattr(self.library, f"pcre2_{name}_8").restype = ctypes.c_void_p
        self.library.pcre2_get_ovector_pointer_8.restype = ctypes.POINTER(ctypes.c_size_t)
        self.subject = EVERYTHING.encode()
        self.code_at = {}
        offset = 0
        for code in CODE_POINTS:
            self.code_at[offset] = code
            offset += len(chr(code).encode())

    def matched(self, pattern):
        """The code points that `pattern`, one character, matches."""
        error, where, pattern = ctypes.c_int(), ctypes.c_size_t(), pattern.encode()
        size = ctypes.c_size_t
        code = ctypes.c_void_p(self.library.pcre2_compile_8(pattern, size(len(pattern)), self.UTF | self.UCP,
                                                            ctypes.byref(error), ctypes.byref(where), None))
        data = ctypes.c_void_p(self.library.pcre2_match_data_create_8(1, None))
        found, start = set(), 0
        while self.library.pcre2_match_8(code, self.subject, size(len(self.subject)), size(start), 0x40000000, data,
                                         None) > 0:
            begin, start = self.library.pcre2_get_ovector_pointer_8(data)[:2]
            found.add(self.code_at[begin])
        return found


class Utf8proc:
    def __init__(self):
        self.library = ctypes.CDLL("libutf8proc.so.2")
        self.free = ctypes.CDLL(None).free

    def form(self, text, options):
        text, result = text.encode(), ctypes.c_void_p()
        length = self.library.utf8proc_map(text, ctypes.c_ssize_t(len(text)), ctypes.byref(result), options | STABLE)
        form = ctypes.string_at(result, length).decode()
        self.free(result)
        return form


def ranges(codes):
    """Sorted (first, last) of the set `codes`."""
    result = []
    for code in sorted(codes):
        if result and result[-1][1] == code - 1:
            result[-1][1] = code
        else:
            result.append([code, code])
    return [tuple(pair) for pair in result]


def erased_by(normalizer):
    return {code for code in CODE_POINTS if normalizer.normalize_str(chr(code)) == ""}


def bert(**options):
    plain = dict(clean_text=False, handle_chinese_chars=False, strip_accents=False, lowercase=False)
    return normalizers.BertNormalizer(**{**plain, **options})


def cut_from_letters(pre_tokenizer, pieces):
    """The code points that, between two letters, make so many pieces."""
    return {code for code in CODE_POINTS if len(pre_tokenizer.pre_tokenize_str(f"a{chr(code)}a")) == pieces}


def lower_runs():
    """(first, last, stride, change) of code points whose lower case is one code point."""
    lower = normalizers.Lowercase()
    changes = {code: lower.normalize_str(chr(code)) for code in CODE_POINTS}
    runs = []
    for code, text in changes.items():
        if text == chr(code) or len(text) > 1:
            continue
        change = ord(text) - code
        last = runs[-1] if runs else None
        if last and last[3] == change and code - last[1] <= 2 and (last[0] == last[1] or code - last[1] == last[2]):
            last[2], last[1] = code - last[1], code
        else:
            runs.append([code, code, 1, change])
    long = {code: text for code, text in changes.items() if len(text) > 1}
    assert long == {0x130: "i\u0307"}, long  # unicode.cpp knows this one
    return runs


def stand_ins():
    """(first, last, other): the text that PCRE2 sees has `other` for these; its category is the right one."""
    pcre2 = Pcre2()
    theirs, ours = {}, {}
    for category in CATEGORIES:
        theirs.update(dict.fromkeys(in_tokenizers(rf"\p{{{category}}}"), category))
        ours.update(dict.fromkeys(pcre2.matched(rf"\p{{{category}}}"), category))
    han, our_han = in_tokenizers(r"\p{Han}"), pcre2.matched(r"\p{sc:Han}")
    spaces, our_spaces = in_tokenizers(r"\s"), pcre2.matched(r"\s")

    def kind(code, category, han_set, space_set):
        return category[code], code in han_set, code in space_set, len(chr(code).encode())

    example, changed = {}, {}
    for code in CODE_POINTS:
        want, have = kind(code, theirs, han, spaces), kind(code, ours, our_han, our_spaces)
        if want == have:
            example.setdefault(want, code)
    for code in CODE_POINTS:
        want = kind(code, theirs, han, spaces)
        if want != kind(code, ours, our_han, our_spaces):
            changed.setdefault(example[want], set()).add(code)
    return sorted((first, last, other) for other, codes in changed.items() for first, last in ranges(codes))


def left_alone():
    """Code points that utf8proc decomposes or reorders and `tokenizers`, whose normal forms are of Unicode 12, does not."""
    utf8proc, nfd, nfkd = Utf8proc(), normalizers.NFD(), normalizers.NFKD()
    found = set()
    for code in CODE_POINTS:
        forms = nfd.normalize_str(chr(code)), nfkd.normalize_str(chr(code))
        if forms != (utf8proc.form(chr(code), DECOMPOSE), utf8proc.form(chr(code), DECOMPOSE | COMPAT)):
            assert forms == (chr(code), chr(code)), hex(code)
            found.add(code)
        # Marks of the combining classes 1 and 240: any other mark changes places with one of them.
        for text in f"{chr(code)}\u0334", f"\u0345{chr(code)}":
            if nfd.normalize_str(text) != utf8proc.form(text, DECOMPOSE):
                found.add(code)
    return found


def table(kind, name, rows):
    cells = ["{" + ", ".join(row) + "}" for row in rows]
    lines, line = [], "   "
    for cell in cells:
        if len(line) + len(cell) + 2 > 110:
            lines.append(line)
            line = "   "
        line += f" {cell},"
    body = "\n".join([*lines, line])
    return f"const {kind} {name}Rows[] = {{\n{body}\n}};\n"


def hexadecimal(rows):
    return [[f"{value:#x}" if value >= 0 else str(value) for value in row] for row in rows]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    default = pathlib.Path(__file__).resolve().parent.parent / "trireme/text/unicode_tables.cpp"
    parser.add_argument("--output", type=pathlib.Path, default=default)
    output = parser.parse_args().output
    sets = {
        "kSpaces": cut_from_letters(pre_tokenizers.WhitespaceSplit(), 2),
        "kNumbers": cut_from_letters(pre_tokenizers.Digits(individual_digits=True), 3),
        "kPunctuation": cut_from_letters(pre_tokenizers.Punctuation(), 3),
        "kWordCharacters": cut_from_letters(pre_tokenizers.Whitespace(), 1),
        "kMarks": erased_by(normalizers.StripAccents()),
        "kNonspacingMarks": erased_by(bert(strip_accents=True)),
        "kControls": erased_by(bert(clean_text=True)),
        "kIdeographs": {code for code in CODE_POINTS
                        if bert(handle_chinese_chars=True).normalize_str(chr(code)) == f" {chr(code)} "},
        "kLeftAlone": left_alone(),
    }
    tables = [("CodeRange", name, hexadecimal(ranges(codes))) for name, codes in sets.items()]
    tables.append(("LowerRun", "kLowerRuns", hexadecimal(lower_runs())))
    tables.append(("StandIn", "kStandIns", hexadecimal(stand_ins())))
    parts = [
        f"// Made by tools/make_unicode_tables.py from tokenizers {tokenizers.__version__}, PCRE2 and utf8proc.",
        '#include "trireme/text/unicode_tables.h"', "", "namespace trireme::text {", "namespace {", "",
        "// clang-format off", "\n".join(table(*entry) for entry in tables) + "// clang-format on", "",
        "}  // namespace", "",
        *(f"const std::span<const {kind}> {name}({name}Rows);" for kind, name, _ in tables), "",
        "}  // namespace trireme::text", ""]
    output.write_text("\n".join(parts))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Trains tokenizers with Python's `tokenizers`, each with other components, and writes them with what they make of texts:
tests/text compares ours with that. Needs: pip install tokenizers sentencepiece protobuf.

In the folder: texts.json; learned.json, texts with the merges that BPE learns from them; and for each tokenizer NAME.json or
NAME.model and NAME.expected.json: ids with and without special tokens and the decoded text of each text, and checksums over all
code points. Most trainers there break ties at random, so that two runs write other vocabularies.
"""
import argparse
import base64
import io
import json
import pathlib
import random
import tempfile
import types
import zlib

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers)

CL100K = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN = CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
BLOCK = 0x1000  # code points that one checksum is over

SENTENCES = [
    "The quick brown fox jumps over the lazy dog. It's 12345 o'clock, isn't it? They'LL say we'Ve been here.",
    "int main(int argc, char** argv) {\n\tfor (size_t i = 0; i < n; ++i) sum += a[i] * 0x1F;\n\treturn 0;\n}\n\n\n",
    "def f(x: float) -> float:\n    return x ** 2  # squared\n\n\nclass A(B):\n    pass\r\n",
    "Größe und Übermut: naïve café, façade, jalapeño, Ångström; ŒUVRE, ǅ, İstanbul, ΑΓΓΕΛΟΣ ὀδυσσεύς",
    "Привет, мир! Как дела? Широкая электрификация южных губерний даст мощный толчок.",
    "中文分词很难。我们今天去北京,明天回上海。日本語のテキスト、カタカナとひらがな。한국어 문장도 있습니다.",
    "مرحبا بالعالم، كيف حالك اليوم؟ ١٢٣٤٥ שלום עולם हिन्दी में क्षत्रिय ภาษาไทยไม่มีช่องว่าง",
    "😀😃👩‍👩‍👧‍👦🏳️‍🌈👍🏽 🇩🇪🇫🇷 ❤️ ☃ ∑∫≤≠ → ⅷ ½ ² ㎏ ﬁ ﬀ ① Ａ",
    "e\u0301 a\u0308\u0323 n\u0303 \u1e9b\u0323 \u0344 \u212b \u2126 q\u0307\u0323 \u0958 \u1100\u1161\u11a8 \u0f73",
    "\x00\x01\x02\x07\x08\x0b\x0c\x1b\x1f\x7f\x80\x85\x9f\xa0\xad \u1680\u180e\u2000\u2003\u2028\u2029\u202f\u205f\u3000\ufeff",
    "   leading and trailing   \t\t\n \n  \n\n   x  y   z    ",
    "\u200b\u200c\u200d\u2060\u2581word\u2581 \ufffd \ufffe \U0001d5d4\U0001d7ce \U000e0041 \U0002ebf0\U00031350 \u1c89\u1c8a \ua7cb \U00016d40",
    "<s> </s> <unk> <mask> [CLS] hello [SEP] <|endoftext|>tail<|endoftext|> wordadded added-word lefty  <left>  and  <right>  done",
    "<0x41> <0x0A> ##ing can not do not n't 's . , ! ? ' x",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "https://example.org/a/b?c=d&e=f#g user@mail.example +49-30-1234567 3.14159 1,000,000 2024-01-31T23:59:59Z",
]
INVALID = [b"\xff\xfe", b"a\x80b", b"\xe4\xb8", b"x\xed\xa0\x80y", b"\xf0\x9f\x98 \xf0\x9f", b"\xc3(\xc0\xaf\xf5\x80\x80\x80",
           b"\xf4\x90\x80\x80", b"ok \xe2\x82\xac \xe2\x82"]


def random_texts(count, length, seed):
    """Parts of the sentences, single characters of them, and random code points, in disorder."""
    draw = random.Random(seed)
    everything = "".join(SENTENCES)
    planes = [(0x20, 0x7F), (0, 0x250), (0x300, 0x370), (0x370, 0x2000), (0x2000, 0x3100), (0x3100, 0xD800), (0xE000, 0x20000)]
    texts = []
    for _ in range(count):
        parts = []
        for _ in range(draw.randint(1, length)):
            kind, sentence = draw.random(), draw.choice(SENTENCES)
            if kind < 0.6:
                begin = draw.randrange(len(sentence))
                parts.append(sentence[begin:begin + draw.randint(1, 20)])
            elif kind < 0.85:
                parts.append(draw.choice(everything))
            else:
                parts.append(chr(draw.randrange(*draw.choice(planes))))
        texts.append("".join(parts))
    return texts


def trained(model, trainer, normalizer=None, pre_tokenizer=None, decoder=None):
    tokenizer = Tokenizer(model)
    for name, part in ("normalizer", normalizer), ("pre_tokenizer", pre_tokenizer), ("decoder", decoder):
        if part is not None:
            setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    return tokenizer


def byte_bpe(vocab=420, specials=("<|endoftext|>",), **parts):
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=list(specials), show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    return trained(models.BPE(), trainer, decoder=decoders.ByteLevel(), **parts)


def gpt2():
    tokenizer = byte_bpe(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def roberta():
    tokenizer = byte_bpe(specials=("<s>", "</s>", "<unk>"), pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True))
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    return tokenizer


def llama3():
    split = pre_tokenizers.Split(Regex(CL100K), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = byte_bpe(specials=("<s>", "</s>"), pre_tokenizer=pre_tokenizers.Sequence([split, byte_level]))
    state = json.loads(tokenizer.to_str())
    state["model"]["ignore_merges"] = True
    state["model"]["vocab"]["\u0120unmergeable"] = len(state["model"]["vocab"])
    tokenizer = Tokenizer.from_str(json.dumps(state))
    template = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), template])
    return tokenizer


def qwen():
    split = pre_tokenizers.Split(Regex(QWEN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = byte_bpe(normalizer=normalizers.NFC(), pre_tokenizer=pre_tokenizers.Sequence([split, byte_level]))
    tokenizer.add_tokens([AddedToken("added-word", normalized=True), AddedToken("word", single_word=True, normalized=True),
                          AddedToken("<left>", lstrip=True), AddedToken("<right>", rstrip=True), AddedToken("caf\u00e9")])
    return tokenizer


def with_byte_fallback(tokenizer, **model):
    """The same with tokens for all bytes."""
    state = json.loads(tokenizer.to_str())
    for byte in range(256):
        state["model"]["vocab"].setdefault(f"<0x{byte:02X}>", len(state["model"]["vocab"]))
    state["model"].update(byte_fallback=True, **model)
    return Tokenizer.from_str(json.dumps(state))


def llama2():
    trainer = trainers.BpeTrainer(vocab_size=380, special_tokens=["<unk>", "<s>", "</s>"], limit_alphabet=120, show_progress=False)
    tokenizer = trained(models.BPE(unk_token="<unk>"), trainer, pre_tokenizer=pre_tokenizers.Metaspace())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    state = json.loads(tokenizer.to_str())
    state["pre_tokenizer"] = None
    tokenizer = with_byte_fallback(Tokenizer.from_str(json.dumps(state)), fuse_unk=True)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    return tokenizer


def mistral():
    trainer = trainers.BpeTrainer(vocab_size=380, special_tokens=["<unk>", "<s>"], limit_alphabet=90, show_progress=False)
    tokenizer = trained(models.BPE(unk_token="<unk>", fuse_unk=True), trainer,
                        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first"))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens([AddedToken("[SEP]", rstrip=True)])
    return tokenizer


def unknown_apart():
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], limit_alphabet=60, show_progress=False)
    return trained(models.BPE(unk_token="<unk>"), trainer, normalizer=normalizers.NFKD(),
                   pre_tokenizer=pre_tokenizers.WhitespaceSplit(), decoder=decoders.Fuse())


def clip():
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=["<unk>"], end_of_word_suffix="</w>",
                                  continuing_subword_prefix="##", show_progress=False)
    model = models.BPE(unk_token="<unk>", end_of_word_suffix="</w>", continuing_subword_prefix="##")
    squeeze = normalizers.Replace(Regex(r"\s+"), " ")
    return trained(model, trainer, normalizer=normalizers.Sequence([normalizers.NFC(), squeeze, normalizers.Lowercase()]),
                   pre_tokenizer=pre_tokenizers.Whitespace(), decoder=decoders.BPEDecoder("</w>"))


def unigram():
    trainer = trainers.UnigramTrainer(vocab_size=350, special_tokens=["<unk>", "<s>"], unk_token="<unk>", show_progress=False)
    return trained(models.Unigram(), trainer, normalizer=normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()]),
                   pre_tokenizer=pre_tokenizers.Metaspace(), decoder=decoders.Metaspace())


def sentencepiece_model(**options):
    """The bytes of a .model with a small table of replacements."""
    rules = {"\ufb01": "fi", "\u00c5": "\u00e5", "A\u030a": "\u00e5", "\u3000": " ", "\u2460": "1", "\uff21": "a", "\u00ad": "",
             "e\u0301": "\u00e9", "\r\n": "\n"}
    model = io.BytesIO()
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as file:
        for key, value in rules.items():
            file.write(" ".join(f"{ord(c):X}" for c in key) + "\t" + " ".join(f"{ord(c):X}" for c in value) + "\n")
        file.flush()
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(SENTENCES), model_writer=model, minloglevel=2,
                                                 normalization_rule_tsv=file.name, hard_vocab_limit=False, **options)
    return model.getvalue()


def charsmap():
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(sentencepiece_model(vocab_size=330))
    return proto.normalizer_spec.precompiled_charsmap


def unigram_bytes():
    trainer = trainers.UnigramTrainer(vocab_size=360, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    tokenizer = trained(models.Unigram(), trainer, pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="never"))
    state = json.loads(tokenizer.to_str())
    state["model"]["vocab"] += [[f"<0x{byte:02X}>", -12.0] for byte in range(256)]
    state["model"]["byte_fallback"] = True
    state["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap()).decode()}
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never"), decoders.Fuse()])
    return tokenizer


def bert(cased=False):
    trainer = trainers.WordPieceTrainer(vocab_size=420, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    tokenizer = trained(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=40), trainer,
                        normalizer=normalizers.BertNormalizer(lowercase=not cased),
                        pre_tokenizer=pre_tokenizers.BertPreTokenizer(), decoder=decoders.WordPiece())
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return tokenizer


def word_level(pre_tokenizer, normalizer=None):
    trainer = trainers.WordLevelTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False)
    return trained(models.WordLevel(unk_token="<unk>"), trainer, normalizer=normalizer, pre_tokenizer=pre_tokenizer)


def splits(behavior, invert=False):
    return word_level(pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\w+|\b'"), behavior, invert), pre_tokenizers.Punctuation("merged_with_previous"),
        pre_tokenizers.Digits(individual_digits=invert)]))


TOKENIZERS = {
    "gpt2": gpt2, "roberta": roberta, "llama3": llama3, "qwen": qwen, "llama2": llama2, "mistral": mistral,
    "unknown_apart": unknown_apart, "clip": clip, "unigram": unigram, "unigram_bytes": unigram_bytes, "bert": bert,
    "bert_cased": lambda: bert(cased=True),
    "accents": lambda: byte_bpe(
        vocab=330, normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Strip()]),
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.Punctuation("contiguous"),
                                               pre_tokenizers.ByteLevel()])),
    "removed": lambda: splits("removed"), "previous": lambda: splits("merged_with_previous"),
    "next": lambda: splits("merged_with_next"), "contiguous": lambda: splits("contiguous"),
    "inverted": lambda: splits("removed", invert=True),
    "delimiter": lambda: word_level(pre_tokenizers.Sequence([pre_tokenizers.CharDelimiterSplit(","), pre_tokenizers.Split(" ", "isolated")]),
                                    normalizers.Strip(left=True, right=False)),
}


# User-defined symbols overlap, hold each other, spaces and characters that would be replaced, and stand alone.
SYMBOLS = dict(user_defined_symbols=["<mask>", "fox", "fox jumps", "ab", "abc", "bcd", "cafe\u0301", "\ufb01", "\u2581\u2581", "aaaa", "\n\n", "5",
                                     "\u4e2d", "\U0001f600", "  x"],
               control_symbols=["[CLS]", "[SEP]", "<|endoftext|>"])
SENTENCEPIECES = {
    "sp_unigram": dict(model_type="unigram", vocab_size=380),
    "sp_unigram_bytes": dict(model_type="unigram", vocab_size=620, byte_fallback=True, character_coverage=0.98),
    "sp_bpe": dict(model_type="bpe", vocab_size=420, add_dummy_prefix=False),
    "sp_bpe_bytes": dict(model_type="bpe", vocab_size=640, byte_fallback=True, character_coverage=0.98,
                         remove_extra_whitespaces=False, allow_whitespace_only_pieces=True),
    "sp_unigram_symbols": dict(model_type="unigram", vocab_size=420, **SYMBOLS),
    "sp_bpe_symbols": dict(model_type="bpe", vocab_size=680, byte_fallback=True, character_coverage=0.98,
                           remove_extra_whitespaces=False, **SYMBOLS),
}


def symbol_texts(count, seed):
    """Symbols, what they begin and end with, and other characters, in disorder."""
    draw = random.Random(seed)
    symbols = SYMBOLS["user_defined_symbols"] + SYMBOLS["control_symbols"]
    texts = []
    for _ in range(count):
        parts = []
        for _ in range(draw.randint(1, 12)):
            symbol = draw.choice(symbols)
            cut = draw.randint(0, len(symbol))
            parts.append(draw.choice([symbol, symbol[:cut], symbol[cut:], " ", "a", "e", "\u2581", "\u3000", "zz"]))
        texts.append("".join(parts))
    return texts


class Processor:
    """SentencePiece's processor with the functions of a tokenizer that are used here."""

    def __init__(self, model):
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)

    def get_vocab(self):
        return {id: id for id in range(self.processor.vocab_size())}

    def encode(self, text, add_special_tokens=False):
        return types.SimpleNamespace(ids=self.processor.encode(text))

    def encode_batch(self, texts, add_special_tokens=False):
        return [self.encode(text) for text in texts]

    def decode(self, ids, skip_special_tokens=True):
        return self.processor.decode(ids)

    def decode_batch(self, many):
        return [self.decode(ids) for ids in many]


def checksums(tokenizer):
    """CRC-32, for each block of code points, of the ids and the decoded text of each code point alone."""
    sums = []
    for first in range(0, 0x110000, BLOCK):
        codes = [code for code in range(first, first + BLOCK) if not 0xD800 <= code < 0xE000]
        ids = [encoding.ids for encoding in tokenizer.encode_batch([chr(code) for code in codes], add_special_tokens=False)]
        data = b"".join(b"".join(id.to_bytes(4, "little") for id in one) + text.encode() + b"\0"
                        for one, text in zip(ids, tokenizer.decode_batch(ids)))
        sums.append(zlib.crc32(data))
    return sums


def expected(tokenizer, texts, special):
    plain = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    return {
        "vocab_size": max(tokenizer.get_vocab().values()) + 1,
        "ids": plain,
        "ids_with_special": [tokenizer.encode(text).ids for text in texts[:special]],
        "decoded": [tokenizer.decode(ids) for ids in plain],
        "decoded_with_special": [tokenizer.decode(ids, skip_special_tokens=False) for ids in plain[:special]],
    }


def learned():
    """What BpeTrainer learns over bytes, as far as the texts go and less far."""
    texts = [*SENTENCES, *random_texts(60, 12, seed=3), "ab abc abcabc bcabc " * 3 + "aaaa aaaaa aaaaaaa"]
    runs = []
    for vocab, specials in (400, ["<|endoftext|>"]), (900, ["</s>", "<pad>", "<|x|>"]), (100000, []):
        trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=specials, show_progress=False,
                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.train_from_iterator(texts, trainer)
        model = json.loads(tokenizer.to_str())["model"]
        vocabulary = sorted(model["vocab"], key=model["vocab"].get)
        runs.append({"vocab_size": vocab, "special": specials, "tokens": vocabulary, "merges": model["merges"]})
    return {"texts": texts, "runs": runs}


def dump(path, value):
    path.write_text(json.dumps(value, ensure_ascii=True, separators=(",", ":")))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent / "fixtures")
    parser.add_argument("--texts", type=int, default=40, help="random texts")
    parser.add_argument("--length", type=int, default=10, help="parts of a random text")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-code-points", action="store_true")
    parser.add_argument("--only", choices=["learned", *TOKENIZERS, *SENTENCEPIECES])
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    texts = ["", " ", "  ", "a", *SENTENCES, *random_texts(options.texts, options.length, options.seed)]
    dump(options.output / "texts.json", {"texts": texts, "invalid": [data.hex() for data in INVALID]})
    texts += [data.decode(errors="replace") for data in INVALID]
    if options.only in (None, "learned"):
        dump(options.output / "learned.json", learned())

    def write(name, tokenizer, special, own=()):
        result = expected(tokenizer, texts, special)
        if own:
            ids = [tokenizer.encode(text).ids for text in own]
            result["own"] = {"texts": own, "ids": ids, "decoded": [tokenizer.decode(one) for one in ids]}
        if not options.no_code_points:
            result["code_points"] = checksums(tokenizer)
        dump(options.output / f"{name}.expected.json", result)

    for name, make in TOKENIZERS.items():
        if options.only in (None, name):
            tokenizer = make()
            dump(options.output / f"{name}.json", json.loads(tokenizer.to_str()))
            write(name, tokenizer, special=20)
    for name, training in SENTENCEPIECES.items():
        if options.only in (None, name):
            model = sentencepiece_model(**training)
            (options.output / f"{name}.model").write_bytes(model)
            write(name, Processor(model), special=0, own=symbol_texts(200, options.seed) if "control_symbols" in training else ())


if __name__ == "__main__":
    main()

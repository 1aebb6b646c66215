"""Tokenizers of GGUF files give llama.cpp's ids."""
# ruff: noqa: RUF001 - letters of many scripts

from __future__ import annotations

import hashlib
import importlib.util
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

import gguf_files
import llama_cpp
from gguf_files import CONTROL, NORMAL, UNUSED, USER_DEFINED
from moaspec.target.weights.gguf_splits import SPLITS
from moaspec.target.weights.gguf_tokenizer import end_ids, read_tokenizer
from moaspec_core.errors import UnknownModelError

needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="needs xllamacpp"
)
STORED = Path(__file__).with_name("gguf_ids.json")
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"

TEXTS = (
    "",
    "Hello world",
    "Steps:\n\n1. Mix",
    "a  b   c    d",
    "  two before, two after  ",
    "\n\n\nthree\n\n\n",
    "tabs\tand\t\ttabs \t x",
    "line\r\nline\r\n\r\nline\r",
    " \n \n x \n",
    "x \n\n y",
    "trailing space ",
    "trailing line\n",
    "   ",
    "I'm you're he'd she'll we've it's don't",
    "I'M YOU'RE HE'D SHE'LL WE'VE IT'S DON'T",
    "'s 't 're 'S 'T ' s rock'n'roll",
    "1 12 123 1234 12345 123456 1234567",
    "a1b22c333d4444",
    "3.14159 1,000,000 10-20 5% $5 #7 v1.2.3",
    " 1  22   333",
    "0x1F 1e10 ½ ² ³ Ⅷ ٣٤٥ १२३ １２３",
    "1234567１234 ٣1234",
    "HTTPServer camelCase PascalCase snake_case SCREAMING_CASE",
    "iPhone McDonald's XMLHttpRequest ABc aBC",
    "def f(x):\n\treturn x + 1\n\n\nclass A:\n    pass\n",
    "for (int i = 0; i < 10; ++i) { a[i] *= 2; }\n",
    "if (a && b || !c) return ~x ^ y | z;",
    "https://example.org/a/b?c=d&e=f#g user@host.example",
    "/usr/local/bin ../x C:\\Windows\\x",
    '<html><body class="a">text</body></html>',
    '{"a": [1, 2, {"b": null}], "c": "\\n"}',
    "**bold** _italic_ `code` ~~gone~~ # Title\n- item\n* item",
    "$x^2 + \\frac{1}{2} = \\sum_{i=0}^n$",
    "!!! ??? ... ,,, --- === >>> <<< ;;;",
    "(a) [b] {c} <d> \"e\" 'f' `g`",
    "a.b,c;d:e!f?g",
    " .x ,y (z !w",
    "...\n\n...\r\n\r\n!!!\n",
    "/\n/ //\n\n",
    "café naïve Ångström ÉCOLE straße",
    "e\u0301 a\u0308 n\u0303o",
    "Привет, Мир! Как дела? ПРИВЕТ",
    "Ελληνικά Ωμέγα ΑΒΓ",
    "你好，世界！今天是2024年1月1日。",
    "日本語のテキスト、カタカナ。",
    "한국어 텍스트 ㄱㄴㄷ ㅏㅑ",
    "ㄅㄆㄇ ㄈ《书名》「引用」…—",
    "สวัสดีครับ ยินดีต้อนรับ",
    "हिन्दी में क्या हाल है? नमस्ते।",
    "বাংলা ভাষা தமிழ் తెలుగు",
    "مرحبا بالعالم، كيف حالك؟",
    "שלום עולם",
    "😀 👍🏽 ❤️ 👨‍👩‍👧 🇫🇷 a😀b",
    "a\u00a0b\u2003c\u3000d\u2028e\u0085f",
    "a\u200bb\u200dc\u200cd\ufeffe",
    "“quoted” ‘single’ – — … • € £ ¥ © ™ ° ± ×",
    "ǅ ʰ ª º ﬁ ｆｕｌｌ ＷＩＤＴＨ ①②③",
    "𝐀𝐁 𝟏𝟐 𠀀𠀁 〇",
    "<|im_start|>user\nHi  there<|im_end|>\n<|im_start|>assistant\n",
    "<\uff5cUser\uff5c>Hi<tool call> 1  2 <|im_end|>\n\n",
    "IMGIMGABZ <sentinel:12> x    y",
    "word " * 20 + "1234 " * 5,
)
SPECIAL = {
    "<|im_start|>": CONTROL,
    "<|im_end|>": CONTROL,
    "<\uff5cUser\uff5c>": CONTROL,
    "<tool call>": USER_DEFINED,
    "[PAD1]": UNUSED,
}
_LETTERS = bytes_to_unicode()


def encoded(text: str) -> str:
    """The text in GPT-2's alphabet of bytes."""
    return "".join(_LETTERS[byte] for byte in text.encode())


def merges() -> list[str]:
    """Merges of the bytes of each character of the texts, then of characters side by side."""
    found: dict[str, str] = {}
    for letter in sorted(set("".join(TEXTS))):
        code = encoded(letter)
        found |= {f"{code[:i]} {code[i]}": code[: i + 1] for i in range(1, len(code))}
    sides = {pair for text in TEXTS for pair in pairwise(text)}
    order = sorted(sides, key=lambda pair: hashlib.sha256("".join(pair).encode()).digest())
    made = set(found.values())
    for left, right in order:
        if encoded(left + right) not in made:
            found[f"{encoded(left)} {encoded(right)}"] = encoded(left + right)
    for left, right in [(" t", "wo"), ("12", "3"), ("\n\n", "\n"), ("  ", "  ")]:
        if {encoded(left), encoded(right)} <= set(found.values()):
            found[f"{encoded(left)} {encoded(right)}"] = encoded(left + right)
    return list(found)


def fields(pre: str) -> dict[str, Any]:
    """Metadata whose merges show where a text is split."""
    if SPLITS[pre].raw:
        return raw_fields(pre)
    words = [encoded(word) for word in ("Hello", " world", "123", "\n\n\n", " text")]
    return gguf_files.byte_level(pre, merges(), words=words, special=SPECIAL)


def raw_fields(pre: str) -> dict[str, Any]:
    """The same over SentencePiece's tokens, without merges of line breaks."""
    texts = [text.replace(" ", SPACE) for text in TEXTS]
    letters = dict.fromkeys("".join(texts))
    pairs = dict.fromkeys(pair for text in texts for pair in pairwise(text) if "\n" not in pair)
    words = dict.fromkeys([*letters, "\n\n", "\n\n\n", *map("".join, pairs)], 0.0)
    for odd in "😀𠀀":  # these are spelled in bytes
        words = {word: 0.0 for word in words if odd not in word}
    left = [f"{a} {b}" for a, b in pairs if a + b in words]
    made = gguf_files.sentencepiece(words, special=SPECIAL, pre=pre, merges=left, scores=None)
    return {**made, "tokenizer.ggml.model": "gemma4" if pre == "gemma4" else "gpt2"}


def digest(ids: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]


@pytest.mark.parametrize("pre", SPLITS)
def test_every_way_to_split_words_gives_the_stored_ids(pre: str) -> None:
    """`gguf_ids.json` has digests of llama.cpp's ids, which the next test compares whole."""
    tokenizer = read_tokenizer(fields(pre), name="x")
    assert (
        digest([tokenizer(text)["input_ids"] for text in TEXTS])
        == json.loads(STORED.read_text())[pre]
    )


@needs_llama_cpp
@pytest.mark.slow
def test_every_way_to_split_words_gives_llama_cpps_ids(tmp_path: Path) -> None:
    files = {pre: gguf_files.write(tmp_path / f"{pre}.gguf", fields(pre)) for pre in SPLITS}
    right = llama_cpp.token_ids(files, TEXTS)
    for pre in SPLITS:
        tokenizer = read_tokenizer(fields(pre), name="x")
        for text, ids in zip(TEXTS, right[pre], strict=True):
            assert (pre, text, tokenizer(text)["input_ids"]) == (pre, text, ids)


@pytest.mark.parametrize("pre", ["smollm", "deepseek-llm", "llama-bpe", "gemma4"])
def test_texts_come_back(pre: str) -> None:
    tokenizer = read_tokenizer(fields(pre), name="x")
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text


PIECES = [*f"{SPACE}abcdeAB12.,'é文\n", "ab", f"{SPACE}a", f"{SPACE}ab", "cd", "abcd", f"{SPACE}b"]
PIECES += [SPACE * 2, SPACE * 3, SPACE * 4, "aa", "aaa", "12", "..", f".{SPACE}", f"{SPACE}12"]
SENTENCES = (
    "abcd ab  a   b    12",
    " ab",
    "  ab ",
    "a\nb\n\n ab",
    "aaaaaaa aa aaa",
    "<|user|>ab<|end|> ab<|end|>  ab",
    "<b>ab</s> cd<s>ab",
    "ab  cd<b>  12",
    "é文 ñ😀 abcd.. .12",
    f"ab{SPACE}cd {SPACE}{SPACE}",
    "<0x0A>ab",
    "x\ty",
    "",
)
SENTENCE_SPECIAL = {
    "<|user|>": CONTROL,
    "<|end|>": CONTROL,
    "<b>": USER_DEFINED,
    "  ": USER_DEFINED,
}


def sentence_fields(**extra: Any) -> dict[str, Any]:
    ranks = sorted(dict.fromkeys(PIECES), key=lambda one: (len(one) == 1, -len(one), one[::-1]))
    scores = {piece: -float(rank) for rank, piece in enumerate(ranks)}
    return gguf_files.sentencepiece(scores, **{"special": SENTENCE_SPECIAL, **extra})


SENTENCE_FILES: dict[str, dict[str, Any]] = {
    "plain": {},
    "without a space": {"add_space_prefix": False},
    "with EOS": {"add_eos_token": True},
    "without BOS": {"add_bos_token": False, "add_space_prefix": True},
}


@needs_llama_cpp
def test_sentencepiece_gives_llama_cpps_ids(tmp_path: Path) -> None:
    files = {
        name: gguf_files.write(tmp_path / f"{name}.gguf", sentence_fields(**extra))
        for name, extra in SENTENCE_FILES.items()
    }
    texts = [*SENTENCES, *TEXTS]
    right = llama_cpp.token_ids(files, texts)
    for name, extra in SENTENCE_FILES.items():
        tokenizer = read_tokenizer(sentence_fields(**extra), name="x")
        for text, ids in zip(texts, right[name], strict=True):
            assert (name, text, tokenizer(text)["input_ids"]) == (name, text, ids)


def test_sentencepiece_sets_a_space_before_each_text() -> None:
    plain = read_tokenizer(sentence_fields(), name="x")
    assert plain.tokenize("ab<|end|>ab<|end|> ab") == [
        f"{SPACE}ab",
        "<|end|>",
        f"{SPACE}ab",
        "<|end|>",
        SPACE,
        f"{SPACE}ab",
    ]
    bare = read_tokenizer(sentence_fields(add_space_prefix=False), name="x")
    assert bare.tokenize("ab<|end|> ab") == ["ab", "<|end|>", f"{SPACE}ab"]
    for tokenizer in (plain, bare):
        ids = tokenizer(" ab\n😀 cd", add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == " ab\n😀 cd"


# Scores of tokens, and texts with the tokens to which llama.cpp merges them.
EQUAL_SCORES: dict[str, tuple[dict[str, float], dict[str, str]]] = {
    "the leftmost of two that overlap": (
        {"bc": -1.0, "ab": -1.0},
        {"abc": "ab c", "bcab": "bc ab", "abcabc": "ab c ab c"},
    ),
    "three in a row": (
        {"cd": -1.0, "bc": -1.0, "ab": -1.0},
        {"abcd": "ab cd", "bcd": "bc d", "abcbcd": "ab c bc d"},
    ),
    "a token that is made in several ways": (
        {"aa": -1.0, "aaa": -2.0, "ba": -1.0},
        {"aaaaa": "aa aaa", "baaaa": "ba aaa", "aaaab": "aa aa b", "abaaa": "a ba aa"},
    ),
    "a better token of what the first one makes": (
        {"cd": -2.0, "abc": -1.0, "ab": -2.0},
        {"abcd": "abc d", "acd": "a cd", "ababcd": "ab abc d"},
    ),
    "a better token on the other side": (
        {"bcd": -1.0, "cd": -2.0, "ab": -2.0},
        {"abcd": "ab cd", "bcd": "bcd", "acd": "a cd"},
    ),
    "scores for no token": ({"ab": 0.0, "abc": 0.0, "abcd": 0.0}, {"abcdabc": "abcd abc"}),
}


def equal_scores(words: dict[str, float], **extra: Any) -> dict[str, Any]:
    letters = dict.fromkeys("abcd", -9.0)
    return gguf_files.sentencepiece(words | letters, add_space_prefix=False, **extra)


@pytest.mark.parametrize("case", EQUAL_SCORES)
def test_of_equal_scores_the_leftmost_goes_first(case: str) -> None:
    words, right = EQUAL_SCORES[case]
    tokenizer = read_tokenizer(equal_scores(words), name="x")
    assert {text: " ".join(tokenizer.tokenize(text)) for text in right} == right


@needs_llama_cpp
def test_llama_cpp_takes_the_leftmost_of_equal_scores(tmp_path: Path) -> None:
    files = {
        case: gguf_files.write(tmp_path / f"{i}.gguf", equal_scores(words))
        for i, (case, (words, _)) in enumerate(EQUAL_SCORES.items())
    }
    texts = list(dict.fromkeys(text for _, right in EQUAL_SCORES.values() for text in right))
    found = llama_cpp.token_ids(files, texts)
    for case, (words, _) in EQUAL_SCORES.items():
        tokenizer = read_tokenizer(equal_scores(words), name="x")
        for text, ids in zip(texts, found[case], strict=True):
            assert (case, text, tokenizer(text)["input_ids"]) == (case, text, ids)


@pytest.mark.parametrize(
    "words",
    [
        {"ab": -1.0, "ba": -1.0},  # aba is "ab a", and bab is "ba b"
        {"ab": -1.0, "bc": -1.0, "ca": -1.0},
        {"ab": -1.0, "abc": -1.0, "cab": -1.0, "ca": -2.0},
    ],
)
def test_equal_scores_that_no_order_of_merges_gives_are_refused(words: dict[str, float]) -> None:
    with pytest.raises(UnknownModelError, match=r"have the same score.*--tokenizer DIR"):
        read_tokenizer(equal_scores(words), name="x")
    special = dict.fromkeys(words, USER_DEFINED)  # cut out of texts before letters are merged
    assert read_tokenizer(equal_scores({}, special=special), name="x").tokenize("abab")


OVERLAPPING_SPECIAL = {
    "|||IP|||": CONTROL,
    "|||EMAIL|||": USER_DEFINED,
    "ab": USER_DEFINED,
    "bcd": USER_DEFINED,
    "ef": CONTROL,
    "fg": CONTROL,
    "  ": USER_DEFINED,
    "   ": USER_DEFINED,
    "\n ": USER_DEFINED,
}
_LETTERS_OF_SPECIAL = dict.fromkeys(f"abcdefg|IPEMAL\n{SPACE}", -1.0)
OVERLAPPING = {
    "byte-level": gguf_files.byte_level("qwen2", ("x y",), special=OVERLAPPING_SPECIAL),
    **{
        f"SentencePiece, prefix {prefix}": gguf_files.sentencepiece(
            _LETTERS_OF_SPECIAL, special=OVERLAPPING_SPECIAL, add_space_prefix=prefix
        )
        for prefix in (False, True)
    },
}
LONGEST_FIRST = {
    "|||IP|||EMAIL|||": ["|", "|", "|", "I", "P", "|||EMAIL|||"],
    "|||EMAIL|||IP|||": ["|||EMAIL|||", "I", "P", "|", "|", "|"],
    "abcdab": ["a", "bcd", "ab"],
    "ab": ["ab"],
    "efg": ["ef", "g"],
    "\n    a": ["\n", "   ", SPACE, "a"],
}


@pytest.mark.parametrize("case", OVERLAPPING)
def test_of_overlapping_special_tokens_the_longest_goes_first(case: str, tmp_path: Path) -> None:
    read_tokenizer(OVERLAPPING[case], name="x").save_pretrained(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    spaces = {"Ġ": SPACE, "Ċ": "\n"}
    for text, right in LONGEST_FIRST.items():
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        found = tokenizer.convert_ids_to_tokens(ids)
        if case.endswith("True"):  # spaces before the parts between
            assert [one for one in found if one in OVERLAPPING_SPECIAL] == [
                one for one in right if one in OVERLAPPING_SPECIAL
            ]
            continue
        assert [spaces.get(one, one) for one in found] == right
        assert tokenizer.decode(ids) == text


@needs_llama_cpp
def test_llama_cpp_takes_the_longest_special_token_first(tmp_path: Path) -> None:
    files = {
        case: gguf_files.write(tmp_path / f"{case}.gguf", fields)
        for case, fields in OVERLAPPING.items()
    }
    texts = [*LONGEST_FIRST, *map("".join, pairwise(LONGEST_FIRST)), "g  \n  ef  ab"]
    found = llama_cpp.token_ids(files, texts)
    for case, fields in OVERLAPPING.items():
        tokenizer = read_tokenizer(fields, name="x")
        for text, ids in zip(texts, found[case], strict=True):
            assert (case, text, tokenizer(text)["input_ids"]) == (case, text, ids)


def test_phi_3_drops_spaces_after_control_tokens() -> None:
    fields = {**sentence_fields(add_space_prefix=False), "general.name": "Phi-3 mini"}
    tokenizer = read_tokenizer(fields, name="x")
    ids = tokenizer("<|end|>\n ab<s> ab", add_special_tokens=False)["input_ids"]
    right = ["<|end|>", "ab", "<s>", f"{SPACE}ab"]
    assert tokenizer.convert_ids_to_tokens(ids) == right
    overlapping = {**SENTENCE_SPECIAL, "b<|": CONTROL}
    fields = {
        **sentence_fields(add_space_prefix=False, special=overlapping),
        "general.name": "phi3",
    }
    tokenizer = read_tokenizer(fields, name="x")
    ids = tokenizer("<|end|>\n ab<s> ab<|end|> b", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == [*right, "<|end|>", "b"]


@needs_llama_cpp
def test_llama_cpp_drops_the_same_spaces_in_phi_3(tmp_path: Path) -> None:
    """Those of ASCII, after control tokens and tokens of users, and no others."""
    known = {**SENTENCE_SPECIAL, "<|endoftext|>": CONTROL}  # llama.cpp asks for it
    spaces = {**known, "  ": USER_DEFINED}
    files = {
        case: {**sentence_fields(special=special, add_space_prefix=prefix), "general.name": "Phi-3"}
        for case, special, prefix in (
            ("plain", known, False),
            ("prefix", known, True),
            ("spaces", spaces, False),
        )
    }
    gaps = (" ", "  ", "\n", "\t\r\n ", "\v\f", "\u00a0", "\u3000", "\u2028", "\u0085", " \u00a0 ")
    texts = [f"<|end|>{gap}ab<s>{gap}ab" for gap in gaps]
    written = {
        case: gguf_files.write(tmp_path / f"{case}.gguf", one) for case, one in files.items()
    }
    right = llama_cpp.token_ids(written, texts)
    for case, fields in files.items():
        tokenizer = read_tokenizer(fields, name="x")
        for text, ids in zip(texts, right[case], strict=True):
            assert (case, text, tokenizer(text)["input_ids"]) == (case, text, ids)


_NO_TYPES = ("token_type", "bos_token_id", "eos_token_id", "unknown_token_id")


def ordinary_roles() -> dict[str, dict[str, Any]]:
    """Files in which the metadata names ordinary tokens, or has no types."""
    bytes_ = gguf_files.byte_level("qwen2", ("! !",))
    words = gguf_files.sentencepiece({"ab": -1.0, **dict.fromkeys(f"ab<>sunk/{SPACE}", -9.0)})
    kinds = ("padding", "unknown", "bos", "eos", "seperator", "mask")
    exclamation, letter, word = 0, 64, words["tokenizer.ggml.tokens"].index("ab")
    adds = {"add_bos_token": True, "add_eos_token": True, "bos_token_id": exclamation}
    adds = {f"tokenizer.ggml.{name}": one for name, one in adds.items()}
    untyped = dict.fromkeys([f"tokenizer.ggml.{name}" for name in _NO_TYPES])
    files = {
        **{kind: {**bytes_, f"tokenizer.ggml.{kind}_token_id": exclamation} for kind in kinds},
        "both added": {**bytes_, **adds, "tokenizer.ggml.eos_token_id": letter},
        **{
            f"SentencePiece {kind}": {**words, f"tokenizer.ggml.{kind}_token_id": word}
            for kind in kinds[:4]
        },
        "no types": {**bytes_, "tokenizer.ggml.token_type": None},
        "SentencePiece, no types": {**words, **untyped},
    }
    return {
        case: {name: value for name, value in fields.items() if value is not None}
        for case, fields in files.items()
    }


ROLES = ordinary_roles()
ROLE_TEXTS = ("Hi! wow!! a", "ab ab xab", "<s>ab", "<unk>")


@pytest.mark.parametrize("case", ROLES)
def test_an_ordinary_token_stays_one_whatever_names_it(case: str, tmp_path: Path) -> None:
    read_tokenizer(ROLES[case], name="x").save_pretrained(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert not {"!", "a", "ab"} & set(tokenizer.all_special_tokens)
    for text in ROLE_TEXTS[:2]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    words = tokenizer.tokenize("wow!!")
    assert words.count("!!") == (not case.startswith("Sent"))
    ids = tokenizer("b")["input_ids"]
    if case == "both added":
        assert (ids[0], ids[-1]) == (0, 64)
    if case == "SentencePiece, no types":
        assert ids[0] == 1
        assert "<s>" not in tokenizer.tokenize("<s>ab")


def test_chat_templates_know_ordinary_tokens() -> None:
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    fields = {**ROLES["both added"], "tokenizer.chat_template": template}
    tokenizer = read_tokenizer(fields, name="x")
    asked = [{"role": "user", "content": "b"}]
    assert tokenizer.apply_chat_template(asked, tokenize=False) == "!ba"


@needs_llama_cpp
def test_llama_cpp_reads_the_same_where_ordinary_tokens_are_named(tmp_path: Path) -> None:
    files = {
        case: gguf_files.write(tmp_path / f"{case}.gguf", fields) for case, fields in ROLES.items()
    }
    right = llama_cpp.token_ids(files, ROLE_TEXTS)
    for case, fields in ROLES.items():
        tokenizer = read_tokenizer(fields, name="x")
        for text, ids in zip(ROLE_TEXTS, right[case], strict=True):
            assert (case, text, tokenizer(text)["input_ids"]) == (case, text, ids)


# Special tokens follow 256 letters, "ab" and <s>.
FIRST = 258
ENDS: dict[str, tuple[dict[str, int], dict[str, Any], set[int]]] = {
    "eos alone": ({"[stop]": CONTROL}, {"eos_token_id": FIRST}, {FIRST}),
    "eot beside eos": (
        {"[stop]": CONTROL, "[turn]": CONTROL},
        {"eos_token_id": FIRST, "eot_token_id": FIRST + 1},
        {FIRST, FIRST + 1},
    ),
    "eom beside eos": (
        {"[stop]": CONTROL, "[message]": CONTROL},
        {"eos_token_id": FIRST, "eom_token_id": FIRST + 1},
        {FIRST, FIRST + 1},
    ),
    **{
        text: ({"[stop]": CONTROL, text: kind}, {"eos_token_id": FIRST}, {FIRST, FIRST + 1})
        for text, kind in {
            "<|im_end|>": CONTROL,
            "<|eot_id|>": CONTROL,
            "<|eom_id|>": CONTROL,
            "<end_of_turn>": NORMAL,
            "<|end|>": USER_DEFINED,
            "<EOT>": CONTROL,
            "_<EOT>": CONTROL,
            "<|endoftext|>": NORMAL,
            "</s>": CONTROL,
            "<\uff5cend\u2581of\u2581sentence\uff5c>": CONTROL,
            "<|end_of_text|>": CONTROL,
            "<|return|>": CONTROL,
            "<turn|>": CONTROL,
            "<|file_sep|>": CONTROL,
            "<|repo_name|>": NORMAL,
            "<|fim_pad|>": CONTROL,
            "[EOS]": CONTROL,
        }.items()
    },
    "harmony": (
        {"<|end|>": CONTROL, "<|return|>": CONTROL, "<|call|>": CONTROL, "<|channel|>": CONTROL},
        {"eos_token_id": FIRST + 1},
        {FIRST + 1, FIRST + 2},
    ),
    "gemma 4": (
        {"</s>": CONTROL, "<turn|>": CONTROL, "<|tool_response>": CONTROL, "<eos>": CONTROL},
        {"eos_token_id": FIRST + 3},
        {FIRST + 1, FIRST + 2, FIRST + 3},
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_tokens_that_end_an_answer(case: str) -> None:
    special, extra, right = ENDS[case]
    fields = gguf_files.byte_level("qwen2", special=special, **extra)
    found = end_ids(fields)
    assert set(found) == right
    assert found[0] == extra["eos_token_id"]


@needs_llama_cpp
@pytest.mark.slow
def test_llama_cpp_ends_answers_at_the_same_tokens(tmp_path: Path) -> None:
    files = {}
    for i, (name, (special, extra, _)) in enumerate(ENDS.items()):
        fields = gguf_files.byte_level("qwen2", special=special, **extra)
        files[name] = gguf_files.write(tmp_path / f"{i}.gguf", fields)
    found = llama_cpp.end_ids(files, range(FIRST - 2, FIRST + 4))
    assert found == {name: right for name, (_, _, right) in ENDS.items()}


def test_no_ordinary_token_ends_an_answer_where_the_file_names_no_eos() -> None:
    assert end_ids(gguf_files.byte_level("qwen2")) == []
    assert end_ids(gguf_files.byte_level("qwen2", special={"<|im_end|>": CONTROL})) == [FIRST]
    assert end_ids(sentence_fields(eos_token_id=None))[0] == 2  # </s>, by kind and by text


def test_ollamas_list_of_ends_is_read() -> None:
    fields = gguf_files.byte_level("qwen2", eos_token_id=FIRST - 1, eos_token_ids=[3, 5, 10**6])
    assert end_ids(fields) == [FIRST - 1, 3, 5]
    assert read_tokenizer(fields, name="x").tokenize("ab") == ["ab"]


def test_all_chat_templates_are_kept() -> None:
    names = {"tool_use": "tools", "rag": "documents"}
    named = {f"tokenizer.chat_template.{name}": text for name, text in names.items()}
    fields = {**gguf_files.byte_level("qwen2"), **named, "tokenizer.chat_templates": list(names)}
    assert read_tokenizer(fields, name="x").chat_template == names
    both = read_tokenizer({**fields, "tokenizer.chat_template": "usual"}, name="x")
    assert both.chat_template == {"default": "usual", **names}
    assert both.get_chat_template(tools=[]) == "tools"
    assert both.get_chat_template() == "usual"


def test_fields_of_other_tokenizers_change_nothing() -> None:
    others: dict[str, Any] = {
        "remove_extra_whitespaces": True,
        "add_sep_token": True,
        "cls_token_id": 0,
        "normalizer.lowercase": False,
        "add_padding_token": False,
    }
    plain, more = (gguf_files.byte_level("qwen2", **given) for given in ({}, others))
    found = [read_tokenizer(fields, name="x")(TEXTS[13])["input_ids"] for fields in (plain, more)]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"pre": "not-known"}, "pre is 'not-known'"),
        ({"model": "t5"}, "model is 't5'"),
        ({"model": "bert"}, "model is 'bert'"),
        ({"merges": ["a bc"]}, "The merge 'a bc'"),
        ({"tokens": ["a", "b", "a"]}, "Two of its tokens are 'a'"),
        ({"token_type": [1]}, "token_type 1 values"),
        ({"tokens": None}, "has no tokens"),
        ({"tokens": [1, 2]}, "tokens is '[1, 2]', and must be a list of texts"),
        ({"merges": [1]}, "merges is '[1]'"),
        ({"scores": [float("nan")]}, "scores is '[nan]'"),
        ({"pre": 3}, "pre is '3', and must be a text"),
        ({"eos_token_id": "2"}, "eos_token_id is '2', and must be a whole number"),
        ({"eot_token_id": [1, 2]}, "eot_token_id is '[1, 2]'"),
        ({"bos_token_id": -1}, "bos_token_id is '-1'"),
        ({"what.is.this": 1}, "tokenizer.ggml.what.is.this is '1', which is not known"),
        ({"normalizer.lowercase": True}, "lowercase is 'True', which is not known"),
        ({"add_bos_token": "yes"}, "add_bos_token is 'yes', and must be true or false"),
    ],
)
def test_other_tokenizers_are_refused_by_name(changed: dict[str, Any], said: str) -> None:
    fields = gguf_files.byte_level("qwen2") | {
        f"tokenizer.ggml.{name}": value for name, value in changed.items()
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    with pytest.raises(UnknownModelError, match=r"of 'x' .*--tokenizer DIR") as refused:
        read_tokenizer(fields, name="x")
    assert said in str(refused.value)

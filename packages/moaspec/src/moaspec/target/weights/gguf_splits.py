"""How llama.cpp splits a text into words, by the name that a GGUF file gives it (`pre`).

The first pattern splits a text into its matches and the pieces between them, the second splits
each of these, and so on. Merges never cross a border of words. Patterns are in the syntax that
Oniguruma (the tokenizers library) and JavaScript share. They match exactly what llama.cpp matches,
also where that is simpler than the pattern of the model's own tokenizer: there, all letters but
A to Z are both upper and lower case.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONTRACTION = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = r"\s*[\r\n]+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_DIGIT = r"\p{N}"
_THREE = r"\p{N}{1,3}"
_GPT2 = rf"'(?:[stmd]|re|ve|ll)| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"


def _words(digits: str, *, letters: str = r"\p{L}+", marks: str = _MARKS) -> str:
    """The pattern of Llama 3: contractions, words with one leading mark, digits, marks, spaces."""
    return f"{_CONTRACTION}|{_LEAD}{letters}|{digits}|{marks}|{_LINES}|{_SPACES}"


def _cased(digits: str, *, letter: str = r"\p{L}", ending: str = "") -> str:
    """The pattern of GPT-4o: a word also ends before a capital that follows a small letter."""
    upper, lower = rf"(?:(?![a-z]){letter})", rf"(?:(?![A-Z]){letter})"
    words = f"{_LEAD}{upper}*{lower}+{ending}|{_LEAD}{upper}+{lower}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}|{_SPACES}"


def _uncased(digits: str) -> str:
    """The pattern of GPT-4o where llama.cpp takes no notice of case."""
    words = rf"{_LEAD}[\p{{L}}\p{{M}}]+(?:{_CONTRACTION})?"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}|{_SPACES}"


def _deepseek3(after_marks: str) -> str:
    """The last pattern of DeepSeek V3."""
    words = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    return rf"{words}| ?[\p{{P}}\p{{S}}]+{after_marks}|{_SPACES}"


_LATIN_GREEK = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters of Latin, Greek, Cyrillic, Armenian, Georgian, Cherokee and the like."""
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK = r"(?:(?!\s)[" + "\u0800-\u9fa5\uac00-\ud7ff])+"
_HAN = (
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ebef"
    "\U0002f800-\U0002fa1f"
)
_SCRIPTS_WITHOUT_SPACES = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    "\u1100-\u11ff]+"
)
_HANGUL_AND_MARKS = (
    "[\uac00-\ud7a3\u3131-\u318e]+|"
    "[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+|"
    "[\u3105-\u312f]+|" + _HAN_AND_KANA
)
_BLOOM = r" ?[^(\s|.,!?" + "\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
# Digits in groups of three from the right; what precedes them stays with the first group.
_GROUPS = r"\P{N}*(?:\p{N}{1,2}(?=(?:\p{N}{3})+(?!\p{N}))|\p{N}{1,3})|\P{N}+"
_KIMI = (
    rf"[{_HAN}]+|{_LEAD}(?:(?![{_HAN}])\p{{L}})+(?:{_CONTRACTION})?|{_THREE}|"
    rf"{_MARKS}|{_LINES}|{_SPACES}"
)
_QWEN2 = _words(_DIGIT)
_RUNS_OF_LINES = r"[^\n]+|\n+"


@dataclass(frozen=True)
class Splits:
    """What a `pre` value means."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token is taken whole
    add_bos: bool = False  # unless the file says otherwise
    # Tokens are texts with U+2581 for spaces, and other characters are <0x..>; otherwise tokens are
    # texts in GPT-2's alphabet of bytes.
    raw: bool = False
    whole_lines: bool = False  # line breaks that are a token together are taken whole


_LLAMA3 = Splits((_words(_THREE),), ignore_merges=True, add_bos=True)
_PLAIN = Splits((_GPT2,))
_SINGLE_DIGITS = Splits((_DIGIT, _GPT2))
_QWEN = Splits((_QWEN2,))
_DEEPSEEK3 = Splits((_THREE, _HAN_AND_KANA, _deepseek3(rf"[\r\n]*|{_LINES}")))
_GPT4O = Splits((_cased(_THREE, ending=f"(?:{_CONTRACTION})?"),))
_BAILING = Splits((_words(_DIGIT).replace(_LINES, r"\s*[\r\n]"),))
_TINY_AYA = Splits((_GROUPS, _uncased(_THREE)))

_SAME: dict[Splits, tuple[str, ...]] = {
    _LLAMA3: (
        "llama3",
        "llama-v3",
        "llama-bpe",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "midm-2.0",
        "lfm2",
        "jina-v5-nano",
    ),
    _PLAIN: (
        "gpt-2",
        "phi-2",
        "mpt",
        "olmo",
        "jais",
        "trillion",
        "granite-docling",
        "exaone4",
        "jina-es",
        "jina-de",
        "jina-v1-en",
        "jina-v2-es",
        "jina-v2-de",
        "jina-v2-code",
        "roberta-bpe",
        "gigachat",
        "a.x-4.0",
        "mellum",
        "modern-bert",
    ),
    _SINGLE_DIGITS: (
        "starcoder",
        "refact",
        "command-r",
        "smollm",
        "codeshell",
        "exaone",
        "minerva-7b",
        "mellum2",
    ),
    _QWEN: (
        "qwen2",
        "deepseek-r1-qwen",
        "kormo",
        "f2llmv2",
        "stablelm2",
        "megrez",
        "hunyuan",
        "solar-open",
        "grok-2",
    ),
    Splits((_words(_THREE),)): ("dbrx", "smaug-bpe", "chatglm-bpe"),
    _DEEPSEEK3: ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"),
    _GPT4O: ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"),
    _BAILING: ("bailingmoe", "bailingmoe2", "llada-moe"),
    _TINY_AYA: ("tiny_aya", "cohere2moe"),
    Splits((_BLOOM,)): ("bloom", "poro-chat", "gpt3-finnish"),
    Splits((_RUNS_OF_LINES,), raw=True, whole_lines=True, add_bos=True): ("gemma4",),
    Splits((_RUNS_OF_LINES,), raw=True): ("sarvam-moe",),
}
_OWN = {
    "default": Splits((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}")),
    "falcon": Splits((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9]{3}")),
    "viking": Splits((_BLOOM, _DIGIT)),
    "deepseek-llm": Splits(
        (
            r"[\r\n]",
            rf"\s?[{_LATIN_GREEK}]+",
            r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001\u3002]+",
            r"\s+(?![\s\S])",
            _CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Splits((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT)),
    "spark2_5": Splits((_THREE, _HAN_AND_KANA, _deepseek3(r"|[\r\n]"), _DIGIT)),
    "glm4": Splits((_words(_THREE),), ignore_merges=True),
    "youtu": Splits((_HANGUL_AND_MARKS, _uncased(_DIGIT)), ignore_merges=True),
    "qwen35": Splits(
        (_words(_DIGIT, letters=r"[\p{L}\p{M}]+", marks=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),)
    ),
    "jais-2": Splits(
        (
            _words(_THREE).replace(
                _SPACES,
                "|".join(rf"\s{{{2**k}}}(?!\S)" for k in range(9, 1, -1)) + r"|\s{1,2}(?!\S)|\s",
            ),
        )
    ),
    "tekken": Splits((_cased(_DIGIT),), ignore_merges=True, add_bos=True),
    "granite-embed-multi-97m": Splits(
        (_cased(_THREE, letter=r"[\p{L}\p{M}]", ending=f"(?:{_CONTRACTION})?"),),
        ignore_merges=True,
    ),
    "chameleon": Splits(
        (
            "<sentinel:[0-9]+>",
            "IMGIMG[A-I]{1,4}Z",
            r"[\t\n]|    |  ",
            _DIGIT,
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
    "kimi-k2": Splits((_KIMI,)),
    "superbpe": Splits((r"\p{N}+", r"\p{N}+?(?=(?:[0-9]{3})+(?![0-9]))")),
    "seed-coder": Splits((_words(_DIGIT, marks=r" ?[^\s\p{L}\p{N}\r\n]+"),)),
    "ufakzeka": Splits((_QWEN2.removeprefix(f"{_CONTRACTION}|"),)),
    "afmoe": Splits(
        (
            _GROUPS,
            _SCRIPTS_WITHOUT_SPACES,
            _deepseek3(rf"[\r\n]*|{_LINES}"),
        )
    ),
    "laguna": Splits((_RUNS_OF_LINES, _QWEN2)),
    "exaone-moe": Splits(
        (
            _words(
                _DIGIT,
                letters=r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
                marks=r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
            ).replace(_LINES, r"\s*[\r\n]"),
        )
    ),
    "minicpm5": Splits((_THREE, _words(r"\p{N}+")), ignore_merges=True),
}

SPLITS = {**_OWN, **{name: splits for splits, names in _SAME.items() for name in names}}
"""All `pre` values that llama.cpp knows for tokenizers of the kinds `gpt2` and `gemma4`."""

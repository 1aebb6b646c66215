"""Normalised copies of a text, with a map from each character to its place in the text.

Compatibility forms, capitals, digits of other scripts, white space, dashes, quotation marks and
angle brackets become the usual ones; accents and invisible characters are removed. In a second copy
the escapes of JSON, HTML, URLs and Markdown are decoded, in a third one also those of mails
(quoted-printable), octal numbers and CSS, which ordinary text contains by chance. Further copies
have no HTML tags. The time is linear in the text.
"""

import html
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from unicodedata import category, decimal, lookup, normalize
from urllib.parse import unquote

_UNSEEN = frozenset("\u034f\u115f\u1160\u17b4\u17b5")
"""Invisible characters besides control and format characters."""
_REPLACEMENTS = {
    **dict.fromkeys("\u2212\u2043", "-"),
    **dict.fromkeys("\u2044\u2215", "/"),
    **dict.fromkeys("\u2018\u2019\u201b\u2032\u02bc\u02b9`", "'"),
    **dict.fromkeys("\u2039\u2329\u3008\u27e8\u276c\u276e\u02c2\u227a\u29fc\u1438", "<"),
    **dict.fromkeys("\u203a\u232a\u3009\u27e9\u276d\u276f\u02c3\u227b\u29fd\u1433", ">"),
    "\u2800": " ",
    "\u0131": "i",  # the small letter of a Turkish capital I
    "\u0237": "j",
}

_ESCAPE = re.compile(
    # Escapes of the first character of escapes, nested in any depth.
    r"%(?:25)+(?=[0-9a-f]{2})|&(?:amp;)+"
    r"|(?-i:\\U)[0-9a-f]{8}|(?:[\\%]u[0-9a-f]{4})+|\\[ux]\{0*[0-9a-f]{1,8}\}|\\x[0-9a-f]{2}"
    r"|\\N\{[\w +-]{1,90}\}|(?:%[0-9a-f]{2})+"
    r"|&(?:#0*[0-9]{1,8}|#x0*[0-9a-f]{1,8}|[a-z][a-z0-9]{1,31});?"
    r"|\\[nrt]|\\(?=[!-/:-@\[-`{-~])|[*`]+|~~|__",
    re.IGNORECASE,
)
_DECODINGS = 8  # passes that decode escapes within escapes

_SEPARATOR = "=(?:0[9ad]|2[0-9a-f]|3[ab]|5f|7c|a0)"
_TOP = (
    "com|org|net|edu|gov|mil|int|info|biz|name|mobi|asia|online|shop|site|club|top|vip|xyz|app"
    "|dev|[a-z]{2}"
)
_NO_ADDRESS = (
    r"(?![\w.-]{1,200}\.(?:avif|bmp|css|csv|docx?|gif|gz|html?|ini|jpe?g|js|json|log|mp[34]|pdf|png"
    r"|pptx?|svg|tar|ts|txt|webp|xlsx?|xml|ya?ml|px|em|ms|kb|gb|vw|vh)(?!\.?[\w-]))"
)
"""Not before names of files or numbers with units."""
_RARE_ESCAPE = re.compile(
    # Quoted-printable applied more than once, and runs.
    r"=\r?\n|=(?:3d)+(?=[02-7a-f][0-9a-f])|(?:=(?:0[9ad]|[2-7a-f][0-9a-f])){2,}"
    # At-signs before a domain; one that begins with digits needs a usual end.
    r"|=40(?=\[(?:ipv6:)?[0-9a-f.:]{3,45}\])|=40(?=[0-9]{0,3}[^\W\d_])(?!x[0-9]|px)"
    r"|=40(?=[0-9][\w-]{0,62}(?:(?:\.|=2e)[\w-]{1,63}){0,8}(?:\.|=2e)"
    rf"(?:{_TOP})(?![\w-])){_NO_ADDRESS}"
    # Other characters; before a digit only between groups of digits, or in a telephone number.
    r"|=(?:2[0-9a-f]|3[a-f]|4[1-9a-f]|[5-7][0-9a-f]|a0)(?![0-9])|=2b(?=[0-9])"
    rf"|{_SEPARATOR}(?=[0-9]{{1,7}}{_SEPARATOR})|(?:"
    + "|".join(rf"(?<={_SEPARATOR}[0-9]{{{size}}})" for size in range(1, 8))
    + "|"
    + "|".join(rf"(?<=\+[0-9]{{{size}}})" for size in range(1, 4))
    + rf"){_SEPARATOR}(?=[0-9])"
    # CSS and octal numbers.
    rf"|\\(?:(?:0{{2,4}})?(?:40|2e)[ ]|0000(?:40|2e))(?=[\w-]){_NO_ADDRESS}"
    r"|\\(?:[0-3][0-7]{2}|[4-7][0-7](?![0-7])|o\{0*[0-7]{1,7}\})",
    re.IGNORECASE,
)
"""Quoted-printable, CSS and octal numbers. A number in code (`width=40`) mostly is none."""

_NO_SPACE = (
    "a|abbr|b|bdi|bdo|big|code|del|em|font|i|ins|kbd|mark|nobr|q|s|samp|small|span|strong|sub|sup|tt"
    "|u|var|wbr"
)
_INLINE_TAG = re.compile(
    rf"<!--.{{0,300}}?-->|</?(?:{_NO_SPACE})(?:\s[^<>]{{0,300}})?/?>", re.IGNORECASE | re.DOTALL
)
_BLOCK_TAGS = re.compile(
    r"(?:\s{0,20}</?[a-z][a-z0-9:-]{0,30}(?:\s[^<>]{0,300})?/?>\s{0,20})+", re.IGNORECASE
)


@dataclass(frozen=True)
class FoldedText:
    """A normalised copy of a text."""

    text: str  # the copy
    # starts, stops: range in the source of each character of the copy; both ascend.
    starts: Sequence[int]
    stops: Sequence[int]
    source: str

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Range in the source of characters `start` to `stop - 1`, with their accents."""
        end = self.stops[stop - 1]
        while end < len(self.source) and _is_mark(self.source[end]):
            end += 1
        return self.starts[start], end


def folded_copies(text: str) -> Iterator[FoldedText]:
    """Yield the folded text, and copies without escapes, emphasis and tags if it has any."""
    read = unfolded(text)
    yield _folded(read)
    plain = _without_escapes(read)
    if plain is not read:
        yield _folded(plain)
    rare = _without_rare_escapes(plain)
    if rare is not plain:
        yield _folded(rare)
    for read in [plain] if rare is plain else [plain, rare]:
        untagged = _replaced(_replaced(read, _INLINE_TAG, ""), _BLOCK_TAGS, ";")
        if untagged.text != read.text:
            yield _folded(untagged)


def plain_copy(text: str) -> FoldedText:
    """Fold a text without its escapes and emphasis."""
    return _folded(_without_escapes(unfolded(text)))


def _without_escapes(read: FoldedText) -> FoldedText:
    for _ in range(_DECODINGS):
        decoded = _decoded(read, _ESCAPE)
        if decoded.text == read.text:
            break
        read = decoded
    return read


def _without_rare_escapes(read: FoldedText) -> FoldedText:
    for _ in range(_DECODINGS):
        decoded = _decoded(read, _RARE_ESCAPE)
        if decoded.text == read.text:
            break
        read = _without_escapes(decoded)
    return read


def fold(text: str) -> FoldedText:
    """Fold a text without decoding its escapes."""
    return _folded(unfolded(text))


def unfolded(text: str) -> FoldedText:
    """Make an unchanged copy of a text."""
    return FoldedText(text, range(len(text)), range(1, len(text) + 1), text)


def _folded(read: FoldedText) -> FoldedText:
    chars, starts, stops = list[str](), list[int](), list[int]()
    last = ""
    for place, char in enumerate(read.text):
        for new in _fold_character(char):
            if new != " " or last != " ":
                chars.append(new)
                starts.append(read.starts[place])
                stops.append(read.stops[place])
                last = new
    return FoldedText("".join(chars), starts, stops, read.source)


def _decoded(read: FoldedText, escapes: re.Pattern[str]) -> FoldedText:
    """Decode escapes; each decoded character maps to the whole escape."""
    return _replaced(read, escapes, _decode_escape)


def _replaced(
    read: FoldedText, pattern: re.Pattern[str], replacement: str | Callable[[str], str]
) -> FoldedText:
    """Replace what a pattern finds; each new character maps to all of it."""
    parts, starts, stops, place = list[str](), list[int](), list[int](), 0
    for found in pattern.finditer(read.text):
        first, end = found.span()
        new = replacement if isinstance(replacement, str) else replacement(found[0])
        parts += [read.text[place:first], new]
        starts += read.starts[place:first]
        starts += [read.starts[first]] * len(new)
        stops += read.stops[place:first]
        stops += [read.stops[end - 1]] * len(new)
        place = end
    starts += read.starts[place:]
    stops += read.stops[place:]
    return FoldedText("".join([*parts, read.text[place:]]), starts, stops, read.source)


def _decode_escape(escape: str) -> str:
    """Decode one escape; emphasis and a backslash before punctuation are dropped."""
    kind = escape[:2].lower()
    if escape[0] in "=&":
        return _html_character(escape) if escape[0] == "&" else _mail_character(escape)
    if kind in ("\\u", "\\x", "%u"):
        return _from_codes(re.findall(r"[0-9a-f]+", re.sub(r"[\\%][ux]", " ", escape.lower())), 16)
    if kind == "\\n" and len(escape) > 2:
        return _named_character(escape[3:-1])
    if escape[0] == "%":
        return "%" if re.fullmatch("%(?:25)+", escape) else unquote(escape)
    if escape[0] != "\\" or len(escape) == 1:
        return ""
    return " " if len(escape) == 2 else _octal_or_css_character(escape)


def _octal_or_css_character(escape: str) -> str:
    css = re.fullmatch(r"\\(?:0{0,4}(40|2e) |0000(40|2e))", escape, re.IGNORECASE)
    digits = re.findall(r"[0-7]+", escape) if css is None else [css[1] or css[2]]
    return _from_codes(digits, 8 if css is None else 16)


def _mail_character(escape: str) -> str:
    if re.fullmatch("=(?:3d)+", escape, re.IGNORECASE):
        return "="
    return bytes.fromhex(escape.replace("=", "").strip()).decode(errors="replace")


def _html_character(escape: str) -> str:
    if re.fullmatch("&(?:amp;)+", escape, re.IGNORECASE):
        return "&"
    escape = re.sub(r"(?<=#)0+(?=[0-9])", "", escape)  # Python reads no numbers of 5000 digits
    return html.unescape(escape if escape.endswith(";") else f"{escape};")


def _from_codes(digits: list[str], base: int) -> str:
    codes = [min(int(digit, base), 0x10FFFF) for digit in digits]
    pairs = "".join(map(chr, codes)).encode("utf-16-le", "surrogatepass")
    return pairs.decode("utf-16-le", "replace")


def _named_character(name: str) -> str:
    """The character of a name or number; nothing for an unknown name."""
    if name.upper().startswith("U+"):
        digits = re.findall(r"[0-9a-f]{1,8}", name[2:].lstrip("0").lower() or "0")[:1]
        return _from_codes(digits, 16)
    try:
        return lookup(name)
    except KeyError:
        return ""


@lru_cache(1 << 12)
def _fold_character(char: str) -> str:
    """Fold a character: into several for a ligature, into none for an accent."""
    found = normalize("NFKD", normalize("NFKD", char).casefold())
    return "".join(_REPLACEMENTS.get(one, _fold_decomposed(one)) for one in found)


def _fold_decomposed(char: str) -> str:
    if char.isspace():
        return " "
    if _is_mark(char) or _is_unseen(char):
        return ""
    digit = decimal(char, None)
    if digit is not None:
        return str(digit)
    return "-" if category(char) == "Pd" else char


def _is_mark(char: str) -> bool:
    return category(char).startswith("M")


def _is_unseen(char: str) -> bool:
    """Whether a character is a format or control character, or a filler."""
    return category(char) in {"Cf", "Cc"} or char in _UNSEEN

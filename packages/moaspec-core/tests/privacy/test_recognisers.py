"""What is found, and what is not."""

from __future__ import annotations

import re

import pytest

from moaspec_core.errors import InputError
from moaspec_core.privacy.recognisers import Phones, Recogniser, cards, emails, ibans
from moaspec_core.privacy.vault import Vault


def found(recognise: Recogniser, text: str) -> list[str]:
    return [text[span.start : span.stop] for span in recognise(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mail a.b+c@sub.example.co.uk, please", ["a.b+c@sub.example.co.uk"]),
        ("<jürgen@müller.de>", ["jürgen@müller.de"]),
        ("nobody@ home or @home.org", []),
        ("a@b", []),
    ],
)
def test_emails(text: str, expected: list[str]) -> None:
    assert found(emails, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4111 1111 1111 1111", ["4111 1111 1111 1111"]),
        ("pay 5500-0000-0000-0004 now", ["5500-0000-0000-0004"]),
        ("378282246310005", ["378282246310005"]),
        ("4111 1111 1111 1112", []),  # wrong check digit
        ("exp 4111 1111 1111 1111 12", ["4111 1111 1111 1111"]),
        ("1234", []),
    ],
)
def test_cards(text: str, expected: list[str]) -> None:
    assert set(expected) <= set(found(cards, text))
    assert bool(expected) == bool(found(cards, text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("DE89 3704 0044 0532 0130 00 is mine", ["DE89 3704 0044 0532 0130 00"]),
        ("gb82west12345698765432", ["gb82west12345698765432"]),
        ("DE88 3704 0044 0532 0130 00", []),  # wrong check digits
        ("NO93 8601 1117 947", ["NO93 8601 1117 947"]),
    ],
)
def test_ibans(text: str, expected: list[str]) -> None:
    assert found(ibans, text) == expected


@pytest.mark.parametrize(
    ("text", "regions", "expected"),
    [
        ("call +49 30 901820 today", ("US",), ["+49 30 901820"]),
        ("(415) 555-2671", ("US",), ["(415) 555-2671"]),
        ("030 901820", ("DE",), ["030 901820"]),
        ("030 901820", ("US",), []),
        ("in 2024 I had 12345", ("US", "DE"), []),
        ("+44 20 7946 0958", (), ["+44 20 7946 0958"]),
    ],
)
def test_phones(text: str, regions: tuple[str, ...], expected: list[str]) -> None:
    assert found(Phones(regions), text) == expected


SPELLINGS = {
    "no-break spaces": lambda text: text.replace(" ", "\u00a0"),
    "thin spaces": lambda text: text.replace(" ", "\u2009"),
    "double spaces": lambda text: text.replace(" ", "  "),
    "dots": lambda text: text.replace(" ", "."),
    "spaced dashes": lambda text: text.replace(" ", " - "),
    "en dashes": lambda text: text.replace(" ", "\u2013"),
    "non-breaking hyphens": lambda text: text.replace(" ", "\u2011"),
    "slashes": lambda text: text.replace(" ", "/"),
    "line breaks": lambda text: text.replace(" ", "\r\n"),
    "nothing": lambda text: text.replace(" ", ""),
    "characters that nobody sees": lambda text: "\u200b".join(text),
    "soft hyphens": lambda text: text.replace(" ", "\u00ad"),
    "full width": lambda text: "".join(
        chr(ord(char) + 0xFEE0) if char.isalnum() or char == "@" else char for char in text
    ),
    "Arabic digits": lambda text: "".join(
        chr(0x660 + int(char)) if char.isdigit() else char for char in text
    ),
    "lower case": str.lower,
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(
    ("recognise", "text"),
    [
        (cards, "4111 1111 1111 1111"),
        (cards, "3782 822463 10005"),
        (ibans, "DE89 3704 0044 0532 0130 00"),
        (ibans, "GB82 WEST 1234 5698 7654 32"),
        (emails, "ada@example.org"),
    ],
)
def test_forms_in_which_people_type_and_paste(
    recognise: Recogniser, text: str, spelling: str
) -> None:
    spelled = SPELLINGS[spelling](text)
    assert found(recognise, f"Here: {spelled}, thanks.") == [spelled]


@pytest.mark.parametrize("number", ["+49 30 901820", "+1 415 555 2671"])
@pytest.mark.parametrize(
    "spelling", ["no-break spaces", "double spaces", "full width", "en dashes"]
)
def test_forms_of_phone_numbers(number: str, spelling: str) -> None:
    spelled = SPELLINGS[spelling](number)
    assert any(spelled in one for one in found(Phones(), f"Call {spelled} now"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Ref AB12 to DE89 3704 0044 0532 0130 00", ["DE89 3704 0044 0532 0130 00"]),
        (
            "DE89370400440532013000 NO9386011117947",
            ["DE89370400440532013000", "NO9386011117947"],
        ),
        (
            "DE89 3704 0044 0532 0130 00\nGB82 WEST 1234 5698 7654 32",
            ["DE89 3704 0044 0532 0130 00", "GB82 WEST 1234 5698 7654 32"],
        ),
        ("IBAN:DE89370400440532013000", ["DE89370400440532013000"]),
        ("IBANDE89370400440532013000", ["DE89370400440532013000"]),
    ],
)
def test_ibans_behind_what_looks_like_one(text: str, expected: list[str]) -> None:
    assert found(ibans, text) == expected


def test_an_unknown_region() -> None:
    with pytest.raises(InputError, match="XX"):
        list(Phones(("XX",))("text"))


CARD, ADDRESS, ACCOUNT = "4242424242424242", "ada@example.org", "DE89370400440532013000"
IBAN, UK_IBAN = "DE89 3704 0044 0532 0130 00", "GB82 WEST 1234 5698 7654 32"


def escaped(text: str, form: str) -> str:
    return "".join(form % ord(char) for char in text)


def nested(text: str, escape: str, depth: int) -> str:
    for _ in range(depth):
        text = text.replace(escape[0], escape)
    return text


FORMS = [
    *(nested("ada%40example.org", "%25", depth) for depth in (1, 2, 5, 30)),
    *(nested("ada&#64;example.org", "&amp;", depth) for depth in (1, 6, 30)),
    nested("ada\\u0040example.org", "\\\\", 4),
    "ada%26amp%3B%2364%3Bexample.org",
    *("ada=40example.org", "ada=40example=2eorg", "ada=40exam=\nple.org", "ada=401and1.com"),
    *("ada=40163.com", "ada=40126.com", "ada=40189.cn", "ada=40163=2Ecom", "ada=4020.mail.co.uk"),
    *(nested("ada=40example.org", "=3D", depth) for depth in (1, 2, 5, 30)),
    *(
        "ada=3D40163=3D2Ecom",
        "ada=3D3D40example.org",
        "ada=40[192.168.0.1]",
        "ada\\134100example.org",
    ),
    *(
        nested(text.replace(" ", separator), "=3D", depth)
        for text in ("4242 4242 4242 4242", "3782 822463 10005", IBAN, UK_IBAN, "+1 415 555 2671")
        for separator in (
            "=20",
            "=2C=20",
            "=2D",
            "=A0",
            "=0D=0A",
            "<br>",
            "</td><td>",
            "&lt;br/&gt;",
        )
        for depth in (0, 1, 3)
    ),
    *("DE89=203704=200044=200532=200130=2000=20", "=2B14155552671", "=28415=29=20555=2D2671"),
    *("ada@[IPv6:2001:db8::1]", "ada@[ipv6:::1]", "ada&#64;[IPv6:2001:db8::1]"),
    *(escaped(one, "\\%o") for one in (ADDRESS, CARD, ACCOUNT)),
    *("ada@example\\56org", "4242\\55\\64\\62\\64\\62-4242-4242"),
    *(f"4242{word}4242{word}4242{word}4242" for word in (" and ", " x ", "x", ", then ", " und ")),
    *(f"3782{word}822463{word}10005" for word in (" and ", " x ")),
    *(
        "ada @ example . org",
        "ada @ mail . example . org",
        "ada@example . com",
        "ada(a)example.org",
    ),
    *("ada\\40 example.org", "ada\\000040example.org", "ada\\40 example\\2e org"),
    *(f"ada&#{'0' * zeros}64;example.org" for zeros in (1, 10, 4400)),
    *(f"ada&#x{'0' * zeros}40;example.org" for zeros in (1, 10, 4400)),
    *("ada\\u{0000000040}example.org", "ada\\o{0000000100}example.org"),
    "ada\\N{U+0000000040}example.org",
    *("ada<b>@</b>example.org", "ada@exam<wbr>ple.org", "ada<!-- at -->@example.org"),
    *(
        "<b>4242</b><i>4242</i> 4242 4242",
        '<p class="n">4242</p>\n<p>4242</p><p>4242</p><p>4242</p>',
    ),
    *("ada\\100example.org", "ada\\100example\\056org", "ada\\o{100}example.org"),
    *("ada\\x{40}example.org", "ada\\U00000040example.org", "ada%u0040example.org"),
    *("ada\\N{COMMERCIAL AT}example.org", "ada\\N{U+0040}example.org"),
    *(escaped(one, form) for one in (ADDRESS, CARD, ACCOUNT) for form in ("=%02X", "\\%03o")),
    *("\u0130NFO@\u015e\u0130RKET.COM.TR", "\u0131\u015f\u0131l@example.org"),
    *(sep.join(CARD) for sep in (",", ", ", "-", " - ", "\n", " | ", '", "', "; ", " / ")),
    *(str(list(one)) for one in (CARD, ACCOUNT)),
    str([int(one) for one in CARD]),
    *("[4242, 4242, 4242, 4242]", '["4242", "4242", "4242", "4242"]', "4242,4242,4242,4242"),
    *("[42, 42424242424242]", '["42", "42424242424242"]', "42 42424242424242", "42-42424242424242"),
    *("42424242, 42424242", "(42), (42), (42), (42), (42), (42), (42), (42)"),
    *("[3782, 822463, 10005]", "3782,822463,10005", "3, 7, 8, 2, 8, 2, 2, 4, 6, 3, 1, 0, 0, 0, 5"),
    *('["+1", "415", "555", "2671"]', "+1,4,1,5,5,5,5,2,6,7,1", str(list("+14155552671"))),
]


@pytest.mark.parametrize("text", FORMS)
@pytest.mark.parametrize("around", ["{}", "Send it to {} today.", '{{"note": "{}", "n": 7}}'])
def test_private_text_in_escapes_and_lists(text: str, around: str) -> None:
    hidden = Vault().hide(around.format(text))
    assert re.search(r"\[(?:EMAIL|CARD|PHONE|IBAN)_\d+\]", hidden)
    rest = re.sub(r"\[[A-Z]+_\d+\]", "", hidden)
    assert sum(char.isdigit() for char in rest) < 4
    assert "org" not in rest


ORDINARY = r"""
x = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]; y = x[4:2] + x[::-1]
for i in range(40): total=40.5; width=40px; img=40x40.png; rate=4012.50; price=4025.75
matrix = [[4, 2, 4], [2, 4, 2], [4, 2, 4]]; primes = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37]
"C:\100example\101.txt" r"\1 \100" '\x41' s.replace("\n", "") 1,234,567,890 2,125,551,234
2026/11/28T00:00:00Z v1.2.3-rc.4 192.168.0.1:8080 10.0.0.0/8 3.14159265358979
color: #404040; a=b==c; key=4f3a9c; uuid=123e4567-e89b-12d3-a456-426614174000
fib = 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144; box=(212, 100, 640, 480); a=0x4242; c=4e2
@decorator def f(a: int=40) -> None: pass; foo@bar; git@v1; user=40; a&b; 100% sure; 50%25 off
bytes: 48 65 6c 6c 6f; 0,1,0,1,1,0,1,0,0,1,1,1,0,1,0; scores 5-4, 3-2, 4-4, 2-1, 3-3, 5-1
x=20 y=204242; if a==20: b=3D40; for x=2020, y=2021, z=2022; id=20261129164653&p1=2020&p2=2021
1+1=2; 4242+4242=8484; 12=2012, 13=2013, 14=2014; t1=2024-11-28 12:30:05 a1=20261129T164653
img=4012.png; w=401.5px; rate=4012.50; t=40123.5ms; f(a)g(b); f(a)2.5; (a) v1.2 or (b) v1.3; z=2B1
a @ b; x @ w . t; home @ 5 . Then; 1920 x 1080 x 24; 1990 and 1991 and 1992 and 1993; 40x40x40x40
C:\data\40 days.txt \1\2 \62 \4242 List<int> Map<String, List<int>> a<b>c 1<x && y>2 `a<b`
<table><tr><td>12</td><td>3456</td><td>789</td><td>2024</td><td>1.5</td></tr></table> x<sup>2</sup>
<td>4242</td><td>4242</td><td>17</td> <li>1200</li><li>1300</li><li>1400</li><li>1500</li>
rows: 1; 20; 300; 4000; 50000; ISBN 978-3-16-148410-0; t=4.5, 5.5, 6.25, 7.125; q=4.25,3.5
"""


def test_ordinary_text_stays() -> None:
    for line in ORDINARY.splitlines():
        assert Vault().hide(line) == line


@pytest.mark.parametrize("second", range(60))
def test_times_are_no_cards(second: int) -> None:
    """A tenth of them have a correct check digit."""
    text = f"2024-11-28 12:30:{second:02} 2024-11-28T12:31:{second:02}"
    assert Vault().hide(text) == text


def test_other_capitals_of_turkish_texts() -> None:
    hidden = Vault().hide("<private>Diyarbak\u0131r</private> D\u0130YARBAKIR diyarbakir")
    assert "YARBAKIR" not in hidden
    assert "diyarbakir" not in hidden

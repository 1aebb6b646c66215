/**
 * Normalised copies of a text, with a map from each character to its place in the text
 * (`moaspec_core/privacy/folding.py`). All indices count UTF-16 units, as strings do.
 *
 * Compatibility forms, capitals, digits of other scripts, white space, dashes, quotation marks and
 * angle brackets become the usual ones; accents and invisible characters are removed. In a second
 * copy the escapes of JSON, HTML, URLs and Markdown are decoded, in a third one also those of mails
 * (quoted-printable), octal numbers and CSS, which ordinary text contains by chance. Further copies
 * have no HTML tags.
 */
import { decodeHTML } from "entities/decode";

/** A set of characters, and what replaces each. */
const REPLACEMENTS: ReadonlyMap<string, string> = new Map(
  (
    [
      ["\u2212\u2043", "-"],
      ["\u2044\u2215", "/"],
      ["\u2018\u2019\u201b\u2032\u02bc\u02b9`", "'"],
      ["\u2039\u2329\u3008\u27e8\u276c\u276e\u02c2\u227a\u29fc\u1438", "<"],
      ["\u203a\u232a\u3009\u27e9\u276d\u276f\u02c3\u227b\u29fd\u1433", ">"],
      ["\u2800", " "],
      ["\u0131", "i"], // the small letter of a Turkish capital I
      ["\u0237", "j"],
    ] as const
  ).flatMap(([chars, to]) => [...chars].map((char): [string, string] => [char, to])),
);
const SPACE = /[\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]/u;
const MARK = /^\p{M}/u;
/** Accents, format and control characters, and fillers. */
const UNSEEN = /[\p{M}\p{Cf}\p{Cc}\u034f\u115f\u1160\u17b4\u17b5]/u;
const DIGIT = /^\p{Nd}/u;
const DASH = /\p{Pd}/u;

const ESCAPE = new RegExp(
  // Escapes of the first character of escapes, nested in any depth.
  String.raw`%(?:25)+(?=[0-9a-fA-F]{2})|&(?:[aA][mM][pP];)+` +
    String.raw`|\\U[0-9a-fA-F]{8}|(?:[\\%][uU][0-9a-fA-F]{4})+|\\[uUxX]\{0*[0-9a-fA-F]{1,8}\}|\\[xX][0-9a-fA-F]{2}` +
    String.raw`|\\[nN]\{[\w +\-]{1,90}\}|(?:%[0-9a-fA-F]{2})+` +
    String.raw`|&(?:#0*[0-9]{1,8}|#[xX]0*[0-9a-fA-F]{1,8}|[a-zA-Z][a-zA-Z0-9]{1,31});?` +
    String.raw`|\\[nrtNRT]|\\(?=[!-/:-@\[-${"`"}{-~])|[*${"`"}]+|~~|__`,
  "gu",
);
const WORD = String.raw`\p{L}\p{N}_`;
const SEPARATOR = "=(?:0[9ad]|2[0-9a-f]|3[ab]|5f|7c|a0)";
const TOP = "com|org|net|edu|gov|mil|int|info|biz|name|mobi|asia|online|shop|site|club|top|vip|xyz|app|dev|[a-z]{2}";
/** Not before names of files or numbers with units. */
const NO_ADDRESS =
  String.raw`(?![${WORD}.\-]{1,200}\.(?:avif|bmp|css|csv|docx?|gif|gz|html?|ini|jpe?g|js|json|log|mp[34]|pdf|png` +
  String.raw`|pptx?|svg|tar|ts|txt|webp|xlsx?|xml|ya?ml|px|em|ms|kb|gb|vw|vh)(?!\.?[${WORD}\-]))`;
/** Quoted-printable, CSS and octal numbers. A number in code (`width=40`) mostly is none of these. */
const RARE_ESCAPE = new RegExp(
  // Quoted-printable applied more than once, and runs.
  String.raw`=\r?\n|=(?:3d)+(?=[02-7a-f][0-9a-f])|(?:=(?:0[9ad]|[2-7a-f][0-9a-f])){2,}` +
    // At-signs before a domain; one that begins with digits needs a usual end.
    String.raw`|=40(?=\[(?:ipv6:)?[0-9a-f.:]{3,45}\])|=40(?=[0-9]{0,3}\p{L})(?!x[0-9]|px)` +
    String.raw`|=40(?=[0-9][${WORD}\-]{0,62}(?:(?:\.|=2e)[${WORD}\-]{1,63}){0,8}(?:\.|=2e)(?:${TOP})(?![${WORD}\-]))` +
    NO_ADDRESS +
    // Other characters; before a digit only between groups of digits, or in a telephone number.
    String.raw`|=(?:2[0-9a-f]|3[a-f]|4[1-9a-f]|[5-7][0-9a-f]|a0)(?![0-9])|=2b(?=[0-9])` +
    String.raw`|${SEPARATOR}(?=[0-9]{1,7}${SEPARATOR})` +
    String.raw`|(?:(?<=${SEPARATOR}[0-9]{1,7})|(?<=\+[0-9]{1,3}))${SEPARATOR}(?=[0-9])` +
    // CSS and octal numbers.
    String.raw`|\\(?:(?:0{2,4})?(?:40|2e)[ ]|0000(?:40|2e))(?=[${WORD}\-])${NO_ADDRESS}` +
    String.raw`|\\(?:[0-3][0-7]{2}|[4-7][0-7](?![0-7])|o\{0*[0-7]{1,7}\})`,
  "giu",
);
const NO_SPACE =
  "a|abbr|b|bdi|bdo|big|code|del|em|font|i|ins|kbd|mark|nobr|q|s|samp|small|span|strong|sub|sup|tt|u|var|wbr";
const INLINE_TAG = new RegExp(
  String.raw`<!--.{0,300}?-->|</?(?:${NO_SPACE})(?:\s[^<>]{0,300})?/?>`,
  "gisu",
);
const BLOCK_TAGS = /(?:\s{0,20}<\/?[a-z][a-z0-9:\-]{0,30}(?:\s[^<>]{0,300})?\/?>\s{0,20})+/giu;
/** The characters of addresses and numbers by name; the browser has no table of all names. */
const NAMED: ReadonlyMap<string, string> = new Map([
  ["COMMERCIAL AT", "@"],
  ["FULL STOP", "."],
  ["HYPHEN-MINUS", "-"],
  ["LOW LINE", "_"],
  ["PLUS SIGN", "+"],
  ["SPACE", " "],
  ...["ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE"].map(
    (name, value): [string, string] => [`DIGIT ${name}`, String(value)],
  ),
]);
/** What HTML gives to no character. */
const NO_CHARACTER = /[\x01-\x08\x0b\x0e-\x1f\x7f-\x9f\p{Noncharacter_Code_Point}]/gu;
/** Passes that decode escapes within escapes. */
const DECODINGS = 8;
const MAX_CODE = 0x10ffff;

/** A normalised copy of a text. */
export class FoldedText {
  /**
   * @param text the copy
   * @param starts, stops range in the source of each unit of the copy; both ascend
   * @param source the original text
   */
  constructor(
    readonly text: string,
    readonly starts: readonly number[],
    readonly stops: readonly number[],
    readonly source: string,
  ) {}

  /** Range in the source of units `start` to `stop - 1`, with their accents. */
  span(start: number, stop: number): [start: number, stop: number] {
    let end = this.stops[stop - 1]!;
    for (let char = charAt(this.source, end); MARK.test(char); char = charAt(this.source, end)) {
      end += char.length;
    }
    return [this.starts[start]!, end];
  }
}

/** The folded text, and copies without escapes, emphasis and tags if it has any. */
export function foldedCopies(text: string): FoldedText[] {
  const read = unfolded(text);
  const plain = withoutEscapes(read);
  const rare = withoutRareEscapes(plain);
  const copies = [folded(read)];
  if (plain !== read) copies.push(folded(plain));
  if (rare !== plain) copies.push(folded(rare));
  for (const one of new Set([plain, rare])) {
    const untagged = replaced(replaced(one, INLINE_TAG, () => ""), BLOCK_TAGS, () => ";");
    if (untagged.text !== one.text) copies.push(folded(untagged));
  }
  return copies;
}

/** Fold a text without its escapes and emphasis. */
export function plainCopy(text: string): FoldedText {
  return folded(withoutEscapes(unfolded(text)));
}

function withoutEscapes(read: FoldedText): FoldedText {
  let plain = read;
  for (let i = 0; i < DECODINGS; i++) {
    const decoded = decode(plain, ESCAPE);
    if (decoded.text === plain.text) break;
    plain = decoded;
  }
  return plain;
}

function withoutRareEscapes(read: FoldedText): FoldedText {
  let plain = read;
  for (let i = 0; i < DECODINGS; i++) {
    const decoded = decode(plain, RARE_ESCAPE);
    if (decoded.text === plain.text) break;
    plain = withoutEscapes(decoded);
  }
  return plain;
}

/** Fold a text without decoding its escapes. */
export function fold(text: string): FoldedText {
  return folded(unfolded(text));
}

/** Make an unchanged copy of a text. */
export function unfolded(text: string): FoldedText {
  const starts: number[] = [];
  const stops: number[] = [];
  let place = 0;
  for (const char of text) {
    for (let i = 0; i < char.length; i++) {
      starts.push(place);
      stops.push(place + char.length);
    }
    place += char.length;
  }
  return new FoldedText(text, starts, stops, text);
}

function folded(read: FoldedText): FoldedText {
  const known = new Map<string, string>();
  const starts: number[] = [];
  const stops: number[] = [];
  let text = "";
  let place = 0;
  for (const char of read.text) {
    let found = known.get(char);
    if (found === undefined) known.set(char, (found = foldCharacter(char)));
    for (const one of found) {
      if (one === " " && text.endsWith(" ")) continue;
      text += one;
      for (let i = 0; i < one.length; i++) {
        starts.push(read.starts[place]!);
        stops.push(read.stops[place]!);
      }
    }
    place += char.length;
  }
  return new FoldedText(text, starts, stops, read.source);
}

/** Decode escapes; each decoded character maps to the whole escape. */
function decode(read: FoldedText, escapes: RegExp): FoldedText {
  return replaced(read, escapes, decodeEscape);
}

/** Replace what a pattern finds; each new unit maps to all of it. */
function replaced(read: FoldedText, pattern: RegExp, replacement: (found: string) => string): FoldedText {
  const parts: string[] = [];
  const starts: number[] = [];
  const stops: number[] = [];
  let place = 0;
  const copy = (end: number) => {
    parts.push(read.text.slice(place, end));
    for (; place < end; place++) {
      starts.push(read.starts[place]!);
      stops.push(read.stops[place]!);
    }
  };
  for (const { 0: found, index } of read.text.matchAll(pattern)) {
    copy(index);
    const fresh = replacement(found);
    parts.push(fresh);
    place = index + found.length;
    for (let i = 0; i < fresh.length; i++) {
      starts.push(read.starts[index]!);
      stops.push(read.stops[place - 1]!);
    }
  }
  copy(read.text.length);
  return new FoldedText(parts.join(""), starts, stops, read.source);
}

/** Decode one escape; emphasis and a backslash before punctuation are dropped. */
function decodeEscape(escape: string): string {
  if (/^=(?:3d)+$/i.test(escape)) return "=";
  if (escape[0] === "=") return fromBytes(escape.trim().slice(1).split("="));
  if (escape[0] === "&") return htmlCharacter(escape);
  if (/^(?:\\[ux]|%u)/i.test(escape)) {
    return fromCodes(escape.replace(/[\\%][ux]|[{}]/gi, " ").trim().split(/ +/), 16);
  }
  if (/^\\N\{/i.test(escape)) return namedCharacter(escape.slice(3, -1).toUpperCase());
  if (escape[0] === "%") return /^%(?:25)+$/.test(escape) ? "%" : fromBytes(escape.slice(1).split("%"));
  if (escape[0] !== "\\" || escape.length === 1) return "";
  const css = /^\\(?:0{0,4}(40|2e) |0000(40|2e))$/i.exec(escape);
  if (css) return fromCodes([css[1] ?? css[2]!], 16);
  return escape.length === 2 ? " " : fromCodes(escape.match(/[0-7]+/g)!, 8);
}

function htmlCharacter(escape: string): string {
  if (/^&(?:amp;)+$/i.test(escape)) return "&";
  const short = escape.replace(/(?<=#x?)0+(?=[0-9a-f])/i, "");
  return decodeHTML(short.endsWith(";") ? short : `${short};`).replace(NO_CHARACTER, "");
}

/** The character of a name or number; nothing for an unknown name. */
function namedCharacter(name: string): string {
  const code = /^U\+0*([0-9A-F]{1,8})/.exec(name)?.[1];
  return code ? fromCodes([code], 16) : (NAMED.get(name) ?? "");
}

function fromBytes(digits: readonly string[]): string {
  const bytes = Uint8Array.from(digits.filter(Boolean), (one) => Number.parseInt(one, 16));
  return new TextDecoder("utf-8", { ignoreBOM: true }).decode(bytes);
}

function fromCodes(digits: readonly string[], base: number): string {
  const text = digits.map((code) => String.fromCodePoint(Math.min(Number.parseInt(code, base), MAX_CODE)));
  // Halves of surrogate pairs become U+FFFD.
  return new TextDecoder("utf-8", { ignoreBOM: true }).decode(new TextEncoder().encode(text.join("")));
}

/** Fold a character: into several for a ligature, into none for an accent. */
function foldCharacter(char: string): string {
  const found = [...char.normalize("NFKD")].map(caseFolded).join("").normalize("NFKD");
  return [...found].map((one) => REPLACEMENTS.get(one) ?? foldDecomposed(one)).join("");
}

/** One form of all letters that differ in case only; a dotless i keeps its own. */
function caseFolded(char: string): string {
  return char === "\u0131" ? char : char.toLowerCase().toUpperCase().toLowerCase();
}

function foldDecomposed(char: string): string {
  if (SPACE.test(char)) return " ";
  if (UNSEEN.test(char)) return "";
  if (DIGIT.test(char)) return decimal(char);
  return DASH.test(char) ? "-" : char;
}

/** Value of a decimal digit: scripts have their ten digits in a row. */
function decimal(char: string): string {
  const code = char.codePointAt(0)!;
  let first = code;
  while (DIGIT.test(String.fromCodePoint(first - 1))) first--;
  return String((code - first) % 10);
}

/** The character at an index; empty at the end. */
function charAt(text: string, index: number): string {
  const code = text.codePointAt(index);
  return code === undefined ? "" : String.fromCodePoint(code);
}

/**
 * Recognisers of e-mail addresses, telephone numbers, payment cards and bank accounts
 * (`moaspec_core/privacy/recognisers.py`).
 *
 * They find text by its form; cards and IBANs also need correct check digits. They cannot recognise
 * names, streets or diagnoses: users mark these.
 */
import { countrySpecs } from "ibantools";
import { findPhoneNumbersInText, isSupportedCountry, parsePhoneNumberFromString } from "libphonenumber-js/max";
import type { CountryCode, PhoneNumber } from "libphonenumber-js/max";
import { InputError } from "../errors.js";
import { FoldedText, foldedCopies, unfolded } from "./folding.js";
import { Span } from "./spans.js";

/** A function that finds private spans in a text. */
export type Recogniser = (text: string) => Iterable<Span>;
type Place = readonly [start: number, stop: number];

const AT = / @ |@ ?| ?[[({<] ?(?:at|@) ?[\])}>] ?|(?<=[\p{L}\p{N}])\(a\)(?=\p{L})/gu;
const LABEL = String.raw`[\p{L}\p{N}_\-]+`;
const DOT = String.raw`(?:[.\u3002]| ?[\[\(\{<] ?(?:dot|\.) ?[\]\)\}>] ?)`;
const TOP = "com|org|net|edu|gov|mil|info|biz|io|dev|app|eu|de|fr|nl|ch|uk|jp|cn|pl|dk|cz|ru|au|ca";
const DOMAIN = new RegExp(
  // With spaces around dots only before usual ends: a sentence may begin there.
  String.raw`${LABEL}(?: ?\. ?${LABEL}){0,4} \. (?:${TOP})(?![\p{L}\p{N}_\-])` +
    String.raw`|${LABEL}(?:${DOT}${LABEL})+|${LABEL}(?: ?\.|\. )${LABEL}` +
    String.raw`|\[(?:ipv6:)?[0-9a-f.:]{3,45}\]`,
  "uy",
);
const QUOTED = /"[^"@]{1,64}"$/u;
const IN_LOCAL = /[\p{L}\p{N}_.!#$%&'*+/=?^`{|}~-]/u;
/** Most characters of an address before the at-sign. */
const MAX_LOCAL = 256;

/** Separators between groups of digits. */
const NEAR = String.raw`[ ./:_|\u00b7\u2022\-]{0,3}`;
const NO_LETTER = String.raw`[^\p{L}\p{N}]`;
/** Separators between the groups of a card or the letters of an account. */
const FAR = `${NO_LETTER}{0,4}`;
const DIGITS = new RegExp(`[0-9](?:${NEAR}[0-9])*`, "gu");
const CARD_LENGTHS = { least: 12, most: 19 };
/** No card begins so, and dates do. */
const CENTURY = /^(?:19|20)/;
const DATE = new RegExp(
  String.raw`(?<!\d)(?:19|20)\d\d([\-/.])(?:0?[1-9]|1[0-2])\1(?:[0-2]?\d|3[01])(?!\d)` +
    String.raw`(?:[t ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?)?`,
  "gu",
);
/** Numbers with anything but letters and digits between them, such as the elements of a list. */
const LISTED = new RegExp(
  String.raw`(?<!LETTER)\d{1,16}(?:NO{1,6}\d{1,16})+(?!LETTER)`
    .replaceAll("NO", NO_LETTER)
    .replaceAll("LETTER", String.raw`[\p{L}\p{N}]`),
  "gu",
);
const SINGLE = new RegExp(
  String.raw`(?<!LETTER)\d(?!LETTER)(?:NO{1,6}\d(?!LETTER))+`
    .replaceAll("NO", NO_LETTER)
    .replaceAll("LETTER", String.raw`[\p{L}\p{N}]`),
  "gu",
);
/** Characters of a listed card, and one more at least. */
const MAX_LISTED = 160;
/**
 * Numbers of the large card companies, which begin with theirs. Digits of a list are a card only
 * with such a number: lists of numbers are common.
 */
const BRANDS = new RegExp(
  String.raw`^(?:4(?:\d{12}|\d{15}|\d{18})|3[47]\d{13}|3(?:0[0-5]|[689]\d)\d{11}|35\d{14}` +
    String.raw`|(?:5[1-5]\d\d|222[1-9]|22[3-9]\d|2[3-6]\d\d|27[01]\d|2720)\d{12}` +
    String.raw`|6(?:011|4[4-9]\d|5\d\d|2\d\d)\d{12,15})$`,
);
const CARD_GROUPS = new RegExp(
  String.raw`(?=(\d{4}(?:FAR\d{4}){3}(?:FAR\d{3})?|\d{4}FAR\d{6}FAR\d{4,5}))`.replaceAll("FAR", `${NO_LETTER}{1,4}`),
  "gu",
);
/** Groups with the same word between them, such as "and". */
const WORDED = new RegExp(
  String.raw`(?<![0-9])(?:[0-9]{4}(WORD)[0-9]{4}(?:\1[0-9]{4}){2}|[0-9]{4}(WORD)[0-9]{6}\2[0-9]{5})(?![0-9])`.replaceAll(
    "WORD",
    "[^a-z0-9]{0,3}[a-z]{1,5}[^a-z0-9]{0,3}",
  ),
  "gu",
);
const CARDS_IN_A_ROW = /(?<!\d)(?:\d{16}){2,}(?!\d)/gu;
const IBAN = new RegExp(`(?=([a-z]${FAR}[a-z](?:${FAR}[0-9]){2}(?:${FAR}[a-z0-9]){11,30}))`, "gu");
const IBAN_LENGTHS = { least: 15, most: 34 };

/** Find e-mail addresses, also international ones. */
export function emails(text: string): Span[] {
  const places: Place[] = [];
  for (const copy of foldedCopies(text)) {
    for (const { 0: at, index } of copy.text.matchAll(AT)) {
      DOMAIN.lastIndex = index + at.length;
      const domain = DOMAIN.exec(copy.text);
      const start = localStart(copy.text, index);
      if (domain && start < index) places.push(copy.span(start, domain.index + domain[0].length));
    }
  }
  return spans(places, "EMAIL");
}

/** Find the start of the part before an at-sign. */
function localStart(text: string, end: number): number {
  const chars = [...text.slice(Math.max(end - MAX_LOCAL, 0), end)];
  let start = end;
  while (chars.length && IN_LOCAL.test(chars.at(-1)!)) start -= chars.pop()!.length;
  const quoted = start === end ? QUOTED.exec(text.slice(Math.max(end - 66, 0), end)) : null;
  return quoted ? end - quoted[0].length : start;
}

/**
 * Find payment card numbers: 12 to 19 digits, in groups or not, with a correct check digit. Other
 * digits may surround them, such as an expiry date, so every range of groups is tried.
 */
export function cards(text: string): Span[] {
  const places: Place[] = [];
  for (const copy of foldedCopies(text)) {
    const undated = copy.text.replace(DATE, (date) => "d".repeat(date.length));
    for (const { 0: digits, index } of undated.matchAll(DIGITS)) {
      for (const [start, stop] of cardRanges(digits)) places.push(copy.span(index + start, index + stop));
    }
    for (const { 1: found, index } of copy.text.matchAll(CARD_GROUPS)) {
      if (hasCheckDigit(digitsOf(found!))) places.push(copy.span(index, index + found!.length));
    }
    for (const { 0: found, index } of [LISTED, SINGLE, WORDED].flatMap((form) => [...copy.text.matchAll(form)])) {
      const digits = digitsOf(found.slice(0, MAX_LISTED));
      if (BRANDS.test(digits) && hasCheckDigit(digits)) places.push(copy.span(index, index + found.length));
    }
    for (const { 0: found, index } of copy.text.matchAll(CARDS_IN_A_ROW)) {
      if (found.match(/\d{16}/g)!.every(hasCheckDigit)) places.push(copy.span(index, index + found.length));
    }
  }
  return spans(places, "CARD");
}

/** Ranges of consecutive groups that are a card number. */
function cardRanges(text: string): Place[] {
  const { least, most } = CARD_LENGTHS;
  const groups = [...text.matchAll(/\d+/g)].map(({ 0: group, index }) => ({ group, index }));
  const found: Place[] = [];
  groups.forEach(({ index: start }, first) => {
    let digits = "";
    for (const { group, index } of groups.slice(first, first + most)) {
      digits += group;
      if (digits.length > most || CENTURY.test(digits)) break;
      if (digits.length >= least && hasCheckDigit(digits)) found.push([start, index + group.length]);
    }
  });
  return found;
}

/** Luhn's check: every second digit from the right counts twice. */
function hasCheckDigit(digits: string): boolean {
  const values = [...digits].reverse().map((digit, i) => (i % 2 ? 2 : 1) * Number(digit));
  return values.reduce((sum, value) => sum + (value > 9 ? value - 9 : value), 0) % 10 === 0;
}

/**
 * Find international bank account numbers with correct length and check digits. A number may begin
 * inside other text that has the form of one.
 */
export function ibans(text: string): Span[] {
  const places: Place[] = [];
  for (const copy of foldedCopies(text)) {
    for (const { 1: found, index } of copy.text.matchAll(IBAN)) {
      const own = [...found!.matchAll(/[a-z0-9]/g)].map((one) => index + one.index);
      const number = own.map((place) => copy.text[place]).join("").toUpperCase();
      // Words that follow have the same characters: the longest valid number counts.
      const size = checkedSizes(number).find((length) => isAccount(number.slice(0, length)));
      if (size !== undefined) places.push(copy.span(own[0]!, own[size - 1]! + 1));
    }
  }
  return spans(places, "IBAN");
}

/** Whether a number has the form that its country gives to accounts. */
function isAccount(number: string): boolean {
  const form = countrySpecs[number.slice(0, 2)]?.bban_regexp;
  return Boolean(form) && new RegExp(form!).test(number.slice(4));
}

/** Lengths with correct check digits (ISO 7064, modulo 97), longest first. */
function checkedSizes(number: string): number[] {
  const { least, most } = IBAN_LENGTHS;
  const value = (char: string) => Number.parseInt(char, 36);
  const head = Number([...number.slice(0, 4)].map(value).join(""));
  const found: number[] = [];
  let rest = 0;
  [...number].forEach((char, i) => {
    if (i < 4) return;
    rest = (rest * (value(char) < 10 ? 10 : 100) + value(char)) % 97;
    const isChecked = (rest * 10 ** 6 + head) % 97 === 1;
    if (isChecked && i + 1 >= least && i + 1 <= most) found.unshift(i + 1);
  });
  return found;
}

/** Separators that the library of telephone numbers does not accept between digits. */
const SPACED = /[_|\u00b7\u2022\\'*[\]{}]/g;
const INTERNATIONAL = new RegExp(String.raw`(?:\+|(?<![0-9:.,])00)((?:${FAR}[0-9]){7,15})`, "gu");

/** Find numbers with a country's prefix and any separators. */
function internationalNumbers(text: string): Place[] {
  const found: Place[] = [];
  for (const { 0: whole, 1: number, index } of text.matchAll(INTERNATIONAL)) {
    const ends = [...number!.matchAll(/\d+/g)].map((group) => group.index + group[0].length);
    const end = ends.reverse().find((one) => isPhone(digitsOf(number!.slice(0, one))));
    if (end !== undefined) found.push([index, index + whole.length - number!.length + end]);
  }
  return found;
}

function isPhone(digits: string): boolean {
  return digits.length >= 7 && (parsePhoneNumberFromString(`+${digits}`)?.isValid() ?? false);
}

/** Whether a found number has the prefix that its country writes before national numbers, or its own. */
function isWhole(found: string, number: PhoneNumber): boolean {
  const { nationalNumber, countryCallingCode } = number;
  const national = digitsOf(number.format("NATIONAL", { nationalPrefix: false })); // false: no optional one
  if (!national.endsWith(nationalNumber)) return true;
  const prefix = national.slice(0, -nationalNumber.length);
  const digits = digitsOf(found);
  return digits.startsWith(prefix) || found.includes("+") || digits.includes(countryCallingCode + nationalNumber);
}

/**
 * Make a recogniser of valid telephone numbers.
 *
 * @param regions two-letter codes of countries whose national forms are found; numbers that begin
 *     with a plus are found for all countries
 * @throws InputError an unknown code
 */
export function phones(regions: readonly string[] = ["US"]): Recogniser {
  const unknown = regions.filter((region) => !isSupportedCountry(region));
  if (unknown.length) {
    throw new InputError(`Unknown telephone regions ${unknown.join(", ")}: use two-letter codes, as US, DE.`);
  }
  const countries = regions.length ? (regions as CountryCode[]) : [undefined];
  return (text) => {
    // Folding joins lines, so the original text is searched too.
    const read = foldedCopies(text);
    const spaced = read.map((one) => new FoldedText(one.text.replace(SPACED, " "), one.starts, one.stops, one.source));
    const texts = new Map([...read, ...spaced, unfolded(text)].map((one) => [one.text.toLowerCase(), one]));
    const places = read.flatMap((one) => internationalNumbers(one.text).map((place) => one.span(...place)));
    for (const defaultCountry of countries) {
      for (const one of texts.values()) {
        const options = defaultCountry ? { defaultCountry } : {};
        for (const { startsAt, endsAt, number } of findPhoneNumbersInText(one.text, options)) {
          if (isWhole(one.text.slice(startsAt, endsAt), number)) places.push(one.span(startsAt, endsAt));
        }
      }
    }
    return spans(places, "PHONE");
  };
}

/** Make all recognisers of this module; see `phones`. */
export function defaultRecognisers(phoneRegions: readonly string[] = ["US"]): Recogniser[] {
  return [ibans, cards, emails, phones(phoneRegions)];
}

function digitsOf(text: string): string {
  return text.replace(/[^0-9]/g, "");
}

/** Spans of these places, ascending, each once. */
function spans(places: readonly Place[], kind: string): Span[] {
  const sorted = [...places].sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  const isNew = ([start, stop]: Place, i: number) => start !== sorted[i - 1]?.[0] || stop !== sorted[i - 1]?.[1];
  return sorted.filter(isNew).map(([start, stop]) => new Span(start, stop, kind));
}

/** Private spans of a text, and the marks that set them (`moaspec_core/privacy/spans.py`). */
import { InputError } from "../errors.js";
import { plainCopy } from "./folding.js";
import type { FoldedText } from "./folding.js";

export const MARKED = "PRIVATE";
const [OPEN, CLOSE] = ["<private>", "</private>"];
const WORD = [..."private"].join(" ?");
/** Text that looks like a mark in a folded text; only the correct form is accepted. */
const TAG = new RegExp(
  String.raw`<(?<before>[ /\\!?#|$%&~+=]{0,8}(?:[\p{L}\p{N}_]{1,16}[:.])?)` +
    String.raw`(?<name>${[..."private"].join("[ ._\\-]?")})(?![\-_]*[\p{L}\p{N}])(?<end> ?>)?`,
  "gu",
);
/** A mark in other brackets, reversed, misspelt or incomplete. */
const NO_TAG = new RegExp(
  String.raw`[\[\{\(\u00ab] ?[\/\\] ?${WORD} ?[\]\}\)\u00bb]|> ?[\/\\] ?${WORD} ?<|etavirp` +
    String.raw`|<[ \/\\]{0,8}(?<word>[\p{L}\p{N}]{5,10})[ \/\\]{0,3}>` +
    String.raw`|<[ \/\\]{0,8}p ?r ?i ?(?:v ?(?:a ?(?:t ?)?)?)?$`,
  "gu",
);
/** Cyrillic, Greek, dotless and phonetic letters, and digits and signs that replace letters. */
const LOOK_ALIKE: ReadonlyMap<string, string> = new Map(
  (
    [
      ["p", "\u1d18\u0440\u03c1\u2ca3"],
      ["r", "\u0280\u0433\u1d26"],
      ["i", "\u026a\u0456\u03b9\u0131\u0269\u04cf1!l|"],
      ["a", "\u1d00\u0430\u03b1\u0251@4"],
      ["e", "\u1d07\u0435\u0454\u03b5\u212e3"],
      ["t", "\u0442\u03c4\u1d1b7"],
      ["v", "\u0475\u03bd\u1d20\u2228"],
    ] as const
  ).flatMap(([to, chars]) => [...chars].map((char): [string, string] => [char, to])),
);
const KIND = /^[A-Z]{2,16}$/;

/** UTF-16 units `start` to `stop - 1` of a text. */
export class Span {
  /**
   * @param kind two to sixteen capitals; the server sees them
   * @throws InputError an empty span, or an invalid kind
   */
  constructor(
    readonly start: number,
    readonly stop: number,
    readonly kind: string = MARKED,
  ) {
    if (!(Number.isInteger(start) && Number.isInteger(stop) && 0 <= start && start < stop)) {
      throw new InputError(`A span needs 0 <= start < stop, got ${start} and ${stop}.`);
    }
    if (!KIND.test(kind)) {
      throw new InputError(`A span's kind is 2 to 16 capital letters, got ${JSON.stringify(kind)}.`);
    }
  }
}

/**
 * Remove the marks `<private>` and `</private>` of a text; returns the text and its spans.
 *
 * Capitals, spaces, full-width brackets, escapes and invisible characters in a mark are ignored.
 *
 * @throws InputError a mark has no partner, is inside another, or is misspelt. Nothing may be sent
 *     then, because the intended span is unknown.
 */
export function marked(text: string): [text: string, spans: Span[]] {
  let kept = "";
  const spans: Span[] = [];
  let place = 0;
  let start = -1;
  for (const tag of tags(text)) {
    if (tag.opens === start >= 0) {
      throw new InputError(
        `${JSON.stringify(text.slice(tag.start, tag.stop))} at character ${tag.start} has no ` +
          `partner: write ${OPEN}...${CLOSE}, one never inside another.`,
      );
    }
    kept += text.slice(place, tag.start);
    place = tag.stop;
    if (!tag.opens && start < kept.length) spans.push(new Span(start, kept.length));
    start = tag.opens ? kept.length : -1;
  }
  if (start >= 0) {
    throw new InputError(`${OPEN} is never closed; write ${CLOSE} where the private text ends.`);
  }
  return [kept + text.slice(place), spans];
}

interface Tag {
  readonly start: number;
  readonly stop: number;
  readonly opens: boolean;
}

/** Find the marks of a text in any spelling; see `marked`. */
function tags(text: string): Tag[] {
  const plain = plainCopy(text);
  // All look-alikes have one unit, as what they replace.
  const spelled = plain.text.replace(/[^\0]/gu, (char) => LOOK_ALIKE.get(char) ?? char);
  for (const { 0: found, index, groups } of spelled.matchAll(NO_TAG)) {
    const word = groups!["word"];
    if (word === undefined || isMisspelt(word)) throw refusal(plain, index, index + found.length);
  }
  return [...spelled.matchAll(TAG)].map(({ 0: found, index, groups }) => {
    const slash = groups!["before"]!.replaceAll(" ", "");
    const name = groups!["name"]!.replaceAll(" ", "");
    const isMark = groups!["end"] !== undefined && ["", "/"].includes(slash) && name === "private";
    if (!isMark) throw refusal(plain, index, index + found.length);
    const [start, stop] = plain.span(index, index + found.length);
    return { start, stop, opens: !slash };
  });
}

function refusal(plain: FoldedText, first: number, end: number): InputError {
  const [start, stop] = plain.span(first, end);
  return new InputError(
    `${JSON.stringify(plain.source.slice(start, stop))} at character ${start} looks like a mark of ` +
      `private text and is none: write ${OPEN}...${CLOSE}, or other words.`,
  );
}

/** Whether one letter is added, missing, wrong or swapped with the next. */
function isMisspelt(word: string): boolean {
  const right = "private";
  if (word === right) return false;
  const most = Math.min(word.length, right.length);
  let head = 0;
  while (head < most && word[head] === right[head]) head++;
  if (head === most) return Math.abs(word.length - right.length) === 1;
  const [rest, other] = [word.slice(head), right.slice(head)];
  const swapped = rest.length > 1 ? rest[1]! + rest[0]! + rest.slice(2) : rest;
  return [rest.slice(1), swapped].includes(other) || [rest, rest.slice(1)].includes(other.slice(1));
}

/**
 * Merge overlapping spans; the merged span has the kind of the first. Dropping one of two
 * overlapping spans would leave its rest readable.
 */
export function mergeSpans(spans: readonly Span[]): Span[] {
  const found: Span[] = [];
  for (const span of [...spans].sort((a, b) => a.start - b.start)) {
    const last = found.at(-1);
    if (!last || span.start >= last.stop) found.push(span);
    else found[found.length - 1] = new Span(last.start, Math.max(last.stop, span.stop), last.kind);
  }
  return found;
}

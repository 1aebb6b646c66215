/**
 * Finds known private texts in another text, in any spelling, in one pass
 * (`moaspec_core/privacy/known_texts.py`).
 */
import { InputError } from "../errors.js";
import { fold } from "./folding.js";
import type { FoldedText } from "./folding.js";
import { Span } from "./spans.js";

/** Private text of at most this length is found as a whole word only; many words contain it. */
const MAX_WHOLE_WORD = 3;
/** Private text of at least this length is found within words too, with any spacing. */
const MIN_INFIX = 8;
/** Limit of nested private texts that are checked per character, on average. */
const MAX_WORK = 64;

const SIGNIFICANT = /[\p{L}\p{N}]|(?![\0-\x7f])\p{S}/u;
const DIGIT = /[0-9]/;
/** Letters of scripts that write words without spaces. */
const WORD = /\p{Lo}/u;

/**
 * The letters, digits and symbols of a folded text, without separators.
 *
 * - chars: these characters
 * - places: range of each in the folded text
 * - breaks: number of separators before each. Those between digits do not count, because digits may
 *   be grouped in any way.
 * - edges: whether a word may begin at each; one more for the end
 */
interface LetterSequence {
  readonly chars: readonly string[];
  readonly places: readonly (readonly [start: number, stop: number])[];
  readonly breaks: readonly number[];
  readonly edges: readonly boolean[];
}

/** Extract the letters, digits and symbols of a folded text. */
function letters({ text }: FoldedText): LetterSequence {
  const chars: string[] = [];
  const places: [number, number][] = [];
  const breaks: number[] = [];
  const edges: boolean[] = [];
  let place = 0;
  let end = -1;
  for (const char of text) {
    if (SIGNIFICANT.test(char)) {
      const before = chars.at(-1) ?? "";
      const apart = place !== end;
      const changes = DIGIT.test(char) !== DIGIT.test(before);
      const digits = !changes && DIGIT.test(char);
      breaks.push((breaks.at(-1) ?? 0) + Number(apart && before !== "" && !digits));
      edges.push(apart || changes || WORD.test(char) || WORD.test(before));
      chars.push(char);
      end = place + char.length;
      places.push([place, end]);
    }
    place += char.length;
  }
  return { chars, places, breaks, edges: [...edges, true] };
}

/** One state of the automaton. */
class Node {
  /** Next state by character. */
  readonly after = new Map<string, Node>();
  /** Failure link: the state of the longest proper suffix. */
  shorter: Node | undefined;
  /** The private text that ends here. */
  ends: { readonly length: number; readonly breaks: Set<number>; readonly kind: string } | undefined;
  /** Output link: the state of the next shorter private text that ends here. */
  nextEnd: Node | undefined;
}

/** An Aho-Corasick automaton of private texts (Aho and Corasick, 1975). */
export class PrivateTextFinder {
  private readonly root = new Node();

  /** @param kinds kinds of private texts by text */
  constructor(kinds: ReadonlyMap<string, string>) {
    for (const [value, kind] of kinds) this.addText(letters(fold(value)), kind);
    this.link();
  }

  /**
   * Find private texts, also with other capitals, spacing, hyphenation or accents.
   *
   * @throws InputError too many private texts are parts of one another
   */
  find(folded: FoldedText): Span[] {
    const read = letters(folded);
    const found: Span[] = [];
    let node = this.root;
    let work = 0;
    read.chars.forEach((char, last) => {
      node = this.step(node, char);
      for (let ending = node.ends ? node : node.nextEnd; ending; ending = ending.nextEnd) {
        if (++work > MAX_WORK * (read.chars.length + MAX_WORK)) {
          throw new InputError("Too many of the private texts are parts of one another; mark fewer.");
        }
        const { length, breaks, kind } = ending.ends!;
        const first = last + 1 - length;
        if (!isMatch(read, first, last + 1, breaks)) continue;
        const [start, stop] = folded.span(read.places[first]![0], read.places[last]![1]);
        found.push(new Span(start, stop, kind));
        break; // the shorter ones are within
      }
    });
    return found;
  }

  private step(node: Node, char: string): Node {
    let from: Node | undefined = node;
    while (from && !from.after.has(char)) from = from.shorter;
    return from?.after.get(char) ?? this.root;
  }

  private addText({ chars, breaks }: LetterSequence, kind: string): void {
    if (!chars.length) return;
    let node = this.root;
    for (const char of chars) {
      const next = node.after.get(char) ?? new Node();
      node.after.set(char, next);
      node = next;
    }
    node.ends ??= { length: chars.length, breaks: new Set(), kind };
    node.ends.breaks.add(breaks.at(-1)!);
  }

  private link(): void {
    const waiting = [this.root];
    for (const node of waiting) {
      for (const [char, after] of node.after) {
        const shorter = node.shorter ? this.step(node.shorter, char) : this.root;
        after.shorter = shorter;
        after.nextEnd = shorter.ends ? shorter : shorter.nextEnd;
        waiting.push(after);
      }
    }
  }
}

/** Whether a range is whole words, long enough, or spaced like the private text. */
function isMatch(read: LetterSequence, start: number, end: number, breaks: ReadonlySet<number>): boolean {
  if (end - start >= MIN_INFIX || (read.edges[start] && read.edges[end])) return true;
  if (end - start <= MAX_WHOLE_WORD) return false;
  return breaks.has(read.breaks[end - 1]! - read.breaks[start]!);
}

/** Placeholders for private text; the mapping is kept in memory only (`moaspec_core/privacy/vault.py`). */
import { InputError } from "../errors.js";
import { foldedCopies } from "./folding.js";
import { PrivateTextFinder } from "./known_texts.js";
import { defaultRecognisers } from "./recognisers.js";
import type { Recogniser } from "./recognisers.js";
import { marked, mergeSpans, Span } from "./spans.js";

export const PLACEHOLDER = /\[[A-Z]{2,16}_\p{Nd}{1,6}\]/gu;
/** Text that may become a placeholder when more text arrives. */
const BEGINNING = /\[(?:[A-Z]{0,16}|[A-Z]{2,16}_\p{Nd}{0,6})$/u;

/** Where an incomplete placeholder begins at the end of a text; the text's length if there is none. */
export function beginning(text: string): number {
  return BEGINNING.exec(text)?.index ?? text.length;
}

/** Kind of text that has the form of a placeholder but is none. */
const LITERAL = "TEXT";

/**
 * Replaces private text by placeholders; equal texts have equal placeholders.
 *
 * Text that was private once stays private: in later texts without marks, in answers, and in the
 * whole conversation of the next turn. Text that was sent before it was marked cannot be hidden.
 *
 * A vault cannot be turned into JSON, and neither its copy nor its representation has private text.
 */
export class Vault {
  readonly #recognisers: readonly Recogniser[];
  readonly #placeholders = new Map<string, string>();
  readonly #values = new Map<string, string>();
  readonly #kinds = new Map<string, string>();
  readonly #counts = new Map<string, number>();
  #finder: PrivateTextFinder | undefined;

  /** @param recognisers find private text without marks; [] for none */
  constructor(recognisers: Iterable<Recogniser> = defaultRecognisers()) {
    this.#recognisers = [...recognisers];
  }

  /** Number of private texts. */
  get size(): number {
    return this.#values.size;
  }

  /** All placeholders in use. */
  get placeholders(): string[] {
    return [...this.#values.keys()];
  }

  toString(): string {
    return `<Vault of ${this.size} private texts>`;
  }

  toJSON(): never {
    throw new InputError("A Vault stays in memory: it cannot be stored or sent.");
  }

  /**
   * Replace marked, recognised and known private text, and remove the marks.
   *
   * @throws InputError a mark is not closed or is misspelt
   */
  hide(text: string): string {
    return this.hideTexts([text])[0]!;
  }

  /** Hide the content of messages of all roles; see `hideTexts`. */
  hideMessages<Message extends { readonly content: string }>(messages: readonly Message[]): Message[] {
    const hidden = this.hideTexts(messages.map(({ content }) => content));
    return messages.map((message, i) => ({ ...message, content: hidden[i]! }));
  }

  /**
   * Hide several texts; text that is marked in one is hidden in all.
   *
   * @throws InputError see `hide`
   */
  hideTexts(texts: readonly string[]): string[] {
    return this.#hidden(texts.map(marked));
  }

  /**
   * Hide the given spans of a text without marks.
   *
   * @throws InputError a span exceeds the text
   */
  hideSpans(text: string, spans: Iterable<Span>): string {
    return this.#hidden([[text, [...spans]]])[0]!;
  }

  /** Replace the placeholders of this vault by their texts. */
  restore(text: string): string {
    return text.replace(PLACEHOLDER, (found) => this.#values.get(found) ?? found);
  }

  /** Make a `Restorer` for text that arrives in pieces. */
  restorer(): Restorer {
    return new Restorer(this);
  }

  /** Replace all private text; takes texts without marks, and their spans. */
  #hidden(texts: readonly (readonly [text: string, spans: Span[]])[]): string[] {
    const found = texts.map(([text, spans]) => [text, this.#findAndRemember(text, spans)] as const);
    const finder = (this.#finder ??= new PrivateTextFinder(this.#kinds));
    return found.map(([text, spans]) => {
      const literal = [...text.matchAll(PLACEHOLDER)].map(
        ({ 0: one, index }) => new Span(index, index + one.length, LITERAL),
      );
      const known = foldedCopies(text).flatMap((copy) => finder.find(copy));
      return this.#replaced(text, [...spans, ...literal, ...known]);
    });
  }

  /** Add recognised spans to marked ones, and remember the texts of both. */
  #findAndRemember(text: string, spans: readonly Span[]): Span[] {
    const found = [...spans, ...this.#recognisers.flatMap((recognise) => [...recognise(text)])];
    for (const { start, stop, kind } of found) {
      if (stop > text.length) {
        throw new InputError(`A span ends at ${stop}, in a text of ${text.length} characters.`);
      }
      const value = text.slice(start, stop);
      this.#placeholder(value, kind);
      if (this.#kinds.has(value)) continue;
      this.#kinds.set(value, kind);
      this.#finder = undefined;
    }
    return found;
  }

  #replaced(text: string, spans: readonly Span[]): string {
    let kept = "";
    let place = 0;
    for (const { start, stop, kind } of mergeSpans(spans)) {
      kept += text.slice(place, start) + this.#placeholder(text.slice(start, stop), kind);
      place = stop;
    }
    return kept + text.slice(place);
  }

  #placeholder(value: string, kind: string): string {
    const known = this.#placeholders.get(value);
    if (known !== undefined) return known;
    const number = (this.#counts.get(kind) ?? 0) + 1;
    const placeholder = `[${kind}_${number}]`;
    this.#counts.set(kind, number);
    this.#placeholders.set(value, placeholder);
    this.#values.set(placeholder, value);
    return placeholder;
  }
}

/** Restores text that arrives in pieces; a piece may end within a placeholder. */
export class Restorer {
  #pending = "";

  constructor(private readonly vault: Vault) {}

  /** Add a piece; returns the text that can be shown, without an incomplete placeholder. */
  push(piece: string): string {
    const text = this.#pending + piece;
    const place = beginning(text);
    this.#pending = text.slice(place);
    return this.vault.restore(text.slice(0, place));
  }

  /** The text that was held back, after the last piece. */
  close(): string {
    const text = this.#pending;
    this.#pending = "";
    return this.vault.restore(text);
  }
}

import type { DeviceTokenizer } from "../bundle/tokenizer.js";

/** Tokens of the prompt that are decoded with a continuation; doubled until they contain text. */
const CONTEXT_TOKENS = 16;
/** Decoders write it for bytes that are not valid UTF-8. */
const UNKNOWN = "\ufffd";

/**
 * Decodes a text token by token. SentencePiece decoders drop the first space of a text, so tokens
 * are decoded together with the last ones of the prompt.
 */
export class TextStream {
  private readonly context: readonly number[];
  private ids: number[] = [];
  private prefix = "";
  /** Number of `ids` whose text is in `prefix`. */
  private numDecoded = 0;

  /**
   * @param decode text of token ids, special tokens included
   * @param after the prompt, if the text is a continuation
   */
  constructor(
    private readonly decode: (tokenIds: number[]) => string,
    after: readonly number[] = [],
  ) {
    const [context, unfinished] = this.split(after);
    this.context = context;
    this.restart();
    for (const token of unfinished) this.step(token);
  }

  private restart(): void {
    this.ids = [...this.context];
    this.numDecoded = this.ids.length;
    this.prefix = this.ids.length ? this.decode(this.ids) : "";
  }

  /** The prompt's last tokens up to a whole character, and those of an unfinished one. */
  private split(after: readonly number[]): [number[], number[]] {
    for (let size = CONTEXT_TOKENS; ; size *= 2) {
      const tail = after.slice(-size);
      let end = tail.length;
      while (end && this.decode(tail.slice(0, end)).endsWith(UNKNOWN)) end--;
      if (end && this.decode(tail.slice(0, end))) return [tail.slice(0, end), tail.slice(end)];
      if (size >= after.length) return [[], []];
    }
  }

  /** Another stream that goes on from here on its own. */
  fork(): TextStream {
    const twin = Object.assign(Object.create(TextStream.prototype) as TextStream, this);
    twin.ids = [...this.ids];
    return twin;
  }

  /** The text that a token completes; empty while a character is not whole. */
  step(tokenId: number): string {
    this.ids.push(tokenId);
    let text = this.decode(this.ids);
    if (text.length <= this.prefix.length || text.endsWith(UNKNOWN)) return "";
    if (!text.startsWith(this.prefix)) {
      // An invalid byte changed text that was returned. The text goes on without these bytes.
      this.restart();
      this.ids.push(tokenId);
      text = this.decode(this.ids);
    }
    const piece = text.slice(this.prefix.length);
    this.ids = this.ids.slice(this.numDecoded);
    this.numDecoded = this.ids.length;
    this.prefix = this.decode(this.ids);
    return piece;
  }
}

/** Watches a generated text, token by token, for strings that end it. */
export class StopStrings {
  private tail = "";
  private readonly keep: number;
  private stream: TextStream;

  /**
   * @param strings not empty
   * @param after the prompt, which is not searched
   */
  constructor(
    private readonly strings: readonly string[],
    tokenizer: DeviceTokenizer,
    after: readonly number[],
  ) {
    this.stream = new TextStream((ids) => tokenizer.decode(ids, { special: true }), after);
    this.keep = Math.max(...strings.map((one) => one.length)) - 1;
  }

  /** Another watcher that goes on from here on its own. */
  fork(): StopStrings {
    const twin = Object.assign(Object.create(StopStrings.prototype) as StopStrings, this);
    twin.stream = this.stream.fork();
    return twin;
  }

  /** Add the next token; the stop string that it completes, the earliest in the text. */
  push(tokenId: number): string | undefined {
    const piece = this.stream.step(tokenId);
    if (!piece) return undefined;
    const text = this.tail + piece;
    this.tail = this.keep ? text.slice(-this.keep) : "";
    const end = (one: string) => text.indexOf(one) + one.length;
    const found = this.strings.filter((one) => text.includes(one));
    return found.sort((a, b) => end(a) - end(b) || (a < b ? -1 : 1))[0];
  }
}

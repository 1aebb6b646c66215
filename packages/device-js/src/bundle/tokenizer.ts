import { Template } from "@huggingface/jinja";
import { Tokenizer } from "@huggingface/tokenizers";
import { BundleError, InputError } from "../errors.js";
import { jsonObject } from "./bundle.js";
import type { Bundle } from "./bundle.js";

/** A message of a conversation; templates may read further fields, such as `tool_calls`. */
export interface ChatMessage {
  readonly role: "system" | "user" | "assistant" | "tool";
  readonly content: string;
  readonly [field: string]: unknown;
}

/** Options of rendering a conversation. */
export interface ChatOptions {
  /** Functions that the model may call, as OpenAI's API takes them: `{type, function}` each. */
  readonly tools?: readonly Record<string, unknown>[];
  /** End within the last message, which is to be continued. */
  readonly continueFinal?: boolean;
}

/** Roles in whose messages control tokens are encoded as text. */
const GUARDED_ROLES = ["user", "tool"];
/** Marks the end of a message that is continued; Unicode gives it to no character. */
const END_MARK = "\ufdd1";
/** Stands between the characters of a guarded token; Unicode gives it to no character. */
const GUARD = "\ufdd0";

interface AddedToken {
  readonly content: string;
  readonly special: boolean;
  readonly lstrip: boolean;
  readonly rstrip: boolean;
}

/**
 * The target's tokenizer and chat template.
 *
 * Control tokens in the text of users are encoded as text, as on the server's side
 * (`moaspec_core/chat/control_tokens.py`): a noncharacter is put between their characters
 * before rendering, and text with such noncharacters is encoded without control tokens.
 */
export class DeviceTokenizer {
  private readonly tokenizer: Tokenizer;
  /** Knows no control tokens. */
  private readonly plain: Tokenizer;
  private readonly config: Record<string, unknown>;
  private readonly control: ReadonlyMap<string, AddedToken>;
  private readonly own: RegExp;
  private readonly guarded: RegExp;
  private readonly template: Template | undefined;
  private readonly source: string | undefined;

  /** @throws BundleError the tokenizer's files cannot be used */
  constructor(bundle: Bundle) {
    try {
      const description = jsonObject(bundle.files.get("tokenizer.json")!);
      this.config = jsonObject(bundle.files.get("tokenizer_config.json")!);
      const added = (description["added_tokens"] ?? []) as AddedToken[];
      const isControl = ({ special, content }: AddedToken) => special && [...content].length > 1;
      this.tokenizer = new Tokenizer(description, this.config);
      this.plain = new Tokenizer(
        { ...description, added_tokens: added.filter(({ special }) => !special) },
        this.config,
      );
      const tokens = added.filter(isControl);
      tokens.sort((a, b) => b.content.length - a.content.length);
      this.control = new Map(tokens.map((token) => [token.content, token]));
      const names = [...this.control.keys()];
      this.own = new RegExp(`(${names.map(escaped).join("|")})`, "u");
      this.guarded = new RegExp(names.map((name) => [...name].map(escaped).join(GUARD)).join("|"), "gu");
      this.source = this.templateSource(bundle);
      this.template = this.source === undefined ? undefined : new Template(this.source);
    } catch (error) {
      throw new BundleError(`The bundle's tokenizer cannot be used: ${(error as Error).message}`);
    }
  }

  private templateSource(bundle: Bundle): string | undefined {
    const file = bundle.files.get("chat_template.jinja");
    if (file) return new TextDecoder().decode(file);
    const given = this.config["chat_template"] ?? undefined;
    if (!Array.isArray(given)) return given as string | undefined;
    const named = given as { name: string; template: string }[];
    return named.find(({ name }) => name === "default")?.template;
  }

  /** Token ids of a text, with the special tokens that the tokenizer adds. */
  encode(text: string): number[] {
    checkCharacters(text);
    return this.tokenizer.encode(text).ids;
  }

  /**
   * Token ids of a conversation, up to where the answer begins. Without a chat template they are
   * those of the messages' contents, one a line.
   *
   * @throws InputError the template refuses these messages, or takes no tools
   */
  chat(messages: readonly ChatMessage[], { tools = [], continueFinal = false }: ChatOptions = {}): number[] {
    if (!this.template) return this.encode(messages.map(({ content }) => content).join("\n"));
    if (tools.length && !/\btools\b/.test(this.source!)) {
      throw new InputError("The model's chat template takes no tools.");
    }
    const hidden = messages.map((message) =>
      GUARDED_ROLES.includes(message.role) ? { ...message, content: this.hide(message.content) } : message,
    );
    const last = hidden.at(-1);
    // The space shows whether the template removes white space at a message's end.
    if (continueFinal && last) hidden.splice(-1, 1, { ...last, content: `${last.content}${END_MARK} ` });
    let text: string;
    try {
      // Variables that transformers always sets.
      const variables = { ...this.specialTokens(), tools: tools.length ? [...tools] : null, documents: null };
      const prompt = { messages: hidden, add_generation_prompt: !continueFinal };
      text = this.template.render({ ...variables, ...prompt });
    } catch (error) {
      throw new InputError(`The chat template refuses these messages: ${(error as Error).message}`);
    }
    if (continueFinal) text = untilMark(text);
    checkCharacters(text);
    return this.tokens(text);
  }

  /**
   * Text of token ids.
   *
   * @param options special: whether special tokens are part of the text
   */
  decode(tokenIds: readonly number[], { special = false } = {}): string {
    if (!tokenIds.length) return "";
    return this.tokenizer.decode([...tokenIds], {
      skip_special_tokens: !special,
      clean_up_tokenization_spaces: !special && this.config["clean_up_tokenization_spaces"] === true,
    });
  }

  /** `bos_token` and others, as templates know them. */
  private specialTokens(): Record<string, string> {
    const found: Record<string, string> = {};
    for (const [name, value] of Object.entries(this.config)) {
      const content = (value as { content?: unknown } | null)?.content ?? value;
      if (/^[a-z]+_token$/.test(name) && typeof content === "string") found[name] = content;
    }
    return found;
  }

  private hide(text: string): string {
    if (!this.control.size) return text;
    const all = new RegExp(this.own, "gu");
    return text.replace(all, (found) => [...found].join(GUARD));
  }

  private isGuarded(text: string): boolean {
    return this.control.size > 0 && text.search(this.guarded) >= 0;
  }

  /** Tokens of a rendered text, which has all control tokens that it needs. */
  private tokens(text: string): number[] {
    const ids: number[] = [];
    let waiting = "";
    const encode = (part: string) =>
      part ? ids.push(...this.tokenizer.encode(part, { add_special_tokens: false }).ids) : 0;
    for (const [part, isPlain] of this.parts(text)) {
      if (!isPlain) {
        waiting += part;
        continue;
      }
      encode(waiting);
      waiting = "";
      if (part) ids.push(...this.plain.encode(part, { add_special_tokens: false }).ids);
    }
    encode(waiting);
    return ids;
  }

  /**
   * Parts of a text, and whether each is encoded without control tokens. White space that belongs to
   * a control token beside it stays with that.
   */
  private *parts(text: string): Generator<readonly [string, boolean]> {
    if (!this.isGuarded(text)) {
      yield [text, false];
      return;
    }
    const pieces = text.split(this.own);
    for (const [i, piece] of pieces.entries()) {
      if (i % 2 || !this.isGuarded(piece)) {
        yield [piece, false];
        continue;
      }
      const before = this.control.get(pieces[i - 1] ?? "")?.rstrip ?? false;
      const after = this.control.get(pieces[i + 1] ?? "")?.lstrip ?? false;
      const start = before ? piece.length - piece.trimStart().length : 0;
      const stop = after ? piece.trimEnd().length : piece.length;
      const middle = piece.slice(start, stop);
      yield [piece.slice(0, start), false];
      yield [middle.replace(this.guarded, (found) => found.replaceAll(GUARD, "")), true];
      yield [piece.slice(stop), false];
    }
  }
}

function escaped(text: string): string {
  return text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&");
}

/** @throws InputError the template has left the last message out */
function untilMark(text: string): string {
  const end = text.lastIndexOf(END_MARK);
  if (end < 0) throw new InputError("The chat template leaves out the message that is to be continued.");
  const kept = text.slice(0, end);
  return text[end + 1] === " " ? kept : kept.trimEnd();
}

/** @throws InputError half of a surrogate pair, which is no character */
function checkCharacters(text: string): void {
  if (/[\ud800-\udfff]/u.test(text)) {
    throw new InputError("The text holds half of a surrogate pair, which is no character.");
  }
}

/** Text that a server decodes by itself: the baseline of client-server decoding. */
import { create, toBinary } from "@bufbuild/protobuf";
import type { Device } from "../device.js";
import { LinkError, WireError } from "../errors.js";
import { GenerateRequestSchema } from "../protocol/target_pb.js";
import type { Generated } from "../protocol/target_pb.js";
import type { WebSocketTransport } from "../protocol/websocket.js";
import { parseGenerated } from "../protocol/wire.js";
import type { StopReason } from "./events.js";
import type { TurnOptions } from "./options.js";
import { frames } from "./server_calls.js";
import { Turn } from "./turn.js";

/** Who proposed a token: the target, the server's drafter, or the text itself. */
export type ServerSource = "target" | "draft" | "copy";
/** By number on the wire. */
const SOURCES: readonly ServerSource[] = ["target", "draft", "copy"];
const STOP_REASONS: readonly string[] = ["stop_token", "stop_string", "max_new_tokens", "context"] satisfies StopReason[];

/** Tokens that follow those of earlier events. */
export interface ServerTextEvent {
  readonly tokenIds: readonly number[];
  /** Of each of `tokenIds`. */
  readonly sources: readonly ServerSource[];
  /** Set on the last event. */
  readonly stopReason?: StopReason;
}

/** Options of a text; the server decides what to draft. */
export interface ServerTextOptions extends Omit<TurnOptions, "draft" | "logprobs"> {
  /** Whether the server's own drafter drafts. */
  speculate?: boolean;
  /** Milliseconds that the whole text may take; default: ten minutes. */
  timeoutMs?: number;
}

/** Text from a server that decodes alone. A text cannot be resumed after a cut of the link. */
export class RemoteText {
  /** @param device whose tokenizer and limits are used; its drafter is not */
  constructor(
    private readonly device: Device,
    private readonly transport: WebSocketTransport,
  ) {}

  /**
   * Answer a conversation.
   *
   * @param promptIds token ids of the whole conversation
   * @throws InputError invalid prompt ids or options
   * @throws LinkError the link broke, or the time is over
   * @throws RefusedError the server refuses; the message says why
   * @throws WireError the server's answer is invalid
   */
  async *stream(promptIds: readonly number[], options: ServerTextOptions = {}): AsyncGenerator<ServerTextEvent> {
    const { speculate = false, timeoutMs = 600_000, ...turnOptions } = options;
    const turn = new Turn(this.device, [...promptIds], turnOptions);
    const request = create(GenerateRequestSchema, {
      tokenIds: [...turn.prompt],
      sampling: turn.request([]).sampling,
      maxNewTokens: turn.maxNewTokens,
      stopTokenIds: [...turn.stops],
      speculate,
      stop: [...turn.strings],
    });
    let count = 0;
    for await (const frame of frames(this.transport, "generate", toBinary(GenerateRequestSchema, request), timeoutMs)) {
      const event = this.event(parseGenerated(frame));
      count += event.tokenIds.length;
      if (count > turn.maxNewTokens) throw new WireError("The server sent more tokens than were asked for.");
      yield event;
      if (event.stopReason) return;
    }
    throw new LinkError("The server ended the call without the text's end.");
  }

  private event({ tokenIds, sources, stopReason }: Generated): ServerTextEvent {
    const { vocab_size } = this.device.manifest.target;
    if (tokenIds.some((token) => token >= vocab_size)) {
      throw new WireError(`The server sent a token outside 0..${vocab_size - 1}.`);
    }
    const named = sources.map((number) => SOURCES[number]);
    if (named.length !== tokenIds.length || named.includes(undefined)) {
      throw new WireError(`The server named ${sources.length} sources of ${tokenIds.length} tokens.`);
    }
    if (stopReason && !STOP_REASONS.includes(stopReason)) {
      throw new WireError("The server ends the text for a reason that the protocol does not have.");
    }
    const ended = stopReason ? { stopReason: stopReason as StopReason } : {};
    return { tokenIds, sources: named as ServerSource[], ...ended };
  }
}

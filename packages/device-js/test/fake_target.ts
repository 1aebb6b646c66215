/** A made-up target behind the real protocol, a drafter that often agrees with it, and bad links. */
import { create, fromBinary, toBinary } from "@bufbuild/protobuf";
import { GenerationDefaults } from "../src/bundle/generation_defaults.js";
import type { Manifest } from "../src/bundle/manifest.js";
import type { Drafter } from "../src/bundle/onnx_drafter.js";
import type { Device } from "../src/device.js";
import { LinkError } from "../src/errors.js";
import { ActivationCodec } from "../src/protocol/activations.js";
import type { MemoryParts } from "../src/protocol/activations.js";
import { PositionSet } from "../src/protocol/position_set.js";
import { ClientMessageSchema, Problem_Kind, ServerMessageSchema } from "../src/protocol/target_pb.js";
import type { ClientMessage, ServerMessage } from "../src/protocol/target_pb.js";
import type { Connection, ConnectionEvents, Transport } from "../src/protocol/transport.js";
import type { Fields } from "../src/protocol/wire.js";
import { commonLength } from "../src/session/draft_ahead.js";
import type { LinkPolicy } from "../src/session/link_policy.js";
import type { RemoteSession } from "../src/session/remote_session.js";

export const VOCAB = 97;
export const PROMPT = [5, 9, 2, 77, 13];
const CODEC = new ActivationCodec("int8", 1, 2);

function hash(text: readonly number[], salt: number): number {
  let state = salt + 1;
  for (const token of text) state = (Math.imul(state ^ token, 0x01000193) + 0x9e37) >>> 0;
  return (state ^ (state >>> 13)) >>> 0;
}

/** The token that the target chooses after a text. */
export function nextToken(text: readonly number[], seed = 0n): number {
  return hash(text, Number(seed)) % VOCAB;
}

/** The target's text after a prompt. */
export function ownText(prompt: readonly number[], count: number, seed = 0n): number[] {
  const text = [...prompt];
  while (text.length < prompt.length + count) text.push(nextToken(text, seed));
  return text.slice(prompt.length);
}

/** A drafter that agrees with the target at a share of texts; it checks how it is used. */
export class FakeDrafter implements Drafter {
  private text: number[] = [];
  private readonly held = new PositionSet();
  runs = 0;
  /** Whether it may be asked without activations. */
  blind = false;

  constructor(
    private readonly share: number,
    private readonly seed = 0n,
  ) {}

  async run(tokenIds: readonly number[], start: number) {
    this.runs += 1;
    if (start > this.text.length) throw new Error(`tokens before ${start} were never stored`);
    if (!this.held.size && !this.blind) throw new Error("drafts without activations mean nothing");
    this.text = [...this.text.slice(0, start), ...tokenIds];
    await Promise.resolve();
    const right = nextToken(this.text, this.seed);
    const agrees = hash(this.text, 7) % 100 < 100 * this.share;
    return { tokenIds: [agrees ? right : (right + 1) % VOCAB], logQ: [-0.1] };
  }

  place(start: number, parts: MemoryParts): void {
    this.held.add(start, start + parts.count);
  }

  cut(length: number): void {
    this.held.cut(length);
  }

  memory(count: number) {
    return { key: new Float32Array(count), value: new Float32Array(count), count };
  }
}

export const MANIFEST: Manifest = {
  protocol: 1,
  sampling_version: 2,
  target: {
    model_type: "fake",
    num_layers: 1,
    hidden_size: 8,
    num_kv_heads: 1,
    head_dim: 2,
    vocab_size: VOCAB,
    tokenizer_hash: null,
    adapter: null,
  },
  fingerprint: "ab",
  self_attention: { num_kv_heads: 1, head_dim: 2 },
  self_attention_layers: 1,
  cross_attention: { num_kv_heads: 1, head_dim: 2 },
  num_target_layers: 0,
  top: 1,
  max_positions: 400,
  rope_growth: null,
  stop_token_ids: [],
  files: {},
};

export function device(share = 0.7, changes: Partial<Manifest> = {}, seed = 0n): Device & { drafter: FakeDrafter } {
  const manifest = { ...MANIFEST, ...changes };
  return { manifest, drafter: new FakeDrafter(share, seed), generationDefaults: new GenerationDefaults({}) };
}

interface Session {
  turn: number;
  text: number[];
  seed: bigint;
  sent: PositionSet;
  prompt: number;
  /** Length up to which tokens are streamed. */
  goal: number;
  isStreaming: boolean;
}

/** A server's message; its turn and session are filled in. */
export type Answer = NonNullable<Fields<typeof ServerMessageSchema>["kind"]>;

/** A server that follows the protocol, unless `lie` changes what it says. */
export class FakeServer implements Transport {
  readonly sessions = new Map<string, Session>();
  readonly received: ClientMessage[] = [];
  connections = 0;
  /** Milliseconds of a pass. */
  passMs = 1;
  /** Most tokens that are streamed after a request; 0 makes it an older server. */
  maxFurther = 32;
  /** Replaces an answer; frames are sent as they are. */
  lie: (answer: Answer, to: ClientMessage) => (Answer | Uint8Array)[] = (answer) => [answer];
  /** Answers before the protocol does: a problem, or undefined. */
  refuse: (message: ClientMessage) => Answer | undefined = () => undefined;

  async connect(events: ConnectionEvents): Promise<Connection> {
    this.connections += 1;
    let open = true;
    const say = (answers: Answer[], message: ClientMessage): void => {
      for (const answer of answers) {
        for (const said of this.lie(answer, message)) {
          if (open) events.onFrame(said instanceof Uint8Array ? said : frameOf(said, message));
        }
      }
    };
    const stream = (session: Session, message: ClientMessage): void => {
      session.isStreaming = open && session.turn === message.turn && session.text.length < session.goal;
      if (!session.isStreaming) return;
      const base = session.text.length;
      session.text.push(nextToken(session.text, session.seed));
      const name = String(message.session);
      say([this.verdict(name, base), ...this.memory(name)], message);
      setTimeout(() => stream(session, message), this.passMs);
    };
    return {
      send: (frame) => {
        const message = fromBinary(ClientMessageSchema, frame);
        this.received.push(message);
        const answers = this.answers(message);
        const session = this.sessions.get(String(message.session));
        setTimeout(() => {
          say(answers, message);
          if (!session || session.isStreaming) return;
          session.isStreaming = true;
          setTimeout(() => stream(session, message), this.passMs);
        }, message.kind.case === "heartbeat" ? 0 : this.passMs);
      },
      close: () => {
        open = false;
      },
    };
  }

  private answers(message: ClientMessage): Answer[] {
    const { kind, turn } = message;
    if (kind.case === "heartbeat") return [kind];
    const refused = this.refuse(message);
    if (refused) return [refused];
    const name = String(message.session);
    if (kind.case === "open") {
      const known = this.sessions.get(name);
      const { tokenIds, promptLength, held, sampling } = kind.value;
      if (known?.turn !== turn || commonLength(known.text, tokenIds) < tokenIds.length) {
        const sent = new PositionSet(held.map((one) => [one.start, one.stop] as const));
        const text = [...tokenIds];
        const seed = sampling?.seed ?? 0n;
        const more = { prompt: promptLength, goal: 0, isStreaming: false };
        this.sessions.set(name, { turn, text, seed, sent, ...more });
        text.push(nextToken(text, seed));
      }
      return [this.verdict(name, tokenIds.length), ...this.memory(name)];
    }
    const session = this.sessions.get(name);
    if (!session || turn > session.turn) return [problem(Problem_Kind.LOST)];
    if (turn < session.turn) return [];
    if (kind.case === "draft") {
      const { base, tokens, further } = kind.value;
      session.goal = further ? base + 1 + Math.min(further, this.maxFurther) : 0;
      // The token that a stream chooses next is the answer.
      if (base === session.text.length && session.isStreaming && session.goal) return [];
      if (base === session.text.length) {
        for (const token of tokens) {
          if (token !== nextToken(session.text, session.seed)) break;
          session.text.push(token);
        }
        session.text.push(nextToken(session.text, session.seed));
      }
      return [this.verdict(name, base), ...this.memory(name)];
    }
    if (kind.case === "resume") {
      session.sent = new PositionSet(kind.value.held.map((one) => [one.start, one.stop] as const));
      return [this.verdict(name, kind.value.base), ...this.memory(name)];
    }
    if (kind.case === "fetch") {
      for (const { start } of kind.value.ranges) session.sent.cut(start);
      return this.memory(name);
    }
    this.sessions.delete(name);
    return [];
  }

  private verdict(name: string, base: number): Answer {
    const { text } = this.sessions.get(name)!;
    const { maxFurther, passMs } = this;
    return { case: "verdict", value: { base, tokens: text.slice(base), passS: passMs / 1000, maxFurther } };
  }

  /** Activations that the device lacks, one message for each range. */
  private memory(name: string): Answer[] {
    const { text, sent } = this.sessions.get(name)!;
    return sent.gaps(text.length - 1).map(([start, stop]): Answer => {
      sent.add(start, stop);
      const data = new Uint8Array((stop - start) * CODEC.tokenBytes);
      return { case: "activations", value: { start, count: stop - start, data } };
    });
  }
}

export function problem(kind: Problem_Kind, more: { message?: string; retryS?: number } = {}): Answer {
  return { case: "problem", value: { kind, ...more } };
}

/** An answer as a frame, for the session and turn of a message. */
export function frameOf(kind: Answer, to: ClientMessage, changes: Partial<ServerMessage> = {}): Uint8Array {
  const { session, turn } = { session: to.session, turn: to.turn, ...changes };
  return toBinary(ServerMessageSchema, create(ServerMessageSchema, { session, turn, kind }));
}

/** What becomes of frames, in both directions. */
export interface Faults {
  /** Shares of frames that vanish, and that come twice. */
  loss?: number;
  twice?: number;
  /** Frames take up to so long, so that later ones overtake them. */
  delayMs?: number;
  /** Frames that each connection carries before it breaks; the list is used up. */
  cutAfter?: number[];
}

/** Connections with faults, drawn from a seed. */
export class FaultyTransport implements Transport {
  /** While set, frames vanish without anybody being told: a cut as networks have them. */
  hole = false;
  connections = 0;
  /** All frames of the device. */
  readonly sent: Uint8Array[] = [];
  private state: number;

  constructor(
    private readonly inner: Transport,
    private readonly faults: Faults = {},
    seed = 1,
  ) {
    this.state = seed;
  }

  private random(): number {
    this.state = (Math.imul(this.state, 1664525) + 1013904223) >>> 0;
    return this.state / 2 ** 32;
  }

  async connect(events: ConnectionEvents, signal: AbortSignal): Promise<Connection> {
    if (this.hole) return new Promise(() => {});
    let left = this.faults.cutAfter?.[this.connections++] ?? Number.POSITIVE_INFINITY;
    let broken = false;
    const carry = (deliver: () => void): void => {
      if (broken) return;
      if (--left < 0) {
        broken = true;
        events.onEnd(new LinkError("cut by the test"));
        return;
      }
      const { loss = 0, twice = 0, delayMs = 0 } = this.faults;
      if (this.hole || this.random() < loss) return;
      for (let copy = this.random() < twice ? 2 : 1; copy; copy--) {
        if (delayMs) setTimeout(() => broken || deliver(), this.random() * delayMs);
        else deliver();
      }
    };
    const connection = await this.inner.connect(
      { onFrame: (frame) => carry(() => events.onFrame(frame)), onEnd: events.onEnd },
      signal,
    );
    return {
      send: (frame) => {
        this.sent.push(frame);
        carry(() => connection.send(frame));
      },
      close: () => {
        broken = true;
        connection.close();
      },
    };
  }
}

/** Let a session send two drafts after each `longest` rounds without any, whatever pays. */
export function draftInTurn(session: RemoteSession, longest = 5): void {
  const { auto } = session as unknown as { auto: LinkPolicy };
  let left = longest;
  auto.numDrafts = () => {
    if (!left) {
      left = longest;
      return 2;
    }
    auto.pause = --left;
    return 0;
  };
}

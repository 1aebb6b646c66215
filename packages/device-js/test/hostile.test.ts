/** A server that lies: every lie is refused or ignored, and none crashes or hangs the device. */
import { toBinary } from "@bufbuild/protobuf";
import { afterEach, expect, test } from "vitest";
import { LinkError, MoaSpecError } from "../src/errors.js";
import { ClientMessageSchema, Problem_Kind } from "../src/protocol/target_pb.js";
import type { VerdictSchema } from "../src/protocol/target_pb.js";
import type { Fields } from "../src/protocol/wire.js";
import { RemoteSession } from "../src/session/remote_session.js";
import { FakeServer, device, frameOf, ownText, problem, PROMPT } from "./fake_target.js";
import type { Answer } from "./fake_target.js";
import { simulateTime } from "./simulated_time.js";

let session: RemoteSession | undefined;
let server: FakeServer;

simulateTime();

afterEach(() => session?.close());

type Verdict = Fields<typeof VerdictSchema>;
type Lie = FakeServer["lie"];

/** A lie about the first verdict after the prompt's. */
function verdict(change: (value: Verdict) => Verdict): Lie {
  return (answer, { kind }) =>
    answer.case === "verdict" && kind.case === "draft" ? [{ case: "verdict", value: change(answer.value as Verdict) }] : [answer];
}

/** Something that is sent before each verdict. */
function beside(...more: Answer[]): Lie {
  return (answer) => (answer.case === "verdict" ? [...more, answer] : [answer]);
}

function frame(bytes: Uint8Array): Lie {
  return (answer) => (answer.case === "verdict" ? [bytes, answer] : [answer]);
}

function activations(start: number, count: number, size: number): Answer {
  return { case: "activations", value: { start, count, data: new Uint8Array(size) } };
}

const BYTES = 8; // of a record

/** What this device has sent last, sent back. */
const echo: Lie = (answer, to) => (answer.case === "verdict" ? [toBinary(ClientMessageSchema, to), answer] : [answer]);

/** The first verdict again, before each later one. */
function replay(): Lie {
  let first: Uint8Array | undefined;
  return (answer, to) => {
    if (answer.case !== "verdict") return [answer];
    first ??= frameOf(answer, to);
    return [first, answer];
  };
}

/** Activations of the whole prompt, with other contents than the server's, each time anew. */
function otherActivations(): Lie {
  let byte = 0;
  return (answer) => {
    const data = new Uint8Array(PROMPT.length * BYTES).fill(++byte % 60);
    return answer.case === "verdict" ? [{ case: "activations", value: { start: 0, count: PROMPT.length, data } }, answer] : [answer];
  };
}

/** Lies that end the session with an error. */
const REFUSED: Record<string, Lie> = {
  "noise": frame(new Uint8Array(64).fill(0xff)),
  "a huge message": frame(new Uint8Array((4 << 20) + 1)),
  "deep groups": frame(new Uint8Array(1 << 20).fill(0x7b)),
  "a truncated message": (answer, to) => [frameOf(answer, to).slice(0, -1)],
  "another session": (answer, to) =>
    answer.case === "verdict" ? [frameOf(answer, to, { session: new Uint8Array(16) })] : [answer],
  "a short session name": (answer, to) =>
    answer.case === "verdict" ? [frameOf(answer, to, { session: new Uint8Array(1) })] : [answer],
  "more tokens than the device knows": verdict((value) => ({ ...value, base: 390 })),
  "a base beyond the text": verdict((value) => ({ ...value, base: value.base! + 1 })),
  "a base of 2^32 - 1": verdict((value) => ({ ...value, base: 2 ** 32 - 1 })),
  "tokens outside the vocabulary": verdict((value) => ({ ...value, tokens: [97] })),
  "a token of 2^32 - 1": verdict((value) => ({ ...value, tokens: [2 ** 32 - 1] })),
  "a text beyond the context": verdict((value) => ({ ...value, tokens: new Array(500).fill(1) })),
  "log-probabilities that nobody asked for": verdict((value) => ({ ...value, logprobs: [0] })),
  "activations of another size": beside(activations(0, 2, 2 * BYTES + 1)),
  "activations without data": beside(activations(0, 1, 0)),
  "data without activations": beside(activations(0, 0, 8)),
  "wrong activations beside a verdict": verdict((value) => ({
    ...value,
    activations: { start: 0, count: 1, data: new Uint8Array(3) },
  })),
  "the device's own messages": echo,
  "a base of -1": (answer, to) => {
    const minusOne = [0x1a, 0x0b, 0x08, ...new Array<number>(9).fill(0xff), 0x01];
    return answer.case === "verdict" ? [new Uint8Array([...frameOf({ case: "heartbeat", value: {} }, to), ...minusOne]), answer] : [answer];
  },
  "an endless number": frame(new Uint8Array([0x10, ...new Array<number>(1000).fill(0xff)])),
  "a length of 2^32 - 1": frame(new Uint8Array([0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f, 1])),
  "a million tokens": verdict((value) => ({ ...value, tokens: new Array(1_000_000).fill(1) })),
  "log-probabilities of fewer tokens": verdict((value) => ({ ...value, logprobs: [Number.NaN, 0, 0, 0, 0, 0] })),
  "a refusal": beside(problem(Problem_Kind.REFUSED)),
};

/** Lies that change nothing, or only the time. */
const IGNORED: Record<string, Lie> = {
  "an empty message": frame(new Uint8Array()),
  "verdicts twice": (answer) => [answer, answer],
  "no tokens at first": (() => {
    let lies = 2;
    return verdict((value) => (lies-- > 0 ? { ...value, tokens: [] } : value));
  })(),
  "verdicts of another turn": (answer, to) =>
    answer.case === "verdict" ? [frameOf({ case: "verdict", value: { base: 0, tokens: [1] } }, to, { turn: 99 }), answer] : [answer],
  "activations beyond the text": beside(activations(1000, 1, BYTES)),
  "activations at 2^32 - 1": beside(activations(2 ** 32 - 1, 1, BYTES)),
  "activations of no tokens": beside(activations(0, 0, 0)),
  "scales that are not finite": beside({
    case: "activations",
    value: { start: 0, count: 1, data: new Uint8Array(BYTES).fill(0x7c) },
  }),
  "heartbeats that nobody sent": beside({ case: "heartbeat", value: { number: 2n ** 64n - 1n } }),
  "a pass of infinite time": verdict((value) => ({ ...value, passS: Number.POSITIVE_INFINITY })),
  "a pass of no time": verdict((value) => ({ ...value, passS: Number.NaN })),
  "an unknown problem": beside({ case: "problem", value: { kind: 77 as Problem_Kind } }),
  "verdicts of earlier rounds": replay(),
  "activations of other numbers": otherActivations(),
  "2^32 - 1 activations": beside(activations(0, 2 ** 32 - 1, BYTES)),
  "2^32 - 1 activations at 2^32 - 1": beside(activations(2 ** 32 - 1, 2 ** 32 - 1, 0)),
  "a negative pass": verdict((value) => ({ ...value, passS: -1 })),
  "a problem of 4 MB": beside({ case: "problem", value: { kind: 77 as Problem_Kind, message: "x".repeat(4_000_000) } }),
  "messages of an unknown kind": frame(new Uint8Array([0xfa, 0x01, 0x02, 1, 2])),
  "unknown fields": (answer, to) => [new Uint8Array([...frameOf(answer, to), 0xfa, 0x01, 0x02, 1, 2])],
};

/** Lies without end: nothing is ever verified. */
const ENDLESS: Record<string, Lie> = {
  "silence": () => [],
  "heartbeats alone": (answer) => (answer.case === "heartbeat" ? [answer] : []),
  "lost": (answer) => [answer.case === "heartbeat" ? answer : problem(Problem_Kind.LOST)],
  "busy": (answer) => [answer.case === "heartbeat" ? answer : problem(Problem_Kind.BUSY)],
  "busy for less than no time": (answer) =>
    [answer.case === "heartbeat" ? answer : problem(Problem_Kind.BUSY, { retryS: -1e300 })],
  "busy for ever": (answer) =>
    [answer.case === "heartbeat" ? answer : problem(Problem_Kind.BUSY, { retryS: Number.POSITIVE_INFINITY })],
  "draining": (answer) => [answer.case === "heartbeat" ? answer : problem(Problem_Kind.DRAINING)],
  "verdicts without tokens": (answer) =>
    [answer.case === "verdict" ? { case: "verdict", value: { base: PROMPT.length, tokens: [] } } : answer],
  "another text from its beginning": (answer) =>
    [answer.case === "verdict" ? { case: "verdict", value: { base: 0, tokens: new Array(20).fill(96) } } : answer],
  "the text before its end": (answer) =>
    [answer.case === "verdict" ? { case: "verdict", value: { base: 1, tokens: PROMPT.slice(1) } } : answer],
};

function run(lie: Lie, giveUpMs = 50_000): Promise<number[]> {
  server = new FakeServer();
  server.lie = lie;
  session = new RemoteSession(device(0.7), server, { draft: 2, giveUpMs });
  return session.generate(PROMPT, { maxNewTokens: 16 }).then(({ tokenIds }) => tokenIds);
}

test.each(Object.keys(REFUSED))("refused: %s", async (name) => {
  const error: unknown = await run(REFUSED[name]!).catch((thrown: unknown) => thrown);
  expect(error).toBeInstanceOf(MoaSpecError);
  expect(error, "the device gave up").not.toBeInstanceOf(LinkError);
  expect(session!.stats.state).not.toBe("up");
});

test.each(Object.keys(IGNORED))("ignored: %s", async (name) => {
  expect(await run(IGNORED[name]!)).toEqual(ownText(PROMPT, 16));
});

test.each(Object.keys(ENDLESS))("given up, and not flooded: %s", async (name) => {
  await expect(run(ENDLESS[name]!, 600)).rejects.toThrow(LinkError);
  expect(server.received.length).toBeLessThan(200);
  expect(server.connections).toBeLessThan(60);
});

test("a refusal is one short line without control characters", async () => {
  const message = `<img src=x onerror=alert(1)>\n\u202e\u0007\ud800${"x".repeat(10_000)}`;
  const error = await run(beside(problem(Problem_Kind.REFUSED, { message }))).catch((thrown: Error) => thrown);
  expect((error as Error).message).toMatch(/^The server refuses: <img src=x onerror=alert\(1\)> \ufffd+x+$/);
  expect((error as Error).message.length).toBeLessThan(600);
});

test("a text that differs is opened again", async () => {
  expect(await run(verdict((value) => ({ ...value, base: value.base! - 1, tokens: [96, 96, 96] })))).toEqual(
    ownText(PROMPT, 16),
  );
});

test("a text that always differs is opened again with pauses, not in a loop", async () => {
  const server = new FakeServer();
  const wrong: Answer = { case: "verdict", value: { base: 2, tokens: [96, 96] } };
  server.lie = (answer) => (answer.case === "verdict" ? [wrong] : [answer]);
  session = new RemoteSession(device(0.7), server, { draft: 2, giveUpMs: 600 });
  await expect(session.generate([5, 9, 2], { maxNewTokens: 16 })).rejects.toThrow(MoaSpecError);
  expect(server.received.length).toBeLessThan(100);
});

test("messages without end do not stop the device", async () => {
  const flood = new Array<Answer>(2000).fill({ case: "heartbeat", value: { number: 1n } });
  expect(await run(beside(...flood))).toEqual(ownText(PROMPT, 16));
});

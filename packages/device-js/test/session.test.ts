/** Sessions against a made-up target: losslessness, cuts, turns, ends, problems. */
import { afterEach, expect, test } from "vitest";
import { LinkError, RefusedError, InputError, WireError } from "../src/errors.js";
import { MAX_STREAMED } from "../src/protocol/limits.js";
import { Problem_Kind } from "../src/protocol/target_pb.js";
import { now } from "../src/session/events.js";
import type { RemoteEvent } from "../src/session/events.js";
import type { LinkPolicy } from "../src/session/link_policy.js";
import type { SessionOptions, TurnOptions } from "../src/session/options.js";
import type { PendingRequest } from "../src/session/remote_verifier.js";
import { RemoteSession } from "../src/session/remote_session.js";
import { FakeServer, FaultyTransport, device, draftInTurn, nextToken, ownText, problem, PROMPT } from "./fake_target.js";
import type { Faults } from "./fake_target.js";
import { simulateTime } from "./simulated_time.js";

const sessions: RemoteSession[] = [];

simulateTime();

afterEach(async () => {
  await Promise.all(sessions.splice(0).map((one) => one.close()));
});

function made(
  options: SessionOptions = {},
  { faults = {} as Faults, share = 0.7, seed = 1, noise = 0n, blind = false } = {},
) {
  const server = new FakeServer();
  const transport = new FaultyTransport(server, faults, seed);
  const here = device(share, {}, noise);
  here.drafter.blind = blind;
  const session = new RemoteSession(here, transport, options);
  sessions.push(session);
  return { server, transport, session };
}

/** Fall into a hole until the session has noticed it, and for a while after that. */
function cutOnce(session: RemoteSession, transport: FaultyTransport): void {
  if (transport.hole || session.stats.cuts) return;
  transport.hole = true;
  const mending = setInterval(() => {
    if (!session.stats.cuts) return;
    clearInterval(mending);
    transport.hole = false;
  }, 50);
}

/** Read a turn as an application does. */
async function read(
  session: RemoteSession,
  prompt: readonly number[],
  options: TurnOptions,
  onEvent: (event: RemoteEvent, text: number[]) => void = () => {},
): Promise<{ text: number[]; events: RemoteEvent[] }> {
  const text: number[] = [];
  const events: RemoteEvent[] = [];
  for await (const event of session.stream(prompt, options)) {
    text.splice(event.start, Infinity, ...event.tokenIds);
    events.push(event);
    onEvent(event, text);
  }
  return { text, events };
}

test.each([0, 1, 4, "auto"] as const)("the text is the target's with draft %s", async (draft) => {
  const { session } = made({ draft });
  const { text, events } = await read(session, PROMPT, { maxNewTokens: 40 });
  expect(text).toEqual(ownText(PROMPT, 40));
  expect(session.result!.tokenIds).toEqual(text);
  expect(events.at(-1)!.stopReason).toBe("max_new_tokens");
  expect(events.every((event) => event.sources.length === event.tokenIds.length)).toBe(true);
  // Whether drafts pay depends on how busy this machine is.
  if (draft !== "auto") expect(session.result!.sources.includes("draft")).toBe(draft !== 0);
});

test.each([0, 0.5, 1])("a drafter that is right at a share of %s of texts", async (share) => {
  const { session } = made({ draft: 3 }, { share });
  const { text } = await read(session, PROMPT, { maxNewTokens: 40 });
  expect(text).toEqual(ownText(PROMPT, 40));
  const { acceptLengths } = session.result!;
  if (share === 0) expect(acceptLengths.every((length) => length === 1)).toBe(true);
  if (share === 1) expect(Math.max(...acceptLengths)).toBe(4);
});

test("drafts that the server did not verify are neither right nor wrong", async () => {
  const { server, session } = made({ draft: 3 }, { share: 0 });
  server.lie = (answer, to) =>
    answer.case === "verdict" && to.kind.case === "draft"
      ? [{ case: "verdict", value: { ...answer.value, dropped: [1, 2] } }]
      : [answer];
  await read(session, PROMPT, { maxNewTokens: 20 });
  expect(Math.max(...session.result!.drafted)).toBe(1);
  expect(Math.max(...session.stats.rounds.map((round) => round.drafted))).toBe(1);
});

test.each(["a request", "an answer"])("drafts that were not verified, where %s was lost and more drafts were sent", async (lost) => {
  const { server, transport, session } = made({ draft: 3, onCut: "wait" }, { share: 0 });
  const cut = () => cutOnce(session, transport);
  const decided = new Map<number, number[]>();
  server.lie = (answer, to) => {
    if (answer.case !== "verdict") return [answer];
    const base = answer.value.base!;
    if (to.kind.case === "draft") {
      if (lost === "an answer") cut();
      if (!decided.has(base)) decided.set(base, [...to.kind.value.tokens.keys()].slice(2));
    }
    return [{ case: "verdict", value: { ...answer.value, dropped: decided.get(base) ?? [] } }];
  };
  await read(session, PROMPT, { maxNewTokens: 12 }, () => lost === "a request" && cut());
  const sent = server.received.flatMap(({ kind }) => (kind.case === "draft" ? [kind.value.tokens.length] : []));
  expect(Math.max(...sent)).toBeGreaterThan(3);
  expect(session.result!.drafted).toEqual([2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 0]);
});

test("a sampled text follows the seed", async () => {
  const { session } = made({ draft: 3 }, { noise: 7n });
  const { text } = await read(session, PROMPT, { maxNewTokens: 30, temperature: 0.8, seed: 7 });
  expect(text).toEqual(ownText(PROMPT, 30, 7n));
});

test.each([
  { loss: 0.2 },
  { twice: 0.5 },
  { delayMs: 30 },
  { loss: 0.1, twice: 0.3, delayMs: 20 },
  { cutAfter: [3, 8, 20, 25, 30] },
])("bad links: %j", async (faults) => {
  for (const seed of [1, 2, 3]) {
    const { session } = made({ draft: 3 }, { faults, seed });
    const { text } = await read(session, PROMPT, { maxNewTokens: 24 });
    expect(text).toEqual(ownText(PROMPT, 24));
  }
});

/** Cut the link after some tokens, until so many provisional ones have been shown. */
async function withCut(
  options: SessionOptions,
  { after = 8, provisional = 6, share = 0.7 } = {},
) {
  const { session, transport, server } = made({ draft: 2, ...options }, { share });
  let most = 0;
  let hasCut = false;
  const found = await read(session, PROMPT, { maxNewTokens: 32 }, (event, text) => {
    if (!hasCut && text.length >= after) hasCut = transport.hole = true;
    most = Math.max(most, session.provisional.length);
    if (most >= provisional) transport.hole = false;
    if (event.numProvisional) expect(session.stats.state === "down" || most > 0).toBe(true);
  });
  return { ...found, session, server, most };
}

test.each([0.3, 0.7, 1])("text goes on without a link and is corrected (%s)", async (share) => {
  const { text, events, session } = await withCut({ onCut: "rollback" }, { share });
  expect(text).toEqual(ownText(PROMPT, 32));
  expect(session.stats.cuts).toBeGreaterThanOrEqual(1);
  expect(session.stats.provisional).toBeGreaterThanOrEqual(6);
  expect(events.some((event) => event.link === "down" && event.numProvisional === 1)).toBe(true);
  expect(session.stats.corrected > 0).toBe(share < 1);
  expect(session.provisional).toEqual([]);
});

test("with keep, provisional tokens stay", async () => {
  const { text, session } = await withCut({ onCut: "keep" }, { share: 0.3 });
  expect(session.stats.corrected).toBe(0);
  expect(text).toHaveLength(32);
  expect(session.result!.tokenIds).toEqual(text);
  const wrong = text.findIndex((token, i) => token !== nextToken([...PROMPT, ...text.slice(0, i)]));
  expect(wrong).toBeGreaterThan(0);
});

test("with wait, nothing is provisional", async () => {
  const { session, transport } = made({ draft: 2, onCut: "wait" });
  const { text } = await read(session, PROMPT, { maxNewTokens: 32 }, (_, shown) => {
    if (shown.length >= 8) cutOnce(session, transport);
  });
  expect(text).toEqual(ownText(PROMPT, 32));
  expect(session.stats.cuts).toBeGreaterThanOrEqual(1);
  expect(session.stats.provisional).toBe(0);
});

test("a whole answer without a link, verified later", async () => {
  const { session, transport } = made({ draft: 2 });
  const { text } = await read(session, PROMPT, { maxNewTokens: 20 }, (_, shown) => {
    if (shown.length === 20 && transport.hole) transport.hole = false;
    else if (session.stats.provisional === 0 && shown.length > 4) transport.hole = true;
  });
  expect(text).toEqual(ownText(PROMPT, 20));
});

test("an answer that begins without a server", async () => {
  const { session, transport } = made({ draft: 2, minHeldShare: 0 }, { blind: true });
  transport.hole = true;
  const { text, events } = await read(session, PROMPT, { maxNewTokens: 20 }, (_, shown) => {
    if (shown.length >= 6) transport.hole = false;
  });
  expect(text).toEqual(ownText(PROMPT, 20));
  expect(events[0]).toMatchObject({ start: 0, numProvisional: 1, link: "connecting" });
  expect(session.stats.provisional).toBeGreaterThanOrEqual(6);
  expect(session.stats.failures).toBe(0);
});

test("without activations nothing is drafted, unless asked for", async () => {
  const { session, transport } = made({ draft: 2 });
  transport.hole = true;
  setTimeout(() => (transport.hole = false), 300);
  const { text, events } = await read(session, PROMPT, { maxNewTokens: 12 });
  expect(text).toEqual(ownText(PROMPT, 12));
  expect(events.every((event) => event.link === "up")).toBe(true);
  expect(() => made({ minHeldShare: 1.5 })).toThrow(InputError);
});

test("a session remembers the text of an earlier one", async () => {
  const first = made({ draft: 2 });
  await read(first.session, PROMPT, { maxNewTokens: 20 });
  const prefix = first.session.prefix()!;
  const whole = [...PROMPT, ...ownText(PROMPT, 20)];
  expect(prefix.tokenIds).toEqual(whole.slice(0, prefix.tokenIds.length));
  expect(prefix.tokenIds.length).toBeGreaterThan(PROMPT.length);
  const second = made({ draft: 2 });
  second.session.remember(prefix);
  const { text } = await read(second.session, [...whole, 5], { maxNewTokens: 12 });
  expect(text).toEqual(ownText([...whole, 5], 12));
  const fresh = made({ draft: 2 });
  await read(fresh.session, [...whole, 5], { maxNewTokens: 12 });
  expect(second.session.stats.activationBytes).toBeLessThan(fresh.session.stats.activationBytes);
  expect(() => second.session.remember(prefix)).toThrow(InputError);
  expect(made().session.prefix()).toBeUndefined();
});

test("a device that has changed its network connects anew", async () => {
  const { session } = made({ draft: 2 });
  let hasChanged = false;
  const { text } = await read(session, PROMPT, { maxNewTokens: 24 }, (_, shown) => {
    if (!hasChanged && shown.length > 6) session.reconnect();
    hasChanged ||= shown.length > 6;
  });
  expect(text).toEqual(ownText(PROMPT, 24));
  expect([session.stats.cuts, session.stats.reconnects]).toEqual([1, 1]);
});

test("a server that has forgotten the session", async () => {
  const { session, server } = made({ draft: 2 });
  let forgotten = false;
  const { text } = await read(session, PROMPT, { maxNewTokens: 20 }, (_, shown) => {
    if (shown.length > 6 && !forgotten) {
      forgotten = true;
      server.sessions.clear();
    }
  });
  expect(text).toEqual(ownText(PROMPT, 20));
  expect(session.stats.reopened).toBeGreaterThanOrEqual(1);
});

test("turns share what they begin with", async () => {
  const { session, server } = made({ draft: 3 });
  const first = await session.generate(PROMPT, { maxNewTokens: 12 });
  const next = [...PROMPT, ...first.tokenIds, 4, 4];
  const second = await session.generate(next, { maxNewTokens: 12, temperature: 1, seed: 3 });
  expect(second.tokenIds).toEqual(ownText(next, 12, 3n));
  const opens = server.received.filter((one) => one.kind.case === "open");
  const held = opens.at(-1)!.kind.value as unknown as { held: { start: number; stop: number }[] };
  expect(held.held[0]).toMatchObject({ start: 0 });
  expect(held.held[0]!.stop).toBeGreaterThan(PROMPT.length);
  const other = [1, 2, 3];
  expect((await session.generate(other, { maxNewTokens: 8 })).tokenIds).toEqual(ownText(other, 8));
});

test("a turn that continues the very text has its own settings", async () => {
  const { session } = made({ draft: 3 });
  const first = await session.generate(PROMPT, { maxNewTokens: 6 });
  const next = [...PROMPT, ...first.tokenIds];
  const second = await session.generate(next, { maxNewTokens: 6, temperature: 1, seed: 5 });
  expect(second.tokenIds).toEqual(ownText(next, 6, 5n));
});

test("a reader that leaves early ends the turn, and the next one works", async () => {
  const { session } = made({ draft: 3 });
  for await (const event of session.stream(PROMPT, { maxNewTokens: 100 })) {
    if (event.start > 5) break;
  }
  expect((await session.generate(PROMPT, { maxNewTokens: 10 })).tokenIds).toEqual(ownText(PROMPT, 10));
});

test("stop tokens, the context's end, and no tokens at all", async () => {
  const text = ownText(PROMPT, 30);
  const { session } = made({ draft: 4 });
  const stopped = await session.generate(PROMPT, { maxNewTokens: 30, stopTokenIds: [text[9]!] });
  const end = text.indexOf(text[9]!) + 1;
  expect([stopped.tokenIds, stopped.stopReason]).toEqual([text.slice(0, end), "stop_token"]);
  const none = await session.generate(PROMPT, { maxNewTokens: 0 });
  expect([none.tokenIds, none.stopReason]).toEqual([[], "max_new_tokens"]);
  const short = new RemoteSession(device(1, { max_positions: 12 }), new FakeServer(), { draft: 4 });
  sessions.push(short);
  const full = await short.generate(PROMPT, { maxNewTokens: 30 });
  expect([full.tokenIds, full.stopReason]).toEqual([text.slice(0, 7), "context"]);
});

test("the drafter's chains are as long as they are asked for, and end with the text", async () => {
  const { session, server } = made({ draft: 5 }, { share: 1 });
  await session.generate(PROMPT, { maxNewTokens: 14 });
  const drafts = server.received.flatMap(({ kind }) => (kind.case === "draft" ? [kind.value] : []));
  expect(Math.max(...drafts.map(({ tokens }) => tokens.length))).toBe(5);
  for (const { base, tokens } of drafts) {
    expect(base + tokens.length).toBeLessThan(PROMPT.length + 14);
  }
});

test("a busy server is asked again", async () => {
  const { session, server } = made({ draft: 2 });
  let busy = 2;
  server.refuse = ({ kind }) =>
    kind.case === "open" && busy-- > 0 ? problem(Problem_Kind.BUSY, { retryS: 0.01 }) : undefined;
  expect((await session.generate(PROMPT, { maxNewTokens: 8 })).tokenIds).toEqual(ownText(PROMPT, 8));
});

test("a server that is about to stop is left for another connection", async () => {
  const { session, server } = made({ draft: 2 });
  let told = false;
  server.lie = (answer) => {
    if (told || answer.case !== "verdict") return [answer];
    told = true;
    return [problem(Problem_Kind.DRAINING), answer];
  };
  expect((await session.generate(PROMPT, { maxNewTokens: 8 })).tokenIds).toEqual(ownText(PROMPT, 8));
  expect(server.connections).toBeGreaterThanOrEqual(2);
});

test("a refusal ends the session", async () => {
  const { session, server } = made();
  server.refuse = () => problem(Problem_Kind.REFUSED, { message: "no\nsuch \u0000 drafter" });
  await expect(session.generate(PROMPT)).rejects.toThrow(new RefusedError("The server refuses: no such \ufffd drafter"));
  await expect(session.generate(PROMPT)).rejects.toThrow(RefusedError);
});

test("a device gives up after a while", async () => {
  const { session, transport } = made({ giveUpMs: 100 });
  transport.hole = true;
  await expect(session.generate(PROMPT)).rejects.toThrow(new LinkError("No link to the server for 100 ms."));
});

const FAULTS: Record<string, Faults> = {
  clean: {},
  messy: { loss: 0.08, twice: 0.15, delayMs: 4 },
  cut: { loss: 0.04, twice: 0.1, delayMs: 3, cutAfter: [12, 17, 25] },
};

test.each(Object.keys(FAULTS).flatMap((name) => [0n, 5n].map((seed) => [name, seed] as const)))(
  "rounds with drafts and streamed tokens in turn, link %s, seed %s",
  async (name, seed) => {
    const { session } = made({}, { faults: FAULTS[name]!, noise: seed });
    draftInTurn(session);
    const sampling = seed ? { temperature: 1, seed } : {};
    for (const prompt of [PROMPT, [1, 2, 3], [8, 8]]) {
      for await (const event of session.stream(prompt, { maxNewTokens: 40, ...sampling })) {
        if (event.start > 6) break; // a turn that is left while tokens are streamed
      }
      const { text } = await read(session, prompt, { maxNewTokens: 40, ...sampling });
      expect(text).toEqual(ownText(prompt, 40, seed));
    }
  },
);

test("a stream that is closed late leaves the next turn alone", async () => {
  const { session } = made({});
  const first = session.stream(PROMPT, { maxNewTokens: 40 });
  await first.next();
  const second = session.stream(PROMPT, { maxNewTokens: 40 });
  const { start, tokenIds } = (await second.next()).value as RemoteEvent;
  const text: number[] = [];
  text.splice(start, text.length, ...tokenIds);
  await first.return(undefined);
  for await (const event of second) text.splice(event.start, text.length, ...event.tokenIds);
  expect(text).toEqual(ownText(PROMPT, 40));
  await session.close();
});

test.each(["rollback", "keep"] as const)("a cut in the middle of a stream, with %s", async (onCut) => {
  const { server, transport, session } = made({ onCut });
  server.passMs = 5;
  draftInTurn(session, 64);
  let kept = 0;
  const { text, events } = await read(session, PROMPT, { maxNewTokens: 60 }, (event, shown) => {
    if (!session.stats.cuts && shown.length > 10) transport.hole = true;
    if (event.numProvisional) kept = event.start + 1;
    if (session.provisional.length >= 4) transport.hole = false;
  });
  expect(session.stats.provisional).toBeGreaterThanOrEqual(4);
  expect(server.received.some(({ kind }) => kind.case === "draft" && kind.value.further > 0)).toBe(true);
  if (onCut === "rollback") {
    expect(text).toEqual(ownText(PROMPT, 60));
  } else {
    expect(text.slice(kept)).toEqual(ownText([...PROMPT, ...text.slice(0, kept)], 60 - kept));
    expect(session.stats.corrected).toBe(0);
  }
  expect(events.at(-1)!.stopReason).toBe("max_new_tokens");
});

test.each(["auto", 0] as const)("an older server streams nothing, with draft %s", async (draft) => {
  const { server, session } = made({ draft });
  server.maxFurther = 0;
  draftInTurn(session);
  const { text } = await read(session, PROMPT, { maxNewTokens: 40 });
  expect(text).toEqual(ownText(PROMPT, 40));
  const asked = server.received.flatMap(({ kind }) => (kind.case === "draft" ? [kind.value.further] : []));
  expect(Math.max(...asked)).toBe(0);
  if (draft === 0) expect(session.result!.acceptLengths).toEqual(new Array(39).fill(1));
});

test("a streamed token that is lost is asked for at once", async () => {
  const { server, session } = made({ draft: 0 });
  let verdicts = 0;
  server.lie = (answer) => (answer.case === "verdict" && ++verdicts === 5 ? [] : [answer]);
  const startedMs = now();
  const { text } = await read(session, PROMPT, { maxNewTokens: 40 });
  expect(now() - startedMs).toBeLessThan(session.options.retryMs);
  expect(text).toEqual(ownText(PROMPT, 40));
  expect(verdicts).toBeGreaterThan(5);
});

test("streamed tokens are the target's, and end with the turn", async () => {
  const { server, session } = made({ draft: 0 });
  const { text } = await read(session, PROMPT, { maxNewTokens: 50 });
  expect(text).toEqual(ownText(PROMPT, 50));
  expect(new Set(session.result!.sources)).toEqual(new Set(["target"]));
  const [held] = server.sessions.values();
  expect(held!.text).toEqual([...PROMPT, ...text]);
});

test("a device that never drafts sends no drafts after a cut", async () => {
  const { server, transport, session } = made({ draft: 0 });
  server.passMs = 5;
  const { text } = await read(session, PROMPT, { maxNewTokens: 60 }, (_, shown) => {
    transport.hole = !session.stats.cuts && shown.length > 10;
  });
  expect(text).toEqual(ownText(PROMPT, 60));
  expect(session.stats.provisional).toBeGreaterThan(0);
  expect(session.result!.acceptLengths).toEqual(new Array(59).fill(1));
});

test.each(["rollback", "keep"] as const)("tokens of a cut are no gain, with %s", async (onCut) => {
  const { server, transport, session } = made({ onCut, maxProvisional: 8 }, { share: 1 });
  server.passMs = 5;
  draftInTurn(session, 3);
  const { auto } = session as unknown as { auto: LinkPolicy };
  let recorded = 0;
  auto.record = () => void (recorded += 1);
  await read(session, PROMPT, { maxNewTokens: 60 }, (_, shown) => {
    if (!session.stats.cuts && shown.length > 10) transport.hole = true;
    if (session.provisional.length >= 4) transport.hole = false;
  });
  const { rounds } = session.stats;
  expect(session.stats.provisional).toBeGreaterThanOrEqual(4);
  expect(rounds.slice(1).some(({ repeated }) => repeated)).toBe(true);
  expect(recorded).toBe(rounds.filter(({ drafted, repeated }) => drafted && !repeated).length);
  expect(recorded).toBeGreaterThan(0);
});

test.each(["auto", 3] as const)("only streamed tokens are observed, with draft %s", async (draft) => {
  const { server, session } = made({ draft });
  server.passMs = 5;
  const inside = session as unknown as { auto: LinkPolicy; verifier: { pending: PendingRequest } };
  const observed = new Set<boolean>();
  inside.auto.observe = () => void observed.add(inside.verifier.pending.opening);
  let prompt = PROMPT;
  for (let turn = 0; turn < 5; turn++) {
    const { text } = await read(session, prompt, { maxNewTokens: 20 });
    prompt = [...prompt, ...text, 3, turn, 8];
  }
  expect([...observed]).toEqual(draft === "auto" ? [false] : []);
});

test("a stop token ends the stream", async () => {
  const { server, session } = made({ draft: 0 });
  server.passMs = 10;
  const stop = ownText(PROMPT, 20).find((token, i, all) => i > 8 && all.indexOf(token) === i)!;
  const { tokenIds } = await session.generate(PROMPT, { maxNewTokens: 60, stopTokenIds: [stop] });
  expect(tokenIds.at(-1)).toBe(stop);
  const halt = server.received.at(-1)!;
  expect(halt.kind).toMatchObject({ case: "draft", value: { base: PROMPT.length + tokenIds.length - 1, further: 0 } });
  const [held] = server.sessions.values();
  expect(held!.goal).toBe(0);
});

test("verdicts for later requests are kept within the stream only", async () => {
  const { server, session } = made({ draft: 0 });
  const { verifier } = session as unknown as { verifier: { early: Map<number, unknown>; text: number[] } };
  let most = 0;
  server.lie = (answer) => {
    most = Math.max(most, verifier.early.size);
    if (answer.case !== "verdict" || !verifier.text.length) return [answer];
    const later = Array.from({ length: 100 }, (_, i) => verifier.text.length + 2 + i);
    const lies = later.map((base) => ({ ...answer, value: { ...answer.value, base, tokens: [1] } }));
    return verifier.text.length > PROMPT.length + 10 ? [...lies, answer] : [answer];
  };
  await expect(session.generate(PROMPT, { maxNewTokens: 50 })).rejects.toThrow(WireError);
  expect(verifier.early.size).toBeLessThanOrEqual(1 + MAX_STREAMED);
  expect(most).toBeLessThanOrEqual(1 + MAX_STREAMED);
});

test("invalid arguments", async () => {
  const { session } = made();
  const wrong: [readonly number[], TurnOptions][] = [
    [[], {}],
    [[97], {}],
    [[1.5], {}],
    [PROMPT, { temperature: -1 }],
    [PROMPT, { topP: 2 }],
    [PROMPT, { seed: 1n << 64n }],
    [PROMPT, { maxNewTokens: 1.5 }],
    [PROMPT, { draft: 300 }],
    [PROMPT, { stop: [""] }],
    [PROMPT, { stop: "x" }],
    [PROMPT, { logitBias: new Map([[-1, 0]]) }],
  ];
  for (const [prompt, options] of wrong) {
    await expect(session.generate(prompt, options)).rejects.toThrow(InputError);
  }
  for (const options of [{ codec: "fp8" }, { onCut: "stay" }, { maxProvisional: -1 }, { draft: "tree" }]) {
    expect(() => made(options as SessionOptions)).toThrow(InputError);
  }
});

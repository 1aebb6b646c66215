/** Sessions with several servers: which one a text goes to, and where it goes on. */
import { afterEach, expect, test } from "vitest";
import WebSocket from "ws";
import { LinkError } from "../src/errors.js";
import { Fleet, fleetKey } from "../src/protocol/fleet.js";
import { Problem_Kind } from "../src/protocol/target_pb.js";
import type { Transport } from "../src/protocol/transport.js";
import { RemoteSession } from "../src/session/remote_session.js";
import { FakeServer, FaultyTransport, device, ownText, problem, PROMPT } from "./fake_target.js";
import { simulateTime } from "./simulated_time.js";

const NAMES = ["ws://one", "ws://two", "ws://three"];
const DEAD: Transport = { connect: () => Promise.reject(new LinkError("nobody listens")) };
const sessions: RemoteSession[] = [];

simulateTime();

afterEach(async () => {
  await Promise.all(sessions.splice(0).map((one) => one.close()));
});

function made(wrap: (server: FakeServer, number: number) => Transport = (server) => server) {
  const servers = NAMES.map(() => new FakeServer());
  const fleet = new Fleet(new Map(NAMES.map((name, i) => [name, wrap(servers[i]!, i)])));
  const session = (draft = 2) => {
    const one = new RemoteSession(device(), fleet, { draft });
    sessions.push(one);
    return one;
  };
  const used = () => servers.flatMap((server, i) => (server.received.length ? [i] : []));
  return { servers, fleet, session, used };
}

const write = (session: RemoteSession, prompt = PROMPT) => session.generate(prompt, { maxNewTokens: 40 });

test("texts with one long beginning meet on one server, others spread", async () => {
  const { session, used } = made();
  const beginning = Array.from({ length: 64 }, (_, i) => i);
  await write(session(), [...beginning, 1]);
  await write(session(), [...beginning, 2, 3]);
  expect(used()).toHaveLength(1);
  for (let i = 0; i < 20; i++) await write(session(), [...PROMPT, i]);
  expect(used()).toHaveLength(3);
});

test("a server that nobody reaches is passed over, and not tried again for a while", async () => {
  const attempts: number[] = [];
  const { session, fleet, used } = made((server, number) => ({
    connect: (events) => {
      attempts.push(number);
      return number === 2 ? server.connect(events) : DEAD.connect(events, new AbortController().signal);
    },
  }));
  for (let i = 0; i < 5; i++) {
    expect((await write(session(), [...PROMPT, i])).tokenIds).toEqual(ownText([...PROMPT, i], 40));
  }
  expect(used()).toEqual([2]);
  expect(attempts.filter((number) => number !== 2).length).toBeLessThanOrEqual(2);
  expect(fleet.avoids(NAMES[2]!)).toBe(false);
});

test("a text goes on elsewhere when its server falls silent", async () => {
  const links: FaultyTransport[] = [];
  const { session, used } = made((server) => {
    const link = new FaultyTransport(server);
    links.push(link);
    return link;
  });
  const one = session();
  let tokens = 0;
  const text: number[] = [];
  for await (const event of one.stream(PROMPT, { maxNewTokens: 60 })) {
    text.splice(event.start, Infinity, ...event.tokenIds);
    tokens += event.tokenIds.length;
    if (tokens > 5) links[used()[0]!]!.hole ||= used().length === 1;
  }
  expect(text).toEqual(ownText(PROMPT, 60));
  expect(used()).toHaveLength(2);
});

test.each([
  ["drains", Problem_Kind.DRAINING],
  ["has no room", Problem_Kind.BUSY],
])("a session leaves a server that %s", async (_, kind) => {
  const { servers, session, used } = made();
  const one = session();
  let asked = 0;
  for (const server of servers) {
    server.refuse = (message) => {
      const refuses = message.kind.case === "open" && asked++ === 0;
      return refuses ? problem(kind, { retryS: 0.01 }) : undefined;
    };
  }
  expect((await write(one)).tokenIds).toEqual(ownText(PROMPT, 40));
  expect(used()).toHaveLength(2);
});

test("a device that connects anew does not blame its server", async () => {
  const attempts: number[] = [];
  const { session, fleet } = made((server, number) => ({
    connect: async (events) => {
      attempts.push(number);
      await new Promise((resolve) => setTimeout(resolve, 30));
      return server.connect(events);
    },
  }));
  const one = session();
  one.connect();
  one.reconnect();
  one.reconnect();
  // A text whose first server is that of a session without one.
  const first = fleet.ranked(new Uint8Array())[0];
  const texts = Array.from({ length: 99 }, (_, i) => [...PROMPT, i]);
  const text = texts.find((ids) => fleet.ranked(fleetKey(ids))[0] === first)!;
  expect((await write(one, text)).tokenIds).toEqual(ownText(text, 40));
  expect(new Set(attempts).size).toBe(1);
  expect(NAMES.some((name) => fleet.avoids(name))).toBe(false);
});

test("with one server, or with none that is not avoided, it is tried again", async () => {
  const server = new FakeServer();
  let asked = 0;
  server.refuse = (message) =>
    message.kind.case === "open" && asked++ === 0 ? problem(Problem_Kind.DRAINING) : undefined;
  const one = new RemoteSession(device(), server, { draft: 2 });
  sessions.push(one);
  expect((await write(one)).tokenIds).toEqual(ownText(PROMPT, 40));
  expect(server.connections).toBe(2);
});

test("a fleet needs addresses that can be used", () => {
  const options = { WebSocket: WebSocket as any };
  expect(() => Fleet.at([], options)).toThrow("at least one");
  expect(() => Fleet.at(["ws://here:1", "http://there"], options)).toThrow("http://there");
});

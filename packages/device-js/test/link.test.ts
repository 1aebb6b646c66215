/** A device's link to its server. */
import { expect, test } from "vitest";
import { LinkError } from "../src/errors.js";
import { Fleet } from "../src/protocol/fleet.js";
import type { Transport } from "../src/protocol/transport.js";
import { LinkStats, now } from "../src/session/events.js";
import { ServerLink } from "../src/session/link.js";
import { FakeServer } from "./fake_target.js";
import { simulateTime } from "./simulated_time.js";

simulateTime();

function made(transport: Transport) {
  const stats = new LinkStats();
  const user = { onMessage: () => {}, onConnect: () => {}, onChange: () => {} };
  return { stats, link: new ServerLink(Fleet.of(transport).route(), new Uint8Array(16), stats, user) };
}

const sleep = (ms: number) => new Promise((resolve) => setTimeout(resolve, ms));

test("a silent link is dead within a second, and attempts become rarer", async () => {
  const server = new FakeServer();
  let isGone = false;
  server.lie = (answer) => (isGone ? [] : [answer]);
  const attempts: number[] = [];
  const { stats, link } = made({
    connect: (events) => {
      attempts.push(now());
      return isGone ? Promise.reject(new LinkError("gone")) : server.connect(events);
    },
  });
  link.start();
  await sleep(10_000);
  expect([stats.state, stats.cuts]).toEqual(["up", 0]);
  isGone = true;
  await sleep(6000);
  expect(stats.noticedMs).toBeGreaterThan(900);
  expect(stats.noticedMs).toBeLessThan(1000);
  const times = [stats.downMs!, ...attempts.slice(1, 7)];
  expect(times.slice(1).map((ms, i) => Math.round(ms - times[i]!))).toEqual([200, 400, 800, 1000, 1000, 1000]);
  await link.close();
});

test("connections that take longer than the limit of an attempt", async () => {
  const server = new FakeServer();
  const { stats, link } = made({
    connect: async (events) => {
      await sleep(3000);
      return server.connect(events);
    },
  });
  link.start();
  await sleep(10_000);
  expect(stats.state).toBe("up");
  await link.close();
});

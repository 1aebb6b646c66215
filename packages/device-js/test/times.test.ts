/** Times by which a device decides how much to draft. */
import { expect, test } from "vitest";
import { MAX_FURTHER } from "../src/protocol/limits.js";
import { AheadDrafter } from "../src/session/draft_ahead.js";
import { LinkStats } from "../src/session/events.js";
import { LinkPolicy } from "../src/session/link_policy.js";
import { FakeDrafter } from "./fake_target.js";

test("heartbeats show that a link has become fast", () => {
  const stats = new LinkStats();
  expect(stats.waitMs).toBeUndefined();
  stats.rttMs = 1000;
  expect(stats.waitMs).toBe(1000);
  for (const receivedMs of [1000, 30000, 1100, 1050, 1200]) {
    const round = { sentMs: 0, receivedMs, passMs: 100, drafted: 3, dropped: 0, accepted: 0, ahead: 0 };
    stats.addRound(round);
    stats.addRound({ ...round, receivedMs: 10, drafted: 0 }); // streamed
  }
  expect(stats.waitMs).toBe(1100);
  stats.rttMs = 5000;
  expect(stats.waitMs).toBe(1100);
  stats.rttMs = 20;
  expect(stats.waitMs).toBe(120);
});

test("a wait counts although a busy server dropped its drafts", () => {
  const stats = new LinkStats();
  stats.rttMs = 20;
  const round = { sentMs: 0, receivedMs: 300, passMs: 100, drafted: 0, dropped: 1, accepted: 0, ahead: 0 };
  stats.addRound(round);
  expect(stats.waitMs).toBe(300);
  stats.addRound({ ...round, receivedMs: 10, dropped: 0 }); // streamed
  expect(stats.waitMs).toBe(300);
});

test("a slow draft step among others is ignored", () => {
  const ahead = new AheadDrafter(new FakeDrafter(1), 100);
  const measure = (tookMs: number, numNew = 1) =>
    (ahead as unknown as { measure(tookMs: number, numNew: number): void }).measure(tookMs, numNew);
  measure(9000, 20); // reads the prompt
  expect(ahead.stepMs).toBeUndefined();
  for (const tookMs of [300, 10, 20, 10]) {
    expect(ahead.isMeasuring).toBe(true);
    measure(tookMs);
  }
  expect(ahead.isMeasuring).toBe(false);
  expect(ahead.stepMs).toBe(20);
  for (let i = 0; i < 9; i++) measure(50); // the device has become slower
  expect(ahead.stepMs).toBe(50);
  for (let i = 0; i < 9; i++) measure(40, 20);
  expect(ahead.stepMs).toBe(40);
});

test("a pause ends early where drafts would pay by now", () => {
  let waitMs = 9000;
  const policy = new LinkPolicy(() => waitMs, () => 3, true, () => 50);
  const drafts = (count: number) => Array.from({ length: count }, () => policy.numDrafts());
  expect(Math.max(...drafts(100))).toBe(0);
  const asked = policy.pause;
  expect(asked).toBeGreaterThan(4 * MAX_FURTHER);
  waitMs = 60;
  const found = drafts(asked);
  const first = found.findIndex((number) => number > 0);
  expect(first).toBeGreaterThanOrEqual(MAX_FURTHER);
  expect(first).toBeLessThanOrEqual(2 * MAX_FURTHER);
  expect(Math.min(...found.slice(first))).toBeGreaterThan(0);
});

test.each([8, Infinity])("few draft steps are not decided by for some time, enough after %s", (enough) => {
  const found: number[] = [];
  const policy = new LinkPolicy(() => 160, () => 5, true, () => 150, () => found.length < enough);
  while (found.length < 40) found.push(policy.numDrafts());
  const first = Math.min(enough, 16);
  expect(Math.max(...found.slice(0, first))).toBe(0);
  expect(Math.min(...found.slice(first))).toBeGreaterThan(1);
});

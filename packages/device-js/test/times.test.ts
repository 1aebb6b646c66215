/** Times by which a device decides how much to draft. */
import { expect, test } from "vitest";
import { MAX_STREAMED } from "../src/protocol/limits.js";
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

test("a cut is no wait", () => {
  const stats = new LinkStats();
  stats.rttMs = 20;
  const round = { sentMs: 0, receivedMs: 8000, passMs: 100, drafted: 12, dropped: 0, accepted: 12, ahead: 0 };
  stats.addRound({ ...round, repeated: true });
  expect(stats.waitMs).toBe(120);
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

const drafts = (policy: LinkPolicy, count: number) => Array.from({ length: count }, () => policy.numDrafts());

test("a link that has become fast begins drafts", () => {
  let waitMs = 9000;
  const policy = new LinkPolicy(() => waitMs, () => 3, true, () => 50);
  expect(Math.max(...drafts(policy, 100))).toBe(0);
  const asked = policy.pause;
  expect(asked).toBe(MAX_STREAMED);
  waitMs = 60;
  const found = drafts(policy, 100);
  expect(Math.max(...found.slice(0, asked))).toBe(0);
  expect(Math.min(...found.slice(asked))).toBeGreaterThan(0);
});

test("few draft steps are not decided by", () => {
  let isKnown = false;
  const policy = new LinkPolicy(() => 160, () => 5, true, () => 150, () => !isKnown);
  expect(Math.max(...drafts(policy, 100))).toBe(0);
  expect(policy.observes).toBe(true);
  const asked = policy.pause;
  isKnown = true;
  const found = drafts(policy, 40);
  expect(Math.max(...found.slice(0, asked))).toBe(0);
  expect(Math.min(...found.slice(asked))).toBeGreaterThan(1);
});

test("drafts of streamed tokens decide, if steps fit between these", () => {
  const policy = new LinkPolicy(() => 192, () => 10, true, () => 150);
  for (let i = 0; i < 12; i++) policy.observe(false);
  expect(Math.max(...drafts(policy, 100))).toBe(0);
  expect(policy.observes).toBe(true);
  for (let i = 0; i < 40; i++) policy.observe(true);
  expect(Math.max(...drafts(policy, 10))).toBeGreaterThan(0);
  expect(new LinkPolicy(() => 192, () => 200, true, () => 150).observes).toBe(false);
});

test.each([0, 500])("drafts that the server drops end, after %s rounds of right ones", (numRight) => {
  const policy = new LinkPolicy(() => 200, () => 5, true, () => 150);
  for (let i = 0; i < 40; i++) policy.observe(true);
  for (let i = 0; i < numRight; i++) {
    const drafted = policy.numDrafts();
    policy.record(drafted, drafted);
  }
  const before = policy.speeds();
  let lost = 0;
  for (let i = 0; i < 1000; i++) {
    if (!policy.numDrafts()) continue;
    policy.record(0, 0);
    lost += 200 / 150 - 1;
  }
  expect(lost).toBeGreaterThan(0);
  expect(lost).toBeLessThan((numRight ? 16 : 1.5) + 0.005 * 1000 + 1);
  expect(policy.speeds()).toEqual(before);
});

test.each([[500, false], [200, true]] as const)("drafts on a link of %s ms are observed: %s", (waitMs, observes) => {
  // 25 tokens take a round trip, or 250 ms without drafts.
  const policy = new LinkPolicy(() => waitMs, () => 3, true, () => 10);
  const found = Array.from({ length: 100 }, () => policy.numDrafts() === 0 && policy.observes);
  expect(found.includes(true)).toBe(observes);
});

/**
 * A device's link to its server: connects, detects a dead connection, and connects again.
 *
 * A link is up after the first message of a connection. Every message shows that the link works;
 * heartbeats cause at least one every half second.
 */
import { LinkError, MoaSpecError, RefusedError, WireError } from "../errors.js";
import type { ServerMessage } from "../protocol/target_pb.js";
import { AVOID_MS, MAX_LATE } from "../protocol/fleet.js";
import type { Route } from "../protocol/fleet.js";
import type { Connection, ConnectionEvents } from "../protocol/transport.js";
import { clientFrame, parseServer } from "../protocol/wire.js";
import type { ClientKind } from "../protocol/wire.js";
import { now } from "./events.js";
import type { LinkState, LinkStats } from "./events.js";
import { WakeUp } from "./timing.js";

/** Milliseconds between two heartbeats, which are the longest silence of an idle link. */
const HEARTBEAT_MS = 500;
/**
 * Milliseconds of silence after which the link is dead. The answer to a heartbeat may be 0.4 s late, twice what a lost
 * packet takes, and readers wait for less than a second.
 */
const DEAD_AFTER_MS = 900;
/** First and longest time, in milliseconds, from the start of a failed attempt to that of the next. */
const BACKOFF_MS = 200;
const MAX_BACKOFF_MS = 1000;
/** Milliseconds that an attempt may take; more after `MAX_LATE` attempts that took too long. */
const CONNECT_MS = 1000;
/**
 * Of `CONNECT_MS`: enough for Chromium, which holds a connection back by up to 5 s, and for long round trips; while
 * packets are lost, the system repeats the first one less and less often, by then every 3 s.
 */
const MAX_LIMIT_FACTOR = 6;
/** A timer that fires this late shows that the device was suspended, not that the link is dead. */
const LATE_MS = 200;
/** Heartbeats without an answer that are remembered. */
const MAX_BEATS = 64;

/** Callbacks of a link. */
export interface LinkUser {
  /** A message other than a heartbeat has arrived. */
  onMessage(message: ServerMessage): void;
  /** There is a new connection; what is sent now precedes all other messages. */
  onConnect(): void;
  /** The state has changed, or the server has refused. */
  onChange(): void;
}

/** Keeps one connection. */
export class ServerLink {
  /** Why the session ended; undefined while it goes on. */
  refused: Error | undefined;
  private connection: Connection | undefined;
  private breakOff: ((error?: Error) => void) | undefined;
  private running: Promise<void> | undefined;
  private isClosing = false;
  private isMoving = false;
  /** Whether this device itself has ended the connection. */
  private isRenewing = false;
  private readonly pause = new WakeUp();
  /** Attempts, one after another, that took too long. */
  private late = 0;
  private heardMs = 0;
  private number = 0n;
  private readonly beats = new Map<bigint, number>();

  /**
   * @param route makes connections
   * @param session random bytes that name the session, set in every message
   * @param stats updated by the link
   */
  constructor(
    private readonly route: Route,
    private readonly session: Uint8Array,
    readonly stats: LinkStats,
    private readonly user: LinkUser,
  ) {}

  /** Whether there is a connection, even if no message has come yet. */
  get connected(): boolean {
    return this.connection !== undefined;
  }

  /** Start to connect, unless that is done already. */
  start(): void {
    this.running ??= this.mend();
  }

  /** Send a message; without a connection it is dropped. */
  send(turn: number, kind: ClientKind): void {
    if (!this.connection) return;
    const frame = clientFrame(this.session, turn, kind);
    this.stats.messagesUp += 1;
    this.stats.bytesUp += frame.length;
    this.connection.send(frame);
  }

  /**
   * Connect to another server; this one is tried last for some time.
   *
   * @param ms for which this server comes last
   * @param anyway whether to replace it even if no other server is known
   */
  leave(ms: number, anyway: boolean): void {
    this.isMoving = this.route.leave(ms);
    if (this.isMoving || anyway) this.breakOff?.();
  }

  /** Connect at once, over a new connection. */
  reconnect(): void {
    this.route.forgive();
    this.late = 0;
    this.isRenewing = true;
    this.pause.set();
    this.breakOff?.();
  }

  /** Stop trying: the session cannot go on. */
  refuse(error: unknown): void {
    const known = error instanceof MoaSpecError;
    this.refused ??= known ? error : new RefusedError(`The session failed: ${String(error)}`);
    this.breakOff?.();
    this.user.onChange();
  }

  /** Close the link. */
  async close(): Promise<void> {
    this.isClosing = true;
    this.pause.set();
    this.breakOff?.();
    await this.running;
    this.setState("closed");
  }

  private setState(state: LinkState): void {
    if (state === this.stats.state) return;
    this.stats.state = state;
    this.user.onChange();
  }

  /** Open one connection after another, with pauses, until the server refuses. */
  private async mend(): Promise<void> {
    let pauseMs = BACKOFF_MS;
    const goesOn = () => !this.refused && !this.isClosing;
    while (goesOn()) {
      const started = now();
      let wasUp = false;
      try {
        wasUp = await this.once();
      } catch (error) {
        this.refuse(error);
      }
      if (!goesOn()) return;
      if (this.isMoving) {
        this.isMoving = false;
        continue;
      }
      // The pause is reset only after a connection that lasted.
      if (wasUp && now() - started > MAX_BACKOFF_MS) pauseMs = BACKOFF_MS;
      // The time of a failed attempt counts as pause.
      await this.pause.wait(Math.max(0, pauseMs - (wasUp ? 0 : now() - started)));
      pauseMs = Math.min(2 * pauseMs, MAX_BACKOFF_MS);
    }
  }

  /** Open one connection and use it until it ends; returns whether it was ever up. */
  private async once(): Promise<boolean> {
    this.isRenewing = false;
    let breakOff!: (error?: Error) => void;
    const broken = new Promise<Error | undefined>((resolve) => {
      breakOff = resolve;
    });
    const events = { onFrame: (frame: Uint8Array) => this.receive(frame, breakOff), onEnd: breakOff };
    const connection = await this.connect(events);
    if (!connection) {
      this.stats.failures += 1;
      this.user.onChange();
      return false;
    }
    const beating = this.begin(connection, breakOff);
    const error = await broken;
    clearInterval(beating);
    const wasUp = this.stats.state === "up";
    this.connection = this.breakOff = undefined;
    connection.close();
    if (wasUp && !this.isClosing) {
      this.stats.cuts += 1;
      this.stats.noticedMs = now() - this.heardMs;
      this.stats.downMs = now();
      this.setState("down");
    }
    // A server, or a proxy before it, that accepts connections and says nothing.
    if (!wasUp && !this.isClosing && !this.isRenewing) this.route.leave(AVOID_MS);
    if (error && !(error instanceof LinkError)) throw error;
    return wasUp;
  }

  /** Open a connection; undefined when the server cannot be reached in time. */
  private async connect(events: ConnectionEvents): Promise<Connection | undefined> {
    const attempt = new AbortController();
    const factor = Math.min(2 ** Math.max(0, this.late - MAX_LATE + 1), MAX_LIMIT_FACTOR);
    const limit = setTimeout(() => {
      this.late += 1;
      attempt.abort();
    }, factor * CONNECT_MS);
    this.breakOff = () => attempt.abort();
    const given = new Promise<undefined>((resolve) => {
      attempt.signal.addEventListener("abort", () => resolve(undefined), { once: true });
    });
    const opening = this.route.connect(events, attempt.signal);
    // A connection that comes too late is of no use.
    opening.then((late) => attempt.signal.aborted && late.close()).catch(() => {});
    try {
      return await Promise.race([opening, given]);
    } catch (error) {
      if (error instanceof LinkError) return undefined;
      throw error;
    } finally {
      clearTimeout(limit);
      this.breakOff = undefined;
    }
  }

  /** Begin to use a connection; returns the timer of its heartbeats. */
  private begin(connection: Connection, breakOff: (error?: Error) => void) {
    this.connection = connection;
    this.breakOff = breakOff;
    this.heardMs = now();
    this.beats.clear();
    this.guarded(() => this.user.onConnect(), breakOff);
    const tickMs = HEARTBEAT_MS / 10;
    let nextMs = now();
    let wokeMs = now();
    return setInterval(() => {
      const time = now();
      if (time - wokeMs > tickMs + LATE_MS) {
        // Messages that came while the device was suspended are not read yet.
        this.heardMs = Math.max(this.heardMs, time - DEAD_AFTER_MS / 2);
      } else if (time - this.heardMs > DEAD_AFTER_MS) {
        breakOff();
      }
      if (time >= nextMs) {
        nextMs = time + HEARTBEAT_MS;
        this.beat(time);
      }
      wokeMs = time;
    }, tickMs);
  }

  private beat(time: number): void {
    this.number += 1n;
    this.beats.set(this.number, time);
    if (this.beats.size > MAX_BEATS) this.beats.delete(this.beats.keys().next().value!);
    this.send(0, { case: "heartbeat", value: { number: this.number } });
  }

  private receive(frame: Uint8Array, breakOff: (error?: Error) => void): void {
    this.heardMs = now();
    this.stats.messagesDown += 1;
    this.stats.bytesDown += frame.length;
    this.guarded(() => {
      const message = parseServer(frame);
      if (message.session.length && !equal(message.session, this.session)) {
        throw new WireError("The server speaks of a session that is not this one.");
      }
      if (this.stats.state !== "up") {
        this.stats.reconnects += this.stats.state === "down" ? 1 : 0;
        this.stats.upMs = now();
        this.stats.failures = this.late = 0;
        this.setState("up");
      }
      if (message.kind.case === "heartbeat") this.noteRoundTrip(message.kind.value.number);
      else this.user.onMessage(message);
    }, breakOff);
  }

  private guarded(work: () => void, breakOff: (error?: Error) => void): void {
    try {
      work();
    } catch (error) {
      breakOff(error as Error);
    }
  }

  private noteRoundTrip(number: bigint): void {
    const sentMs = this.beats.get(number);
    if (sentMs === undefined) return;
    this.beats.delete(number);
    const tookMs = now() - sentMs;
    const { rttMs } = this.stats;
    this.stats.rttMs = rttMs === undefined ? tookMs : 0.8 * rttMs + 0.2 * tookMs;
  }
}

function equal(a: Uint8Array, b: Uint8Array): boolean {
  return a.length === b.length && a.every((byte, i) => byte === b[i]);
}

/**
 * Several servers as one: chooses the server of each text, and avoids servers for some time.
 *
 * A hash of a text's first tokens decides the order in which it tries the servers, as in Python. So texts with one long
 * beginning meet on the server that has read it.
 */
import { blake2b } from "@noble/hashes/blake2.js";
import { InputError, LinkError } from "../errors.js";
import type { Connection, ConnectionEvents, Transport } from "./transport.js";
import { WebSocketTransport } from "./websocket.js";
import type { WebSocketOptions } from "./websocket.js";

/** First tokens that choose the server. */
const KEY_TOKENS = 64;
/** Milliseconds for which a server comes last that cannot be reached or that drains, or that has no room. */
export const AVOID_MS = 10_000;
export const BUSY_MS = 2000;
/** Attempts to reach a session's own server that may take too long, before another one is tried. */
export const MAX_LATE = 2;

/** Servers of one target; a transport for many sessions. */
export class Fleet {
  private readonly avoided = new Map<string, number>();

  /** @param servers the transport to each server, by its address */
  constructor(private readonly servers: ReadonlyMap<string, Transport>) {}

  /**
   * The fleet at some addresses, with the same options.
   *
   * @param addresses ws://HOST:PORT or wss://HOST:PORT; with the same addresses Python's devices choose the same server
   *   for a text
   * @throws InputError no address, or one that cannot be used
   */
  static at(addresses: readonly string[], options: WebSocketOptions = {}): Fleet {
    if (!addresses.length) throw new InputError("A fleet has at least one address.");
    return new Fleet(new Map(addresses.map((one) => [one, new WebSocketTransport(one, options)])));
  }

  /** The fleet itself, or a fleet of one server. */
  static of(transport: Transport | Fleet): Fleet {
    return transport instanceof Fleet ? transport : new Fleet(new Map([["", transport]]));
  }

  /** The transport of one session. */
  route(): Route {
    return new Route(this);
  }

  transport(server: string): Transport {
    return this.servers.get(server)!;
  }

  /** Let a server come last for some time. */
  avoid(server: string, ms: number): void {
    this.avoided.set(server, performance.now() + ms);
  }

  /** Whether a server comes last. */
  avoids(server: string): boolean {
    return (this.avoided.get(server) ?? 0) > performance.now();
  }

  /**
   * All servers, in the order of a text's attempts.
   *
   * @param key of the text; decides which server is the first
   * @param own the server that knows the text; it comes first, unless it is avoided
   */
  ranked(key: Uint8Array, own?: string): string[] {
    const all = [...this.servers.keys()];
    // The remainder of the key as a big-endian number.
    const first = key.reduce((rest, byte) => (256 * rest + byte) % all.length, 0);
    const until = (server: string) => (this.avoids(server) ? this.avoided.get(server)! : 0);
    const isOther = (server: string) => Number(server !== own);
    return [...all.slice(first), ...all.slice(0, first)].sort(
      (a, b) => until(a) - until(b) || isOther(a) - isOther(b),
    );
  }
}

/**
 * The transport of one session: leads to the server of its text, or to the next.
 *
 * A session stays with its server, also after a cut, until that server drains, has no room or cannot be reached.
 */
export class Route implements Transport {
  private key: Uint8Array = new Uint8Array();
  private own: string | undefined;
  private tried: string | undefined;
  private late = 0;
  private servers: readonly string[] = [];

  constructor(private readonly fleet: Fleet) {}

  /** Let the beginning of this text choose a server, when the next one is chosen. */
  aim(tokenIds: readonly number[]): void {
    this.key = fleetKey(tokenIds);
  }

  /** Forget an attempt that this device itself breaks off: its server is not to blame. */
  forgive(): void {
    this.tried = undefined;
  }

  /** Avoid the server of the latest connection; returns whether the next one will be another server. */
  leave(ms: number): boolean {
    if (this.own !== undefined) this.fleet.avoid(this.own, ms);
    return !this.servers.every((server) => this.fleet.avoids(server));
  }

  /** Connect to the first server that can be reached; see `Transport`. */
  async connect(events: ConnectionEvents, signal: AbortSignal): Promise<Connection> {
    this.judgeLast();
    this.servers = this.fleet.ranked(this.key, this.own);
    let problem = new LinkError("There is no server.");
    for (const server of this.servers) {
      this.tried = server;
      try {
        const connection = await this.fleet.transport(server).connect(events, signal);
        if (!signal.aborted) {
          this.own = server;
          this.tried = undefined;
          this.late = 0;
        }
        return connection;
      } catch (error) {
        if (!(error instanceof LinkError) || signal.aborted) throw error;
        problem = error;
        this.fleet.avoid(server, AVOID_MS);
        this.tried = undefined;
      }
    }
    throw problem;
  }

  /** Avoid the server of an attempt that took too long. */
  private judgeLast(): void {
    if (this.tried === undefined) return;
    this.late += 1;
    if (this.tried !== this.own || this.late >= MAX_LATE) {
      this.fleet.avoid(this.tried, AVOID_MS);
      this.late = 0;
    }
    this.tried = undefined;
  }
}

/** The hash of a text's beginning, 8 bytes. */
export function fleetKey(tokenIds: readonly number[]): Uint8Array {
  return blake2b(new TextEncoder().encode(tokenIds.slice(0, KEY_TOKENS).join(",")), { dkLen: 8 });
}

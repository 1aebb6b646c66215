/**
 * Asks a server over HTTP whether it is there, before a WebSocket is opened to it.
 *
 * Browsers hold WebSockets back after failed ones: Chromium by up to 5 s, Firefox by up to a minute. Requests over HTTP
 * they never hold back. So while a server is away, a page asks over HTTP, and no WebSocket fails.
 */

/** Time after which a WebSocket is opened without an answer: it waits for a slow network as well as a request does. */
const SLOW_MS = 500;

/** What a page knows of the server of one address. */
export class Health {
  private readonly url: string;
  private hasFailed = false;
  /** Whether a request failed after `SLOW_MS` since the last connection: then a slow device takes that long. */
  private failsLate = false;
  /** Whether requests reach this server; for pages of another origin their policy may forbid it. */
  private isKnown: boolean;

  /**
   * @param server its address, http://HOST:PORT or https://HOST:PORT
   * @param origin of the page
   */
  constructor(server: string, origin?: string) {
    this.url = `${server}/health`;
    this.isKnown = new URL(server).origin === origin;
  }

  /** The health of the server of a WebSocket's address; undefined outside of browsers, which hold nothing back. */
  static of(address: string): Health | undefined {
    const { location } = globalThis as { location?: { origin: string } };
    return location && new Health(address.replace(/^ws/, "http"), location.origin);
  }

  /** Note an attempt that failed, or a connection that broke. */
  noteFailure(): void {
    this.hasFailed = true;
  }

  /** Note a connection. */
  noteOpened(): void {
    this.hasFailed = this.failsLate = false;
    if (!this.isKnown) void this.answers(new AbortController().signal);
  }

  /** Whether a WebSocket may succeed now; asks the server only after a failure. */
  async mayOpen(signal: AbortSignal): Promise<boolean> {
    if (!this.hasFailed) return true;
    const answer = this.answers(signal);
    const found = await (this.failsLate ? answer : Promise.race([answer, this.slow(answer, signal)]));
    return found || !this.isKnown;
  }

  /** True after a while, unless there is an answer by then; notes whether that fails. */
  private slow(answer: Promise<boolean>, signal: AbortSignal): Promise<true> {
    return new Promise((resolve) => {
      const timer = setTimeout(() => {
        resolve(true);
        void answer.then((found) => {
          // An attempt that was given up says nothing.
          if (!found && !signal.aborted) this.failsLate = true;
        });
      }, SLOW_MS);
      void answer.then(() => clearTimeout(timer));
    });
  }

  /** Whether the server answers, or a proxy for it; one whose server is away answers with 502 to 504. */
  private async answers(signal: AbortSignal): Promise<boolean> {
    try {
      const { status, body } = await fetch(this.url, { cache: "no-store", redirect: "manual", signal });
      void body?.cancel();
      if (status >= 500) return false;
      this.isKnown = true;
      return true;
    } catch {
      return false;
    }
  }
}

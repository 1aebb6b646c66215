/** Small tools for waiting. */

/** Let other tasks run, such as handlers of received messages. */
export function nextTask(): Promise<void> {
  const immediate = (globalThis as { setImmediate?: (run: () => void) => unknown }).setImmediate;
  if (immediate) return new Promise((resolve) => immediate(resolve));
  // Browsers delay nested timers by 4 ms, and messages not at all.
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(0);
  });
}

/** A signal that is remembered until somebody waits for it. */
export class WakeUp {
  private isSet = false;
  private resolve: (() => void) | undefined;

  set(): void {
    this.isSet = true;
    this.resolve?.();
  }

  /** Wait for the signal, at most `timeoutMs`, and take it back. */
  async wait(timeoutMs: number): Promise<void> {
    if (!this.isSet) {
      await new Promise<void>((resolve) => {
        const timer = setTimeout(resolve, timeoutMs);
        this.resolve = () => {
          clearTimeout(timer);
          resolve();
        };
      });
    }
    this.resolve = undefined;
    this.isSet = false;
  }
}

/** Values that a producer adds and one consumer takes, until the end. */
export class EventQueue<T> {
  private readonly values: T[] = [];
  private readonly wakeUp = new WakeUp();
  private ended = false;

  push(value: T): void {
    this.values.push(value);
    this.wakeUp.set();
  }

  end(): void {
    this.ended = true;
    this.wakeUp.set();
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<T> {
    for (;;) {
      while (this.values.length) yield this.values.shift()!;
      if (this.ended) return;
      await this.wakeUp.wait(60_000);
    }
  }
}

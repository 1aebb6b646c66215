/** Sessions and servers in simulated time, so that tests end the same way on every machine. */
import { afterEach, beforeEach, vi } from "vitest";

/** Run the tests of this file with a clock that skips all waiting; computing takes no time. */
export function simulateTime(): void {
  beforeEach(() => {
    vi.useFakeTimers().setTimerTickMode("nextTimerAsync");
  });
  afterEach(() => void vi.useRealTimers());
}

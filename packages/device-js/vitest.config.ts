import { defineConfig } from "vitest/config";

// Tests of sessions wait for timers of links, not for a CPU; one worker is enough.
export default defineConfig({ test: { include: ["test/**/*.test.ts"], maxWorkers: 1, testTimeout: 60_000 } });

import { defineConfig } from "vitest/config";

// Tests wait for simulated timers and for a server, not for a CPU; one worker is enough.
export default defineConfig({ test: { include: ["test/**/*.test.ts"], maxWorkers: 1, testTimeout: 60_000 } });

// One draft step of a bundle in onnxruntime-web: node device_wasm.mjs BUNDLE THREADS. Prints JSON.
import { readFileSync } from "node:fs";

const [bundle, threads] = process.argv.slice(2);
const [SLOTS, NUM_READ, WARM_UP, REPEATS] = [512, 40, 5, 60];
const memories = [];
WebAssembly.Memory = new Proxy(WebAssembly.Memory, {
  construct(kind, sizes) {
    memories.push(new kind(...sizes));
    return memories.at(-1);
  },
});
const place = new URL("../packages/device-js/node_modules/onnxruntime-web/dist/ort.node.min.mjs", import.meta.url);
const { env, InferenceSession, Tensor } = await import(place);
env.wasm.numThreads = Number(threads);

const cpuMs = () => { const { user, system } = process.cpuUsage(); return (user + system) / 1000; };
const { self_attention: text, self_attention_layers: count = 1, cross_attention: memory, target, num_target_layers } = JSON.parse(readFileSync(`${bundle}/manifest.json`));
const [began, beganCpu] = [performance.now(), cpuMs()];
const session = await InferenceSession.create(new Uint8Array(readFileSync(`${bundle}/drafter.onnx`)), { logSeverityLevel: 3 });
const [createMs, createCpuMs] = [performance.now() - began, cpuMs() - beganCpu];

const cache = ({ num_kv_heads, head_dim }) => {
  const sizes = [num_kv_heads, SLOTS, head_dim];
  return new Tensor("float32", new Float32Array(sizes.reduce((a, b) => a * b)), sizes);
};
const feeds = {
  memory_key: cache(memory), memory_value: cache(memory),
  memory_mask: new Tensor("bool", new Uint8Array(SLOTS).fill(1, 0, NUM_READ), [SLOTS]),
};
for (const kind of ["key", "value"]) {
  for (let layer = 0; layer < count; layer++) feeds[layer ? `text_${kind}_${layer}` : `text_${kind}`] = cache(text);
}
for (let layer = 0; layer < num_target_layers; layer++) {
  for (const kind of ["key", "value"]) feeds[`layer_${kind}_${layer}`] = cache(target);
}
const steps = [];
for (let i = 0; i < WARM_UP + REPEATS; i++) {
  const start = NUM_READ + (i % 8);
  feeds.token_ids = new Tensor("int64", BigInt64Array.of(BigInt(1000 + i)), [1]);
  feeds.start = new Tensor("int64", BigInt64Array.of(BigInt(start)), [1]);
  const [wall, cpu] = [performance.now(), cpuMs()];
  const found = await session.run(feeds);
  steps.push({ wall: performance.now() - wall, cpu: cpuMs() - cpu });
  for (const name of Object.keys(found)) if (name.startsWith("new_")) feeds[name.slice(4)] = found[name];
}
const least = (name) => Math.min(...steps.slice(WARM_UP).map((step) => step[name]));
console.log(JSON.stringify({
  threads: Number(threads), create_ms: createMs, create_cpu_ms: createCpuMs, step_ms: least("wall"), step_cpu_ms: least("cpu"),
  heap_bytes: memories.reduce((sum, { buffer }) => sum + buffer.byteLength, 0),
}));
process.exit(0);

/** The Node device of `learning_server.py`: a line of JSON for each one of its input. */
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const [bundle, address, draft, maxNewTokens] = process.argv.slice(2);
const own = new URL("../packages/device-js/", import.meta.url);
const { resolve } = createRequire(new URL("package.json", own));
const ort = await import(pathToFileURL(resolve("onnxruntime-web")));
const { default: WebSocket } = await import(pathToFileURL(resolve("ws")));
const { loadDevice, RemoteSession, WebSocketTransport } = await import(new URL("dist/index.js", own));
const { fromDirectory } = await import(new URL("dist/node.js", own));

const device = await loadDevice(fromDirectory(bundle), ort);
const transport = new WebSocketTransport(address, { WebSocket });
const session = new RemoteSession(device, transport, { draft: Number(draft) });
for await (const line of createInterface(process.stdin)) {
  const { prompt, bias } = JSON.parse(line);
  let result = {};
  if (prompt) {
    const logitBias = new Map(bias);
    const turn = { maxNewTokens: Number(maxNewTokens), temperature: 0, logitBias };
    [result] = await Promise.all([session.generate(prompt, turn), device.update(transport)]);
  }
  const { tokenIds, acceptLengths } = result;
  console.log(JSON.stringify({ tokenIds, acceptLengths, version: device.version, cuts: session.stats.cuts }));
}
await session.close();

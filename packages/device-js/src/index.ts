export { fromUrl, readBundle } from "./bundle/bundle.js";
export type { Bundle, ReadFile } from "./bundle/bundle.js";
export type { Manifest } from "./bundle/manifest.js";
export { OnnxDrafter } from "./bundle/onnx_drafter.js";
export type { Drafter, OnnxRuntime } from "./bundle/onnx_drafter.js";
export { DeviceTokenizer } from "./bundle/tokenizer.js";
export type { ChatMessage, ChatOptions } from "./bundle/tokenizer.js";
export { loadDevice } from "./device.js";
export type { Device, LoadedDevice } from "./device.js";
export * from "./errors.js";
export { cards, defaultRecognisers, emails, ibans, phones } from "./privacy/recognisers.js";
export type { Recogniser } from "./privacy/recognisers.js";
export { marked, Span } from "./privacy/spans.js";
export { Vault } from "./privacy/vault.js";
export type { Restorer } from "./privacy/vault.js";
export type { CodecName } from "./protocol/activations.js";
export { Fleet } from "./protocol/fleet.js";
export type { Description } from "./protocol/target_pb.js";
export type { Connection, ConnectionEvents, Transport } from "./protocol/transport.js";
export { WebSocketTransport } from "./protocol/websocket.js";
export type { WebSocketOptions } from "./protocol/websocket.js";
export type { SamplingOptions } from "./sampling/params.js";
export { LinkStats, tau } from "./session/events.js";
export type {
  GenerationResult,
  LinkState,
  RemoteEvent,
  RoundTrip,
  Source,
  StopReason,
} from "./session/events.js";
export type { OnCut, RemoteOptions, SessionOptions, TurnOptions } from "./session/options.js";
export type { Prefix } from "./session/remote_session.js";
export { RemoteSession } from "./session/remote_session.js";
export type { DrafterVersion } from "./session/server_calls.js";
export { RemoteText } from "./session/server_text.js";
export type { ServerSource, ServerTextEvent, ServerTextOptions } from "./session/server_text.js";

// A conversation as a tree of messages: an edited question or a repeated one starts a branch. It is
// plain data that can be stored and exported:
//   chat {id, title, updated, nodes, leaf}
//   node {id, parent, role: "user" | "assistant", text}, and of answers {runs, stats, finish, kept,
//   plain: {text, runs, stats, finish}, verdict: {same, text}}

const TITLE = 60;

/** A unique id of a conversation. */
export const freshId = () =>
  [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(36)).join("");

/** An empty conversation. */
export const emptyChat = () => ({
  id: freshId(), title: "New chat", updated: Date.now(), nodes: [], leaf: null,
});

/** The node with an id, or undefined. */
export const nodeOf = (chat, id) => chat.nodes.find((node) => node.id === id);

/** Add a message after a parent (null: at the beginning), and show it. */
export function add(chat, parent, message) {
  const id = Math.max(0, ...chat.nodes.map((node) => node.id)) + 1;
  const node = { id, parent, ...message };
  if (chat.nodes.length === 0) chat.title = titleOf(message.text);
  chat.nodes.push(node);
  chat.leaf = id;
  return node;
}

/** Title of a conversation, from a question. */
export function titleOf(text) {
  const line = text.trim().split("\n")[0];
  const letters = [...line];
  return letters.length > TITLE ? `${letters.slice(0, TITLE - 1).join("")}…` : line || "New chat";
}

/** The visible messages, first to last. */
export function path(chat) {
  const found = [];
  for (let node = nodeOf(chat, chat.leaf); node; node = nodeOf(chat, node.parent)) {
    found.unshift(node);
  }
  return found;
}

/** A message and its alternatives, oldest first. */
export const versions = (chat, node) => chat.nodes.filter((one) => one.parent === node.parent);

/** Show a message and its latest descendants. */
export function show(chat, node) {
  let leaf = node;
  for (let next = node; next; next = chat.nodes.findLast((one) => one.parent === leaf.id)) {
    leaf = next;
  }
  chat.leaf = leaf.id;
}

/** The messages of a request: those up to and including a node. */
export function asked(chat, node, system) {
  const messages = path({ ...chat, leaf: node.id }).map(({ role, text }) => ({
    role, content: text,
  }));
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

// A conversation as a tree of messages: editing a question or asking again begins a branch. Plain
// data, so that it can be stored and exported as it is:
//   chat {id, title, updated, nodes, leaf}
//   node {id, parent, role: "user" | "assistant", text}, and of answers {runs, stats, finish, kept,
//   plain: {text, runs, stats, finish}, verdict: {same, text}}

const TITLE = 60;

/** An id that no other conversation has. */
export const freshId = () =>
  [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(36)).join("");

/** A conversation without messages. */
export const emptyChat = () => ({
  id: freshId(), title: "New chat", updated: Date.now(), nodes: [], leaf: null,
});

/** The node of an id, or undefined. */
export const nodeOf = (chat, id) => chat.nodes.find((node) => node.id === id);

/** Add a message after another one (null: at the beginning), and show it. */
export function add(chat, parent, message) {
  const id = Math.max(0, ...chat.nodes.map((node) => node.id)) + 1;
  const node = { id, parent, ...message };
  if (chat.nodes.length === 0) chat.title = titleOf(message.text);
  chat.nodes.push(node);
  chat.leaf = id;
  return node;
}

/** A title out of a question. */
export function titleOf(text) {
  const line = text.trim().split("\n")[0];
  const letters = [...line];
  return letters.length > TITLE ? `${letters.slice(0, TITLE - 1).join("")}…` : line || "New chat";
}

/** The messages that are shown, first to last. */
export function path(chat) {
  const found = [];
  for (let node = nodeOf(chat, chat.leaf); node; node = nodeOf(chat, node.parent)) {
    found.unshift(node);
  }
  return found;
}

/** A message and its alternatives, oldest first. */
export const versions = (chat, node) => chat.nodes.filter((one) => one.parent === node.parent);

/** Show a message, and the latest of what follows it. */
export function show(chat, node) {
  let leaf = node;
  for (let next = node; next; next = chat.nodes.findLast((one) => one.parent === leaf.id)) {
    leaf = next;
  }
  chat.leaf = leaf.id;
}

/** What a server is asked: the messages up to a node, this one included. */
export function asked(chat, node, system) {
  const messages = path({ ...chat, leaf: node.id }).map(({ role, text }) => ({
    role, content: text,
  }));
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

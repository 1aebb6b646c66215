// Conversations from files and storage are untrusted. They are rebuilt from known fields of the right
// type and size. Their text is rendered like the text of a model.

import { freshId, titleOf } from "./thread.js";

const FORMAT = "moaspec-chats";
const MAX_NODES = 10_000;
const MAX_ID = 1_000_000_000;
const MAX_TEXT = 1_000_000;
const MAX_TITLE = 200;
const KINDS = new Set(["draft", "copy", "target", "device", "provisional", "corrected"]);
const FINISHES = new Set(["stop", "length", "stopped", "broken"]);
const FIGURES = [
  "tokens", "rounds", "tau", "drafted", "accepted", "copied", "tokens_per_second", "elapsed_s",
];

/** A readable error about a file. */
export class FileError extends Error {}

const isText = (value, most) => typeof value === "string" && value.length <= most;
const isId = (value) => Number.isInteger(value) && value >= 0 && value < MAX_ID;
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** Serialise conversations for a file. */
export const exported = (chats) => JSON.stringify({ format: FORMAT, version: 1, chats }, null, 1);

/** Parse a file's text: `{chats, refused}`, conversations with new ids and a count. */
export function imported(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new FileError("The file is not JSON. Choose one that this page has exported.");
  }
  if (!isObject(file) || file.format !== FORMAT || !Array.isArray(file.chats)) {
    throw new FileError("The file holds no conversations. Choose one that this page has exported.");
  }
  if (file.version !== 1) {
    throw new FileError("The file was written by a later version of this page.");
  }
  const chats = file.chats.map(checkedChat).filter((chat) => chat !== null);
  return {
    chats: chats.map((chat) => ({ ...chat, id: freshId() })),
    refused: file.chats.length - chats.length,
  };
}

/** Validate a conversation; null if it is invalid. */
export function checkedChat(given) {
  if (!isObject(given) || !Array.isArray(given.nodes) || given.nodes.length > MAX_NODES) return null;
  const nodes = [];
  const known = new Map();
  for (const one of given.nodes) {
    const node = checkedNode(one, known);
    if (node === null) return null;
    known.set(node.id, node);
    nodes.push(node);
  }
  if (nodes.length === 0) return null;
  return {
    id: isText(given.id, 64) && /^\w+$/.test(given.id) ? given.id : freshId(),
    title: isText(given.title, MAX_TITLE) ? given.title : titleOf(nodes[0].text),
    updated: Number.isFinite(given.updated) ? given.updated : 0,
    nodes,
    leaf: known.has(given.leaf) ? given.leaf : nodes.at(-1).id,
  };
}

// Parents precede their children, so there is no cycle.
function checkedNode(given, known) {
  if (!isObject(given) || !isId(given.id) || known.has(given.id)) return null;
  const parent = given.parent === null ? null : known.get(given.parent);
  const follows = parent === null ? "user" : { user: "assistant", assistant: "user" }[parent?.role];
  if (!isText(given.text, MAX_TEXT) || given.role !== follows) return null;
  const node = { id: given.id, parent: parent?.id ?? null, role: given.role, text: given.text };
  return given.role === "user" ? node : { ...node, ...checkedAnswer(given) };
}

function checkedAnswer(given) {
  const answer = checkedText(given);
  answer.kept = given.kept === true;
  if (isObject(given.plain) && isText(given.plain.text, MAX_TEXT)) {
    answer.plain = { text: given.plain.text, ...checkedText(given.plain) };
  }
  if (isObject(given.verdict) && isText(given.verdict.text, 1000)) {
    answer.verdict = { same: given.verdict.same === true, text: given.verdict.text };
  }
  return answer;
}

function checkedText(given) {
  return {
    runs: checkedRuns(given.runs, given.text.length),
    stats: checkedStats(given.stats),
    finish: FINISHES.has(given.finish) ? given.finish : null,
  };
}

// Runs of another length would colour the wrong words.
function checkedRuns(given, length) {
  if (!Array.isArray(given)) return [];
  const right = given.every((run) => Array.isArray(run) && KINDS.has(run[0]) &&
    Number.isSafeInteger(run[1]) && run[1] > 0);
  const total = right ? given.reduce((sum, [, one]) => sum + one, 0) : -1;
  return total === length ? given.map(([kind, one]) => [kind, one]) : [];
}

function checkedStats(given) {
  if (!isObject(given)) return null;
  const stats = {};
  for (const name of FIGURES) if (Number.isFinite(given[name])) stats[name] = given[name];
  return Number.isFinite(stats.tokens) ? stats : null;
}

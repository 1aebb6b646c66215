// Conversations and settings in the browser's own storage; nothing of them is sent anywhere.

import { checkedChat } from "./checked.js";

const CHAT = "moaspec-chat-";

/** Keeps conversations, one entry each, so that two tabs do not write over one another. */
export class Store {
  /** Whether the last conversation could be kept. */
  full = false;
  #deleted = new Set(); // an answer that is still being written must not bring one back

  /** All conversations, the latest first. */
  chats() {
    const found = keys(CHAT).map((key) => checkedChat(readJson(key)));
    return found.filter((chat) => chat !== null).sort((a, b) => b.updated - a.updated);
  }

  /** One conversation, or null. */
  chat(id) {
    return checkedChat(readJson(CHAT + id));
  }

  /** Keep a conversation; false where the storage is full or forbidden. */
  keep(chat) {
    if (this.#deleted.has(chat.id)) return true;
    this.full = !write(CHAT + chat.id, JSON.stringify(chat));
    return !this.full;
  }

  delete(id) {
    this.#deleted.add(id);
    forget(CHAT + id);
  }

  clear() {
    for (const key of keys(CHAT)) this.delete(key.slice(CHAT.length));
  }
}

/** The object under a key, or null. */
export function readJson(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null; // storage may be forbidden, and what is there may be anything
  }
}

/** Store a text; false where it cannot be. */
export function write(key, text) {
  try {
    localStorage.setItem(key, text);
    return true;
  } catch {
    return false;
  }
}

function keys(prefix) {
  try {
    return Object.keys(localStorage).filter((key) => key.startsWith(prefix));
  } catch {
    return [];
  }
}

function forget(key) {
  try {
    localStorage.removeItem(key);
  } catch {
    // then there is nothing there either
  }
}

// Conversations and settings in the browser's storage. They are not sent anywhere.

import { checkedChat } from "./checked.js";

const CHAT = "moaspec-chat-";

/** Stores each conversation in its own entry, so that two tabs do not overwrite each other. */
export class Store {
  /** Whether the last conversation could be stored. */
  full = false;
  #deleted = new Set(); // a running answer must not restore a deleted conversation

  /** All conversations, latest first. */
  chats() {
    const found = keys(CHAT).map((key) => checkedChat(readJson(key)));
    return found.filter((chat) => chat !== null).sort((a, b) => b.updated - a.updated);
  }

  /** One conversation, or null. */
  chat(id) {
    return checkedChat(readJson(CHAT + id));
  }

  /** Store a conversation. Returns false if the storage is full or forbidden. */
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
    return null; // storage may be forbidden or hold invalid data
  }
}

/** Store a text. Returns false if that fails. */
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
    // storage is forbidden, so there is nothing to remove
  }
}

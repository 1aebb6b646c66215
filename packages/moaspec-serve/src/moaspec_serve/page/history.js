// The list of stored conversations: open, rename, delete, export, import.

import { exported, FileError, imported } from "./checked.js";
import { button, element } from "./elements.js";

const WIDE = matchMedia("(min-width: 75rem)");
const MAX_FILE = 50_000_000;

const $ = (id) => document.getElementById(id);

export class History {
  /** `acts` has callbacks `{current(), open(chat), fresh()}`. */
  constructor(store, acts) {
    this.store = store;
    this.acts = acts;
    this.dialog = $("history");
    $("show-history").addEventListener("click", () => this.#toggle());
    $("close-history").addEventListener("click", () => this.dialog.close());
    $("export-all").addEventListener("click", () => save(store.chats(), "moaspec-chats.json"));
    $("import").addEventListener("click", () => $("import-file").click());
    $("import-file").addEventListener("change", () => this.#import());
    $("clear-all").addEventListener("click", () => this.#clear());
    window.addEventListener("storage", () => this.show());
    WIDE.addEventListener("change", () => this.dialog.close());
    this.dialog.addEventListener("close", () => this.#told());
  }

  /** Show all conversations. */
  show() {
    const chats = this.store.chats();
    $("chats").replaceChildren(...chats.map((chat) => this.#item(chat)));
    $("no-chats").hidden = chats.length > 0;
    $("export-all").disabled = $("clear-all").disabled = chats.length === 0;
  }

  // Show the list beside the conversation if there is room, else over it.
  #toggle() {
    if (this.dialog.open) this.dialog.close();
    else if (WIDE.matches) this.dialog.show();
    else this.dialog.showModal();
    this.show();
    this.#told();
  }

  #told() {
    $("show-history").setAttribute("aria-expanded", String(this.dialog.open));
  }

  #item(chat) {
    const item = element("li");
    const open = button(chat.title, chat.title, () => {
      if (!WIDE.matches) this.dialog.close();
      this.acts.open(chat.id);
    });
    open.className = "open";
    if (chat.id === this.acts.current().id) open.setAttribute("aria-current", "true");
    const acts = element("span", "acts");
    acts.append(
      button("Rename", `Rename ${chat.title}`, () => this.#rename(item, chat)),
      button("Export", `Export ${chat.title}`, () => save([chat], "moaspec-chat.json")),
      button("Delete", `Delete ${chat.title}`, () => this.#delete(chat)),
    );
    item.append(open, acts);
    return item;
  }

  #rename(item, chat) {
    const form = element("form");
    const input = element("input");
    input.value = chat.title;
    input.maxLength = 200;
    input.setAttribute("aria-label", "Title");
    form.append(input, element("button", "small", "Save"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#retitle(chat, input.value.trim());
    });
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.preventDefault();
      event.stopPropagation();
      this.show();
    });
    item.replaceChildren(form);
    input.select();
  }

  #retitle(chat, title) {
    const current = this.acts.current();
    const renamed = current.id === chat.id ? current : chat;
    if (title) renamed.title = title;
    this.store.keep(renamed);
    this.show();
  }

  #delete(chat) {
    if (!confirm(`Delete the conversation “${chat.title}”?`)) return;
    this.store.delete(chat.id);
    if (chat.id === this.acts.current().id) this.acts.fresh();
    this.show();
  }

  #clear() {
    if (!confirm("Delete all conversations that this browser keeps?")) return;
    this.store.clear();
    this.acts.fresh();
    this.show();
    document.dispatchEvent(new Event("moaspec-cleared")); // a device keeps texts elsewhere, too
  }

  async #import() {
    const [file] = $("import-file").files;
    $("import-file").value = ""; // allows the same file to be chosen again
    if (!file) return;
    try {
      if (file.size > MAX_FILE) throw new FileError("The file is larger than 50 MB.");
      $("imported").textContent = this.#keepAll(imported(await file.text()));
    } catch (error) {
      $("imported").textContent =
        error instanceof FileError ? error.message : "The file cannot be read.";
    }
    this.show();
  }

  #keepAll({ chats, refused }) {
    const kept = chats.filter((chat) => this.store.keep(chat)).length;
    const said = [`Imported: ${kept}.`];
    if (refused) said.push(`Left out because they are damaged: ${refused}.`);
    if (kept < chats.length) said.push(`The browser’s storage has no room for ${chats.length - kept}.`);
    return said.join(" ");
  }
}

/** Download conversations as a file. */
function save(chats, name) {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([exported(chats)], { type: "application/json" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

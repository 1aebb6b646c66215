// Questions and answers on the page, with their buttons.

import { Answer } from "./answer.js";
import { copyButton } from "./copy.js";
import { button, element } from "./elements.js";
import { path, versions } from "./thread.js";

const AGAIN = "Writes another answer. At temperature 0 it is the same text; raise it in Settings.";
const SHORTENED = 40;

const about = (node) => [...node.text].slice(0, SHORTENED).join("");

/** Buttons that switch between the versions of a message; empty if there is one version. */
function versionSwitch(chat, node, { choose, busy }) {
  const all = versions(chat, node);
  const at = all.indexOf(node);
  if (all.length < 2) return [];
  const step = (text, by, label) => {
    const made = button(text, label, () => choose(all[at + by]));
    made.disabled = busy() || !all[at + by];
    return made;
  };
  return [
    step("‹", -1, "Previous version"),
    element("span", "version", `${at + 1} of ${all.length}`),
    step("›", 1, "Next version"),
  ];
}

class Question {
  constructor(node, acts) {
    this.node = node;
    this.acts = acts;
    this.element = element("div", "asked");
    this.text = element("p", "question", node.text);
    this.actions = element("div", "actions");
    this.element.append(this.text, this.actions);
  }

  refresh(chat) {
    const edit = button("Edit", `Edit this question: ${about(this.node)}`, () => this.#edit());
    edit.disabled = this.acts.busy();
    this.actions.replaceChildren(
      ...versionSwitch(chat, this.node, this.acts),
      copyButton(() => this.node.text, "Copy this question"),
      edit,
    );
  }

  remove() {
    this.element.remove();
  }

  #edit() {
    const form = element("form", "edit");
    const area = element("textarea");
    area.value = this.node.text;
    area.setAttribute("aria-label", "Question");
    const send = element("button", "small main", "Ask this instead");
    const leave = () => {
      form.replaceWith(this.text);
      this.actions.hidden = false;
      this.actions.lastElementChild?.focus();
    };
    form.append(area, button("Cancel", "Cancel", leave), send);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.acts.busy()) return; // the typed text stays
      leave();
      if (area.value.trim()) this.acts.edit(this.node, area.value.trim());
    });
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); leave(); }
    });
    this.text.replaceWith(form);
    this.actions.hidden = true;
    area.focus();
  }
}

class Reply {
  constructor(node, acts) {
    this.node = node;
    this.acts = acts;
    this.element = element("div", "reply");
    this.actions = element("div", "actions");
    this.panes = element("div", "panes");
    this.element.append(this.panes, this.actions);
    this.#fill();
  }

  /** Show or hide a second answer beside the first. */
  #fill() {
    const { plain, verdict } = this.node;
    this.answer = new Answer(plain ? "With speculation" : "Answer", this.node);
    this.plain = plain ? new Answer("Plain decoding", plain) : null;
    this.panes.append(this.answer.element, ...plain ? [this.plain.element] : []);
    this.panes.classList.toggle("both", Boolean(plain));
    if (verdict) this.judge(verdict);
  }

  refresh(chat) {
    const acts = this.acts;
    const cut = this.node.finish !== "stop" && this.node.text && !this.plain && !acts.busy();
    const again = button("Try again", "Try again: write another answer", () => acts.again(this.node));
    again.dataset.tip = AGAIN;
    again.disabled = acts.busy();
    this.actions.replaceChildren(
      ...versionSwitch(chat, this.node, acts),
      copyButton(() => this.node.text, "Copy this answer"),
      again,
      ...cut ? [button("Continue", "Continue this answer", () => acts.proceed(this.node))] : [],
    );
  }

  /** Show the comparison of two answers above them. */
  judge({ same, text }) {
    const verdict = element("p", `verdict ${same ? "same" : "differs"}`, text);
    this.panes.prepend(verdict);
    return verdict;
  }

  remove() {
    this.answer.remove();
    this.plain?.remove();
    this.element.remove();
  }
}

/** The visible conversation. `acts` has callbacks `{edit, again, proceed, choose, busy}`. */
export class Log {
  #views = new Map();
  #chat = null;
  #follows = true;

  constructor(box, acts) {
    this.box = box;
    this.acts = acts;
    // Keep the end visible while text grows or the window shrinks, unless the reader has scrolled.
    const follow = () => { if (this.#follows) this.toEnd(); };
    box.addEventListener("scroll", () => { this.#follows = this.#atEnd; });
    box.addEventListener("growth", follow);
    new ResizeObserver(follow).observe(box);
  }

  get #atEnd() {
    return this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 60;
  }

  /** Show the beginning of the introduction, else the end of the conversation. */
  toEnd() {
    this.#follows = true;
    this.box.scrollTop = this.#views.size ? this.box.scrollHeight : 0;
  }

  /** Show a conversation. Messages that are already visible stay unchanged. */
  show(chat) {
    if (chat !== this.#chat) this.#clear();
    this.#chat = chat;
    const shown = path(chat);
    const wanted = new Set(shown.map((node) => node.id));
    for (const [id, view] of this.#views) if (!wanted.has(id)) this.#drop(id, view);
    for (const node of shown) {
      if (!this.#views.has(node.id)) this.#views.set(node.id, this.#viewOf(node));
      const view = this.#views.get(node.id);
      this.box.append(view.element);
      view.refresh(chat);
    }
    this.trouble(null);
  }

  /** The view of a message. */
  of(node) {
    return this.#views.get(node.id);
  }

  /** Render a message again the next time. */
  forget(node) {
    const view = this.of(node);
    if (view) this.#drop(node.id, view);
  }

  /** Show an error below the last message, with a button to retry. */
  trouble(error, retry) {
    this.box.querySelector(".failure")?.remove();
    if (!error) return;
    const failure = element("div", "failure");
    failure.setAttribute("role", "alert");
    failure.append(element("p", "", error.message), button("Retry", "Retry", retry));
    this.box.append(failure);
    this.toEnd();
  }

  #viewOf(node) {
    return node.role === "user" ? new Question(node, this.acts) : new Reply(node, this.acts);
  }

  #drop(id, view) {
    view.remove();
    this.#views.delete(id);
  }

  #clear() {
    for (const [id, view] of this.#views) this.#drop(id, view);
  }
}

// Actions on a conversation: ask, edit, ask again, continue, compare.

import { emptyText } from "./answer.js";
import { verdict } from "./compare.js";
import { Log } from "./messages.js";
import { race } from "./race.js";
import { add, asked, emptyChat, nodeOf, show } from "./thread.js";

export class Chat {
  /** The visible conversation. */
  chat = emptyChat();
  #running = null; // AbortController of the answer that streams
  #racing = false;

  /**
   * `parts` are `{server, store, settings, speaker, panel, box}`; `heard` has callbacks:
   * `busy(label)` with null when nothing runs, `changed()` and `failed(error)`.
   */
  constructor(parts, heard) {
    this.parts = parts;
    this.heard = heard;
    this.log = new Log(parts.box, {
      edit: (node, text) => this.#ask(node.parent, text),
      again: (node) => this.#answer(nodeOf(this.chat, node.parent)),
      proceed: (node) => this.#proceed(node),
      choose: (node) => this.#choose(node),
      busy: () => this.busy,
    });
  }

  get busy() {
    return this.#running !== null;
  }

  /** Show another conversation. */
  open(chat) {
    this.stop();
    this.chat = chat;
    this.parts.panel.clear();
    this.#show();
    this.log.toEnd();
  }

  /** Ask a new question. */
  async send(question) {
    await this.#ask(this.chat.leaf, question);
  }

  stop() {
    this.#running?.abort();
  }

  /** Store the conversation in the browser. */
  keep() {
    // During a race the answers are incomplete.
    if (this.chat.nodes.length && !this.#racing) this.parts.store.keep(this.chat);
  }

  #show() {
    this.log.show(this.chat);
    this.heard.changed();
  }

  #choose(node) {
    if (this.busy) return;
    show(this.chat, node);
    this.keep();
    this.#show();
  }

  async #ask(parent, text) {
    if (this.busy) return;
    const question = add(this.chat, parent, { role: "user", text });
    await this.#answer(question);
  }

  async #answer(question) {
    if (this.busy) return;
    const { compares } = this.parts.settings;
    const node = add(this.chat, question.id, { role: "assistant", ...emptyText() });
    if (compares) node.plain = emptyText();
    await this.#write(node, async (body, signal) => {
      const reply = this.log.of(node);
      if (compares) reply.plain.note("Runs next, so that neither slows the other.", "waiting");
      await this.#stream(reply.answer, body, signal);
      if (compares && !signal.aborted) await this.#compare(reply, body, signal);
    });
  }

  async #proceed(node) {
    if (this.busy) return;
    const more = { continue_final_message: true, add_generation_prompt: false };
    await this.#write(node, (body, signal) =>
      this.#stream(this.log.of(node).answer, { ...body, ...more }, signal), { more: true });
  }

  /** Stream an answer into a node with `work`, and handle its errors. */
  async #write(node, work, { more = false } = {}) {
    const { chat } = this;
    const { settings, speaker } = this.parts;
    const running = new AbortController();
    this.#running = running;
    this.heard.busy("Stop");
    show(chat, node);
    this.keep();
    this.#show();
    this.log.toEnd();
    const last = more ? node : nodeOf(chat, node.parent);
    let failure = null;
    try {
      const body = settings.body(await this.parts.server.known());
      const messages = asked(chat, last, settings.values.system);
      await work({ ...body, messages }, running.signal);
    } catch (error) {
      failure = error;
    }
    speaker.end();
    this.#running = null;
    this.#racing = false;
    this.#finish(node, chat, () => {
      if (failure) this.#fail(failure, () => (more ? this.#proceed(node) : this.#answer(last)));
    });
  }

  #finish(node, chat, shown) {
    chat.updated = Date.now();
    if (!node.text) remove(chat, node);
    if (node.plain && !node.plain.text) {
      delete node.plain;
      if (chat === this.chat) this.log.forget(node);
    }
    if (chat.nodes.length) this.parts.store.keep(chat);
    this.heard.busy(null);
    if (chat !== this.chat) return;
    this.#show();
    shown();
  }

  #fail(failure, retry) {
    this.log.trouble(failure, retry);
    this.heard.failed(failure);
  }

  async #stream(answer, body, signal, { figures = true } = {}) {
    answer.begin();
    if (figures) this.parts.panel.clear();
    let reason = "broken";
    try {
      for await (const chunk of this.parts.server.chat(body, signal)) {
        const text = answer.take(chunk);
        if (figures) this.#follow(chunk.moaspec ?? {}, text);
      }
      reason = "stopped";
    } finally {
      answer.end(reason);
    }
  }

  #follow(said, text) {
    const { panel, speaker } = this.parts;
    const before = panel.state;
    panel.take(said);
    speaker.add(text);
    if (said.link?.state === "down" && before !== "down") {
      speaker.say("The link is down. What follows is provisional.");
    }
    if (said.correction) speaker.say(`${said.correction.removed} provisional tokens were corrected.`);
  }

  /** Ask again without speculation, then replay both answers side by side. */
  async #compare(reply, body, signal) {
    const { answer, plain } = reply;
    plain.notes.replaceChildren();
    const moaspec = { ...body.moaspec, speculation: false };
    await this.#stream(plain, { ...body, moaspec }, signal, { figures: false });
    if (signal.aborted) return;
    const of = ({ ids, written }) => ({ ids, stats: written.stats, kept: written.kept });
    reply.node.verdict = verdict(of(answer), of(plain));
    this.keep();
    await this.#race([answer, plain]);
    const shown = reply.judge(reply.node.verdict);
    this.parts.speaker.say(reply.node.verdict.text);
    shown.scrollIntoView({ block: "nearest" });
  }

  async #race(answers) {
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    if (still || answers.some(({ record }) => record.length < 2)) return;
    this.#running = new AbortController();
    this.#racing = true;
    this.heard.busy("Skip the race");
    await race(answers, this.#running.signal);
    this.#racing = false;
  }
}

/** Remove an answer without text from a conversation. */
function remove(chat, node) {
  chat.nodes = chat.nodes.filter((other) => other !== node);
  show(chat, nodeOf(chat, node.parent));
}

// An answer on the page: verified text, provisional text, then notes.

import { addRun } from "./colours.js";
import { element } from "./elements.js";
import { Prose } from "./prose.js";

const SHORT = 160;
const WAIT_MS = 30;
const SHARE = 8; // render at most 1/8 of the time, so that a model on this machine is not slowed

const FINISHES = {
  length: "Ended at the token limit.",
  stopped: "Stopped.",
  broken: "The answer broke off here.",
};

/** The kind of a piece: "corrected", or else its source. */
export const kindOf = (piece) => (piece.was === "corrected" ? "corrected" : piece.source);

/** Data of an empty answer. */
export const emptyText = () => ({ text: "", runs: [], stats: null, finish: null });

export class Answer {
  ids = [];
  record = []; // {at, pieces}: when pieces arrived, to replay the answer
  #provisional = [];
  #prose = new Prose();
  #planned = 0;
  #cost = 0;
  #clock = "";

  /** `written` stores the text and may already have one. */
  constructor(title, written) {
    this.written = written;
    this.element = element("article", "answer");
    this.title = element("h3", "", title);
    this.speed = element("span", "speed");
    this.title.append(" ", this.speed);
    this.notes = element("div", "notes");
    this.element.append(this.title, this.#prose.element, this.notes);
    this.#figures();
    if (written.text) this.#render(true);
    this.#remark();
  }

  /** Start or continue streaming. */
  begin() {
    this.element.setAttribute("aria-busy", "true");
    this.written.finish = null;
    this.#remark();
  }

  /** Add a chunk of the stream. Returns the verified text that it adds. */
  take(chunk) {
    const choice = chunk.choices[0];
    const said = chunk.moaspec ?? {};
    if (said.correction) this.#correct(said.correction);
    if (said.pieces?.length) this.record.push({ at: performance.now(), pieces: said.pieces });
    const more = this.add(said.pieces ?? []);
    if (said.pieces || said.provisional) this.#provisional = said.provisional ?? [];
    this.written.stats = said.stats ?? this.written.stats;
    this.written.finish = choice?.finish_reason ?? this.written.finish;
    this.#plan();
    return more;
  }

  /** Add verified pieces. Returns their text. */
  add(pieces) {
    for (const piece of pieces) {
      this.ids.push(piece.id);
      this.written.kept ||= piece.source === "device";
      this.written.text += piece.text;
      addRun(this.written.runs, kindOf(piece), piece.text.length);
    }
    this.#plan();
    return pieces.map((piece) => piece.text).join("");
  }

  /** End streaming. `reason` is used if the server sent no finish reason. */
  end(reason) {
    this.element.removeAttribute("aria-busy");
    this.written.finish ??= reason ?? null;
    this.#provisional = [];
    this.#now();
    this.#remark();
  }

  /** Clear the text and its end, so that a race can replay it until `end`. */
  rewind() {
    this.element.setAttribute("aria-busy", "true");
    this.notes.querySelector(".finish")?.remove();
    Object.assign(this.written, { text: "", runs: [] });
    this.ids = [];
    this.#now();
  }

  /** Show a text instead of the statistics. An empty text shows the statistics again. */
  clock(text) {
    this.#clock = text;
    this.#figures();
  }

  /** Add a note below the text. */
  note(text, kind = "") {
    const note = element("div", `note ${kind}`, text);
    this.notes.append(note);
    return note;
  }

  remove() {
    clearTimeout(this.#planned);
    this.#prose.remove();
    this.element.remove();
  }

  // Chunks arrive faster than they can be rendered.
  #plan() {
    if (this.#planned) return;
    this.#planned = setTimeout(() => this.#render(), Math.max(WAIT_MS, SHARE * this.#cost));
  }

  #now() {
    clearTimeout(this.#planned);
    this.#render(true);
  }

  #render(anew = false) {
    this.#planned = 0;
    const start = performance.now();
    const runs = this.written.runs.map((run) => [...run]);
    for (const piece of this.#provisional) addRun(runs, "provisional", piece.text.length);
    const text = this.written.text + this.#provisional.map((piece) => piece.text).join("");
    this.#prose.show(text, runs, { anew });
    this.#figures();
    this.element.dispatchEvent(new CustomEvent("growth", { bubbles: true }));
    this.#cost = performance.now() - start;
  }

  #figures() {
    const { stats } = this.written;
    if (!stats || this.#clock) {
      this.speed.textContent = this.#clock;
      return;
    }
    const parts = [`${stats.tokens} tokens`];
    if (stats.tokens_per_second) parts.push(`${stats.tokens_per_second.toFixed(1)} tokens/s`);
    if (stats.tau) parts.push(`${stats.tau.toFixed(2)} a pass`);
    this.speed.textContent = parts.join(" · ");
  }

  #remark() {
    this.notes.querySelector(".finish")?.remove();
    const remark = FINISHES[this.written.finish];
    if (remark) this.note(remark, "finish");
  }

  #correct({ confirmed, removed, text }) {
    const all = confirmed + removed;
    const note = this.note(`The link is back: ${confirmed} of ${all} provisional tokens were ` +
      `right, ${removed} were taken back.`, "correction");
    const gone = element("details");
    gone.open = text.length <= SHORT;
    gone.append(element("summary", "", "What was taken back"), element("del", "", text));
    note.append(gone);
  }
}

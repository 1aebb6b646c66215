// One answer on the page: verified tokens, then what is provisional, then what there is to say of it.

const NAMES = {
  draft: "drafted and accepted",
  target: "the model’s own",
  copy: "copied from the text",
  device: "kept, never checked",
  provisional: "provisional",
  corrected: "corrected",
};

const SHORT = 160;

/** An element with a class and text. */
export function element(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.textContent = text;
  return made;
}

/** The class of a piece: what became of it comes before who proposed it. */
export const kindOf = (piece) => (piece.was === "corrected" ? "corrected" : piece.source);

export class Answer {
  text = "";
  ids = [];
  stats = null;
  kept = false;
  finish = null;

  constructor(title) {
    this.element = element("article", "answer");
    this.title = element("h3", "", title);
    this.speed = element("span", "speed");
    this.title.append(" ", this.speed);
    this.body = element("div", "text");
    this.verified = element("span");
    this.tail = element("span", "tail");
    this.body.append(this.verified, this.tail);
    this.element.append(this.title, this.body);
    this.element.setAttribute("aria-busy", "true");
  }

  /** Take in a chunk of the stream; the verified text that it adds. */
  take(chunk) {
    const choice = chunk.choices[0];
    const said = chunk.moaspec ?? {};
    if (said.correction) this.#correct(said.correction);
    (said.pieces ?? []).forEach((piece) => this.#append(piece));
    if (said.pieces || said.provisional) this.#provisional(said.provisional ?? []);
    if (said.stats) this.#figures(said.stats);
    this.finish = choice?.finish_reason ?? this.finish;
    const more = choice?.delta?.content ?? "";
    this.text += more;
    return more;
  }

  /** A remark below the text. */
  note(text, kind = "") {
    const note = element("div", `note ${kind}`, text);
    this.element.append(note);
    return note;
  }

  /** Nothing more comes. */
  end() {
    this.element.removeAttribute("aria-busy");
    if (this.finish === "length") this.note("Ended at the limit of tokens.");
  }

  #append(piece) {
    this.ids.push(piece.id);
    this.kept ||= piece.source === "device";
    if (piece.text) this.verified.append(token(piece.text, kindOf(piece)));
  }

  // What did not change stays in place, so that a selection in it does too.
  #provisional(pieces) {
    const shown = [...this.tail.children];
    const texts = pieces.map((piece) => piece.text);
    let same = 0;
    while (same < shown.length && shown[same].textContent === texts[same]) same += 1;
    shown.slice(same).forEach((old) => old.remove());
    texts.slice(same).forEach((text) => this.tail.append(token(text, "provisional")));
  }

  #figures(stats) {
    this.stats = stats;
    const parts = [`${stats.tokens} tokens`];
    if (stats.tokens_per_second) parts.push(`${stats.tokens_per_second.toFixed(1)} tokens/s`);
    if (stats.tau) parts.push(`tau ${stats.tau.toFixed(2)}`);
    this.speed.textContent = parts.join(" · ");
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

/** A token; the space before a word is no part of what is marked, so that each stands by itself. */
function token(text, kind) {
  const made = element("span", `token ${kind}`);
  const word = text.trimStart();
  made.append(text.slice(0, text.length - word.length));
  if (word) made.append(element("span", "ink", word));
  made.title = NAMES[kind] ?? kind;
  return made;
}

// The panel: speed, tokens per pass, draft tree of a pass, link.

import { draw, sentence } from "./tree.js";

const STATES = {
  up: "connected",
  down: "cut: this device writes alone",
  syncing: "back: checking what was written alone",
};

const FIGURES = ["speed", "tau", "accepted", "tokens", "rounds", "copied"];

const $ = (id) => document.getElementById(id);

/** A readable number of bytes. */
export function bytes(number) {
  const units = ["B", "kB", "MB", "GB"];
  const power = Math.min(Math.floor(Math.log10(Math.max(number, 1)) / 3), units.length - 1);
  return `${(number / 1000 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
}

/** A sentence on whether drafting pays on a link: `gain` is the speed with drafts over that without. */
export function pays(gain) {
  if (gain == null) {
    return "Drafts pay where they and a round trip take less time than the passes they save.";
  }
  const much = `${gain.toFixed(1)} times the speed of streaming`;
  return gain < 1 ?
    `Drafts do not pay here: with the round trip they would give ${much}, so the server ` +
      "streams nearly all tokens." :
    `Drafts pay here: about ${much}.`;
}

const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)}%` : "–");

export class Panel {
  #rounds = [];
  #link = null;
  #stats = null;
  #following = true;
  #planned = false;
  #invitation = $("round-said").textContent;

  /** `cut(true or false)` is called when the link is switched. */
  constructor(cut) {
    $("round").addEventListener("input", (event) => {
      this.#following = Number(event.target.value) === this.#rounds.length;
      this.#drawRound();
    });
    $("cut").addEventListener("click", () => cut($("cut").getAttribute("aria-checked") === "true"));
  }

  /** Clear the panel before another answer or conversation. */
  clear() {
    this.#rounds = [];
    this.#following = true;
    this.#stats = null;
    for (const id of FIGURES) $(id).textContent = "–";
    $("accepted").removeAttribute("title");
    $("round-said").textContent = this.#invitation;
    $("round").removeAttribute("aria-valuetext");
    $("tree").replaceChildren();
    this.#plan();
  }

  /** Show the round, speed and link of a chunk. */
  take(said) {
    if (said.round) this.#rounds.push({ ...said.round, pieces: said.pieces });
    this.#stats = said.stats ?? this.#stats;
    if (said.link) this.link(said.link);
    this.#plan();
  }

  /** Update the link from a chunk, which has some fields only, or from the server. */
  link(link) {
    if (!link) return;
    this.#link = { ...this.#link, ...link };
    this.#plan();
  }

  /** The link's last known state. */
  get state() {
    return this.#link?.state;
  }

  // Chunks may arrive faster than the screen is drawn.
  #plan() {
    if (this.#planned) return;
    this.#planned = true;
    requestAnimationFrame(() => {
      this.#planned = false;
      this.#drawStats();
      this.#drawLink();
      if (this.#following) this.#drawRound();
    });
  }

  #drawStats() {
    const stats = this.#stats;
    const brief = [];
    if (stats?.tau) brief.push(`${stats.tau.toFixed(2)} tokens a pass`);
    if (stats?.tokens_per_second) brief.push(`${stats.tokens_per_second.toFixed(1)} tokens/s`);
    if (this.#link) brief.push(`link ${this.#link.state}`);
    $("brief").textContent = brief.join(" · ");
    if (!stats) return;
    $("speed").textContent = stats.tokens_per_second?.toFixed(1) ?? "–";
    $("tau").textContent = stats.tau?.toFixed(2) ?? "–";
    $("tokens").textContent = stats.tokens;
    $("rounds").textContent = stats.rounds;
    $("accepted").textContent = share(stats.accepted, stats.drafted);
    $("accepted").title = `${stats.accepted} of ${stats.drafted}`;
    $("copied").textContent = stats.copied;
  }

  #drawLink() {
    const link = this.#link;
    if (!link) return;
    $("link-state").textContent = STATES[link.state];
    $("link-state").dataset.state = link.state;
    $("pays").textContent = pays(link.draft_gain);
    $("round-trip").textContent =
      link.round_trip_s == null ? "–" : `${Math.round(link.round_trip_s * 1000)} ms`;
    $("sent").textContent = bytes(link.bytes_sent);
    $("received").textContent = bytes(link.bytes_received);
    $("cut").hidden = !link.can_cut;
    $("cut").setAttribute("aria-checked", String(!link.cut));
    $("cut-hint").textContent = link.cut ? "restore it" : "cut it";
  }

  #drawRound() {
    const slider = $("round");
    slider.disabled = this.#rounds.length < 2;
    slider.max = Math.max(this.#rounds.length, 1);
    if (this.#following) slider.value = this.#rounds.length;
    const round = this.#rounds[Number(slider.value) - 1];
    if (!round) return;
    $("round-said").textContent = sentence(round);
    slider.setAttribute("aria-valuetext", sentence(round));
    draw($("tree"), round);
  }
}

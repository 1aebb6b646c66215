// Entry point: connects the parts of the page.

import { Chat } from "./chat.js";
import { History } from "./history.js";
import { Panel } from "./panel.js";
import { markPrivate } from "./private.js";
import { Server } from "./server.js";
import { Settings } from "./settings.js";
import { Speaker } from "./spoken.js";
import { Store } from "./store.js";
import { emptyChat } from "./thread.js";
import { explainWords } from "./tips.js";
import { followViewport } from "./viewport.js";

const $ = (id) => document.getElementById(id);
const KEY = "moaspec-key";
const OPEN = "moaspec-open";
const POLL_MS = 1000;
const FULL = "The browser’s storage is full or forbidden, so this conversation is not kept. " +
  "Export and delete older ones.";

const server = new Server();
const store = new Store();
const speaker = new Speaker($("spoken"));
const settings = new Settings();
const panel = new Panel(cutLink);
const chat = new Chat({ server, store, settings, speaker, panel, box: $("log") }, {
  busy, changed, failed,
});
const history = new History(store, {
  current: () => chat.chat,
  open: (id) => chat.open(store.chat(id) ?? emptyChat()),
  fresh: () => chat.open(emptyChat()),
});

/** Session storage of the tab. It survives a reload only. */
const tab = {
  get: (key) => { try { return sessionStorage.getItem(key); } catch { return null; } },
  set: (key, value) => { try { sessionStorage.setItem(key, value); } catch { /* asked again */ } },
};

/** Show an error above the message box. */
function trouble(error, retry) {
  $("trouble").hidden = !error;
  $("trouble-text").textContent = error?.message ?? "";
  $("retry").hidden = !retry;
  $("retry").onclick = retry ?? null;
  failed(error);
}

function failed(error) {
  if (error?.status !== 401) return;
  $("key-form").hidden = false;
  $("key").focus();
}

async function connect() {
  const about = await server.about();
  trouble(null);
  $("key-form").hidden = true;
  $("model").textContent = about.model;
  $("place").textContent =
    about.mode === "edge" ? "on a server, drafted on this device" : "on one device";
  $("compare-label").hidden = $("speculation-row").hidden = !about.speculation;
  for (const one of document.querySelectorAll(".edge-only")) one.hidden = about.mode !== "edge";
  panel.link(about.link);
}

/** Connect to the server, or show the error. */
const tryConnect = () => connect().catch((error) =>
  trouble(error, error.status === 401 ? null : tryConnect));

async function cutLink(cut) {
  try {
    panel.link(await server.cut(cut));
    speaker.say(cut ? "The link is cut." : "The link is restored.");
  } catch (error) {
    trouble(error, () => cutLink(cut));
  }
}

/** Poll the link, which changes between answers too. */
async function watchLink() {
  if ($("link").hidden || document.hidden) return;
  await server.about().then(({ link }) => panel.link(link), () => {});
}

/** Set the label of the button, which sends a message or stops an answer. */
function busy(label) {
  $("send").textContent = label ?? "Send";
  $("send").classList.toggle("stop", label !== null);
  if (label === null && store.full) trouble({ message: FULL });
}

function changed() {
  const shown = chat.chat;
  $("intro").hidden = shown.nodes.length > 0;
  $("kept").hidden = !shown.nodes.some((node) => node.kept);
  tab.set(OPEN, shown.id);
  if ($("history").open) history.show();
}

async function send(question) {
  if (chat.busy || !question.trim()) return;
  $("message").value = "";
  trouble(null);
  await chat.send(question.trim());
}

function listen() {
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (chat.busy) chat.stop();
    else send($("message").value);
  });
  $("message").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send($("message").value);
  });
  document.addEventListener("keydown", (event) => {
    const inDialog = event.target.closest?.("dialog");
    if (event.key === "Escape" && !event.defaultPrevented && !inDialog) chat.stop();
  });
  $("private").addEventListener("click", () => markPrivate($("message"), (text) => speaker.say(text)));
  $("examples").addEventListener("click", (event) => {
    if (event.target.matches("button")) send(event.target.textContent);
  });
  $("fresh").addEventListener("click", () => {
    chat.open(emptyChat());
    $("message").focus();
  });
  $("show-settings").addEventListener("click", () => $("settings").showModal());
  $("close-settings").addEventListener("click", () => $("settings").close());
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    server.key = $("key").value.trim();
    tab.set(KEY, server.key);
    tryConnect();
  });
  // The browser may discard a hidden page.
  document.addEventListener("visibilitychange", () => { if (document.hidden) chat.keep(); });
  window.addEventListener("pagehide", () => chat.keep());
}

function start() {
  server.key = tab.get(KEY) ?? "";
  // On small screens the panel would push the conversation off the screen.
  $("panel").open = matchMedia("(min-width: 60rem)").matches;
  listen();
  explainWords();
  followViewport();
  chat.open(store.chat(tab.get(OPEN)) ?? emptyChat());
  setInterval(watchLink, POLL_MS);
  tryConnect();
}

start();

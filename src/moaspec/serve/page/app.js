// The page: a conversation with the server it comes from, and everything that is shown about it.

import { Answer, element } from "./answer.js";
import { verdict } from "./compare.js";
import { Panel } from "./panel.js";
import { Server } from "./server.js";
import { Speaker } from "./spoken.js";

const $ = (id) => document.getElementById(id);
const KEY = "moaspec-key";
const POLL_MS = 1000;
const ASKED = { sources: true, tree: true, stats: true, link: true, provisional: true };

const server = new Server();
const speaker = new Speaker($("spoken"));
const panel = new Panel(cutLink);
const messages = [];
let about = null;
let running = null; // the AbortController of the answer that is being written

/** Whether the end of the conversation is on the screen, so that it should stay there. */
const atEnd = () => $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 60;
const toEnd = () => { $("log").scrollTop = $("log").scrollHeight; };

function trouble(error) {
  $("trouble").textContent = error?.message ?? "";
  $("trouble").hidden = !error;
  if (error?.status === 401) {
    $("key-form").hidden = false;
    $("key").focus();
  }
}

async function connect() {
  about = await server.about();
  trouble(null);
  $("key-form").hidden = true;
  $("model").textContent = about.model;
  $("place").textContent =
    about.mode === "edge" ? "on a server, drafted on this device" : "on one device";
  $("compare-label").hidden = !about.speculation;
  for (const one of document.querySelectorAll(".edge-only")) one.hidden = about.mode !== "edge";
  panel.link(about.link);
}

/** Connect, and say in words what is in the way. */
const tryConnect = () => connect().catch(trouble);

async function cutLink(cut) {
  try {
    panel.link(await server.cut(cut));
    speaker.say(cut ? "The link is cut." : "The link is restored.");
  } catch (error) {
    trouble(error);
  }
}

/** The link changes while nothing streams too. */
async function watchLink() {
  if (about?.mode !== "edge" || document.hidden) return;
  await server.about().then(({ link }) => panel.link(link), () => {});
}

function settings() {
  return {
    model: about.model,
    temperature: Number($("temperature").value) || 0,
    max_completion_tokens: Number($("max-tokens").value) || 256,
    seed: crypto.getRandomValues(new Uint32Array(1))[0] >>> 1,
  };
}

/** Stream one answer into its place. */
async function write(answer, body, { figures }) {
  try {
    for await (const chunk of server.chat(body, running.signal)) {
      const stay = atEnd();
      const text = answer.take(chunk);
      if (figures) follow(chunk.moaspec ?? {}, text);
      if (stay) toEnd();
    }
  } finally {
    answer.end();
    if (running.signal.aborted) answer.note("Stopped.");
  }
}

function follow(said, text) {
  const before = panel.state;
  panel.take(said);
  speaker.add(text);
  if (said.link?.state === "down" && before !== "down") {
    speaker.say("The link is down. What follows is provisional.");
  }
  if (said.correction) speaker.say(`${said.correction.removed} provisional tokens were corrected.`);
}

/** The question and its answers: with speculation, then plainly, each with the machine to itself. */
async function turn(question) {
  const compare = $("compare").checked;
  const body = { ...settings(), messages: [...messages, { role: "user", content: question }] };
  const place = element("div", compare ? "turn both" : "turn");
  place.append(element("p", "question", question));
  $("log").append(place);
  const answer = new Answer(compare ? "With speculation" : "Answer");
  const plain = new Answer("Plain decoding");
  place.append(answer.element, ...(compare ? [plain.element] : []));
  if (compare) plain.verified.textContent = "Runs next, so that neither slows the other.";
  toEnd();
  panel.clear();
  await write(answer, { ...body, moaspec: ASKED }, { figures: true });
  speaker.end();
  $("kept").hidden &&= !answer.kept;
  messages.push(body.messages.at(-1), { role: "assistant", content: answer.text });
  if (compare && !running.signal.aborted) await beside(place, answer, plain, body);
}

async function beside(place, answer, plain, body) {
  plain.verified.textContent = "";
  const asked = { sources: true, stats: true, speculation: false };
  await write(plain, { ...body, moaspec: asked }, { figures: false });
  if (running.signal.aborted) return;
  const { same, text } = verdict(answer, plain);
  place.append(element("p", `verdict ${same ? "same" : "differs"}`, text));
  speaker.say(text);
  toEnd();
}

async function send(question) {
  if (running || !question.trim()) return;
  running = new AbortController();
  show(true);
  trouble(null);
  try {
    if (!about) await connect();
    $("intro").hidden = true;
    $("message").value = "";
    await turn(question.trim());
  } catch (error) {
    trouble(error);
    if (!$("message").value) $("message").value = question;
  } finally {
    running = null;
    show(false);
  }
}

/** The button sends, or stops what runs. */
function show(busy) {
  $("send").textContent = busy ? "Stop" : "Send";
  $("send").classList.toggle("stop", busy);
  $("fresh").disabled = busy;
}

function startAnew() {
  messages.length = 0;
  for (const old of $("log").querySelectorAll(".turn")) old.remove();
  $("intro").hidden = false;
  $("message").focus();
}

function listen() {
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.abort();
    else send($("message").value);
  });
  $("message").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send($("message").value);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  $("examples").addEventListener("click", (event) => {
    if (event.target.matches("button")) send(event.target.textContent);
  });
  $("fresh").addEventListener("click", startAnew);
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    server.key = $("key").value.trim();
    try {
      sessionStorage.setItem(KEY, server.key);
    } catch {
      // then it is asked for again
    }
    tryConnect();
  });
}

function start() {
  try {
    server.key = sessionStorage.getItem(KEY) ?? "";
  } catch {
    // storage may be forbidden
  }
  // Where there is little room the figures would push the conversation off the screen.
  $("panel").open = matchMedia("(min-width: 60rem)").matches;
  listen();
  setInterval(watchLink, POLL_MS);
  tryConnect();
}

start();

// Markdown of a model as elements of the page. A model's text is not trusted: HTML in it is shown as
// text, images become links, and what is left goes through DOMPurify.

import { Marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js"; // sets globalThis.DOMPurify

const ALLOWED = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li",
    "ol", "p", "pre", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["align", "class", "href", "start"],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i,
  ADD_URI_SAFE_ATTR: ["align", "start"], // their values are no addresses, and are not tested as such
  RETURN_DOM_FRAGMENT: true,
};
const LANGUAGE = /(?:^|\s)language-([\w+#.-]{1,20})/;
const HEADING_ABOVE = 3; // an answer's own heading

const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escaped = (text) => text.replace(/[&<>"']/g, (one) => ESCAPES[one]);

const paragraph = (text) => `<p>${escaped(text.trim()).replaceAll("\n", "<br>")}</p>`;

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text, block }) => (block ? paragraph(text) : escaped(text)),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || "image")}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

/**
 * Split a text into blocks that can be rendered one by one: `{raw, at, tokens}`, `at` being where a
 * block begins. Text that the parser cannot read is one plain block.
 */
export function blocks(text) {
  const source = text.replaceAll("\r\n", " \n").replaceAll("\r", "\n"); // as long as the text
  let at = 0;
  return lexed(source).map((token) => {
    const start = source.indexOf(token.raw, at);
    const block = { raw: token.raw, at: start < 0 ? at : start, tokens: [token] };
    at = block.at + token.raw.length;
    return block;
  });
}

/** One block as a fragment of harmless elements. */
export function render(block) {
  const fragment = globalThis.DOMPurify.sanitize(parsed(block), ALLOWED);
  fragment.querySelectorAll("a").forEach(safeLink);
  levelHeadings(fragment);
  return fragment;
}

// Text may be nested too deeply to be read.
function lexed(source) {
  try {
    return marked.lexer(source);
  } catch {
    return [{ type: "paragraph", raw: source, text: source, tokens: [plain(source)] }];
  }
}

function parsed({ raw, tokens }) {
  try {
    return marked.parser(tokens);
  } catch {
    return paragraph(raw);
  }
}

const plain = (text) => ({ type: "text", raw: text, text, escaped: false });

function safeLink(link) {
  const href = link.getAttribute("href");
  if (!href) return;
  link.target = "_blank";
  link.rel = "noopener noreferrer nofollow";
  link.title = href; // what the link says may be something else
}

// Below the answer's own heading, and no level left out, whatever the model wrote.
function levelHeadings(fragment) {
  let last = HEADING_ABOVE;
  for (const old of fragment.querySelectorAll("h1, h2, h3, h4, h5, h6")) {
    const wanted = HEADING_ABOVE + Number(old.localName[1]);
    last = Math.min(wanted, last + 1, 6);
    const heading = document.createElement(`h${last}`);
    heading.append(...old.childNodes);
    old.replaceWith(heading);
  }
}

/** The language that a code block names, for people; its class is removed. */
export function takeLanguage(code) {
  const language = LANGUAGE.exec(code.className)?.[1] ?? "";
  code.removeAttribute("class");
  return language;
}

// Renders a model's Markdown. The text is untrusted: HTML is shown as text, images become links, and
// the result goes through DOMPurify.

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
  ADD_URI_SAFE_ATTR: ["align", "start"], // their values are not URIs and need no check
  RETURN_DOM_FRAGMENT: true,
};
const LANGUAGE = /(?:^|\s)language-([\w+#.-]{1,20})/;
const HEADING_ABOVE = 3; // level of an answer's title

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
 * Split a text into blocks that can be rendered separately: `{raw, at, tokens}`, `at` being the
 * offset of the block. Text that the parser cannot read becomes one plain block.
 */
export function blocks(text) {
  const source = text.replaceAll("\r\n", " \n").replaceAll("\r", "\n"); // keeps the length of the text
  let at = 0;
  return lexed(source).map((token) => {
    const start = source.indexOf(token.raw, at);
    const block = { raw: token.raw, at: start < 0 ? at : start, tokens: [token] };
    at = block.at + token.raw.length;
    return block;
  });
}

/** Render a block as a fragment of safe elements. */
export function render(block) {
  const fragment = globalThis.DOMPurify.sanitize(parsed(block), ALLOWED);
  fragment.querySelectorAll("a").forEach(safeLink);
  levelHeadings(fragment);
  return fragment;
}

// The parser throws on deeply nested text.
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
  link.title = href; // the link's text may name another address
}

// Headings start below the answer's title and skip no level.
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

/** The readable language of a code block; removes its class. */
export function takeLanguage(code) {
  const language = LANGUAGE.exec(code.className)?.[1] ?? "";
  code.removeAttribute("class");
  return language;
}

// Buttons that copy a text.

import { element } from "./elements.js";

const SHOWN_MS = 1500;

/** Copy a text. Returns false if the browser forbids it. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text); // pages without HTTPS have no clipboard API
  }
}

function copyBySelection(text) {
  const area = element("textarea", "hidden");
  area.value = text;
  document.body.append(area);
  const focused = document.activeElement;
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return done;
}

/** A button that copies the result of `text()`. */
export function copyButton(text, label) {
  const button = element("button", "small", "Copy");
  button.type = "button";
  button.setAttribute("aria-label", label);
  button.addEventListener("click", async () => {
    button.textContent = (await copy(text())) ? "Copied" : "Cannot copy";
    setTimeout(() => { button.textContent = "Copy"; }, SHOWN_MS);
  });
  return button;
}

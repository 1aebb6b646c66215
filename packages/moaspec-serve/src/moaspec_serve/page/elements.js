// Creates DOM elements.

/** Create an element with a class and text. */
export function element(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.textContent = text;
  return made;
}

/** A small button. `label` is its accessible name, longer than its text. */
export function button(text, label, pressed) {
  const made = element("button", "small", text);
  made.type = "button";
  if (label !== text) made.setAttribute("aria-label", label);
  made.addEventListener("click", pressed);
  return made;
}

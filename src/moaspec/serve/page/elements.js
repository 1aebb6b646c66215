// Making elements.

/** An element with a class and text. */
export function element(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.textContent = text;
  return made;
}

/** A small button; `label` says more than its text does to those who do not see the page. */
export function button(text, label, pressed) {
  const made = element("button", "small", text);
  made.type = "button";
  if (label !== text) made.setAttribute("aria-label", label);
  made.addEventListener("click", pressed);
  return made;
}

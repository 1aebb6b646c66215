// Explanations of words: elements with `data-tip` show it when they are pointed at or focused.

const EDGE = 8; // pixels

export function explainWords() {
  const tip = document.getElementById("tip");
  let of = null;

  const hide = () => {
    described(of)?.removeAttribute("aria-describedby");
    of = null;
    tip.hidden = true;
  };
  const show = (event) => {
    const word = event.target.closest?.("[data-tip]");
    if (!word) {
      if (event.type !== "pointerover" || !tip.contains(event.target)) hide();
      return;
    }
    if (word !== of) hide();
    of = word;
    tip.textContent = word.dataset.tip;
    tip.hidden = false;
    described(word).setAttribute("aria-describedby", "tip");
    // A modal dialog covers everything that is not in it.
    (word.closest("dialog, main") ?? document.body).append(tip);
    place(tip, word.getBoundingClientRect());
  };

  for (const kind of ["pointerover", "focusin"]) document.addEventListener(kind, show);
  document.addEventListener("focusout", hide);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !of) return;
    event.preventDefault(); // a dialog around it stays open
    event.stopPropagation();
    hide();
  }, true);
}

// Of a label and its field, the field is what is focused.
const described = (word) => word?.control ?? word;

function place(tip, word) {
  const { width, height } = tip.getBoundingClientRect();
  const most = document.documentElement.clientWidth - width - EDGE;
  tip.style.left = `${Math.max(EDGE, Math.min(word.left, most))}px`;
  const below = word.bottom + EDGE / 2;
  const above = word.top - height - EDGE / 2;
  tip.style.top = `${below + height > window.innerHeight && above > 0 ? above : below}px`;
}

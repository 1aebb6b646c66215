// Tooltips: elements with `data-tip` show it on hover and focus.

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
    // A modal dialog covers everything outside of it.
    (word.closest("dialog, main") ?? document.body).append(tip);
    place(tip, word.getBoundingClientRect());
  };

  for (const kind of ["pointerover", "focusin"]) document.addEventListener(kind, show);
  document.addEventListener("focusout", hide);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !of) return;
    event.preventDefault(); // keeps a surrounding dialog open
    event.stopPropagation();
    hide();
  }, true);
}

// The focus is on a label's field.
const described = (word) => word?.control ?? word;

function place(tip, word) {
  const { width, height } = tip.getBoundingClientRect();
  const most = document.documentElement.clientWidth - width - EDGE;
  tip.style.left = `${Math.max(EDGE, Math.min(word.left, most))}px`;
  const below = word.bottom + EDGE / 2;
  const above = word.top - height - EDGE / 2;
  tip.style.top = `${below + height > window.innerHeight && above > 0 ? above : below}px`;
}

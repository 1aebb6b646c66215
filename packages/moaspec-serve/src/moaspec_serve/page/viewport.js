// The visible part of the page. A phone's keyboard covers the page instead of shrinking it, so the
// page gets the height of the visible part.

const SHORT = 520; // pixels of height below which only the conversation and the message box are shown

export function followViewport() {
  const seen = window.visualViewport;
  const root = document.documentElement;
  const follow = () => {
    // A magnified page is partly visible too, but no keyboard covers it.
    const height = seen && seen.scale === 1 ? seen.height : window.innerHeight;
    root.style.setProperty("--height", `${height}px`);
    root.style.setProperty("--top", `${seen && seen.scale === 1 ? seen.offsetTop : 0}px`);
    root.classList.toggle("short", height < SHORT);
  };
  for (const of of [seen, window]) of?.addEventListener("resize", follow);
  seen?.addEventListener("scroll", follow);
  follow();
}

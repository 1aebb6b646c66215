// The part of the page that can be seen. A phone's keyboard covers the page instead of shrinking it,
// so the page is made as high as what is left.

const SHORT = 520; // pixels below which everything but the conversation and the message box folds

export function followViewport() {
  const seen = window.visualViewport;
  const root = document.documentElement;
  const follow = () => {
    // While a page is magnified, less of it is seen, but no keyboard covers it.
    const height = seen && seen.scale === 1 ? seen.height : window.innerHeight;
    root.style.setProperty("--height", `${height}px`);
    root.style.setProperty("--top", `${seen && seen.scale === 1 ? seen.offsetTop : 0}px`);
    root.classList.toggle("short", height < SHORT);
  };
  for (const of of [seen, window]) of?.addEventListener("resize", follow);
  seen?.addEventListener("scroll", follow);
  follow();
}

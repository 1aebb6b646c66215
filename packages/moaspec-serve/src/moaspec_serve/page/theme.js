// Light or dark theme: the system's, unless the settings choose one. This is not a module, so it runs
// before the first paint and nothing flashes.
(() => {
  const KEY = "moaspec-theme";
  const THEMES = ["light", "dark"];
  const root = document.documentElement;

  function stored() {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null; // storage may be forbidden
    }
  }

  function store(theme) {
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      // the choice is not stored
    }
  }

  function use(theme) {
    if (THEMES.includes(theme)) root.dataset.theme = theme;
    else delete root.dataset.theme;
  }

  use(stored());
  document.addEventListener("DOMContentLoaded", () => {
    const choice = document.getElementById("theme");
    choice.value = root.dataset.theme ?? "system";
    choice.addEventListener("change", () => {
      use(choice.value);
      store(choice.value);
    });
  });
})();

// Light or dark: the system's choice unless another is made in the settings. No module, so that it
// runs before anything is drawn and nothing flashes.
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
      // then it is chosen again next time
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

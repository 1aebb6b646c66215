// Light or dark: the system's choice until the button is used. No module, so that it runs before
// anything is drawn and nothing flashes.
(() => {
  const KEY = "moaspec-theme";
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");

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

  const isDark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";

  function showButton() {
    const button = document.getElementById("theme");
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Use ${isDark() ? "light" : "dark"} colours`);
  }

  if (stored()) root.dataset.theme = stored();
  document.addEventListener("DOMContentLoaded", () => {
    showButton();
    system.addEventListener("change", showButton);
    document.getElementById("theme").addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      store(root.dataset.theme);
      showButton();
    });
  });
})();

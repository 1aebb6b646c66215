// Sorts the table of prompts by the column that is pressed, and copies the command.
const table = document.getElementById("prompts");
const heads = [...table.tHead.rows[0].cells];
const keyOf = (row, column) => {
  const text = row.cells[column].textContent;
  return text !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
};
const compare = (a, b) =>
  typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(b, "en", { numeric: true });
heads.forEach((head, column) => head.addEventListener("click", () => {
  const up = head.ariaSort !== "ascending";
  for (const one of heads) one.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const rows = [...table.tBodies[0].rows];
  rows.sort((a, b) => (up ? 1 : -1) * compare(keyOf(a, column), keyOf(b, column)));
  table.tBodies[0].append(...rows);
}));
const copy = document.querySelector(".copy");
copy.hidden = !navigator.clipboard;
copy.addEventListener("click", async () => {
  await navigator.clipboard.writeText(document.querySelector(".command").textContent);
  copy.textContent = "Copied";
});

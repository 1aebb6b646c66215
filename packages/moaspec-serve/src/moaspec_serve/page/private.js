// Marks of private text, which does not leave the device.

const [OPEN, CLOSE] = ["<private>", "</private>"];

/** Put marks around a field's selection, unless it has some; without a selection, write between them. */
export function markPrivate(field, say) {
  const { selectionStart: start, selectionEnd: end, value } = field;
  const selected = value.slice(start, end);
  if (!selected.includes(OPEN) && !selected.includes(CLOSE)) {
    field.setRangeText(OPEN + selected + CLOSE, start, end, "end");
    say("Marked as private.");
  }
  if (start === end) field.setSelectionRange(start + OPEN.length, start + OPEN.length);
  field.focus();
}

// Marks of private text, which does not leave the device.

const [OPEN, CLOSE] = ["<private>", "</private>"];

/** Put marks around a field's selection; without one, write between them. */
export function markPrivate(field) {
  const { selectionStart: start, selectionEnd: end, value } = field;
  field.setRangeText(OPEN + value.slice(start, end) + CLOSE, start, end, "end");
  if (start === end) field.setSelectionRange(start + OPEN.length, start + OPEN.length);
  field.focus();
}

// SPDX-License-Identifier: Apache-2.0
// Copying to the clipboard, if the browser allows it.

/** Copies a text, and shows the result on the button for two seconds. Returns whether it was copied. */
export async function copy(text, button, done = "Copied", otherwise = "Not allowed") {
  button.dataset.name ??= button.textContent;
  let copied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copied = false;
  }
  button.textContent = copied ? done : otherwise;
  setTimeout(() => (button.textContent = button.dataset.name), 2000);
  return copied;
}

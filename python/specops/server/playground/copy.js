// SPDX-License-Identifier: Apache-2.0
// Copying a text, as far as the browser lets a page do that.

/** Copies; the button tells for a moment what came of it, in place of its name. Returns whether it did. */
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

// SPDX-License-Identifier: Apache-2.0
// Example prompts and messages. The bundled model writes Python; edits repeat much text, new code little.

import {$, make} from "./dom.js";

const TESTS = `class DequeTest(unittest.TestCase):
    def test_append(self):
        d = deque()
        d.append(1)
        d.append(2)
        self.assertEqual(list(d), [1, 2])

    def test_appendleft(self):
        d = deque()
        d.appendleft(1)
        d.appendleft(2)
        self.assertEqual(list(d), [2, 1])

    def test_pop(self):`;

const CLASSES = `class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance


class SavingsAccount:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):`;

const DATA = `CODES = {
    200: "OK",
    201: "Created",
    202: "Accepted",
    204: "No Content",
    301: "Moved Permanently",
    302: "Found",`;

const FRESH = `def read_config(path):
    """Read a configuration file and return its sections."""
    sections = {}
    with open(path) as file:
        for line in file:`;

const MEAN = `def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)`;

export const PROMPTS = {"Tests": TESTS, "Similar class": CLASSES, "Data": DATA, "New code": FRESH};

const MESSAGES = {
  "Explain": "Explain photosynthesis in three sentences.",
  "Code": "Write a Python function that merges two sorted lists, and a test for it.",
  "Edit": `Add type hints to this function, and repeat it in full:\n\n${MEAN}`,
};

/** Shows the examples of a mode; `onChoice` receives the text of a clicked example. */
export function showExamples(mode, onChoice) {
  const examples = mode === "chat" ? MESSAGES : PROMPTS;
  if ($("examples").dataset.of === Object.keys(examples).join()) return;
  $("examples").dataset.of = Object.keys(examples).join();
  $("examples").replaceChildren(
    ...Object.entries(examples).map(([name, text]) => {
      const button = make("button", {type: "button"}, name);
      button.addEventListener("click", () => onChoice(text));
      return button;
    }),
  );
}

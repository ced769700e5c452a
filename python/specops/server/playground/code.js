// SPDX-License-Identifier: Apache-2.0
// The form's request as a curl command and as a Python program.

import {$} from "./dom.js";
import {requestOf} from "./runs.js";

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** Returns a JSON value in Python's notation. */
function python(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value).map(([name, its]) => `${JSON.stringify(name)}: ${python(its)}`).join(", ")}}`;
}

function command({path, fields, seed}, hasKey) {
  const body = JSON.stringify(fields).slice(0, -1) + (seed ? `,"seed":${seed}}` : "}");
  const headers = ["-H 'Content-Type: application/json'"];
  if (hasKey) headers.push('-H "Authorization: Bearer $API_KEY"');
  return [`curl -s ${location.origin}/${path}`, ...headers, `-d ${quoted(body)}`].join(" \\\n  ");
}

function program({path, fields: {speculative_config: config, ...fields}, seed}, hasKey) {
  const isChat = path.includes("chat");
  const values = Object.entries(fields).map(([name, value]) => [name, python(value)]);
  if (seed) values.push(["seed", seed]);
  values.push(["extra_body", python({speculative_config: config})]);
  return [
    ...(hasKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${location.origin}/v1", api_key=${hasKey ? 'os.environ["API_KEY"]' : '"none"'})`,
    `answer = client.${isChat ? "chat.completions" : "completions"}.create(`,
    ...values.map(([name, text]) => `    ${name}=${text},`),
    ")",
    `print(answer.choices[0].${isChat ? "message.content" : "text"})`,
  ].join("\n");
}

/** Shows the request unless the code is hidden; `model` is the name of the server's model. */
export function showCode(settings, model, hasKey) {
  if ($("code").hidden) return;
  const isChat = settings.mode === "chat";
  const system = settings.system ? [{role: "system", content: settings.system}] : [];
  const messages = isChat ? [...system, {role: "user", content: settings.message}] : null;
  const {path, fields} = requestOf(settings, settings.method, messages);
  const request = {path, fields: {model, ...fields}, seed: settings.seed};
  $("code-text").textContent = ($("language").value === "curl" ? command : program)(request, hasKey);
}

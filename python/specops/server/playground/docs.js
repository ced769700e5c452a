// SPDX-License-Identifier: Apache-2.0
// The page /docs: all routes and their fields, from /openapi.json.

import {request} from "./api.js";
import {$, make} from "./dom.js";

const NUMBER = new Intl.NumberFormat("en", {maximumFractionDigits: 6});

let schemas = {};

const nameOf = (reference) => reference.split("/").at(-1);
const isNothing = ({type}) => type === "null"; // null is the same as absent

/** The alternatives of a field, without null. */
const branchesOf = (field) => (field.anyOf ?? field.oneOf ?? [field]).flatMap((one) => (one.anyOf ? branchesOf(one) : [one])).filter((one) => !isNothing(one));

function typeOf(field) {
  if (field.$ref) return nameOf(field.$ref);
  if (field.anyOf || field.oneOf) return [...new Set(branchesOf(field).map(typeOf))].join(" or ");
  if (field.const !== undefined) return JSON.stringify(field.const);
  if (field.enum) return field.enum.map((one) => JSON.stringify(one)).join(" or ");
  if (field.type === "array") return `list of ${field.items ? typeOf(field.items).replace(/^\w+/, "$&s") : "anything"}`;
  return field.type ?? "anything";
}

/** The range of a field's values, such as "above 0, to 1" or "at most 16". */
function rangeOf(field) {
  const ranges = branchesOf(field).map(({minimum, exclusiveMinimum, maximum, maxItems, maxLength, maxProperties}) => {
    const low = exclusiveMinimum === undefined ? minimum : exclusiveMinimum;
    const maximumSize = maxItems ?? maxLength ?? maxProperties;
    if (low === undefined) return maximumSize === undefined ? "" : `at most ${NUMBER.format(maximumSize)}`;
    const from = `${exclusiveMinimum === undefined ? "" : "above "}${NUMBER.format(low)}`;
    return maximum === undefined ? `${from} or more` : `${from} to ${NUMBER.format(maximum)}`;
  });
  return [...new Set(ranges.filter(Boolean))].join("; ");
}

const code = (text) => make("code", {}, text);
const cellsOf = (tag, cells) => make("tr", {}, ...cells.map((cell) => make(tag, tag === "th" ? {scope: "col"} : {}, cell)));

/** A table of fields: [name, schema, whether it is required]. */
function tableOf(fields, label) {
  const rows = fields.map(([name, field, isRequired]) => {
    const isShown = field.default !== undefined && field.default !== null;
    const otherwise = isRequired ? "required" : isShown ? JSON.stringify(field.default) : "";
    return cellsOf("td", [code(name), typeOf(field), rangeOf(field), otherwise, field.description ?? ""]);
  });
  const head = make("thead", {}, cellsOf("th", ["field", "type", "range", "default", "meaning"]));
  const table = make("table", {}, head, make("tbody", {}, ...rows));
  return make("div", {class: "scrolls", tabindex: 0, role: "group", "aria-label": label}, table);
}

const isNeutral = ({description = ""}) => /^(no effect|only these values)/.test(description);

function bodyOf(name, label) {
  const {properties, required = []} = schemas[name];
  const fields = Object.entries(properties);
  const known = fields.filter(([, field]) => !isNeutral(field));
  const others = fields.filter(([, field]) => isNeutral(field)).map(([other]) => other);
  known.sort(([a], [b]) => required.includes(b) - required.includes(a));
  const table = tableOf(known.map(([field, schema]) => [field, schema, required.includes(field)]), label);
  if (!others.length) return [table];
  return [table, make("p", {class: "soft"}, `Supported only with values that have no effect: ${others.join(", ")}.`)];
}

/** A text, indented if it is JSON without a number that JavaScript would round. */
function indented(text) {
  try {
    if (/(?<![.\d])\d{17}/.test(text)) return text;
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** What sends a route's example, which may be edited first; nothing for a route that needs a name in its path. */
function trialOf(title, path, example) {
  const body = example && make("textarea", {rows: 5, spellcheck: "false", "aria-label": `Body of ${title}`}, JSON.stringify(example, null, 2));
  const send = make("button", {type: "button", class: "main"}, "Send");
  const answer = make("pre", {tabindex: 0, role: "group", "aria-label": `Answer to ${title}`, hidden: true});
  send.addEventListener("click", async () => {
    answer.hidden = false;
    answer.textContent = "Waiting for the answer.";
    try {
      const response = await request(path.slice(1), {key: $("key").value, body: body?.value ?? null});
      answer.textContent = indented(await response.text());
    } catch (error) {
      answer.textContent = error.message;
    }
  });
  return make("details", {class: "trial code"}, make("summary", {}, "Try it out"), ...(body ? [body] : []), send, answer);
}

function routeOf(path, method, {description = "", requestBody, parameters = [], responses}) {
  const title = `${method.toUpperCase()} ${path}`;
  const example = requestBody?.content["application/json"].example;
  const canBeTried = !path.includes("{") && (example || method === "get");
  const parts = [make("h2", {}, title), make("p", {}, description)];
  if (canBeTried) parts.push(trialOf(title, path, example));
  else if (requestBody) parts.push(make("p", {class: "soft"}, "No example: the model has no chat template."));
  const label = `Fields of ${title}`;
  if (parameters.length) parts.push(tableOf(parameters.map(({name, schema, required}) => [name, schema, required]), label));
  if (requestBody) parts.push(...bodyOf(nameOf(requestBody.content["application/json"].schema.$ref), label));
  const statuses = Object.entries(responses).map(([status, one]) => `${status}${status === "200" ? "" : `: ${one.description}`}`);
  parts.push(make("p", {class: "soft"}, `Answers ${statuses.join("; ")}.`));
  return make("section", {id: title.replaceAll(/\W+/g, "-"), class: "route", "aria-label": title}, ...parts);
}

async function show() {
  const {paths, components} = await (await request("openapi.json")).json();
  schemas = components.schemas;
  $("key-field").hidden = !components.securitySchemes;
  const routes = Object.entries(paths).flatMap(([path, item]) =>
    Object.entries(item).filter(([method]) => method !== "head").map(([method, route]) => routeOf(path, method, route)));
  const links = routes.map(({id, ariaLabel}) => make("li", {}, make("a", {href: `#${id}`}, ariaLabel)));
  $("contents").append(make("ul", {}, ...links));
  $("routes").append(...routes);
  if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
}

show().catch((error) => ($("error").textContent = error.message));

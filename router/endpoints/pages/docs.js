// Shows openapi.json. The page needs nothing from other hosts.
const element = (tag, text, ...children) => {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
};
const code = text => element("code", text);
const row = (tag, ...cells) => element("tr", "", ...cells.map(each => element(tag, "", each)));

const document_ = await (await fetch("openapi.json")).json();
const resolved = schema => schema.$ref ? document_.components.schemas[schema.$ref.split("/").pop()] : schema;

function typeOf(schema) {
  const options = schema.anyOf ?? schema.oneOf;
  if (options) return [...new Set(options.map(typeOf))].join(" | ");
  if (schema.enum) return schema.enum.map(each => JSON.stringify(each)).join(" | ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.type === "array") return `list of ${typeOf(schema.items ?? {})}`;
  return schema.type ?? "any";
}

function fields(title, schema) {
  const {properties, required = []} = resolved(schema);
  if (!properties) return [];
  const rows = Object.entries(properties).map(([name, field]) => row("td", code(name), typeOf(field),
    required.includes(name) ? "required" : "default" in field ? JSON.stringify(field.default) : "",
    field.description ?? ""));
  return [element("table", "", row("th", title, "type", "default", "note"), ...rows)];
}

const json = content => content?.content?.["application/json"]?.schema;
for (const [path, methods] of Object.entries(document_.paths))
  for (const [method, operation] of Object.entries(methods)) {
    const name = element("b", method);
    name.className = "method";
    const [body, answer] = [json(operation.requestBody), json(operation.responses["200"])];
    const errors = Object.keys(operation.responses).filter(status => status !== "200").join(", ");
    operations.append(element("details", "",
      element("summary", "", name, code(path), ` ${operation.summary}`),
      ...(operation.security ? [element("p", "Needs an API key.")] : []),
      ...(errors ? [element("p", `Statuses of errors: ${errors}`)] : []),
      ...(body ? fields("request", body) : []), ...(answer ? fields("response", answer) : [])));
  }
about.replaceChildren(`${document_.info.title} ${document_.info.version}. The same as `,
  Object.assign(element("a", "openapi.json"), {href: "openapi.json"}), ".");

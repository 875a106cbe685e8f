import { MAX_TOKENS, chatChoices } from "./client.js";
import { markdown } from "./markdown.js";
import { element, short } from "./parts.js";

const [url, key, chat, form, text, send, stop, clear, model, setup, system, temperature] =
  ["url", "key", "chat", "form", "text", "send", "stop", "clear", "model", "setup", "system", "temperature"]
    .map(id => document.getElementById(id));
if (location.pathname.endsWith("/chat")) url.value = location.href.replace(/\/chat.*$/, "");
key.value = sessionStorage.getItem("key") ?? "";
const messages = [];
let running = null;

async function ask(path) {
  const answer = await fetch(`${url.value}/${path}`, { headers: key.value ? { Authorization: `Bearer ${key.value}` } : {} });
  if (!answer.ok) throw Object.assign(new Error(answer.statusText), { status: answer.status });
  return answer.json();
}

async function showModel() {
  const found = await ask("v1/models").catch(error => error);
  model.textContent = found.data?.[0]?.id ?? "";
  if (found.status === 401) setup.open = true; // the key is asked for there
}

function show(kind, content, parent = chat) {
  const made = parent.appendChild(element(parent === chat ? "article" : "div", { className: kind }, content));
  chat.scrollTop = chat.scrollHeight;
  return made;
}

// Draws the answer at most once a frame: a fast model sends hundreds of tokens a second.
function drawing(answer) {
  const received = { reasoning: "", content: "" }, parts = { reasoning: null, content: null };
  let due = false;
  function draw() {
    due = false;
    const atEnd = chat.scrollTop + chat.clientHeight > chat.scrollHeight - 40;
    for (const kind of ["reasoning", "content"]) {
      if (!received[kind]) continue;
      parts[kind] ??= answer.appendChild(element("div", { className: kind === "content" ? "content markdown" : kind }));
      parts[kind].replaceChildren(...(kind === "content" ? markdown(received.content) : [received.reasoning]));
    }
    if (atEnd) chat.scrollTop = chat.scrollHeight;
  }
  return {
    received, draw,
    add(delta) {
      for (const kind of ["reasoning", "content"]) received[kind] += delta[kind] ?? "";
      if (!due) requestAnimationFrame(draw);
      due = true;
    },
  };
}

async function route(id) {
  const found = await ask(`status/requests/${encodeURIComponent(id)}`).catch(() => null); // the admin port may have it
  return found && found.route.length ? ` · ${found.route.map(each => each.split(" at ")[0]).join(" → ")}` : "";
}

async function answer(question) {
  messages.push({ role: "user", content: question });
  show("user", question);
  const shown = show("assistant", ""), drawn = drawing(shown);
  const about = {}, began = performance.now();
  let first = 0;
  running = new AbortController();
  send.disabled = !(stop.disabled = false);
  const body = { messages: system.value ? [{ role: "system", content: system.value }, ...messages] : messages };
  if (temperature.value !== "") body.temperature = Number(temperature.value);
  try {
    for await (const { delta, finish_reason } of chatChoices(url.value, key.value, body, running.signal, each => Object.assign(about, each))) {
      first ||= performance.now();
      drawn.add(delta);
      if (finish_reason === "length") about.cut = true;
    }
    drawn.draw();
    const passed = performance.now() - first, count = about.usage?.completion_tokens ?? 0;
    const speed = count > 1 ? ` · ${short(1000 * (count - 1) / passed)} tokens/s` : "";
    const footer = shown.appendChild(element("footer", {},
      `${count} tokens · first after ${short(first - began)} ms${speed}${about.cut ? ` · cut after ${MAX_TOKENS} tokens` : ""}`));
    footer.append(await route(about.id));
    chat.scrollTop = chat.scrollHeight;
    if (!model.textContent) showModel();
  } catch (error) {
    drawn.draw();
    if (error.name !== "AbortError") show("error", error.message, shown);
  }
  messages.push({ role: "assistant", content: drawn.received.content });
  send.disabled = !(stop.disabled = true);
}

form.addEventListener("submit", event => {
  event.preventDefault();
  const question = text.value.trim();
  if (!question || send.disabled) return;
  text.value = "";
  answer(question);
});
text.addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
});
key.addEventListener("change", () => {
  sessionStorage.setItem("key", key.value);
  showModel();
});
stop.addEventListener("click", () => running.abort());
clear.addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  chat.replaceChildren();
});
showModel();

export const MAX_TOKENS = 2048; // Some models go on until their context is full.

// Yields the choices of a chat completion as they arrive. Throws an Error with the server's message. `told` gets the
// request's id when the answer begins, and the usage at its end.
export async function* chatChoices(url, key, body, signal, told = () => {}) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const asked = { max_tokens: MAX_TOKENS, ...body, stream: true, stream_options: { include_usage: true } };
  const response = await fetch(`${url}/v1/chat/completions`, {
    method: "POST", headers, signal, body: JSON.stringify(asked),
  }).catch(error => {
    if (!(error instanceof TypeError)) throw error;
    // A browser does not tell a script why a connection failed.
    throw new Error(`No answer from ${url}. Check that the server runs and that the address is right` +
      (url.startsWith(globalThis.origin) ? "." : `, and give the router --allowed-origins ${globalThis.origin}.`));
  });
  if (!response.ok) {
    throw new Error((await response.json()).error.message);
  }
  told({ id: response.headers.get("x-request-id") });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let read = await reader.read(); !read.done; read = await reader.read()) {
    const events = (rest + read.value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: {")) continue; // a comment, or [DONE]
      const data = JSON.parse(event.slice("data: ".length));
      if (data.error) throw new Error(data.error.message);
      if (data.usage) told({ usage: data.usage });
      yield* data.choices;
    }
  }
}

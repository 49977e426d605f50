// The public API, as this page uses it. Addresses are relative, so that the server may stand below a path.

export class ApiError extends Error {
  constructor(message, { status = 0, param = null, code = null } = {}) {
    super(message);
    Object.assign(this, { status, param, code });
  }
}

function headers(key, more = {}) {
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function request(address, options) {
  let response;
  try {
    response = await fetch(address, { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Is it still running, and is this machine online?");
  }
  if (response.ok) return response;
  throw await refusal(response);
}

// What the server says about a refused request, in OpenAI's shape or not.
async function refusal(response) {
  const text = await response.text();
  let error = null;
  try {
    error = JSON.parse(text).error;
  } catch {
    error = null; // a proxy's page, say: its status is told
  }
  const wait = response.headers.get("Retry-After");
  const message = error?.message ?? `The server answered ${response.status} ${response.statusText}`.trim();
  const advice = wait ? `${message} (try again in ${wait} s)` : message;
  return new ApiError(advice, { status: response.status, param: error?.param, code: error?.code });
}

export async function getJson(address, key) {
  return (await request(address, { headers: headers(key) })).json();
}

export async function remove(address, key) {
  return (await request(address, { method: "DELETE", headers: headers(key) })).json();
}

export async function upload(address, file, key) {
  const options = { method: "POST", headers: headers(key, { "Content-Type": "application/octet-stream" }), body: file };
  return (await request(address, options)).json();
}

// The chunks of a streamed answer, as they come. An error in the stream, and one that ends early, are thrown.
export async function* stream(address, body, key, signal) {
  const response = await request(address, {
    method: "POST",
    headers: headers(key, { "Content-Type": "application/json" }),
    body: JSON.stringify(body),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The connection broke in the middle of the answer.");
    }
    if (piece.done) throw new ApiError("The answer ended before it was complete.");
    rest += piece.value;
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      const data = event.slice(6);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, chunk.error);
      yield chunk;
    }
  }
}

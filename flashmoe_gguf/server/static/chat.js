// One streamed chat completion, piece by piece.

// Yields pieces of text; throws what the server says when it fails, also half-way.
export async function* askStreaming(messages, headers, signal) {
  const answer = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers },
    body: JSON.stringify({ messages, stream: true }),
    signal,
  });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue; // comments say that there is life
      const data = line.slice("data: ".length).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      const piece = event.choices.length ? event.choices[0].delta.content : "";
      if (piece) yield piece;
    }
  }
}

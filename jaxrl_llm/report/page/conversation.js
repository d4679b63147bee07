// A sample of several turns as a conversation: what was sampled, and what was observed.

const KINDS = {
  prompt: "prompt",
  sampled: "sampled",
  observed: "observed, not in the loss",
};

function conversationNodes(sample) {
  const { messages, num_left_out: left } = sample.conversation;
  const blocks = messages.map(messageBlock);
  if (!messages.some(({ kind }) => kind === "prompt")) {
    blocks.unshift(messageBlock({ kind: "prompt", role: "text", text: sample.prompt || "", calls: [] }));
  }
  return [
    element("h3", {}, "Conversation"), element("p", { class: "note" }, summaryOf(sample)),
    element("div", { class: "conversation" }, ...blocks),
    left ? note(`${left} further messages are in the trace.`) : "",
  ];
}

function summaryOf({ conversation: { spans, stop_reason: reason, tool_s: seconds, rewards } }) {
  const parts = [counted(spans.length, "turn"), `stop reason ${reason}`, `${number(seconds) || 0} s of tools`];
  if (rewards.length) parts.push(`turn rewards ${rewards.map(number).join(", ")}`);
  return parts.join("; ");
}

function counted(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

function messageBlock(message) {
  const { kind, role, name, turn, row, tokens, reward, failed, tool_s: seconds } = message;
  const place = turn ? `turn ${turn}${row ? ` in row ${row}` : ""}` : name;
  const facts = [place, KINDS[kind], tokens === undefined ? "" : counted(tokens, "token")];
  if (seconds !== undefined) facts.push(`${number(seconds) || 0} s`);
  if (typeof reward === "number") facts.push(`reward ${number(reward)}`);
  const head = element("div", { class: "note" }, element("b", {}, role), ` ${facts.filter(Boolean).join(", ")}`);
  if (failed) head.append(element("span", { class: "bad" }, `, ${counted(failed, "call")} failed`));
  return element("div", { class: `message ${kind}` }, head,
    message.thinking ? element("pre", { class: "thinking" }, message.thinking) : null,
    message.text ? element("pre", {}, message.text) : null,
    ...message.calls.map(callLine));
}

function callLine({ name, arguments: values, status }) {
  const bad = status && status !== "ok";
  return element("pre", { class: "call" }, `${name}(${values})`,
    bad ? element("span", { class: "bad" }, ` ${status}`) : null);
}

// Whether a token of the response was observed: it lies in no turn.
function isObserved({ conversation }, place) {
  return Boolean(conversation) && !conversation.spans.some(([start, end]) => start <= place && place < end);
}

function conversationText({ conversation }) {
  return conversation ? conversation.messages.map(({ text, calls }) =>
    `${text}\n${calls.map((call) => `${call.name}(${call.arguments})`).join("\n")}`).join("\n") : "";
}

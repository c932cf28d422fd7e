// Relay Outbox: hands what happens in OpenCode to `outbox hook opencode`, one call at a time and in order.
// Written by `outbox hook install opencode`; taken away by `outbox hook uninstall opencode`.
import { spawn } from "node:child_process"

const [program, ...words] = ["outbox", "hook", "opencode"]
const told = new Set([
  "session.created",
  "session.deleted",
  "session.error",
  "session.idle",
  "session.compacted",
  "permission.asked",
])

let last = Promise.resolve()

function call(value) {
  return new Promise((resolve) => {
    try {
      const child = spawn(program, words, { stdio: ["pipe", "ignore", "ignore"] })
      child.on("error", resolve)
      child.on("close", resolve)
      child.stdin.on("error", () => {})
      child.stdin.end(JSON.stringify(value))
    } catch {
      resolve()
    }
  })
}

function hand(value) {
  last = last.then(() => call(value))
}

function isWanted(event) {
  if (event.type !== "message.part.updated") return told.has(event.type)
  const part = event.properties?.part
  // Of a finished tool call tool.execute.after tells; it does not run for one that failed.
  if (part?.type === "tool") return part.state?.status === "error"
  return part?.type === "text" && part.time?.end !== undefined
}

export const RelayOutbox = async ({ directory }) => ({
  event: async ({ event }) => {
    if (isWanted(event)) hand(event)
  },
  "chat.message": async (input, output) => {
    hand({ hook: "chat.message", directory, input, output })
  },
  "tool.execute.after": async (input, output) => {
    hand({ hook: "tool.execute.after", directory, input, output })
  },
})

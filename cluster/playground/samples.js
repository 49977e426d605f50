// Prompts for a model that answers from documents, as the demo model does.

const LIBRARY = "The library opens at nine in the morning. On Sundays it stays closed.";

const TELEMETRY = `[1] Collector: The collector receives traces, metrics and logs, processes them, and exports this telemetry to one or more backends. It removes the need to run several agents.
[2] Sampling: Sampling reduces how many traces are stored. Head sampling decides as early as possible; tail sampling waits for whole requests first.
[3] Baggage: Baggage is a set of key-value pairs, carried along from service to service next to the context.`;

const CODE = `[1] cache.py:
\`\`\`python
def read_json(path):
    """Read a file, or return nothing when it is missing."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    finally:
        metrics.count("reads")
\`\`\``;

export const SAMPLES = [
  { name: "Rename a function", documents: CODE, question: "Write the function again, with the name `load_json`." },
  { name: "Opening hours", documents: LIBRARY, question: "When does the library open?" },
  { name: "Telemetry", documents: TELEMETRY, question: "What does the collector receive?" },
  {
    name: "No documents",
    documents: "",
    question: "A farmer has 12 cows. Each cow gives 8 liters of milk a day. How many liters does the farmer get in a week?",
  },
];
